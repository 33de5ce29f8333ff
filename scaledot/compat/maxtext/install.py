"""install and uninstall: the functions of MaxText that are replaced."""

from scaledot.compat.maxtext.replaced import replace, restore_all
from scaledot.path_patterns import RecipesByPath, Rules

# What MaxText's remat policies `minimal_with_quantization` and the like save.
RESIDUAL_NAME = "quantization"


def install(rules: Rules, *, residual_name: str = RESIDUAL_NAME) -> None:
    """Makes MaxText compute its matmuls under recipes; call it before MaxText builds a model.

    A second call replaces the rules; `uninstall` restores MaxText. Delayed scaling with gradient accumulation is
    refused when the model is built, because MaxText does not differentiate its state there. Sparse experts that
    cannot be quantised stay as they are, with a warning that says why.

    Args:
      rules: a recipe for all layers, or {path pattern: recipe or None}; the first match applies. With `scan_layers`, a
        path is that of all layers of the stack.
      residual_name: the `checkpoint_name` of residuals; MaxText's policies with `quantization` in their names save the
        default.
    """
    RecipesByPath(rules)  # raises for a misspelt recipe before MaxText is imported
    try:
        from maxtext.kernels import megablox  # pyright: ignore[reportMissingImports]
        from maxtext.layers import linears, moe, quantizations  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(f"scaledot.compat.maxtext needs MaxText: {error}") from error
    from scaledot.compat.maxtext import experts, model

    uninstall()
    settings = model.Settings(rules, residual_name)
    replace(quantizations, "configure_quantization", settings.configure_quantization)
    replace(quantizations, "maybe_quantize_model", settings.maybe_quantize_model)
    replace(linears, "_compute_dot_general_nnx", model.compute_dot_general)
    replace(moe.RoutedMoE, "sparse_matmul", experts.sparse_matmul)
    replace(megablox, "gmm", experts.gmm)


def uninstall() -> None:
    """Restores the functions of MaxText that `install` replaced; models that exist keep their recipes."""
    restore_all()

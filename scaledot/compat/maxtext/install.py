"""The functions of MaxText that `install` replaces, and how to restore them."""

from typing import Any

from scaledot.path_patterns import RecipesByPath, Rules

# What MaxText's remat policies `minimal_with_quantization` and the like save.
RESIDUAL_NAME = "quantization"

_originals: dict[tuple[Any, str], Any] = {}  # the replaced attributes, by module or class and name


def install(rules: Rules, *, residual_name: str = RESIDUAL_NAME) -> None:
    """Makes MaxText compute its matmuls under recipes; call it before MaxText builds a model.

    A second call replaces the rules; `uninstall` restores MaxText. Delayed scaling with gradient accumulation is
    refused when the model is built, because MaxText does not differentiate its state there. So are recipes for experts
    that MaxText computes by a grouped matmul other than Megablox's, which is the one that is replaced.

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
    _replace(quantizations, "configure_quantization", settings.configure_quantization)
    _replace(quantizations, "maybe_quantize_model", settings.maybe_quantize_model)
    _replace(linears, "_compute_dot_general_nnx", model.compute_dot_general)
    _replace(moe.RoutedMoE, "sparse_matmul", experts.sparse_matmul)
    _replace(megablox, "gmm", experts.gmm)


def uninstall() -> None:
    """Restores the functions of MaxText that `install` replaced; models that exist keep their recipes."""
    while _originals:
        (target, name), value = _originals.popitem()
        setattr(target, name, value)


def original(target: Any, name: str) -> Any:
    """The attribute of a module or class of MaxText, as it was before `install` replaced it."""
    return _originals.get((target, name)) or getattr(target, name)


def _replace(target: Any, name: str, function: Any) -> None:
    _originals[target, name] = getattr(target, name)
    setattr(target, name, function)

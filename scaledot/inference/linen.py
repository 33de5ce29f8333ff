"""Flax linen models with quantised kernels: `quantize_params` quantises them, `with_quantized_params` runs the model.

    params = sd.linen.quantize_params(model, params, "nvfp4", x)
    y = sd.linen.with_quantized_params(model).apply({"params": params}, x)

The parameters of a linen model do not tell which axes of a kernel are contracted, so `quantize_params` traces
`model.init` for an example input. A plain `model.apply` cannot multiply by a ScaledArray: layers convert parameters to
arrays, which raises for a ScaledArray. Under the interceptors of `with_quantized_params`, layers whose kernel is a
ScaledArray multiply by its codes, and other layers are unchanged.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen import meta

from scaledot.array import ScaledArray
from scaledot.flax_hooks import MatmulUnderRecipe
from scaledot.flax_hooks.linen import (
    NO_HOOK,
    WITH_HOOK,
    WITHOUT_HOOK,
    InterceptedModel,
    check_module,
    einsum_layer,
    eval_shapes,
    fields_set,
    hook_of,
    multiplies,
    own_matmul,
    promote_dtype,
    promotes_itself,
)
from scaledot.formats import Format
from scaledot.inference import weights
from scaledot.inference.weights import Axes, KernelRecorder
from scaledot.path_patterns import FormatRules, FormatsByPath, Layer, table, warn_of_overlooked
from scaledot.train.weights import KERNEL, keyed_leaves, unboxed


def quantize_params(model: nn.Module, params: Any, rules: FormatRules, *args, **kwargs) -> Any:
    """Returns `params` with the kernels of Dense, DenseGeneral, Einsum and Conv layers as ScaledArrays.

    Run the model with them through `with_quantized_params(model)`. Biases, norms and embeddings stay as they are.
    Blocks run along the contracting dims, and kernels that nn.scan or nn.vmap stack along leading axes are quantised
    one layer at a time. A kernel in a box, such as nn.Partitioned, is unboxed.

    Layers that cannot be quantised stay as they are, with a warning that names them. It can be traced: `jax.eval_shape`
    of it is a target for restoring a checkpoint.

    Args:
      model: the linen Module of `params`; not a model of `with_recipe`, but its `model`.
      params: the collection "params".
      rules: a Format for all kernels, its name, or {path pattern: format or None}; the first match applies. Patterns
        match the path of a layer: "mlp/up" for "mlp/up/kernel". A replaced `block` is a group size:
        dataclasses.replace(FORMATS["int4"], block=(128,)).
      args, kwargs: those of `model.init` after the key: arrays or ShapeDtypeStructs, and any static arguments. Nothing
        is computed with them.

    >>> import jax.numpy as jnp
    >>> model, x = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(8)]), jnp.ones((2, 64))
    >>> params = model.init(jax.random.key(0), x)["params"]
    >>> params = quantize_params(model, params, {"layers_2": None, "*": "nvfp4"}, x)
    >>> params["layers_0"]["kernel"]
    ScaledArray(nvfp4[64,32], block=(16, 1), dtype=float32)
    >>> with_quantized_params(model).apply({"params": params}, x).shape
    (2, 8)
    """
    check_module(model)
    formats = FormatsByPath(rules)
    leaves, tree = keyed_leaves(params, ScaledArray)
    kernels = {path: unboxed(leaf) for path, leaf in leaves if path.rpartition("/")[-1] == KERNEL}
    found = _found_layers(model, args, kwargs)
    chosen: dict[str, tuple[Axes, Format]] = {}
    for layer, (type_name, axes, shape) in found.items():
        path = _joined(layer, KERNEL)
        obstacle = functools.partial(_obstacle, kernels.get(path), axes, shape)
        format = formats.decide(layer, type_name, obstacle)
        if format is not None:
            assert isinstance(axes, Axes)
            chosen[path] = axes, format
    for path, kernel in kernels.items():
        layer = path.rpartition("/")[0]
        if layer not in found and kernel.ndim > 1:
            formats.decide(layer, "layer", lambda _: "the example arguments do not reach it")
    formats.check_all_matched()
    warn_of_overlooked(formats.layers, stacklevel=2, setting="a format")
    return tree.unflatten(
        [weights.quantize_kernel(kernels[path], *chosen[path]) if path in chosen else leaf for path, leaf in leaves]
    )


def _joined(layer: str, name: str) -> str:
    return f"{layer}/{name}" if layer else name


Found = tuple[str, Axes | str, tuple[int, ...]]  # type of a layer, its kernel's axes or why not, its kernel's shape


def _found_layers(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Found]:
    """The layers of a model that multiply by a kernel, by path, found by tracing `init`."""
    found: dict[str, Found] = {}

    def interceptor(call, args, kwargs, context: nn.module.InterceptorContext):
        result, layer = call(*args, **kwargs), context.module
        if multiplies(layer, context.method_name):
            kernel = unboxed(layer.get_variable("params", KERNEL))
            axes = _axes(layer, args, kwargs)
            found["/".join(layer.path)] = type(layer).__name__, axes, () if kernel is None else kernel.shape
        return result

    with nn.intercept_methods(interceptor):
        eval_shapes(functools.partial(model.init, **kwargs), jax.random.key(0), *args)
    return found


def _axes(layer: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Axes | str:
    """The axes of a layer's kernel, or why the layer cannot multiply by a ScaledArray."""
    if isinstance(layer, WITHOUT_HOOK):
        return NO_HOOK
    own = own_matmul(layer, replaceable=MatmulUnderRecipe)
    if own is not None or promotes_itself(layer):
        return f"it has a {own or 'promote_dtype'} of its own"
    if isinstance(layer, nn.Conv):
        size = layer.kernel_size
        return (
            "it has a mask" if layer.mask is not None else weights.conv_axes(1 if isinstance(size, int) else len(size))
        )
    if isinstance(layer, nn.Einsum):
        called = args[1] if len(args) > 1 else kwargs.get("einsum_str")
        return weights.einsum_axes(nn.module.merge_param("einsum_str", layer.einsum_str, called))
    if isinstance(layer, nn.DenseGeneral):
        counts = (len(_as_tuple(value)) for value in (layer.axis, layer.features, layer.batch_dims))
        return weights.dense_axes(*counts)
    return weights.dense_axes(1, 1)


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _obstacle(kernel: Any, axes: Axes | str, shape: tuple[int, ...], format: Format) -> str | None:
    """Why the kernel of a layer cannot be quantised to a format; None if it can. `shape` is that without stacking."""
    if isinstance(axes, Axes):
        if kernel is None:
            return "`params` has no kernel at its path"
        if kernel.shape[max(kernel.ndim - axes.ndim, 0) :] != shape:
            return (
                f"its kernel in `params` has shape {kernel.shape} and in a call {shape}; only kernels that are stacked "
                "along leading axes, `variable_axes={'params': 0}`, can be quantised"
            )
    return weights.obstacle(kernel, axes, format)


class WithQuantizedParams(InterceptedModel):
    """A model whose `apply` multiplies by the codes of kernels that are ScaledArrays; other attributes are the model's.

    Two are equal if their models are.
    """

    def _run(self, name: str, *args, **kwargs):
        with _intercepted():
            return getattr(self.model, name)(*args, **kwargs)

    def _explain(self, variables: Mapping[str, Any], *args, **kwargs) -> str:
        report = _Report(variables["params"])
        with _intercepted(report):
            eval_shapes(functools.partial(self.model.apply, **kwargs), variables, *args)
        return table(report.rows)


class _Report:
    """The rows of `explain` by path, collected while a model is traced."""

    def __init__(self, params: Any):
        self.rows: dict[str, Layer] = {}
        self._stored = {path: unboxed(leaf) for path, leaf in keyed_leaves(params, ScaledArray)[0]}
        self._recorders: dict[str, KernelRecorder] = {}

    def recorder(self, layer: nn.Module) -> KernelRecorder:
        return self._recorders.setdefault("/".join(layer.path), KernelRecorder())

    def add(self, layer: nn.Module, kernel: Any) -> None:
        """Adds the row of a layer after its call; `kernel` is that of one layer of a stack."""
        path, type_name = "/".join(layer.path), type(layer).__name__
        if isinstance(layer, WITHOUT_HOOK):
            self.rows[path] = Layer(type_name, None, NO_HOOK)
        elif isinstance(kernel, ScaledArray):
            whole = self._stored.get(_joined(path, KERNEL), kernel)
            self.rows[path] = weights.quantized_layer(type_name, whole, self._recorders[path].names)
        else:
            self.rows[path] = Layer(type_name, None, f"its kernel is {weights.described(kernel)}")


def _intercepted(report: _Report | None = None):
    """A context manager inside which layers multiply by kernels that are ScaledArrays."""

    def interceptor(call, args, kwargs, context: nn.module.InterceptorContext):
        layer = context.module
        if not multiplies(layer, context.method_name):
            return call(*args, **kwargs)
        kernel = meta.unbox(layer.get_variable("params", KERNEL))
        if isinstance(kernel, ScaledArray) and isinstance(layer, WITH_HOOK):
            result = _run_layer(layer, call, args, kwargs, None if report is None else report.recorder(layer))
        else:
            result = call(*args, **kwargs)
        if report is not None:
            report.add(layer, kernel)
        return result

    return nn.intercept_methods(interceptor)


def _run_layer(layer: nn.Module, call, args: tuple, kwargs: Mapping[str, Any], recorder: KernelRecorder | None):
    """Calls a layer whose kernel is a ScaledArray."""
    if isinstance(layer, nn.Einsum):
        with fields_set(layer, {"promote_dtype": promote_dtype}):
            return einsum_layer(layer, functools.partial(weights.weight_einsum, kernel=recorder), *args, **kwargs)
    hook = hook_of(layer)
    operation = functools.partial(weights.OPERATION[hook], kernel=recorder)
    with fields_set(layer, {hook: operation, f"{hook}_cls": None, "promote_dtype": promote_dtype}):
        return call(*args, **kwargs)


def with_quantized_params(model: nn.Module) -> WithQuantizedParams:
    """The model with an `apply` that takes the parameters of `quantize_params`.

    A layer whose kernel is a ScaledArray multiplies x, in the layer's dtype, by the codes; the result is that of the
    layer with dequantised weights up to rounding. Layers with other kernels are unchanged. Works under jit, vmap,
    nn.scan and nn.remat. nn.jit caches traces regardless of interceptors: apply such a model with quantised parameters
    only. Kernels are constants: gradients exist for x and all other parameters.
    """
    return WithQuantizedParams(model)

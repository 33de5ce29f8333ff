"""Flax NNX models with quantised kernels: `quantize_params` quantises them in place.

    model = sd.nnx.quantize_params(model, "nvfp4")
    y = model(x)

The value of a kernel's nnx.Param becomes a ScaledArray, and the layer's matmul one that takes it. Both are ordinary
attributes of the layer, so nnx.split, nnx.merge, nnx.state and nnx.jit work as for any model.
"""

import functools
from typing import Any

import jax
from flax import nnx

from scaledot.array import ScaledArray
from scaledot.flax_hooks.nnx import NO_HOOK, hook_of, multiplying, promote_dtype, promotes_itself
from scaledot.inference import weights
from scaledot.inference.weights import Axes, KernelRecorder
from scaledot.path_patterns import FormatRules, FormatsByPath, Layer, warn_of_overlooked


def quantize_params(model: nnx.Module, rules: FormatRules) -> nnx.Module:
    """Quantises the kernels of a model's Linear, LinearGeneral, Einsum and Conv layers in place; returns the model.

    Kernels become ScaledArrays with blocks along their contracting dims; layers multiply x, in their dtype, by the
    codes. Biases, norms and embeddings stay as they are. Kernels that nnx.vmap stacks along leading axes, for nnx.scan,
    are quantised one layer at a time. Layers that cannot be quantised stay as they are, with a warning that names them;
    `explain` lists the format of each layer.

    `nnx.eval_shape` of a function that constructs and quantises a model is a target for restoring a checkpoint.

    Args:
      rules: a Format for all kernels, its name, or {path pattern: format or None}; the first match applies. A replaced
        `block` is a group size: dataclasses.replace(FORMATS["int4"], block=(128,)).

    >>> import jax.numpy as jnp
    >>> model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 8, rngs=nnx.Rngs(1)))
    >>> model = quantize_params(model, {"layers/2": None, "*": "nvfp4"})
    >>> model.layers[0].kernel.get_value()
    ScaledArray(nvfp4[64,32], block=(16, 1), dtype=float32)
    >>> model(jnp.ones((2, 64))).shape
    (2, 8)
    """
    formats = FormatsByPath(rules)
    chosen: list[tuple[nnx.Module, Axes, Any]] = []
    for path, layer in multiplying(model):
        axes = _axes(layer)
        kernel = _kernel(layer)
        format = formats.decide(path, type(layer).__name__, functools.partial(weights.obstacle, kernel, axes))
        if format is not None:
            assert isinstance(axes, Axes)
            chosen.append((layer, axes, format))
    formats.check_all_matched()  # before the model is changed
    for layer, axes, format in chosen:
        _param(layer).set_value(weights.quantize_kernel(_kernel(layer), axes, format))
        _set_matmul(layer)
    warn_of_overlooked(formats.layers, stacklevel=2, setting="a format")
    return model


def _param(layer: nnx.Module) -> Any:
    return getattr(layer, "kernel", None)


def _kernel(layer: nnx.Module) -> Any:
    """The kernel of a layer; None if it has none, as nnx.LoRA."""
    param = _param(layer)
    return None if param is None else param.get_value()


def _axes(layer: nnx.Module) -> Axes | str:
    """The axes of a layer's kernel, or why the layer cannot multiply by a ScaledArray."""
    hook = hook_of(layer)
    if hook is None:
        return NO_HOOK
    own = hook.attribute if hook.holds_other(layer) else None
    own = own or ("dot_general" if getattr(layer, "dot_general_cls", None) is not None else None)
    if isinstance(_kernel(layer), ScaledArray):
        return "its kernel is quantised already"
    if own is not None or promotes_itself(layer):
        return f"it has a {own or 'promote_dtype'} of its own"
    if isinstance(layer, nnx.Conv):
        return "it has a mask" if layer.mask is not None else weights.conv_axes(len(layer.kernel_size))
    if isinstance(layer, nnx.Einsum):
        return weights.einsum_axes(layer.einsum_str)
    if isinstance(layer, nnx.LinearGeneral):
        return weights.dense_axes(len(layer.axis), len(layer.out_features), len(layer.batch_axis))
    return weights.dense_axes(1, 1)


def _set_matmul(layer: nnx.Module, recorder: KernelRecorder | None = None) -> None:
    """Sets the matmul of a layer to one that takes a ScaledArray."""
    hook = hook_of(layer)
    assert hook is not None
    operation = weights.OPERATION[hook.attribute]
    if recorder is not None:
        operation = functools.partial(operation, kernel=recorder)
    setattr(layer, hook.attribute, nnx.static(operation))
    setattr(layer, "promote_dtype", promote_dtype)  # noqa: B010  (not a field of every layer)


def quantized_layers(model: nnx.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Layer]:
    """The rows of `explain` for layers whose kernel is a ScaledArray, by path.

    args, kwargs: those of a call of the model, which is traced for the kernels that its layers run; without any, the
    rows do not name kernels.
    """
    layers = [(path, layer) for path, layer in multiplying(model) if isinstance(_kernel(layer), ScaledArray)]
    recorders = {path: KernelRecorder() for path, _ in layers}
    if args or kwargs:
        graphdef, state = nnx.split(model)

        def call(state, args):
            traced = nnx.merge(graphdef, state)
            for path, layer in multiplying(traced):
                if path in recorders:
                    _set_matmul(layer, recorders[path])
            traced(*args, **kwargs)

        jax.eval_shape(call, state, args)
    return {
        path: weights.quantized_layer(type(layer).__name__, _kernel(layer), recorders[path].names)
        for path, layer in layers
    }

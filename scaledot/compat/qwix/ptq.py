"""Post-training quantisation of a model's parameters, for models of `quantize_model` with a PtqProvider."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.compat.qwix import weight_sites
from scaledot.compat.qwix.array import QArray, as_scaled
from scaledot.compat.qwix.quantizers import HowToQuantize, quantize
from scaledot.compat.qwix.rules import PtqProvider
from scaledot.train.weights import unboxed
from scaledot.transform.reshaped_weight import ReshapedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithAux:
    """A quantised parameter, and how it is quantised, which `quantize_params` applies to the original one.

    array: a QArray, whose leaves may be boxes with sharding metadata. param_shape: the shape of the original parameter,
    if the model reshapes it to that of `array` before it multiplies by it.
    """

    array: QArray
    how: HowToQuantize = dataclasses.field(metadata={"static": True})
    param_shape: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(unboxed(self.array.qvalue).shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def to_scaled(self) -> ScaledArray | ReshapedWeight:
        """The parameter as an argument of `scaledot.transform.quantized`; its leaves must not be boxes."""
        scaled = as_scaled(self.array)
        return scaled if self.param_shape is None else ReshapedWeight(scaled, self.param_shape)


class HowAndShape(NamedTuple):
    """How a parameter is quantised, after a reshape to `shape`."""

    how: HowToQuantize
    shape: tuple[int, ...]


def hows_of(provider: PtqProvider, jaxpr: Any, params: Sequence[str | None]) -> dict[str, HowAndShape]:
    """{path: how} of the parameters that the rules quantise. params: the path of each input of the jaxpr, or None."""
    hows: dict[str, HowAndShape] = {}
    for site in weight_sites.find(jaxpr, params):
        how = provider.how_to_quantize(site)
        if how is not None:
            hows.setdefault(site.param, HowAndShape(_for_stack(how, site.stacked), site.shape))
    return hows


def _for_stack(how: HowToQuantize, stacked: int) -> HowToQuantize:
    """The same for an array with leading axes of stacked layers, each of which has scales of its own."""
    channelwise = (*range(stacked), *(axis + stacked for axis in how.channelwise_axes))
    tiled = {axis + stacked: size for axis, size in how.tiled_axes.items()}
    return dataclasses.replace(how, channelwise_axes=channelwise, tiled_axes=tiled)


def quantize_params(
    params: Mapping[str, Any],
    abstract_quantized_params: Any,
    quant_stats: Mapping[str, Any] | None = None,
    *,
    allow_extra_params: bool = False,
) -> dict[str, Any]:
    """Returns `params` with quantised weights, for the model of `quantize_model(model, PtqProvider(rules))`.

    Args:
      params: nested dictionaries of arrays, all parameters or some of them. In linen, unboxed; in NNX,
        `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.
      abstract_quantized_params: in linen, `jax.eval_shape(quantized_model.init, key, x)["params"]`; in NNX, the
        quantised model, which may be abstract; the result is then a pure dict for `nnx.update(quantized_model, ...)`.
      quant_stats: must be empty, because static ranges of activations are not supported.
      allow_extra_params: leave out parameters that the quantised model does not have, instead of raising.
    """
    from flax.traverse_util import flatten_dict, unflatten_dict

    if quant_stats:
        raise ValueError("`quant_stats` is not supported: scales of activations are computed from the activations")
    quantized: dict[tuple, Any] = {}
    for path, param in flatten_dict(params).items():
        if not isinstance(param, jax.Array):
            raise TypeError(f"`params` must hold arrays, but {'/'.join(map(str, path))} is a {type(param).__name__}")
        abstract = _at(abstract_quantized_params, path)
        if abstract is None and not allow_extra_params:
            raise ValueError(
                f"`abstract_quantized_params` has no {'/'.join(map(str, path))}; allow_extra_params=True skips it"
            )
        if abstract is not None:
            is_quantized = isinstance(abstract, WithAux)
            quantized[path] = quantize_param(param, abstract.how, abstract.shape) if is_quantized else param
    if not isinstance(abstract_quantized_params, Mapping):
        quantized = {key: value for path, leaf in quantized.items() for key, value in _pure_leaves(path, leaf)}
    return unflatten_dict(quantized)


def quantize_param(param: jax.Array, how: HowToQuantize, shape: tuple[int, ...]) -> WithAux:
    """Quantises a parameter after a reshape to `shape`, that of the operand in the model."""
    array = quantize(jnp.asarray(param).reshape(shape), how)
    return WithAux(array, how, None if param.shape == shape else param.shape)


def names_of_part(names: tuple, part: jax.Array) -> tuple:
    """The mesh axes of codes or scales of a parameter with these: none along axes of size 1, or after a reshape."""
    if len(names) != part.ndim:
        return (None,) * part.ndim
    return tuple(name if size > 1 else None for name, size in zip(names, part.shape, strict=True))


def _at(tree: Any, path: tuple) -> Any:
    """The entry of nested mappings, sequences or modules at a path; None if there is none."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(key, int):
            tree = tree[key] if key < len(tree) else None
        else:
            tree = getattr(tree, key, None)
        if tree is None:
            return None
    return tree


def _pure_leaves(path: tuple, leaf: Any):
    """The (path, array) pairs of a parameter in the pure dict of an NNX state."""
    if not isinstance(leaf, WithAux):
        return [(path, leaf)]
    parts = {name: getattr(leaf.array, name) for name in ("qvalue", "scale", "zero_point")}
    return [((*path, "array", name), part) for name, part in parts.items() if part is not None]

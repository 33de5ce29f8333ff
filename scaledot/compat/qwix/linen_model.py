"""Flax linen models under the rules of a provider."""

import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import jax
from flax.core import meta

from scaledot.array import ScaledArray
from scaledot.compat.qwix.ptq import HowAndShape, WithAux, hows_of, names_of_part, quantize_param
from scaledot.compat.qwix.quantizers import HowToQuantize
from scaledot.compat.qwix.rules import PtqProvider, QuantizationProvider
from scaledot.flax_hooks.linen import InterceptedModel
from scaledot.train.weights import keyed_leaves, unboxed
from scaledot.transform import quantized
from scaledot.transform.reshaped_weight import ReshapedWeight

NOISE_STREAM = "stochastic_rounding"


class QuantizedModel(InterceptedModel):
    """A linen model whose `apply` runs under the rules of a provider; other attributes are the model's.

    It is not a linen Module: quantise the outermost model, not a part of another one. Keys for stochastic rounding come
    from the rng stream `stochastic_rounding`.
    """

    _LOST = "the rules of the provider; use apply or clone"

    def __init__(self, model, provider: QuantizationProvider, methods: Collection[str]):
        super().__init__(model, provider, tuple(methods))
        self.provider, self.methods = provider, tuple(methods)

    def _run(self, name: str, *args, **kwargs):
        if name == "apply" and _method_name(kwargs.get("method")) in self.methods:
            return self._apply(*args, **kwargs)
        return getattr(self.model, name)(*args, **kwargs)

    def _apply(self, variables: Mapping[str, Any], *args, **kwargs):
        params, others = _split(variables)
        rngs = kwargs.get("rngs")
        key = rngs.get(NOISE_STREAM) if isinstance(rngs, Mapping) else None
        return self._quantized(params, others, *args, **kwargs, **({} if key is None else {"sr_key": key}))

    @functools.cached_property
    def _quantized(self):
        """`_call` under the rules; one function for all calls, which caches its traces."""
        rules = self.provider.site_rules()
        return quantized(self._call, rules) if rules else self._call

    def _call(self, params: Any, others: Mapping[str, Any], *args, **kwargs):
        return self.model.apply({"params": params, **others}, *args, **kwargs)

    def _explain(self, *args, **kwargs) -> str:
        raise TypeError("scaledot.linen.explain is for `with_recipe`; use scaledot.transform.report for this model")


class PtqModel(QuantizedModel):
    """A linen model with quantised weights: `init` returns them, and `apply` multiplies by their codes."""

    provider: PtqProvider

    def __init__(self, model, provider: PtqProvider, methods: Collection[str]):
        super().__init__(model, provider, methods)
        self._hows: dict[Hashable, dict[str, HowAndShape]] = {}

    def _run(self, name: str, *args, **kwargs):
        result: Any = super()._run(name, *args, **kwargs)
        if name == "init":
            return self._quantized_variables(result, *args, **kwargs)
        if name == "init_with_output":
            return result[0], self._quantized_variables(result[1], *args, **kwargs)
        return result

    def _quantized_variables(self, variables: Mapping[str, Any], rngs: Any, *args, **kwargs) -> dict[str, Any]:
        """The variables of `init` with quantised weights; other arguments are those of `init`."""
        params, others = _split(variables)
        hows = self._hows_of(meta.unbox(params), others, *args, **{**kwargs, "rngs": rngs, "mutable": True})
        leaves, tree = keyed_leaves(params)
        boxes = [_quantized_box(leaf, *hows[path]) if path in hows else leaf for path, leaf in leaves]
        return {**others, "params": tree.unflatten(boxes)}

    def _apply(self, variables: Mapping[str, Any], *args, **kwargs):
        params, others = _split(variables)
        leaves, tree = keyed_leaves(params, WithAux)
        by_path = {path: _as_weight(leaf) for path, leaf in leaves}
        plain = tree.unflatten([_abstract(leaf) for leaf in by_path.values()])
        for path in self._hows_of(plain, others, *args, **kwargs):
            if not isinstance(by_path[path], (ScaledArray, ReshapedWeight)):
                raise ValueError(
                    f"{path!r} of `params` is not quantised; pass what `init` or `quantize_params` returns"
                )
        params = tree.unflatten(list(by_path.values()))
        return super()._apply({**others, "params": params}, *args, **kwargs)

    def _hows_of(self, params: Any, others: Mapping[str, Any], *args, **kwargs) -> dict[str, HowAndShape]:
        """{path: how} of the unboxed parameters that the rules quantise, arrays or ShapeDtypeStructs."""
        key = _types((params, others, args, kwargs))
        if key not in self._hows:
            jaxpr = jax.make_jaxpr(lambda params: self._call(params, others, *args, **kwargs))(params)
            paths = [path for path, _ in keyed_leaves(params)[0]]
            self._hows[key] = hows_of(self.provider, jaxpr, paths)
        return self._hows[key]


def _method_name(method: Any) -> str:
    """The name of the argument `method` of `apply`."""
    return "__call__" if method is None else method if isinstance(method, str) else method.__name__


def _split(variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The collection "params", and the others."""
    return variables.get("params", {}), {name: value for name, value in variables.items() if name != "params"}


def _quantized_box(param: Any, how: HowToQuantize, shape: tuple[int, ...]) -> WithAux:
    """A parameter, quantised; codes and scales are in boxes like that of the parameter, if it has one."""
    quantized_param = quantize_param(unboxed(param), how, shape)
    if not isinstance(param, meta.AxisMetadata):
        return quantized_param
    array = quantized_param.array
    parts = {
        name: _like_box(param, part)
        for name in ("qvalue", "scale", "zero_point")
        if (part := getattr(array, name)) is not None
    }
    return dataclasses.replace(quantized_param, array=dataclasses.replace(array, **parts))


def _like_box(box: Any, part: jax.Array) -> Any:
    """`part` in a box with the axis names of `box`."""
    boxed = box.replace_boxed(part)
    if not isinstance(boxed, meta.Partitioned):
        return boxed
    return boxed.replace(names=names_of_part(box.names, part))


def _as_weight(leaf: Any) -> Any:
    """A parameter, unboxed, as a ScaledArray or ReshapedWeight if it is quantised."""
    return meta.unbox(leaf).to_scaled() if isinstance(leaf, WithAux) else unboxed(leaf)


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, (ScaledArray, ReshapedWeight)) else leaf


def _types(tree: Any) -> Hashable:
    """A key that is equal for trees of equal structure whose arrays have equal types and other leaves are equal."""
    leaves, structure = jax.tree.flatten(tree)
    types = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves)
    return structure, *types

"""Flax NNX models under the rules of a provider."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from scaledot.compat.qwix.array import QArray
from scaledot.compat.qwix.ptq import WithAux, hows_of, names_of_part, quantize_param
from scaledot.compat.qwix.quantizers import HowToQuantize
from scaledot.compat.qwix.rules import PtqProvider, QuantizationProvider
from scaledot.train.weights import keyed_leaves
from scaledot.transform import Rule, quantized

NOISE_STREAM = "stochastic_rounding"
RNGS = "qwix_rngs"  # Qwix's name of the attribute
PARTS = ("qvalue", "scale", "zero_point")


def quantize_nnx_model(
    model: nnx.Module, provider: QuantizationProvider, method: str, args: tuple, kwargs: dict[str, Any]
) -> nnx.Module:
    """Returns a copy of a model whose `method` runs under the rules; a PtqProvider quantises its weights.

    args, kwargs: those of the method, for which the model is traced.
    """
    original_class = getattr(type(model), "unquantized_type", type(model))
    original = getattr(original_class, method)
    rngs = kwargs.pop("rngs", None)
    model = nnx.clone(model)
    if isinstance(provider, PtqProvider):
        _quantize_weights(model, provider, original, args, kwargs)
    fields = {"unquantized_type": original_class, method: _under_rules(original, provider.site_rules())}
    model.__class__ = type(original_class.__name__, (original_class,), fields)
    setattr(model, RNGS, nnx.data(rngs))
    return model


def _under_rules(original: Callable[..., Any], rules: tuple[Rule, ...]) -> Callable[..., Any]:
    """A method that runs `original` under the rules, and updates the variables that it changes."""

    def method(self: nnx.Module, *args, **kwargs):
        graph, params, others = nnx.split(_with_scaled_params(self), nnx.Param, ...)

        def call(params: nnx.State, others: nnx.State, *args, **kwargs):
            model = nnx.merge(graph, params, others)
            result = original(model, *args, **kwargs)
            return result, nnx.state(model, nnx.Not(nnx.Param))

        function = quantized(call, rules) if rules else call
        result, changed = function(params, others, *args, **kwargs, **_noise_key(self))
        _update(self, others, changed)
        return result

    return method


def _noise_key(model: nnx.Module) -> dict[str, jax.Array]:
    """The keyword argument with the key of stochastic rounding, from `model.qwix_rngs` as in Qwix, if it has any."""
    rngs = getattr(model, RNGS, None)
    return {} if rngs is None else {"sr_key": rngs[NOISE_STREAM]()}


def _update(model: nnx.Module, before: nnx.State, after: nnx.State) -> None:
    """Writes the variables that a call changed. Unchanged ones may belong to an outer trace, which forbids a write."""
    old = dict(nnx.to_flat_state(before))
    changed = [
        (path, variable)
        for path, variable in nnx.to_flat_state(after)
        if path not in old or any(a is not b for a, b in zip(*map(jax.tree.leaves, (old[path], variable)), strict=True))
    ]
    if changed:
        nnx.update(model, nnx.from_flat_state(changed))


def _quantize_weights(model: nnx.Module, provider: PtqProvider, original, args: tuple, kwargs: dict[str, Any]) -> None:
    """Replaces the parameters that the rules quantise by WithAux, in place."""
    graph, params, others = nnx.split(_with_scaled_params(model), nnx.Param, ...)

    def call(params: nnx.State):
        return original(nnx.merge(graph, params, others), *args, **kwargs)

    leaves, _ = keyed_leaves(params)
    hows = hows_of(provider, jax.make_jaxpr(call)(params), [_path(path) for path, _ in leaves])
    for path, (how, shape) in hows.items():
        _quantize_attribute(model, path.split("/"), how, shape)


def _path(path: str) -> str:
    """The path of a parameter from that of its array in a State."""
    parts = path.split("/")
    return "/".join(parts[:-1] if parts[-1] in ("value", "raw_value") else parts)


def _quantize_attribute(model: Any, path: list[str], how: HowToQuantize, shape: tuple[int, ...]) -> None:
    *modules, name = path
    owner = model
    for part in modules:
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    param = getattr(owner, name)
    weight = quantize_param(param[...], how, shape)
    parts = {part: _like(param, getattr(weight.array, part)) for part in PARTS}
    array = QArray(**parts, qtype=weight.array.qtype)
    setattr(owner, name, nnx.data(dataclasses.replace(weight, array=array)))


def _like(param: nnx.Param, part: jax.Array | None) -> nnx.Variable | None:
    """`part` as a Param with the metadata of `param`."""
    if part is None:
        return None
    variable = param.replace(part)
    names = variable.get_metadata().get("sharding_names")
    if names:
        variable.set_metadata(sharding_names=names_of_part(names, part))
    return variable


def _with_scaled_params(model: nnx.Module) -> nnx.Module:
    """The model, or if it has quantised parameters a copy with Params of ScaledArrays or ReshapedWeights instead."""
    found = [
        (path, name)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, WithAux)
    ]
    if not found:
        return model
    model = nnx.clone(model)
    modules = dict(nnx.iter_modules(model))
    for path, name in found:
        weight: WithAux = getattr(modules[path], name)
        parts = {part: getattr(weight.array, part) for part in PARTS}
        array = QArray(**{part: v if v is None else v[...] for part, v in parts.items()}, qtype=weight.array.qtype)
        setattr(modules[path], name, nnx.Param(dataclasses.replace(weight, array=array).to_scaled()))
    return model

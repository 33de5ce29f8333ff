"""Evaluates a jaxpr with the contractions of a `Plan` under their recipes.

Equations that do not change are bound as they are, so derivative rules, shardings, effects and weak types survive.
Equations with jaxprs that change are evaluated by the function of JAX that made them (`lax.scan`, `jax.checkpoint`,
...), which traces the new body. Randomness and state are extra inputs of these bodies: each contraction hashes its
index into the key, a scan its iteration, and the states of a scan's contractions have a leading axis of its length.

Two equal calls, such as those of a jitted layer, share one function and are traced once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from scaledot import train
from scaledot.array import ScaledArray
from scaledot.numerics.rounding import hash_words, key_words
from scaledot.ops.quantize import dequantize
from scaledot.state import State
from scaledot.transform.analysis import Choice, Plan, bind
from scaledot.transform.custom_weight import CustomWeight
from scaledot.transform.jaxprs import CALLS, read, scan_counts, type_of
from scaledot.transform.reshaped_weight import ReshapedWeight
from scaledot.transform.scaled import contract_scaled

States = list[State]
Result = tuple[list[Any], States]


@dataclasses.dataclass
class Rewriter:
    """Evaluates plans. functions: the jitted functions of equal calls."""

    functions: dict[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    def evaluate(self, plan: Plan, args: Sequence[Any], key: Any, states: States) -> Result:
        """The outputs of `plan.closed` for `args`, and the states of `plan.delayed` after their use."""
        jaxpr, consts = plan.closed
        values = [*consts, *args] if len(args) == len(jaxpr.invars) else args
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
        remaining, returned = list(states), []
        for i, eqn in enumerate(jaxpr.eqns):
            values = read(env, eqn.invars, lambda value: value)
            with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
                if i not in plan.sites and i not in plan.inner:
                    outs = _unchanged(eqn, values)
                else:
                    outs, used = self._changed(plan, i, values, key, remaining)
                    returned += used
                    remaining = remaining[len(used) :]
            env.update(zip(eqn.outvars, outs, strict=True))
        return read(env, jaxpr.outvars, lambda value: value), returned

    def _changed(self, plan: Plan, i: int, values: list[Any], key: Any, states: States) -> Result:
        eqn = plan.closed.jaxpr.eqns[i]
        if i in plan.sites:
            return contract(eqn, plan.sites[i], _in_own_shape(values), key, i, states)
        inner = plan.inner[i]
        count = sum(len(one.delayed) for one in inner)
        key = _fold(key, i) if any(one.needs_key for one in inner) else None
        return _HANDLERS[eqn.primitive.name](self, eqn, inner, values, key, states[:count])

    def call(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """jit, closed_call: a jitted function, the same one for equal calls."""
        (plan,) = plans
        params = eqn.params
        key_of_call = eqn.primitive.name, plan.signature, params.get("name")
        if key_of_call not in self.functions:
            self.functions[key_of_call] = _jit(functools.partial(self.evaluate, plan), params)
        return self.functions[key_of_call](values, key, states)

    def checkpoint(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """jax.checkpoint with its policy."""
        (plan,) = plans
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(functools.partial(self.evaluate, plan), **options)(values, key, states)

    def scan(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """lax.scan, over states and the index of the iteration as well."""
        (plan,) = plans
        consts, carry = scan_counts(eqn)
        length, options = eqn.params["length"], {name: eqn.params[name] for name in ("reverse", "unroll")}

        def body(carried: list[Any], slices: tuple[Any, Any, Any]) -> tuple[list[Any], tuple[list[Any], States]]:
            xs, states, iteration = slices
            outs, states = self.evaluate(plan, [*values[:consts], *carried, *xs], _fold(key, iteration), states)
            return outs[:carry], (outs[carry:], states)

        iterations = None if key is None else jnp.arange(length, dtype=jnp.uint32)
        xs = _in_own_shape(values[consts + carry :]), states, iterations
        carried, (ys, states) = lax.scan(body, _plain(values[consts : consts + carry]), xs, length, **options)
        return [*carried, *ys], states

    def while_loop(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """lax.while_loop, with the index of the iteration if a contraction needs a key."""
        condition, body = plans
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]

        def is_unfinished(loop: tuple[Any, list[Any]]) -> Any:
            outs, _ = self.evaluate(condition, [*values[:first], *loop[1]], _fold(key, loop[0]), [])
            return outs[0]

        def iterate(loop: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            outs, _ = self.evaluate(body, [*values[first:second], *loop[1]], _fold(key, loop[0]), [])
            return None if key is None else loop[0] + jnp.uint32(1), outs

        start = None if key is None else jnp.uint32(0)
        return lax.while_loop(is_unfinished, iterate, (start, _plain(values[second:])))[1], states

    def cond(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """lax.switch."""
        branches = [lambda args, key, plan=plan: self.evaluate(plan, args, key, [])[0] for plan in plans]
        index, *args = values
        return lax.switch(index, branches, args, key), states

    def shard_map(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """jax.shard_map along the same mesh axes; the key is replicated."""
        (plan,) = plans
        params, replicated = eqn.params, jax.sharding.PartitionSpec()

        def body(args: tuple[Any, ...], key: Any) -> tuple[Any, ...]:
            return tuple(self.evaluate(plan, args, key, [])[0])

        mapped = jax.shard_map(
            body,
            mesh=params["mesh"],
            in_specs=(params["in_specs"], replicated),
            out_specs=params["out_specs"],
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )
        return list(mapped(tuple(_plain(values)), key)), states

    def custom_jvp(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """A jax.custom_jvp with the new function and the tangents of its own rule."""
        (plan,) = plans

        @jax.custom_jvp
        def function(args: list[Any], key: Any) -> list[Any]:
            return self.evaluate(plan, args, key, [])[0]

        @function.defjvp
        def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
            original = functools.partial(bind, eqn)
            return function(*primals), jax.jvp(original, tuple(primals[0]), tuple(tangents[0]))[1]

        return function(_plain(values), key), states

    def custom_vjp(self, eqn: JaxprEqn, plans: tuple[Plan, ...], values: list[Any], key: Any, states: States) -> Result:
        """A jax.custom_vjp with the new function, its forward rule rewritten, and its backward rule as it was."""
        plan, forward = plans

        @jax.custom_vjp
        def function(args: list[Any], key: Any) -> list[Any]:
            return self.evaluate(plan, args, key, [])[0]

        def fwd(args: list[Any], key: Any) -> tuple[Any, Any]:
            outs, _ = self.evaluate(forward, args, key, [])
            return jax.tree.unflatten(forward.out_tree, outs)

        def bwd(vjp: Any, cotangents: list[Any]) -> tuple[Any, None]:
            return list(vjp(cotangents)), None

        function.defvjp(fwd, bwd)
        return function(_plain(values), key), states


_HANDLERS: dict[str, Callable[..., Result]] = {
    **dict.fromkeys(CALLS, Rewriter.call),
    "remat2": Rewriter.checkpoint,
    "checkpoint": Rewriter.checkpoint,
    "scan": Rewriter.scan,
    "while": Rewriter.while_loop,
    "cond": Rewriter.cond,
    "shard_map": Rewriter.shard_map,
    "custom_jvp_call": Rewriter.custom_jvp,
    "custom_vjp_call": Rewriter.custom_vjp,
}


def contract(eqn: JaxprEqn, choice: Choice, values: list[Any], key: Any, index: int, states: States) -> Result:
    """The result of a contraction under its recipe. index: of the equation, which is hashed into the key."""
    weight = values[choice.site.weight]
    if isinstance(weight, CustomWeight):
        (y,), used = contract(eqn, choice, _bases(values), key, index, states)
        x, *rest = values[1 - choice.site.weight], *values[2:]
        return [weight.contract(choice.site, x, y, _fold(key, index), *rest)], used
    if any(isinstance(value, ScaledArray) for value in values):
        return [contract_scaled(eqn, choice, values, _fold(key, index), _fold(_fold(key, index), 1))], []
    recipe = choice.recipe
    if recipe is None:  # the weight was computed from a quantised parameter, and is not quantised
        return bind(eqn, *values), []
    function, keywords = under_recipe(choice)
    keywords |= {"key": _fold(key, index)} if recipe.stochastic else {}
    keywords |= {"state": states[0]} if recipe.delayed else {}
    y = function(*values, **keywords)
    y, used = (y[0], [y[1]]) if recipe.delayed else (y, [])
    return [y], used


def under_recipe(choice: Choice) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of the operands of a contraction that runs it under the recipe, and its keyword arguments."""
    site = choice.site
    keywords: dict[str, Any] = {"recipe": choice.recipe, "preferred_element_type": site.out.dtype}
    keywords["precision"] = site.params["precision"]
    if site.params.get("out_sharding") is not None:
        keywords["out_sharding"] = site.params["out_sharding"]
    return functools.partial(_FUNCTIONS[site.primitive], site.params, site.weight), keywords


def _dot(params: dict[str, Any], weight: int, lhs: Any, rhs: Any, **keywords: Any) -> Any:
    """dot_general with the weight as second operand; the dims of the result are those of the equation."""
    (contracting, batch) = params["dimension_numbers"]
    if weight == 1:
        return train.dot_general(lhs, rhs, (contracting, batch), **keywords)
    numbers = (contracting[::-1], batch[::-1])
    y = train.dot_general(rhs, lhs, numbers, **keywords)
    y, *used = y if isinstance(y, tuple) else (y,)
    batches, free = len(batch[0]), lhs.ndim - len(contracting[0]) - len(batch[0])
    y = jnp.moveaxis(y, range(y.ndim - free, y.ndim), range(batches, batches + free))
    return (y, *used) if used else y


def _conv(params: dict[str, Any], weight: int, lhs: Any, rhs: Any, **keywords: Any) -> Any:
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"
    return train.conv_general_dilated(lhs, rhs, **{name: params[name] for name in names}, **keywords)


def _ragged(params: dict[str, Any], weight: int, lhs: Any, rhs: Any, group_sizes: Any, **keywords: Any) -> Any:
    return train.ragged_dot(lhs, rhs, group_sizes, **keywords)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "ragged_dot_general": _ragged,
}


def _plain(values: Sequence[Any]) -> list[Any]:
    assert not any(isinstance(value, CustomWeight) for value in values), "a CustomWeight is used without a view"
    return [dequantize(value) if isinstance(value, ScaledArray) else value for value in _in_own_shape(values)]


def _in_own_shape(values: Sequence[Any]) -> list[Any]:
    """The values, where parameters that have not been reshaped to an operand are dequantised."""
    return [value.dequantized() if isinstance(value, ReshapedWeight) else value for value in values]


def _bases(values: Sequence[Any]) -> list[Any]:
    return [value.base if isinstance(value, CustomWeight) else value for value in values]


def _unchanged(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Binds an equation. Quantised parameters stay quantised where only their shape or dtype changes."""
    if values and isinstance(values[0], CustomWeight):
        return [values[0].with_base(base) for base in _unchanged(eqn, _bases(values))]
    if isinstance(values[0] if values else None, ReshapedWeight) and eqn.primitive.name not in _OF_RESHAPED:
        values = _in_own_shape(values)
    if isinstance(values[0] if values else None, _QUANTIZED) and eqn.primitive.name in _SHAPE_OPS:
        changed = _SHAPE_OPS[eqn.primitive.name](values, eqn)
        if changed is not None:
            return [changed]
    return bind(eqn, *_plain(values))


def _converted(values: list[Any], eqn: JaxprEqn) -> ScaledArray | ReshapedWeight | None:
    dtype = eqn.params["new_dtype"]
    return values[0].astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else None


def _sliced(values: list[Any], eqn: JaxprEqn) -> ScaledArray | None:
    params, q = eqn.params, values[0]
    strides = params["strides"] or (1,) * q.ndim
    return q[
        tuple(slice(*ends) for ends in zip(params["start_indices"], params["limit_indices"], strides, strict=True))
    ]


def _indexed(values: list[Any], eqn: JaxprEqn) -> ScaledArray | None:
    """A dynamic_slice of length 1 along some axes, as of stacked layers."""
    q, *starts = values
    sizes = eqn.params["slice_sizes"]
    if any(size not in (1, full) for size, full in zip(sizes, q.shape, strict=True)):
        return None
    index = tuple(
        slice(None) if size == full else start for size, full, start in zip(sizes, q.shape, starts, strict=True)
    )
    return q[index].reshape(sizes)


_QUANTIZED = ScaledArray, ReshapedWeight
_OF_RESHAPED = ("convert_element_type", "reshape", "copy", "stop_gradient")
_SHAPE_OPS: dict[str, Callable[[list[Any], JaxprEqn], ScaledArray | ReshapedWeight | None]] = {
    "convert_element_type": _converted,
    "transpose": lambda values, eqn: values[0].transpose(eqn.params["permutation"]),
    "reshape": lambda values, eqn: values[0].reshape(eqn.params["new_sizes"]),
    "squeeze": lambda values, eqn: values[0].reshape(type_of(eqn.outvars[0]).shape),
    "slice": _sliced,
    "dynamic_slice": _indexed,
    "copy": lambda values, eqn: values[0],
    "stop_gradient": lambda values, eqn: values[0],
}


def _fold(key: Any, number: Any) -> jax.Array | None:
    """A raw key that is hashed from a key and a number; unlike jax.random.fold_in it needs no Threefry."""
    return None if key is None else jnp.stack(hash_words([*key_words(key), jnp.uint32(number)]))


def _jit(function: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """jax.jit with the name of the original function, which profiles and dumps show."""

    def call(values: list[Any], key: Any, states: States) -> Result:
        return function(values, key, states)

    call.__name__ = call.__qualname__ = params.get("name", "call")
    return jax.jit(call, inline=params.get("inline", False))

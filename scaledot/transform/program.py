"""`quantized` and `init_state`: a function is traced, analysed, and evaluated with its contractions replaced."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import state
from scaledot.array import ScaledArray
from scaledot.state import State
from scaledot.transform.analysis import Analysis, Choice, Place, Plan
from scaledot.transform.jaxprs import Closed, closed
from scaledot.transform.origins import CONSTANT, DATA, Origin
from scaledot.transform.reshaped_weight import ReshapedWeight
from scaledot.transform.rewrite import Rewriter
from scaledot.transform.rules import Rules, check_all_match, parse_rules

ParamArgs = int | Sequence[int] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The jaxpr of a function.

    names: for each input, the path of the parameter that it is, or None. scaled: those that are ScaledArrays. origins:
    of constants and inputs. rebuild: makes the result of the function from the outputs of the jaxpr.
    """

    jaxpr: Closed
    names: tuple[str | None, ...]
    scaled: frozenset[str]
    origins: tuple[Origin, ...]
    rebuild: Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced and analysed function.

    state_names: one for each entry of `plan.delayed`. choices: one for each contraction. rebuild: makes the result of
    the function from the outputs of the jaxpr.
    """

    plan: Plan
    state_names: tuple[str, ...]
    choices: tuple[Choice, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    rewriter: Rewriter = dataclasses.field(default_factory=Rewriter)

    def init_state(self) -> dict[str, State]:
        """The initial states of delayed scaling, by name, with a leading axis for each surrounding scan."""
        states = {}
        for name, choice in zip(self.state_names, self.plan.delayed, strict=True):
            assert choice.recipe is not None
            lengths = choice.site.lengths
            initial = state.init_state(choice.recipe)
            states[name] = jax.tree.map(lambda a, lengths=lengths: jnp.broadcast_to(a, (*lengths, *a.shape)), initial)
        return states

    def ordered(self, scaling_state: Any) -> list[State]:
        """The checked states in the order of `plan.delayed`."""
        if not self.state_names:
            if scaling_state:
                raise ValueError("`scaling_state` is passed, but no contraction has delayed scaling; leave it out")
            return []
        expected = jax.eval_shape(self.init_state)
        if scaling_state is None:
            raise ValueError(
                f"{self.plan.delayed[0].recipe} of {self.state_names[0]!r} uses delayed scaling and needs "
                "`scaling_state`; in the first step, pass transform.init_state(fn, rules)(*args)"
            )
        for name in {**expected, **scaling_state}:
            if name not in scaling_state:
                raise ValueError(f"`scaling_state` has no entry for {name!r}; it is of another program or other rules")
            if name not in expected:
                raise ValueError(f"`scaling_state` has an entry {name!r}, which the function does not have")
            state.check_tree(scaling_state[name], dict(state.described_leaves(expected[name])), name, "the function")
        return [scaling_state[name] for name in self.state_names]


AnyProgram = TypeVar("AnyProgram")


@dataclasses.dataclass(frozen=True, eq=False)
class Transform(Generic[AnyProgram]):
    """A function, the positions of the arguments that hold parameters, and its programs by types of arguments.

    analyse: makes a program of a traced function; its second argument is `complete`, as in `program`.
    """

    fn: Callable[..., Any]
    param_args: tuple[int, ...] | None
    analyse: Callable[[Traced, bool], AnyProgram]
    programs: dict[Hashable, AnyProgram] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, fn: Callable[..., Any], params: ParamArgs, analyse: Callable[[Traced, bool], AnyProgram]) -> Self:
        """The Transform of checked arguments."""
        if not callable(fn):
            raise TypeError(f"`fn` must be a function, not {fn!r}")
        param_args = params if params is None else (params,) if isinstance(params, int) else tuple(params)
        return cls(fn, param_args, analyse)

    def program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], complete: bool = False
    ) -> tuple[AnyProgram, list[Any]]:
        """The program for arguments of these types, and the arrays among them, which are its inputs.

        complete: whether to list the contractions in backward rules as well.
        """
        paths_and_leaves, tree = flattened(args, kwargs)
        arrays = {i: leaf for i, (_, leaf) in enumerate(paths_and_leaves) if _is_array(leaf)}
        static = tuple((i, leaf) for i, (_, leaf) in enumerate(paths_and_leaves) if i not in arrays)
        types = tuple(_type(leaf) for leaf in arrays.values())
        key = (tree, types, static, complete) if all(isinstance(leaf, Hashable) for _, leaf in static) else None
        if key is not None and key in self.programs:
            return self.programs[key], list(arrays.values())
        names = [self.param_name(path, len(args)) for path, _ in paths_and_leaves]

        def call(values: Sequence[Any]) -> Any:
            leaves = dict(static) | dict(zip(arrays, values, strict=True))
            args, kwargs = jax.tree.unflatten(tree, [leaves[i] for i in range(len(names))])
            return self.fn(*args, **kwargs)

        traced = self._traced(call, [(names[i], leaf) for i, leaf in arrays.items()])
        program = self.analyse(traced, complete)
        if key is not None and not traced.jaxpr.consts:  # constants may be tracers, or change between calls
            self.programs[key] = program
        return program, list(arrays.values())

    def _traced(self, call: Callable[..., Any], inputs: list[tuple[str | None, Any]]) -> Traced:
        rebuilds = []

        def flat(*values: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(call(values))
            arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}
            static = {i: leaf for i, leaf in enumerate(leaves) if i not in arrays}

            def rebuild(outs: Sequence[Any]) -> Any:
                merged = static | dict(zip(arrays, outs, strict=True))
                return jax.tree.unflatten(tree, [merged[i] for i in range(len(leaves))])

            rebuilds.append(rebuild)
            return list(arrays.values())

        jaxpr = closed(jax.make_jaxpr(flat)(*(_abstract(leaf) for _, leaf in inputs)))
        origins = [DATA if name is None else Origin(params=frozenset([name]), view=()) for name, _ in inputs]
        scaled = frozenset(name for name, leaf in inputs if name is not None and _is_scaled(leaf))
        names = tuple(name for name, _ in inputs)
        return Traced(jaxpr, names, scaled, (*self._constants(jaxpr), *origins), rebuilds[-1])

    def _constants(self, jaxpr: Closed) -> list[Origin]:
        """Origins of the arrays that the function closes over: parameters if no argument holds any."""
        if self.param_args is not None:
            return [CONSTANT] * len(jaxpr.consts)
        return [Origin(params=frozenset([f"constant_{i}"])) for i in range(len(jaxpr.consts))]

    def param_name(self, path: tuple[Any, ...], count: int) -> str | None:
        """The path of a parameter within its argument; None for a leaf of another argument."""
        of_kwargs, position = path[0].idx == 1, getattr(path[1], "idx", None)
        positions = {p % count if count else p for p in self.param_args or ()}
        if of_kwargs or position not in positions:
            return None
        parts = jax.tree_util.keystr(path[2:], simple=True, separator="/").split("/")
        parts = parts[1:] if parts[0] == "params" and len(parts) > 1 else parts  # linen's collection
        parts = parts[:-1] if parts[-1] in ("value", "raw_value") and len(parts) > 1 else parts  # an nnx.Variable
        return "/".join(parts) or self._argument_name(position)

    def _argument_name(self, position: int) -> str:
        try:
            parameters = list(inspect.signature(self.fn).parameters.values())
        except ValueError:  # some callables have no signature
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return positional[position] if position < len(positional) else f"argument_{position}"


def with_recipes(fn: Callable[..., Any], rules: Rules | None, params: ParamArgs) -> Transform[Program]:
    """The Transform of a function whose contractions get recipes; rules: None for a function that is only looked at."""
    parsed = () if rules is None else parse_rules(rules)

    def analyse(traced: Traced, complete: bool) -> Program:
        analysis = Analysis(parsed, traced.scaled, complete)
        plan = analysis.plan(traced.jaxpr, traced.origins, Place())
        check_all_match(parsed, [choice.site for choice in analysis.choices])
        names = unique([choice.site.path for choice in plan.delayed])
        return Program(plan, names, tuple(analysis.choices), traced.rebuild)

    return Transform.of(fn, params, analyse)


def quantized(fn: Callable[..., Any], rules: Rules, *, params: ParamArgs = 0) -> Callable[..., Any]:
    """A function that computes what `fn` computes, with its contractions under the recipes that `rules` choose.

    `dot_general`, `conv_general_dilated` and `ragged_dot` are replaced wherever they are, also inside jit, scan, while,
    cond, checkpoint, shard_map and custom derivative rules; everything else is evaluated as it was. Differentiate the
    result: `jax.grad(quantized(loss, rules))`. `quantized(jax.grad(loss), rules)` raises, because its backward pass
    consists of plain contractions already.

    Args:
      fn: any function of arrays and pytrees.
      rules: a recipe, a mapping of path patterns to recipes, or a list of `Rule`; see `scaledot.transform.rules`.
      params: the position of the argument that holds parameters, or several positions. None: parameters are the arrays
        that `fn` closes over. Leaves may be ScaledArrays; their codes are multiplied without dequantising a copy.

    Returns:
      A function with the arguments of `fn` and two more: `sr_key`, for recipes with stochastic rounding, a new key in
      each step; and `scaling_state`, for recipes with delayed scaling, from `init_state`. With the latter it returns
      (result, state), and the gradient with respect to a state is the next state, as in `scaledot.state`.

    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])
    >>> params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    >>> grads = jax.grad(quantized(loss, {"up": "mxfp8", "down": None}))(params, jnp.ones((4, 32)))
    """
    transform = with_recipes(fn, rules, params)

    def call(*args: Any, sr_key: Any = None, scaling_state: Any = None, **kwargs: Any) -> Any:
        program, inputs = transform.program(args, kwargs)
        states = program.ordered(scaling_state)
        inputs = [*program.plan.closed.consts, *inputs]
        outs, states = program.rewriter.evaluate(
            program.plan, inputs, sr_key if program.plan.needs_key else None, states
        )
        result = program.rebuild(outs)
        return (result, dict(zip(program.state_names, states, strict=True))) if states else result

    call.__name__ = call.__qualname__ = f"quantized_{getattr(fn, '__name__', type(fn).__name__)}"
    call.__doc__ = fn.__doc__
    return call


def init_state(fn: Callable[..., Any], rules: Rules, *, params: ParamArgs = 0) -> Callable[..., dict[str, State]]:
    """A function of the arguments of `fn` that returns the initial `scaling_state` of `quantized(fn, rules)`.

    The state is a dictionary by the path of each contraction with delayed scaling. Contractions inside a scan have a
    leading axis of its length. Arguments may be ShapeDtypeStructs.

    >>> state = init_state(lambda w, x: x @ w, "fp8_delayed")(jnp.ones((32, 32)), jnp.ones((4, 32)))
    >>> {name: sorted(tensors) for name, tensors in state.items()}
    {'w': ['g', 'w', 'x']}
    """
    transform = with_recipes(fn, rules, params)

    def call(*args: Any, **kwargs: Any) -> dict[str, State]:
        return transform.program(args, kwargs)[0].init_state()

    return call


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with "#2", "#3", ... after repeated ones."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return tuple(unique)


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """Paths and leaves of all arguments, where a ScaledArray is a leaf, and their tree structure."""
    return jax.tree.flatten_with_path((args, kwargs), is_leaf=_is_scaled)


def _is_scaled(leaf: Any) -> bool:
    return isinstance(leaf, (ScaledArray, ReshapedWeight))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or _is_scaled(leaf)


def _abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if _is_scaled(leaf) else leaf


def _type(leaf: Any) -> Hashable:
    """The type of an array, and for a ScaledArray those of its codes and scales."""
    if _is_scaled(leaf):
        leaves, tree = jax.tree.flatten(leaf)
        return (tree, *map(_type, leaves))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, np.dtype(leaf.dtype), leaf.sharding, leaf.weak_type
    return jax.typeof(leaf)

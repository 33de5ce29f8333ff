"""Finds the contractions of a jaxpr, decides which run under a recipe, and keeps the result as a `Plan`.

Whether an operand is a weight follows from data flow, not from its position, because einsum swaps operands. Every
value has an `Origin`: the parameters that it depends on, and whether it depends on any other argument. A value that
depends on parameters only is a weight, however it was computed: converted, transposed, sliced from stacked layers,
concatenated, normalised. A row of an embedding table depends on token ids as well, so it is data. The origin of a
parameter that was only rearranged has a `View`; `Analysis.other_uses` lists where a parameter is used in another way.

The loss of a two-layer MLP, `dot(relu(dot(x, w1)), w2)`, has the sites `w1` and `w2`; `q @ k.T` of attention has no
weight and is left as it is unless a rule has `operands="activations"`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from scaledot.contraction import Contraction
from scaledot.recipes import Recipe
from scaledot.train.conv import groups_reason
from scaledot.train.scope import ContractionScope, innermost
from scaledot.transform.jaxprs import CALLS, Closed, closed, inner_jaxprs, read, scan_counts, type_of
from scaledot.transform.origins import CONSTANT, DATA, Origin, join, passed, rearranged
from scaledot.transform.rules import Rule
from scaledot.transform.site import PRIMITIVES, Site


@dataclasses.dataclass(frozen=True)
class Choice:
    """What becomes of a site: its recipe and the rule that chose it, or the reason why it has none.

    existing: the name of the recipe that it has already, from a Flax hook or `scaledot.train`; it is left as it is.
    is_keyed: whether its weight is a CustomWeight that takes a key.
    """

    site: Site
    recipe: Recipe | None
    rule: Rule | None = None
    reason: str = ""
    existing: str = ""
    is_keyed: bool = False

    @property
    def needs_key(self) -> bool:
        return self.is_keyed or bool(self.recipe and self.recipe.stochastic)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The equations of a jaxpr that change, by index.

    sites: contractions under a recipe. inner: for equations with jaxprs that change, or that take quantised parameters,
    the plans of these jaxprs. out_tree: of the forward rule of a custom_vjp, the structure of (results, vjp function).
    """

    closed: Closed
    sites: Mapping[int, Choice]
    inner: "Mapping[int, tuple[Plan, ...]]"
    out_tree: Any = None

    @property
    def is_empty(self) -> bool:
        return not self.sites and not self.inner

    @functools.cached_property
    def choices(self) -> tuple[Choice, ...]:
        """All contractions under a recipe, in the order of equations."""
        found: list[Choice] = []
        for i in sorted({*self.sites, *self.inner}):
            found += [self.sites[i]] if i in self.sites else [c for plan in self.inner[i] for c in plan.choices]
        return tuple(found)

    @functools.cached_property
    def delayed(self) -> tuple[Choice, ...]:
        """Those of `choices` that have a state."""
        return tuple(choice for choice in self.choices if choice.recipe and choice.recipe.delayed)

    @functools.cached_property
    def needs_key(self) -> bool:
        return any(choice.needs_key for choice in self.choices)

    @functools.cached_property
    def signature(self) -> Any:
        """Equal for two plans of the same jaxpr that evaluate to the same program."""
        sites = tuple(
            (i, choice.recipe, choice.is_keyed, choice.site.weight, choice.site.view)
            for i, choice in sorted(self.sites.items())
        )
        inner = tuple((i, tuple(plan.signature for plan in plans)) for i, plans in sorted(self.inner.items()))
        return id(self.closed.jaxpr), sites, inner


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a jaxpr is called: the scope, the lengths of surrounding scans, and what is around it.

    no_state: the construct through which a state of delayed scaling cannot pass, such as "a while loop"; None without.
    """

    scope: str = ""
    lengths: tuple[int, ...] = ()
    in_loop: bool = False
    no_state: str | None = None
    in_derivative_rule: bool = False

    def within(self, scope: str) -> "Place":
        return dataclasses.replace(self, scope="/".join(filter(None, (self.scope, scope))))


@dataclasses.dataclass
class Analysis:
    """One pass over a program. choices: all contractions found, also those that are left as they are.

    scaled: paths of parameters that are ScaledArrays or CustomWeights. keyed: of CustomWeights that take a key.
    other_uses: for each parameter, the operations other than contractions that it, or a view of it, is an operand of.
    """

    rules: tuple[Rule, ...]
    scaled: frozenset[str] = frozenset()
    complete: bool = False
    keyed: frozenset[str] = frozenset()
    choices: list[Choice] = dataclasses.field(default_factory=list)
    other_uses: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    _flows: dict[Any, tuple[Origin, ...]] = dataclasses.field(default_factory=dict)

    def plan(self, jaxpr: Closed, ins: Sequence[Origin], place: Place, record: bool = True) -> Plan:
        """The plan of a jaxpr whose inputs have the origins `ins`. record: whether to add to `choices`."""
        sites: dict[int, Choice] = {}
        inner: dict[int, tuple[Plan, ...]] = {}

        def visit(i: int, eqn: JaxprEqn, origins: list[Origin]) -> None:
            here = place.within(str(eqn.source_info.name_stack))
            if eqn.primitive.name == "custom_vjp_call" and (scope := innermost(here.scope)):
                if record:
                    self.choices.append(_existing(eqn, origins, here, scope))
                self._note_use(origins, f"a matmul under the recipe {scope.recipe}")
            elif eqn.primitive.name in PRIMITIVES:
                choice = self._choose(eqn, origins, here)
                if record:
                    self.choices.append(choice)
                if choice.site.operands != "weight":
                    self._note_use(origins, eqn.primitive.name)
                if choice.recipe is not None or self._is_scaled(origins):
                    sites[i] = choice
            elif inner_jaxprs(eqn):
                plans = self._inner(eqn, origins, here, record)
                if any(not plan.is_empty for plan in plans) or (plans and self._is_scaled(origins)):
                    inner[i] = plans
                inside = passed(eqn, origins) if plans else [DATA] * len(origins)
                self._note_use([o for o, p in zip(origins, inside, strict=True) if p.view is None], eqn.primitive.name)
            elif rearranged(eqn, origins) is None:
                self._note_use(origins, eqn.primitive.name)

        self._flow(jaxpr, ins, visit)
        return Plan(jaxpr, sites, inner)

    def _note_use(self, origins: Sequence[Origin], operation: str) -> None:
        for origin in origins:
            for param in origin.params if origin.view is not None else ():
                uses = self.other_uses.setdefault(param, [])
                uses += [] if operation in uses else [operation]

    def _is_scaled(self, origins: Sequence[Origin]) -> bool:
        return any(origin.is_weight and origin.params <= self.scaled for origin in origins)

    def _flow(self, jaxpr: Closed, ins: Sequence[Origin], visit: Callable[..., None] | None = None) -> list[Origin]:
        """Origins of the outputs; calls `visit` with the index, the equation and the origins of its operands.

        ins: origins of the inputs, after those of constants if there are origins for them.
        """
        variables = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
        ins = [*[CONSTANT] * (len(variables) - len(ins)), *ins]
        env: dict[Any, Origin] = dict(zip(variables, ins, strict=True))
        for i, eqn in enumerate(jaxpr.jaxpr.eqns):
            origins = read(env, eqn.invars, lambda _: CONSTANT)
            if visit:
                visit(i, eqn, origins)
            env.update(zip(eqn.outvars, self._out_origins(eqn, origins), strict=True))
        return read(env, jaxpr.jaxpr.outvars, lambda _: CONSTANT)

    def _outs(self, jaxpr: Any, ins: Sequence[Origin]) -> list[Origin]:
        key = id(closed(jaxpr).jaxpr), tuple(ins)
        if key not in self._flows:
            self._flows[key] = tuple(self._flow(closed(jaxpr), ins))
        return list(self._flows[key])

    def _out_origins(self, eqn: JaxprEqn, origins: list[Origin]) -> list[Origin]:
        name, params = eqn.primitive.name, eqn.params
        if (outs := rearranged(eqn, origins)) is not None:
            return outs
        origins = passed(eqn, origins)
        if name in CALLS:
            return self._outs(params[CALLS[name]], origins)
        if name == "cond":
            branches = [self._outs(branch, origins[1:]) for branch in params["branches"]]
            self._note_use([out for outs in branches for out in outs], name)
            return [join(outs) for outs in zip(*branches, strict=True)]
        if name == "scan":
            consts, carry = scan_counts(eqn)
            ins = self._fixed_point(params["jaxpr"], origins, consts, carry)
            outs = self._outs(params["jaxpr"], ins)
            self._note_use(outs, name)
            return [dataclasses.replace(out, view=None) for out in outs]
        if name == "while":
            return self._fixed_point(params["body_jaxpr"], *_while_body(eqn, origins))[params["body_nconsts"] :]
        return [join(origins)] * len(eqn.outvars)

    def _fixed_point(self, jaxpr: Any, ins: list[Origin], consts: int, carry: int) -> list[Origin]:
        """Origins of the inputs of a loop body, with those of carried values joined over all iterations."""
        while True:
            outs = self._outs(jaxpr, ins)
            self._note_use(outs[:carry], "a loop")
            joined = [join(pair) for pair in zip(ins[consts : consts + carry], outs[:carry], strict=True)]
            if joined == ins[consts : consts + carry]:
                return ins
            ins = [*ins[:consts], *joined, *ins[consts + carry :]]

    def _inner(self, eqn: JaxprEqn, origins: list[Origin], place: Place, record: bool) -> tuple[Plan, ...]:
        """Plans of the jaxprs of an equation; none if its primitive is not one that can be rewritten."""
        name, params = eqn.primitive.name, eqn.params
        origins = passed(eqn, origins)
        if name == "custom_vjp_call":
            return self._custom_vjp(eqn, origins, place, record)
        if name == "custom_jvp_call":
            rules = dataclasses.replace(place, no_state="a custom_jvp")
            return (self.plan(closed(params["call_jaxpr"]), origins, rules, record),)
        if name == "shard_map":
            place = dataclasses.replace(place, no_state="a shard_map")
        if name in CALLS:
            return (self.plan(closed(params[CALLS[name]]), origins, place, record),)
        if name == "cond":
            place = dataclasses.replace(place, no_state="a cond")
            return tuple(self.plan(closed(branch), origins[1:], place, record) for branch in params["branches"])
        if name == "scan":
            ins = self._fixed_point(params["jaxpr"], origins, *scan_counts(eqn))
            place = dataclasses.replace(place, lengths=(*place.lengths, params["length"]))
            return (self.plan(closed(params["jaxpr"]), ins, place, record),)
        if name == "while":
            place = dataclasses.replace(place, in_loop=True, no_state="a while loop")
            ins = self._fixed_point(params["body_jaxpr"], *_while_body(eqn, origins))
            condition = [*origins[: params["cond_nconsts"]], *ins[params["body_nconsts"] :]]
            plans = (params["cond_jaxpr"], condition), (params["body_jaxpr"], ins)
            return tuple(self.plan(closed(jaxpr), ins, place, record) for jaxpr, ins in plans)
        if record:
            self._list_left(eqn, place, f"inside {name}, which is not rewritten")
        return ()

    def _custom_vjp(self, eqn: JaxprEqn, origins: list[Origin], place: Place, record: bool) -> tuple[Plan, ...]:
        """Plans of the function and of its forward rule; its backward rule is left as it is."""
        place = dataclasses.replace(place, no_state="a custom_vjp")
        plan = self.plan(closed(eqn.params["call_jaxpr"]), origins, place, record)
        if plan.is_empty and not self.complete:
            return (plan,)
        forward, backward, out_tree = rules_of_custom_vjp(eqn)
        if record:
            for inner in contractions_of(backward.jaxpr):
                site = make_site(inner, [DATA, DATA], place)
                self.choices.append(
                    Choice(site, None, reason="in the backward rule of a custom_vjp, which is not rewritten")
                )
        if plan.is_empty:
            return (plan,)
        place = dataclasses.replace(place, in_derivative_rule=True)
        return plan, dataclasses.replace(self.plan(forward, origins, place, record=False), out_tree=out_tree)

    def _list_left(self, eqn: JaxprEqn, place: Place, reason: str) -> None:
        for jaxpr in inner_jaxprs(eqn):
            for inner in contractions_of(jaxpr):
                self.choices.append(Choice(make_site(inner, [DATA, DATA], place), None, reason=reason))

    def _choose(self, eqn: JaxprEqn, origins: list[Origin], place: Place) -> Choice:
        site = make_site(eqn, origins[:2], place)
        derivative = _derivative(place)
        rule = next((rule for rule in self.rules if rule.matches(site)), None)
        if rule is None:
            reason = _UNMATCHED[site.operands] if self.rules else "it has no recipe"
            return Choice(site, None, reason=reason, is_keyed=not self.keyed.isdisjoint(site.parameters))
        if rule.recipe is None:
            return Choice(site, None, rule, "its rule has no recipe")
        reason = _obstacle(eqn, site, rule.recipe) or derivative
        if reason is None and rule.recipe.delayed and place.no_state:
            reason = f"{rule.recipe.name} has a state, which cannot pass through {place.no_state}"
        if reason is None and rule.recipe.delayed and self._is_scaled(origins[:2]):
            reason = f"{rule.recipe.name} has delayed scaling, and a quantised parameter has no amax history"
        return Choice(site, None, rule, reason) if reason else Choice(site, rule.recipe, rule)


def _existing(eqn: JaxprEqn, origins: list[Origin], place: Place, scope: ContractionScope) -> Choice:
    """The Choice of a contraction that runs under a recipe already; the first operands of `eqn` are x and w."""
    types = [type_of(atom) for atom in (*eqn.invars[:2], eqn.outvars[0])]
    outer = dataclasses.replace(place, scope=place.scope.partition(str(scope))[0].strip("/"))
    params = {"dimension_numbers": _numbers_of(scope.equation, *types[:2]), "precision": None}
    site = _site(scope.primitive, types, scope.products, params, origins[:2], outer)
    return Choice(site, None, existing=scope.recipe)


def _numbers_of(equation: str, x: Any, w: Any) -> Any:
    """Dimension numbers of operands that were not flattened to matrices, or were; None if they are batched by vmap."""
    operands, _, out = equation.partition("->")
    lhs, _, rhs = operands.partition(",")
    if equation and (len(lhs), len(rhs)) == (x.ndim, w.ndim):
        return Contraction(lhs, rhs, out).dimension_numbers
    is_matmul = (x.ndim, w.ndim) == (2, 2) and x.shape[1] == w.shape[0]
    return (((1,), (0,)), ((), ())) if is_matmul else None


def _derivative(place: Place) -> str | None:
    """Raises ValueError for a contraction of a backward pass; the reason to leave one of a forward-mode derivative."""
    if place.in_derivative_rule or "jvp(" not in place.scope:
        return None
    if "transpose(" in place.scope:
        raise ValueError(
            "the function contains a backward pass, whose contractions are not those of a recipe's dgrad and wgrad; "
            "quantise the loss and differentiate the result: jax.grad(transform.quantized(loss, rules))"
        )
    return "it is part of a forward-mode derivative"


_UNMATCHED = {
    "weight": "no rule matches",
    "activations": "no weight among its operands; a rule with operands='activations' would match",
    "parameters": "no operand depends on data",
    "constant": "one operand is a constant, not a parameter",
    "constants": "both operands are constants",
}


def _while_body(eqn: JaxprEqn, origins: list[Origin]) -> tuple[list[Origin], int, int]:
    """Origins of the inputs of a while body, and the numbers of its constants and carried values."""
    consts = eqn.params["body_nconsts"]
    ins = origins[eqn.params["cond_nconsts"] :]
    return ins, consts, len(ins) - consts


def contractions_of(jaxpr: Any) -> Iterator[JaxprEqn]:
    """All contractions of a jaxpr and of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRIMITIVES:
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from contractions_of(inner)


# By the number of operands that depend on data, and the number that depend on parameters only.
_OPERANDS = {
    (2, 0): "activations",
    (1, 1): "weight",
    (1, 0): "constant",
    (0, 2): "parameters",
    (0, 1): "parameters",
    (0, 0): "constants",
}


def make_site(eqn: JaxprEqn, origins: Sequence[Origin], place: Place) -> Site:
    """The Site of a contraction whose first two operands have the given origins."""
    types = [type_of(atom) for atom in (*eqn.invars[:2], eqn.outvars[0])]
    return _site(eqn.primitive.name, types, _products(eqn, *types[:2]), eqn.params, origins, place)


def _site(
    primitive: str,
    types: Sequence[Any],
    products: int,
    params: Mapping[str, Any],
    origins: Sequence[Origin],
    place: Place,
) -> Site:
    """types: of lhs, rhs and the result. products: that are added up for each element of the result."""
    lhs, rhs, out = types
    operands = _OPERANDS[sum(origin.is_data for origin in origins), sum(origin.is_weight for origin in origins)]
    weight = 0 if operands == "weight" and origins[0].is_weight else 1
    paths = sorted(origins[weight].params) if operands == "weight" else []
    view = origins[weight].view if operands == "weight" else None
    layers = [path.rpartition("/")[0] or path for path in paths]
    path = " + ".join(dict.fromkeys(layers)) or place.scope or primitive
    names = tuple(dict.fromkeys([path, *layers, *paths, place.scope]))
    return Site(
        path=path,
        names=names,
        scope=place.scope,
        primitive=primitive,
        operands=operands,
        weight=weight,
        lhs=lhs,
        rhs=rhs,
        out=out,
        flops=2 * math.prod(out.shape) * products,
        lengths=place.lengths,
        in_loop=place.in_loop,
        params=params,
        parameters=tuple(paths),
        view=view,
    )


def _products(eqn: JaxprEqn, lhs: Any, rhs: Any) -> int:
    """The number of products that are added up for each element of the result."""
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"].rhs_spec
        return math.prod(rhs.shape[axis] for axis in numbers[1:])
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return math.prod(lhs.shape[axis] for axis in numbers[0][0])
    return math.prod(lhs.shape[axis] for axis in eqn.params["dimension_numbers"][0][0])


def _obstacle(eqn: JaxprEqn, site: Site, recipe: Recipe) -> str | None:
    """Why a contraction cannot run under a recipe; None if it can."""
    for aval in (site.lhs, site.rhs, site.out):
        if not jnp.issubdtype(aval.dtype, jnp.floating) or jnp.finfo(aval.dtype).bits < 16:
            return f"it has dtype {aval.dtype.name}"
    if eqn.primitive.name == "dot_general":
        return None if eqn.params["dimension_numbers"][0][0] else "it has no contracting dim"
    if site.operands == "weight" and site.weight != 1:
        return f"the weight is lhs of {eqn.primitive.name}"
    if eqn.primitive.name == "ragged_dot_general":
        return ragged_obstacle(eqn.params) if len(eqn.invars) == 3 else "it has a group offset"
    return _conv_obstacle(eqn, site, recipe)


def _conv_obstacle(eqn: JaxprEqn, site: Site, recipe: Recipe) -> str | None:
    groups = eqn.params["feature_group_count"]
    if eqn.params["batch_group_count"] != 1:
        return "it has batch_group_count > 1"
    outputs, inputs, *_ = (site.rhs.shape[axis] for axis in eqn.params["dimension_numbers"].rhs_spec)
    return groups_reason(recipe, groups, inputs, outputs // groups)


def ragged_obstacle(params: Mapping[str, Any]) -> str | None:
    """Why a ragged_dot_general of these params is not supported; None if it is."""
    numbers = params["ragged_dot_dimension_numbers"]
    plain = (((1,), (1,)), ((), ()))
    dims = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    is_plain = dims == plain and (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions) == (0, 0)
    if not is_plain or params.get("group_offset") is not None:
        return "only ragged_dot of (m, k) and (groups, k, n) is supported, not another ragged_dot_general"
    return None


def rules_of_custom_vjp(eqn: JaxprEqn) -> tuple[Closed, Closed, Any]:
    """Jaxprs of the forward and the backward rule, and the structure of the outputs of the forward rule.

    These are (results, vjp function); a vjp function is a pytree of residuals.
    """
    function = functools.partial(bind, eqn)
    avals = [atom.aval for atom in eqn.invars]
    forward, outs = jax.make_jaxpr(lambda *args: jax.vjp(function, *args), return_shape=True)(*avals)
    backward = jax.make_jaxpr(lambda vjp, cotangents: vjp(cotangents))(outs[1], outs[0])
    return closed(forward), closed(backward), jax.tree.structure(outs)


def bind(eqn: JaxprEqn, *args: Any) -> list[Any]:
    """Evaluates an equation."""
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]

"""Decides which parameters of a traced function have adapters, and plans the function with them.

A parameter has an adapter if all of its matmuls match rules with one Config, and nothing else uses it. Otherwise the
adapted function would differ from the function with merged weights, and training would optimise another model than is
served. The function is analysed twice: to find its matmuls, and, knowing the adapted parameters, to plan the rewriting.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.lora.config import AdapterRule, Config, Rules, parse_rules
from scaledot.lora.uses import Use, use_of
from scaledot.lora.weight import AdaptedWeight, Factors
from scaledot.transform.analysis import Analysis, Choice, Place, Plan, ragged_obstacle
from scaledot.transform.custom_weight import CustomWeight
from scaledot.transform.program import ParamArgs, Traced, Transform, unique
from scaledot.transform.rewrite import Rewriter
from scaledot.transform.rules import check_all_match
from scaledot.transform.site import Site

Adapters = Mapping[str, Factors]


@dataclasses.dataclass(frozen=True)
class AdaptedParameter:
    """A parameter with a Config, its uses, and for each use the name of its factors in the pytree of adapters."""

    path: str
    config: Config
    uses: tuple[Use, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return unique([self.path] * len(self.uses))

    @property
    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        return {n: use.factor_shapes(self.config.rank) for n, use in zip(self.names, self.uses, strict=True)}


class Decision(NamedTuple):
    """A contraction, the first rule that matches it, and its Config or the reason why it has no adapter."""

    site: Site
    rule: AdapterRule | None
    outcome: Config | str


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterProgram:
    """A traced function with adapters.

    parameters: those with adapters, by path. decisions: one for each contraction. other_uses: for each parameter, the
    other operations that use it. names: for each input of the plan, the path of the parameter that it is, or None.
    """

    plan: Plan
    parameters: Mapping[str, AdaptedParameter]
    decisions: tuple[Decision, ...]
    other_uses: Mapping[str, list[str]]
    names: tuple[str | None, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    rewriter: Rewriter = dataclasses.field(default_factory=Rewriter)

    def __call__(self, adapters: Adapters, inputs: Sequence[Any], key: Any) -> Any:
        """The result of the function; inputs: those of the plan, without constants."""
        self.check(adapters)
        values = [self._value(name, leaf, adapters) for name, leaf in zip(self.names, inputs, strict=True)]
        values = [*self.plan.closed.consts, *values]
        outs, _ = self.rewriter.evaluate(self.plan, values, key if self.plan.needs_key else None, [])
        return self.rebuild([out.base if isinstance(out, CustomWeight) else out for out in outs])

    def _value(self, name: str | None, leaf: Any, adapters: Adapters) -> Any:
        if name is None:
            return leaf
        frozen = leaf if isinstance(leaf, ScaledArray) else lax.stop_gradient(leaf)
        if name not in self.parameters:
            return frozen
        parameter = self.parameters[name]
        factors = tuple(dict(adapters[of_use]) for of_use in parameter.names)
        return AdaptedWeight(frozen, factors, parameter.uses, parameter.config)

    def reasons_of_tables(self) -> dict[str, str]:
        """Why lookup tables, such as embeddings, that no contraction uses have no adapter, by path."""
        multiplied = {path for decision in self.decisions for path in decision.site.parameters}
        tables = {path: uses for path, uses in self.other_uses.items() if "gather" in uses and path not in multiplied}
        return {path: _also_used(uses) for path, uses in tables.items()}

    def shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """The types of all adapters, as the pytree that `init` returns."""
        return {
            name: {factor: jax.ShapeDtypeStruct(shape, parameter.config.dtype) for factor, shape in shapes.items()}
            for parameter in self.parameters.values()
            for name, shapes in parameter.shapes.items()
        }

    def check(self, adapters: Any) -> None:
        """Raises ValueError unless `adapters` has the names and shapes of this program's."""
        if not isinstance(adapters, Mapping):
            raise TypeError(f"`adapters` must be the dictionary that lora.init returns, not {type(adapters).__name__}")
        expected = self.shapes()
        for name in {**expected, **adapters}:
            if name not in expected or name not in adapters:
                known, where = ("the function", "`adapters`") if name in expected else ("`adapters`", "the function")
                raise ValueError(
                    f"{known} has an adapter {name!r} and {where} has not; they are of another function or other rules"
                )
            found = {factor: tuple(array.shape) for factor, array in adapters[name].items()}
            wanted = {factor: struct.shape for factor, struct in expected[name].items()}
            if found != wanted:
                raise ValueError(
                    f"`adapters` has shapes {found} for {name!r}; the function and its rules need {wanted}"
                )


def with_adapters(fn: Callable[..., Any], rules: Rules, params: ParamArgs) -> Transform[AdapterProgram]:
    """The Transform of a function whose matmuls get adapters."""
    if params is None:
        raise TypeError("`params` must be the position of the argument with parameters, or several, not None")
    parsed = parse_rules(rules)

    def analyse(traced: Traced, complete: bool) -> AdapterProgram:
        analysis = Analysis((), traced.scaled, complete)
        analysis.plan(traced.jaxpr, traced.origins, Place())
        decisions, parameters = _decided(analysis, parsed)
        repeated = sorted(name for name in parameters if traced.names.count(name) > 1)
        if repeated:
            raise ValueError(f"two parameters have the path {repeated[0]!r}; rename one, so that adapters have names")
        keyed = frozenset(path for path, parameter in parameters.items() if parameter.config.dropout)
        second = Analysis((), traced.scaled.union(parameters), keyed=keyed)
        plan = second.plan(traced.jaxpr, traced.origins, Place())
        return AdapterProgram(plan, parameters, decisions, analysis.other_uses, traced.names, traced.rebuild)

    return Transform.of(fn, params, analyse)


def _decided(
    analysis: Analysis, rules: Sequence[AdapterRule]
) -> tuple[tuple[Decision, ...], dict[str, AdaptedParameter]]:
    """A Decision for each contraction, and the parameters with adapters."""
    matched = [
        (choice, next((rule for rule in rules if rule.matches(choice.site)), None)) for choice in analysis.choices
    ]
    by_parameter: dict[str, list[tuple[Choice, AdapterRule | None]]] = {}
    for choice, rule in matched:
        for path in choice.site.parameters:
            by_parameter.setdefault(path, []).append((choice, rule))
    found = {path: _parameter(path, uses, analysis) for path, uses in by_parameter.items()}
    decisions = tuple(Decision(choice.site, rule, _outcome(choice.site, rule, found)) for choice, rule in matched)
    _check_rules(rules, decisions, analysis.other_uses)
    return decisions, {path: one for path, one in found.items() if isinstance(one, AdaptedParameter)}


def _parameter(path: str, matched: list[tuple[Choice, AdapterRule | None]], analysis: Analysis) -> Any:
    """The AdaptedParameter of a path whose matmuls matched rules, or the reason why it has no adapter."""
    configs = {rule.config if rule else None for _, rule in matched}
    if configs == {None}:
        return "its rule is None" if any(rule for _, rule in matched) else "no rule matches"
    if len(configs) > 1:
        raise ValueError(
            f"`rules` choose different configs for the matmuls of {path!r}: {', '.join(map(str, configs))}; an adapter "
            "belongs to the parameter, so match its path instead of named scopes"
        )
    obstacle = next(filter(None, (_obstacle(choice) for choice, _ in matched)), None)
    if obstacle:
        return obstacle
    if uses := analysis.other_uses.get(path):
        return _also_used(uses)
    (config,) = configs
    assert config is not None
    uses = tuple(dict.fromkeys(use_of(choice.site) for choice, _ in matched))
    if len({use.stacked for use in uses}) > 1:
        return "its parameter is sliced by a scan in one place and not in another"
    return AdaptedParameter(path, config, uses)


def _also_used(operations: Sequence[str]) -> str:
    return f"its parameter is an operand of {' and '.join(operations)}, which takes no adapter"


def _outcome(site: Site, rule: AdapterRule | None, found: Mapping[str, Any]) -> Config | str:
    if site.operands != "weight":
        return "no operand is a parameter"
    if rule is None or rule.config is None:
        return "its rule is None" if rule else "no rule matches"
    outcomes = [found[path] for path in site.parameters]
    reason = next((outcome for outcome in outcomes if isinstance(outcome, str)), None)
    return reason or rule.config


def _obstacle(choice: Choice) -> str | None:
    """Why a matmul by a parameter cannot have an adapter; None if it can."""
    site = choice.site
    if choice.existing:
        return (
            f"it is under the recipe {choice.existing}; adapt the function without recipes, then quantise it: "
            "transform.quantized(lora.adapted(fn, rules), recipe, params=1)"
        )
    if site.primitive == "conv_general_dilated":
        return "it is a convolution, which takes no adapter"
    for aval in (site.lhs, site.rhs, site.out):
        if not jnp.issubdtype(aval.dtype, jnp.floating) or jnp.finfo(aval.dtype).bits < 16:
            return f"it has dtype {aval.dtype.name}"
    if site.primitive == "ragged_dot_general":
        return "the weight is lhs of a ragged matmul" if site.weight == 0 else ragged_obstacle(site.params)
    return None if site.params["dimension_numbers"][0][0] else "it has no contracting dim"


def _check_rules(
    rules: Sequence[AdapterRule], decisions: Sequence[Decision], other_uses: Mapping[str, list[str]]
) -> None:
    """Raises ValueError for a rule with a Config that gives no matmul an adapter, with the reason."""
    for rule in rules:
        matched = [decision for decision in decisions if decision.rule is rule]
        if rule.config and matched and all(isinstance(decision.outcome, str) for decision in matched):
            raise ValueError(
                f"the rule {rule} gives no matmul an adapter; {matched[0].site.path}: {matched[0].outcome}"
            )
        tables = [path for path in other_uses if fnmatch.fnmatchcase(path, rule.path)]
        if tables and not any(rule.matches(decision.site) for decision in decisions):
            uses = " and ".join(other_uses[tables[0]])
            raise ValueError(f"the rule {rule} matches no matmul; {tables[0]} is an operand of {uses}")
    check_all_match(rules, [decision.site for decision in decisions])
    if not any(isinstance(decision.outcome, Config) for decision in decisions):
        reasons = dict.fromkeys(f"{site.path}: {outcome}" for site, _, outcome in decisions)
        raise ValueError(f"no matmul of the function gets an adapter; {'; '.join(reasons) or 'it has no matmul'}")

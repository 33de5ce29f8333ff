"""`report`: every contraction of a function, its recipe or the reason why it has none, and the kernel that it takes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from scaledot.kernels import table
from scaledot.ops.explain import problems
from scaledot.recipes import RECIPES, Recipe
from scaledot.state import init_state
from scaledot.transform.analysis import Choice
from scaledot.transform.program import ParamArgs, with_recipes
from scaledot.transform.rewrite import under_recipe
from scaledot.transform.rules import Rules


@dataclasses.dataclass(frozen=True)
class Row:
    """A contraction: where it is, what it computes, and what became of it.

    executions: of one call, 0 if unknown (in a while loop). flops: of all executions, where an unknown number counts as
    1. share: of the FLOPs of all contractions. recipe: that of a rule, of a Flax hook or of `scaledot.train`, or "".
    rule: "" if none chose the recipe. kernel: those of fwd, dgrad and wgrad, "" without a recipe or if unknown.
    """

    path: str
    scope: str
    primitive: str
    lhs: str
    rhs: str
    executions: int
    flops: int
    share: float
    rule: str
    recipe: str
    reason: str
    kernel: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of all contractions, in program order; `str` is a table."""

    rows: tuple[Row, ...]

    @property
    def quantized_share(self) -> float:
        """The share of FLOPs under a recipe."""
        return sum(row.share for row in self.rows if row.recipe)

    def records(self) -> list[dict[str, Any]]:
        """The rows as dictionaries."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __str__(self) -> str:
        titles = "path", "operands", "executions", "share", "recipe", "kernel, or the reason"
        lines = [titles, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        flops = sum(row.flops for row in self.rows)
        count = sum(bool(row.recipe) for row in self.rows)
        total = (
            f"{count} of {len(self.rows)} contractions under a recipe: {self.quantized_share:.1%} of {flops:.3g} FLOPs"
        )
        return "\n".join([*text, total])


def _cells(row: Row) -> tuple[str, ...]:
    executions = str(row.executions or "in a while loop")
    outcome = row.kernel if row.recipe else row.reason
    return row.path, f"{row.lhs} x {row.rhs}", executions, f"{row.share:.1%}", row.recipe or "-", outcome


def report(fn: Callable[..., Any], rules: Rules | None = None, *, params: ParamArgs = 0) -> Callable[..., Report]:
    """A function of the arguments of `fn` that returns the `Report` of `quantized(fn, rules)`.

    Contractions that run under a recipe already, by the hooks of linen and NNX or by `scaledot.train`, are listed with
    it; without `rules`, only these have a recipe. Nothing is computed; arguments may be ShapeDtypeStructs. Kernels are
    those of the default device.

    >>> import jax, jax.numpy as jnp
    >>> def f(params, x):
    ...     return jax.nn.softmax(x @ params["q"] @ x.T)
    >>> print(report(f, "mxfp8")({"q": jnp.ones((64, 64))}, jnp.ones((32, 64))))
    path         operands                       executions  share  recipe  kernel, or the reason
    q            float32[32,64] x float32[64,64]  1  66.7%  mxfp8   xla_upcast, xla_codes
    dot_general  float32[32,64] x float32[64,32]  1  33.3%  -  no weight among its operands; a rule with ...
    1 of 2 contractions under a recipe: 66.7% of 3.93e+05 FLOPs
    """
    transform = with_recipes(fn, rules, params)

    def call(*args: Any, **kwargs: Any) -> Report:
        return make_report(transform.program(args, kwargs, complete=True)[0].choices)

    return call


def make_report(choices: Sequence[Choice]) -> Report:
    """The Report of what became of each contraction."""
    total = sum(choice.site.total_flops for choice in choices)
    return Report(tuple(_row(choice, total) for choice in choices))


def _row(choice: Choice, total: int) -> Row:
    site = choice.site
    flops = site.total_flops
    return Row(
        path=site.path,
        scope=site.scope,
        primitive=site.primitive,
        lhs=_typed(site.lhs),
        rhs=_typed(site.rhs),
        executions=0 if site.in_loop else flops // site.flops if site.flops else 1,
        flops=flops,
        share=flops / total if total else 0.0,
        rule=str(choice.rule) if choice.rule else "",
        recipe=choice.recipe.name if choice.recipe else choice.existing,
        reason=choice.reason,
        kernel=_kernels(choice),
    )


def _typed(aval: Any) -> str:
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _kernels(choice: Choice) -> str:
    """Names of the kernels of fwd, dgrad and wgrad, each once."""
    recipe = choice.recipe or RECIPES.get(choice.existing)
    site = choice.site
    is_known = not choice.existing or site.params["dimension_numbers"] or site.primitive == "ragged_dot_general"
    if recipe is None or not is_known:
        return ""
    return _kernels_of(recipe, site.primitive, _Operands(dataclasses.replace(choice, recipe=recipe)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Operands:
    """A choice that is hashed by the types of its operands, so that equal layers are traced once."""

    choice: Choice

    @property
    def _types(self) -> Any:
        site = self.choice.site
        return site.lhs, site.rhs, site.out, site.weight, str(site.params)

    def __hash__(self) -> int:
        return hash(self._types)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Operands) and self._types == other._types


@functools.lru_cache(maxsize=256)
def _kernels_of(recipe: Recipe, primitive: str, operands: _Operands) -> str:
    function, keywords = under_recipe(operands.choice)
    site = operands.choice.site
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (site.lhs, site.rhs)]

    def verb(*args: Any, recipe: Recipe, key: Any = None, kernel: Any = None, **rest: Any) -> Any:
        return function(*args, recipe=recipe, key=key, kernel=kernel, **rest)

    if primitive == "ragged_dot_general":
        types.append(jax.ShapeDtypeStruct(site.rhs.shape[:1], jax.numpy.int32))
    if recipe.delayed:
        keywords["state"] = init_state(recipe)
    found = [table.choose(problem).name for problem in problems(verb, *types, **keywords) if problem.op != "cast"]
    return ", ".join(dict.fromkeys(found))

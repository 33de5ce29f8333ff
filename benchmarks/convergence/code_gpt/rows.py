"""The rows of the comparison: which recipe each block of the model trains under, and from which step on.

To add a row, add a line to ROWS.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.convergence.code_gpt.config import Config, digest
from scaledot.formats import FORMATS, Format, row_of
from scaledot.numerics.hadamard import Hadamard
from scaledot.recipes import GEMM_OPERANDS, NVFP4, UNQUANTISED, Cast, Gemm, Recipe, find_recipe

BASELINE, REFERENCE = "bf16", "nvfp4"  # gaps are differences to the first, and are compared with that of the second

Recipes = tuple[Recipe | None, ...]  # of each block; None is bf16


@dataclasses.dataclass(frozen=True)
class Row:
    """A model to train.

    recipe: of all blocks: a Recipe, its name, or "bf16" or None for none.
    last: of the last block; None: the same.
    switch: (fraction of the run, recipe of all blocks from then on).
    """

    name: str
    recipe: Recipe | str | None = BASELINE
    last: Recipe | str | None = None
    switch: tuple[float, Recipe | str | None] | None = None

    def __post_init__(self):
        if self.switch is not None and not 0 < self.switch[0] < 1:
            raise ValueError(f"`switch` of {self.name!r} must be at a fraction between 0 and 1, not {self.switch[0]}")

    def phases(self, config: Config) -> list[tuple[int, Recipes]]:
        """Returns (end, recipes of the blocks) of each phase, which lasts until step `end`, a multiple of the chunk."""
        last = self.recipe if self.last is None else self.last
        first = (_found(self.recipe),) * (config.blocks - 1) + (_found(last),)
        if self.switch is None:
            return [(config.steps, first)]
        fraction, then = self.switch
        end = round(fraction * config.steps / config.chunk) * config.chunk
        phases = [(end, first), (config.steps, (_found(then),) * config.blocks)]
        return phases if 0 < end < config.steps else phases[end == 0 :][:1]

    def casts(self, config: Config) -> list[Any]:
        """Returns [end, casts of each block] of each phase as JSON values; names of recipes are left out."""
        return [[end, [_casts(recipe) for recipe in recipes]] for end, recipes in self.phases(config)]

    def digest(self, config: Config) -> str:
        """Returns a hash of `casts`, which changes with a recipe, and not if it is only renamed."""
        return digest(self.casts(config))

    def __str__(self) -> str:
        parts = [_name(self.recipe)]
        parts += [] if self.last is None else [f"last block {_name(self.last)}"]
        parts += [] if self.switch is None else [f"{_name(self.switch[1])} from {100 * self.switch[0]:g} % on"]
        return ", ".join(parts)


def _found(recipe: Recipe | str | None) -> Recipe | None:
    return None if recipe is None or recipe == BASELINE else find_recipe(recipe)


def _name(recipe: Recipe | str | None) -> str:
    found = _found(recipe)
    return BASELINE if found is None else found.name


def _casts(recipe: Recipe | None) -> Any:
    return None if recipe is None else {key: value for key, value in recipe.to_dict().items() if key != "name"}


_X = Cast(FORMATS["nvfp4"])  # in blocks of 1x16, rounded to nearest
_G = Cast(FORMATS["nvfp4"], rounding="stochastic")
NVFP4_1X16 = dataclasses.replace(NVFP4, name="nvfp4_1x16", fwd=Gemm(_X, _X), dgrad=Gemm(_G, _X))
NVFP4_FORWARD = Recipe("nvfp4_forward", NVFP4.fwd, Gemm(), Gemm())
NVFP4_1X16_FORWARD = Recipe("nvfp4_1x16_forward", NVFP4_1X16.fwd, Gemm(), Gemm())
NVFP4_BACKWARD = dataclasses.replace(NVFP4, name="nvfp4_backward", fwd=Gemm())


def _searched(format: str, **fields) -> Format:
    return dataclasses.replace(FORMATS[format], name=f"{format}_search", search="scales", scale_max=256.0, **fields)


def _eden(format: Format, **fields) -> Cast:
    return Cast(format, rounding="ms_eden", rotation=Hadamard(128, mask=None), **fields)


def _with_means(name: str, recipe: Recipe) -> Recipe:
    """The recipe with the means of x and g subtracted."""

    def gemm(matmul: str, operands: Gemm) -> Gemm:
        casts = zip(GEMM_OPERANDS[matmul], (operands.lhs, operands.rhs), strict=True)
        return Gemm(
            *(c if c is None or tensor == "w" else dataclasses.replace(c, subtract_mean=True) for tensor, c in casts)
        )

    return Recipe(name, *(gemm(matmul, getattr(recipe, matmul)) for matmul in GEMM_OPERANDS))


def _recipe(name: str, forward: Cast, eden: Cast, again: bool = False) -> Recipe:
    """One cast of x and w in fwd and one of both operands of dgrad and wgrad. again: cast x and w from those of fwd."""
    saved = dataclasses.replace(eden, requantized=again)
    return Recipe(name, Gemm(forward, forward), Gemm(eden, saved), Gemm(saved, eden))


_S = Cast(_searched("nvfp4"))
_EDEN = _eden(dataclasses.replace(FORMATS["nvfp4"], name="nvfp4_eden", target=6 * (16 / 17) / 0.93, scale_max=256.0))
_EDEN_S = _eden(_searched("nvfp4"))
SEARCH_SR = dataclasses.replace(NVFP4, name="search_sr", fwd=Gemm(_S, _S), dgrad=Gemm(_G, _S))
SEARCH_EDEN = _recipe("search_eden", _S, _EDEN)
SEARCH_EDEN_S = _recipe("search_eden_search", _S, _EDEN_S)
SEARCH_EDEN_S_AGAIN = _recipe("search_eden_search_again", _S, _EDEN_S, again=True)
INT_S, INT_EDEN_S = Cast(_searched("nvint4")), _eden(_searched("nvint4"))
UNIFORM = _recipe("uniform", INT_S, INT_EDEN_S)
IF4 = _recipe("if4", Cast(_searched("if4")), _eden(_searched("if4")))
IF4_EDEN = _recipe("if4_eden", Cast(_searched("if4")), _EDEN_S)
_INT_R = dataclasses.replace(INT_S, rotation=Hadamard())
UNIFORM_ROTATED = _recipe("uniform_rotated", _INT_R, INT_EDEN_S)

ROWS = (
    Row("quartet_ii", "quartet_ii"),
    Row("search, sr", SEARCH_SR),
    Row("search, eden", SEARCH_EDEN),
    Row("search, eden search", SEARCH_EDEN_S),
    Row("search, eden search again", SEARCH_EDEN_S_AGAIN),
    Row("search, eden search, mean", _with_means("mean", SEARCH_EDEN_S)),
    Row("nvfp4, mean", _with_means("nvfp4_mean", NVFP4)),
    Row("search, eden search, last block mxfp8", SEARCH_EDEN_S, last="mxfp8"),
    Row("search forward only", Recipe("search_forward", Gemm(_S, _S), Gemm(), Gemm())),
    Row("if4 search, if4 eden search", IF4),
    Row("if4 search, if4 eden search, mean", _with_means("if4_mean", IF4)),
    Row("if4 search, nvfp4 eden search", IF4_EDEN),
    Row("uniform search, eden search", UNIFORM),
    Row("uniform search rotated, eden search", UNIFORM_ROTATED),
    Row("bf16"),
    Row("unquantised", UNQUANTISED),
    Row("mxfp8", "mxfp8"),
    Row("nvfp4", "nvfp4"),
    Row("nvfp4_four_over_six", "nvfp4_four_over_six"),
    Row("nvfp4, last block mxfp8", "nvfp4", last="mxfp8"),
    Row("nvfp4, last block bf16", "nvfp4", last="bf16"),
    Row("nvfp4, bf16 from 90 %", "nvfp4", switch=(0.9, "bf16")),
    Row("nvfp4, 1x16 weights", NVFP4_1X16),
    Row("nvfp4, forward only", NVFP4_FORWARD),
    Row("nvfp4, 1x16 weights, forward only", NVFP4_1X16_FORWARD),
    Row("nvfp4, backward only", NVFP4_BACKWARD),
)


def selected(text: str | None, rows: Sequence[Row] = ROWS) -> list[Row]:
    """Returns the rows named in `text`, separated by commas, in that order; None for all.

    A name may contain commas: of several names that fit, the longest is taken.

    >>> [row.name for row in selected("nvfp4, last block mxfp8,nvfp4,bf16")]
    ['nvfp4, last block mxfp8', 'nvfp4', 'bf16']
    """
    by_name = {row.name: row for row in rows}
    chosen: list[Row] = []
    rest = ",".join(by_name) if text is None else text
    while rest := rest.strip():
        fitting = [name for name in by_name if f"{rest},".startswith(f"{name},")]
        name = max(fitting, key=len) if fitting else rest.partition(",")[0]
        chosen.append(row_of("row", name, Row, by_name, "ROWS"))
        rest = rest[len(name) + 1 :]
    return list(dict.fromkeys(chosen))

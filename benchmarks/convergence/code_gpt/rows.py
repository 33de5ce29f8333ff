"""The rows of the comparison: which recipe each block of the model trains under, and from which step on.

To add a row, add a line to ROWS.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.convergence.code_gpt.config import AVERAGED, Config, digest
from scaledot.formats import FORMATS, row_of
from scaledot.numerics.hadamard import Hadamard
from scaledot.recipes import IF4, NVFP4, NVFP4_PLUS, UNQUANTISED, Cast, Gemm, Recipe, find_recipe
from scaledot.recipes.casts import GEMM_OPERANDS

BASELINE, REFERENCE = "bf16", "nvfp4"  # gaps are differences to the first, and are compared with that of the second

Recipes = tuple[Recipe | None, ...]  # of each block; None is bf16


@dataclasses.dataclass(frozen=True)
class Row:
    """A model to train.

    recipe: of all blocks: a Recipe, its name, or "bf16" or None for none.
    last: of the last block; None: the same.
    switch: (fraction of the run, before the final loss is averaged; recipe of all blocks from then on).
    """

    name: str
    recipe: Recipe | str | None = BASELINE
    last: Recipe | str | None = None
    switch: tuple[float, Recipe | str | None] | None = None

    def __post_init__(self):
        if self.switch is not None and not 0 < self.switch[0] < AVERAGED:
            raise ValueError(
                f"`switch` of {self.name!r} must be at a fraction between 0 and {AVERAGED}, from which on losses are "
                f"averaged, not {self.switch[0]}"
            )

    def phases(self, config: Config) -> list[tuple[int, Recipes]]:
        """Returns (end, recipes of the blocks) of each phase after the shared steps.

        A phase lasts until step `end`, a multiple of the chunk.
        """
        last = self.recipe if self.last is None else self.last
        first = (_found(self.recipe),) * (config.blocks - 1) + (_found(last),)
        if self.switch is None:
            return [(config.steps, first)]
        fraction, then = self.switch
        end = round(fraction * config.steps / config.chunk) * config.chunk
        last_phase = (config.steps, (_found(then),) * config.blocks)
        if end <= config.shared_steps:
            return [last_phase]
        return [(end, first), last_phase] if end < config.steps else [(end, first)]

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


def _variant(recipe: Recipe, name: str, **gemms: Gemm) -> Recipe:
    fields: dict[str, Any] = {"name": name, **gemms}
    return dataclasses.replace(recipe, **fields)


def _cast_of(recipe: Recipe, operand: str) -> Cast:
    """The cast of an operand such as "x of fwd"."""
    return next(cast for matmul, tensor, cast in recipe.casts() if f"{tensor} of {matmul}" == operand)


def _changed(recipe: Recipe, name: str, change: Callable[[str, str, Cast], Cast | None]) -> Recipe:
    """The recipe with change(matmul, tensor, cast) for each cast; None leaves that operand unquantised."""
    casts = {(matmul, tensor): change(matmul, tensor, cast) for matmul, tensor, cast in recipe.casts()}
    gemms = {m: Gemm(*(casts.get((m, tensor)) for tensor in tensors)) for m, tensors in GEMM_OPERANDS.items()}
    return _variant(recipe, f"{recipe.name}_{name}", **gemms)


def _with_means(recipe: Recipe, tensors: str) -> Recipe:
    """The recipe with the means of these tensors subtracted, and of no other."""
    name = f"means_{tensors}" if tensors else "no_mean"
    return _changed(recipe, name, lambda matmul, tensor, cast: replace(cast, subtract_mean=tensor in tensors))


def _only(recipe: Recipe, name: str, *operands: str) -> Recipe:
    """The recipe with only these operands, such as "x of fwd", quantised."""
    return _changed(recipe, name, lambda matmul, tensor, cast: cast if f"{tensor} of {matmul}" in operands else None)


def _requantised(recipe: Recipe) -> Recipe:
    """The recipe with w of dgrad and x of wgrad cast from those of fwd."""
    again = "w of dgrad", "x of wgrad"
    return _changed(
        recipe,
        "requantised",
        lambda matmul, tensor, cast: replace(cast, requantized=f"{tensor} of {matmul}" in again),
    )


def _in_format(recipe: Recipe, format: str, **fields: Any) -> Recipe:
    """The recipe in another format, with the largest code as the target of block amaxes. fields: of its fwd casts."""

    def change(matmul: str, tensor: str, cast: Cast) -> Cast:
        row = FORMATS[format]
        changed = replace(cast.format, name=format, element=row.element, grids=row.grids, target=None)
        return replace(cast, format=changed, **(fields if matmul == "fwd" else {}))

    return _changed(recipe, format, change)


def _unsearched(cast: Cast) -> Cast:
    return replace(cast, format=FORMATS["nvfp4"])


def _with_search(cast: Cast) -> Cast:
    return replace(cast, format=replace(cast.format, name="nvfp4_search", search="scales", target=None))


_NEAREST = Cast(FORMATS["nvfp4"])  # in blocks of 1x16
_STOCHASTIC = Cast(FORMATS["nvfp4"], rounding="stochastic")
_SEARCHED = _cast_of(NVFP4_PLUS, "w of fwd")
_EDEN = _cast_of(NVFP4_PLUS, "g of dgrad")
_EDENS = {"dgrad": Gemm(_EDEN, _EDEN), "wgrad": Gemm(_EDEN, _EDEN)}
NVFP4_1X16 = _variant(NVFP4, "nvfp4_1x16", fwd=Gemm(_NEAREST, _NEAREST), dgrad=Gemm(_STOCHASTIC, _NEAREST))
NVFP4_SEARCH = _variant(NVFP4_1X16, "nvfp4_search", fwd=Gemm(_SEARCHED, _SEARCHED))
NVFP4_EDEN = _variant(NVFP4, "nvfp4_eden", **_EDENS)
PLUS_NO_MEAN = _with_means(NVFP4_PLUS, "")
PLUS_UNSEARCHED_FORWARD = _changed(
    NVFP4_PLUS, "unsearched_forward", lambda matmul, _, cast: _unsearched(cast) if matmul == "fwd" else cast
)
PLUS_SEARCHED_BACKWARD = _changed(
    NVFP4_PLUS, "search", lambda matmul, _, cast: cast if matmul == "fwd" else _with_search(cast)
)
_ROTATION = Hadamard(128, mask=None)  # the one that the cast kernel supports
_FORWARD, _BACKWARD = ("x of fwd", "w of fwd"), ("g of dgrad", "w of dgrad", "x of wgrad", "g of wgrad")

ROWS = (
    Row("bf16"),
    Row("unquantised", UNQUANTISED),
    *(Row(name, name) for name in ("mxfp8", "nvfp4", "nvfp4_four_over_six", "quartet_ii", "averis", "ufp4")),
    *(Row(name, name) for name in ("nvfp4_plus", "if4")),
    # Parts alone: nvfp4 with one change.
    Row("nvfp4, 1x16 weights", NVFP4_1X16),
    Row("nvfp4, 1x16 weights, searched forward", NVFP4_SEARCH),
    Row("nvfp4, 1x16 weights, nvint4 grid", _in_format(NVFP4_1X16, "nvint4")),
    Row("nvfp4, 1x16 weights, if4 grid", _in_format(NVFP4_1X16, "if4")),
    Row("nvfp4, MS-EDEN backward", NVFP4_EDEN),
    Row("nvfp4, forward only", _only(NVFP4, "forward", *_FORWARD)),
    Row("nvfp4, backward only", _only(NVFP4, "backward", *_BACKWARD)),
    # Parts taken out of nvfp4_plus, or added to it.
    Row("nvfp4_plus, no mean", PLUS_NO_MEAN),
    Row("nvfp4_plus, means of x and g", _with_means(NVFP4_PLUS, "xg")),
    Row("nvfp4_plus, no search forward", PLUS_UNSEARCHED_FORWARD),
    Row("nvfp4_plus, searched backward", PLUS_SEARCHED_BACKWARD),
    Row("nvfp4_plus, no mean, requantised", _requantised(PLUS_NO_MEAN)),
    Row("nvfp4_plus, forward only", _only(NVFP4_PLUS, "forward", *_FORWARD)),
    Row("nvfp4_plus, no mean, forward only", _only(PLUS_NO_MEAN, "forward", *_FORWARD)),
    Row("nvfp4_plus, no mean, backward only", _only(PLUS_NO_MEAN, "backward", *_BACKWARD)),
    Row("nvfp4_plus, only x of fwd", _only(NVFP4_PLUS, "x", "x of fwd")),
    Row("nvfp4_plus, only w of fwd", _only(NVFP4_PLUS, "w", "w of fwd")),
    # Other grids.
    Row("if4, no mean", _with_means(IF4, "")),
    Row("nvint4_plus", _in_format(NVFP4_PLUS, "nvint4")),
    Row("nvint4_plus, rotated forward", _in_format(NVFP4_PLUS, "nvint4", rotation=_ROTATION)),
    # A part of the model, or of the run, in higher precision.
    Row("nvfp4, last block mxfp8", "nvfp4", last="mxfp8"),
    Row("nvfp4, bf16 from 80 %", "nvfp4", switch=(0.8, "bf16")),
    Row("nvfp4_plus, last block mxfp8", "nvfp4_plus", last="mxfp8"),
    Row("nvfp4_plus, no mean, last block mxfp8", PLUS_NO_MEAN, last="mxfp8"),
    Row("nvfp4_plus, bf16 from 80 %", "nvfp4_plus", switch=(0.8, "bf16")),
    Row("if4, last block mxfp8", "if4", last="mxfp8"),
)


def selected(text: str, rows: Sequence[Row] = ROWS) -> list[Row]:
    """Returns the rows named in `text`, separated by commas, in that order.

    A name may contain commas: of several names that fit, the longest is taken.

    >>> [row.name for row in selected("nvfp4, last block mxfp8,nvfp4,bf16")]
    ['nvfp4, last block mxfp8', 'nvfp4', 'bf16']
    """
    by_name = {row.name: row for row in rows}
    chosen: list[Row] = []
    rest = text
    while rest := rest.strip():
        fitting = [name for name in by_name if f"{rest},".startswith(f"{name},")]
        name = max(fitting, key=len) if fitting else rest.partition(",")[0]
        chosen.append(row_of("row", name, Row, by_name, "ROWS"))
        rest = rest[len(name) + 1 :]
    return list(dict.fromkeys(chosen))

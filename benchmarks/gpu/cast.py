"""Casts: bytes per second beside a copy on the device, and beside what XLA makes of the same two results.

Every byte is counted once: what is read and what is written. Codes and scales are compared with the reference, byte
for byte, on fresh data before anything is timed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scaledot as sd
from benchmarks.gpu import report
from benchmarks.gpu.sides import jax_side, measure
from scaledot.kernels import xla_casts
from scaledot.kernels.hopper import cast_8bit, cast_microscaled
from scaledot.kernels.hopper.sizes import LINE
from scaledot.kernels.layouts import PerGroup, Transposed, logical, values_of
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, View
from scaledot.numerics import blocks
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.cast import CastSpec
from scaledot.ops.cast_spec import propagating

SHAPE = (16384, 16384)
COPY = "copy on the device (float32)"


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One cast of a matrix: a format in tiles of (rows, columns), for a matmul that contracts an axis.

    contracted: None for an ordinary array, as `sd.quantize` makes it.
    """

    format: sd.Format
    tile: tuple[int, int]
    contracted: int | None
    is_residual: bool = False
    stochastic: bool = False
    rotation: sd.Hadamard | None = None

    def view(self, dtype, key: int) -> View:
        rotation = self.rotation
        if rotation is not None:
            rotation = dataclasses.replace(rotation, axis=-2 if self.contracted == 0 else -1)
        dtype = np.dtype(dtype)
        spec = CastSpec(self.format, blocks.trim(self.tile), dtype, dtype, Calibration("absmax"), rotation)
        spec = spec if self.contracted is None else propagating(spec, 2)
        return View(spec, key if self.stochastic else None, self.contracted, self.is_residual)


@dataclasses.dataclass(frozen=True)
class Case:
    """Casts of one matrix; target: the least part of the copy's rate."""

    name: str
    dtype: Any
    wanted: tuple[Wanted, ...]
    target: float | None = None
    given_multiplier: bool = False

    def problems(self, x: jax.Array) -> tuple[CastProblem, ...]:
        """What one pass makes."""
        views = tuple(wanted.view(self.dtype, at) for at, wanted in enumerate(self.wanted))
        given = frozenset({"multiplier"}) if self.given_multiplier else frozenset()
        return (CastProblem(x.shape, views, given, amax=self.given_multiplier),)

    def given(self, x: jax.Array, key: jax.Array) -> CastArguments:
        multiplier = jnp.full((1, 1), 3.0, jnp.float32) if self.given_multiplier else None
        return CastArguments(tuple(jax.random.split(key, len(self.wanted))), multiplier=multiplier)

    def ours(self, x: jax.Array, key: jax.Array) -> CastResult:
        """By the kernel, on whatever device."""
        made = [kernel_for(problem).run(problem, x, self.given(x, key)) for problem in self.problems(x)]
        return CastResult(tuple(_codes(array) for one in made for array in one.arrays), made[0].amax)

    def theirs(self, x: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        """The same by XLA, transposed where ours is."""
        made = [xla_casts.run(problem, x, self.given(x, key)) for problem in self.problems(x)]
        arrays = (_codes(array) for one in made for array in one.arrays)
        return tuple(
            q.T if wanted.contracted == 0 and wanted.format.scale == "float32" else q
            for wanted, q in zip(self.wanted, arrays, strict=True)
        )

    def largest(self, x: jax.Array) -> jax.Array:
        return sd.amax(x)


@dataclasses.dataclass(frozen=True)
class GroupCase(Case):
    """The same of rows in groups of uneven sizes, one of them empty, with some rows that belong to none."""

    def sizes(self, rows: int) -> jax.Array:
        return jnp.array([rows * share // 16 for share in (3, 0, 5, 1, 2, 2, 1, 1)])

    def problems(self, x: jax.Array) -> tuple[CastProblem, ...]:
        (problem,) = super().problems(x)
        groups = self.sizes(x.shape[0]).size
        return tuple(
            dataclasses.replace(
                problem, views=(view,), groups=groups, group_multiple=LINE if view.contracted == 0 else 1
            )
            for view in problem.views
        )

    def given(self, x: jax.Array, key: jax.Array) -> CastArguments:
        return super().given(x, key)._replace(group_sizes=self.sizes(x.shape[0]))

    def largest(self, x: jax.Array) -> jax.Array:
        return sd.amax(x[: self.sizes(x.shape[0]).sum()])


def kernel_for(problem: CastProblem) -> Any:
    """The kernel that makes these casts, as a module of `kernels.hopper`."""
    reason = cast_8bit.problem_reason(problem)
    other = reason and cast_microscaled.problem_reason(problem)
    if other:
        raise ValueError(f"no kernel makes {problem}: {reason}; {other}")
    return cast_microscaled if reason else cast_8bit


def _codes(q: Any) -> Any:
    return q.codes if isinstance(q, PerGroup) else q


def _pair(format: str, tile: int, square: bool = False, **changed) -> tuple[Wanted, ...]:
    row = sd.FORMATS[format]
    lines = ((1, tile), (tile, 1)) if tile and not square else ((tile, tile), (tile, tile))
    return tuple(Wanted(row, line, axis, **changed) for line, axis in zip(lines, (1, 0), strict=True))


def _one(format: str, tile: tuple[int, int], **changed) -> tuple[Wanted, ...]:
    return (Wanted(sd.FORMATS[format], tile, None, **changed),)


ROTATED = sd.Hadamard()
NV, INT8 = sd.FORMATS["nvfp4"], sd.FORMATS["int8"]
# What `sd.quantize` asks for: ordinary arrays, in which NaN and infinities saturate.
QUANTIZE_CASES = (
    Case("quantize e4m3, one scale", jnp.bfloat16, _one("fp8_e4m3", (0, 0))),
    Case("quantize e4m3, lines of 128", jnp.bfloat16, _one("fp8_e4m3", (1, 128))),
    Case("quantize mxfp8", jnp.bfloat16, _one("mxfp8", (1, 32))),
    Case("quantize nvfp4", jnp.bfloat16, _one("nvfp4", (1, 16))),
)
CASES = (
    Case("e4m3, both layouts, given factor, with amax", jnp.bfloat16, _pair("fp8_e4m3", 0), 0.85, True),
    Case("e4m3, both layouts, given factor, with amax, float32", jnp.float32, _pair("fp8_e4m3", 0), 0.85, True),
    Case("e4m3, both layouts, current scaling", jnp.bfloat16, _pair("fp8_e4m3", 0)),
    Case("e5m2, both layouts, current scaling, stochastic", jnp.bfloat16, _pair("fp8_e5m2", 0, stochastic=True)),
    Case("e4m3, lines of 128 in both orientations", jnp.bfloat16, _pair("fp8_e4m3", 128)),
    Case("e4m3, lines of 128 in both orientations, float32", jnp.float32, _pair("fp8_e4m3", 128)),
    Case("e4m3, squares of 128 in both layouts", jnp.float32, _pair("fp8_e4m3", 128, square=True)),
    Case("int8, lines of 128 in both orientations, stochastic", jnp.bfloat16, _pair("int8", 128, stochastic=True)),
    Case("int8, squares of 128 in both layouts", jnp.float32, _pair("int8", 128, square=True)),
    Case(
        "int8 x: rotated lines along rows, lines down columns",
        jnp.bfloat16,
        (Wanted(INT8, (1, 128), 1, rotation=ROTATED), Wanted(INT8, (128, 1), 0, True)),
    ),
    Case(
        "int8 w: rotated lines down columns, lines along rows",
        jnp.float32,
        (Wanted(INT8, (128, 1), 0, rotation=ROTATED), Wanted(INT8, (1, 128), 1, True)),
    ),
    Case("mxfp8, both orientations, codes", jnp.bfloat16, _pair("mxfp8", 32, is_residual=True), 0.75),
    Case("mxfp8, both orientations, values", jnp.bfloat16, _pair("mxfp8", 32), 0.75),
    Case(
        "nvfp4 x: values, rotated codes",
        jnp.bfloat16,
        (Wanted(NV, (1, 16), 1), Wanted(NV, (16, 1), 0, True, False, ROTATED)),
    ),
    Case("nvfp4 w: 16x16, values and codes", jnp.float32, (Wanted(NV, (16, 16), 0), Wanted(NV, (16, 16), 1, True))),
    Case("nvfp4 w: lines, values and codes", jnp.float32, (Wanted(NV, (16, 1), 0), Wanted(NV, (1, 16), 1, True))),
    Case(
        "nvfp4 g: stochastic, values, rotated values",
        jnp.bfloat16,
        (Wanted(NV, (1, 16), 1, False, True), Wanted(NV, (16, 1), 0, False, True, ROTATED)),
    ),
    GroupCase(
        "e4m3 rows in groups, given factor, with amax", jnp.bfloat16, _pair("fp8_e4m3", 0), given_multiplier=True
    ),
    GroupCase("e4m3 rows in groups, current scaling", jnp.bfloat16, _pair("fp8_e4m3", 0)),
    GroupCase("e4m3 rows in groups, lines of 128", jnp.bfloat16, _pair("fp8_e4m3", 128)),
    GroupCase("e4m3 rows in groups, lines of 128, float32", jnp.float32, _pair("fp8_e4m3", 128)),
    GroupCase("int8 rows in groups, lines of 128, stochastic", jnp.bfloat16, _pair("int8", 128, stochastic=True)),
    GroupCase(
        "int8 rows in groups, rotated lines along rows, lines down columns",
        jnp.bfloat16,
        (Wanted(INT8, (1, 128), 1, rotation=ROTATED), Wanted(INT8, (128, 1), 0, True)),
    ),
    *QUANTIZE_CASES,
    Case("quantize e5m2, one scale", jnp.bfloat16, _one("fp8_e5m2", (0, 0))),
    Case("quantize e4m3, one scale, given factor, with amax", jnp.float32, _one("fp8_e4m3", (0, 0)), None, True),
    Case("quantize e4m3, squares of 128", jnp.float32, _one("fp8_e4m3", (128, 128))),
    Case("quantize int8, one scale, stochastic", jnp.bfloat16, _one("int8", (0, 0), stochastic=True)),
    Case("quantize int8, rotated lines of 128", jnp.bfloat16, _one("int8", (1, 128), rotation=ROTATED)),
    Case("quantize mxfp8 e5m2 down columns", jnp.bfloat16, _one("mxfp8_e5m2", (32, 1))),
    Case("quantize mxfp8 in squares, stochastic", jnp.float32, _one("mxfp8", (32, 32), stochastic=True)),
    Case("quantize nvfp4 down columns, stochastic", jnp.bfloat16, _one("nvfp4", (16, 1), stochastic=True)),
    Case("quantize nvfp4 in squares", jnp.bfloat16, _one("nvfp4", (16, 16))),
    Case(
        "quantize nvfp4, both orientations",
        jnp.bfloat16,
        (Wanted(NV, (1, 16), None), Wanted(NV, (16, 1), None)),
    ),
    GroupCase("quantize e4m3 rows in groups, one scale each", jnp.bfloat16, _one("fp8_e4m3", (0, 0))),
    GroupCase("quantize int8 rows in groups, lines of 128", jnp.bfloat16, _one("int8", (1, 128))),
)


def check(case: Case, shape: tuple[int, int] = (415, 1072)) -> None:
    """Raise unless our bytes are the reference's, of NaN and infinities, too.

    What is rotated has whole groups of rows and columns.
    """
    if any(wanted.rotation is not None for wanted in case.wanted):
        shape = shape[0] // 16 * 16, shape[1] // 16 * 16
    x = jax.random.normal(jax.random.key(11), shape, jnp.float32)
    x = x * jnp.exp(2 * jax.random.normal(jax.random.key(12), shape))
    x = x.astype(case.dtype).at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan).at[100].set(0)
    key = jax.random.key(5)
    made = case.ours(x, key)
    for ours, theirs in zip(made.arrays, case.theirs(x, key), strict=True):
        require_same(case.name, ours, theirs)
    if case.given_multiplier and made.amax != case.largest(x):
        raise AssertionError(f"{case.name}: saw {made.amax} for the largest magnitude, which is {case.largest(x)}")


def require_same(what: str, ours: Any, theirs: sd.ScaledArray) -> None:
    if isinstance(ours, Transposed):
        ours = ours.stored
    if isinstance(ours, sd.ScaledArray) and ours.format == theirs.format:
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    else:
        ours = logical(ours)
        pairs = [(ours.data, values_of(theirs))]
    for a, b in pairs:
        if _canonical(a) != _canonical(b):
            differing = np.mean(np.asarray(a).astype(np.float32) != np.asarray(b).astype(np.float32))
            raise AssertionError(f"{what}: {differing:.2%} of {a.dtype}{a.shape} differ from the reference")


def _canonical(a: jax.Array) -> bytes:
    """The bytes of an array in which every NaN has the same: floats have several, and a GPU writes another of e5m2."""
    array = np.asarray(a)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.tobytes()
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).tobytes()


def moved_bytes(f: Callable[..., Any], x: jax.Array, key: jax.Array) -> int:
    """What is read, once, and what the results take."""
    results = jax.tree.leaves(jax.eval_shape(f, x, key))
    return x.nbytes + sum(leaf.size * leaf.dtype.itemsize for leaf in results)


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    key, rows = jax.random.key(0), []
    chosen = [case for case in CASES if not cases or case.name in cases]
    for case in chosen:
        check(case)
    print(f"{len(chosen)} casts have the reference's bytes")
    for case in chosen:
        x = jax.random.normal(jax.random.key(1), SHAPE, case.dtype)
        big = jax.random.normal(jax.random.key(2), SHAPE, jnp.float32)
        sides = [
            jax_side(COPY, lambda x: lax.neg(x), big),
            jax_side("scaledot", case.ours, x, key, ours=True),
            jax_side("XLA", case.theirs, x, key),
        ]
        timed, missing = measure(sides, turns, skipped)
        copy_rate = 2 * big.nbytes / timed[COPY].median
        row = {
            "case": case.name,
            "dtype": np.dtype(case.dtype).name,
            "copy_gbs": copy_rate / 1e9,
            "target": case.target,
        }
        print(f"{case.name}, {row['dtype']}; a copy moves {copy_rate / 1e9:.0f} GB/s")
        moved = moved_bytes(case.ours, x, key)
        row["sides"] = {}
        for name in (side for side in ("scaledot", "XLA") if side in timed):
            rate = moved / timed[name].median
            row["sides"][name] = {**timed[name].as_dict(), "gbs": rate / 1e9, "of_copy": rate / copy_rate}
            target = case.target if name == "scaledot" else None
            print(report.side_line(name, timed[name], f"{rate / copy_rate:.0%} of copy", target, rate / copy_rate))
        rows.append({**row, "missing": missing})
        print(f"wrote {report.write('cast', rows, shape=SHAPE)}", flush=True)

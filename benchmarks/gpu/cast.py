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
from scaledot.kernels.mosaic import casts
from scaledot.kernels.mosaic.casts import View
from scaledot.train.casts import Laid
from scaledot.train.groups import Groups, PerGroup, cast_rows

SHAPE = (16384, 16384)
COPY = "copy on the device (float32)"


@dataclasses.dataclass(frozen=True)
class Case:
    """A cast of one matrix for two products; target: the least part of the copy's rate."""

    name: str
    dtype: Any
    views: tuple[View, ...]
    target: float | None = None
    given_factor: bool = False

    def ours(self, x: jax.Array, key: jax.Array) -> Any:
        factor = jnp.float32(3.0) if self.given_factor else None
        return casts.run(x, self.views, list(jax.random.split(key, len(self.views))), factor, self.given_factor, False)

    def theirs(self, x: jax.Array, key: jax.Array) -> Any:
        """The same by XLA, transposed where ours is."""
        keys = jax.random.split(key, len(self.views))
        return tuple(self._reference(view, x, each) for view, each in zip(self.views, keys, strict=True))

    def largest(self, x: jax.Array) -> jax.Array:
        return sd.amax(x)

    def _reference(self, view: View, x: jax.Array, key: jax.Array) -> sd.ScaledArray:
        block, rounding = view.tile if view.summed else view.tile[::-1], "stochastic" if view.stochastic else "nearest"
        cast = sd.Cast(view.format, block, rounding, view.rotation)
        laid = Laid(cast, view.tile, None if view.rotation is None else view.summed)
        q = laid.quantize(x, jnp.float32(3.0) if self.given_factor else None, key)
        return q.T if view.summed == 0 and view.format.scale == "float32" else q


@dataclasses.dataclass(frozen=True)
class GroupCase(Case):
    """The same of rows in groups of uneven sizes, one of them empty, with some rows that belong to none."""

    def sizes(self, rows: int) -> jax.Array:
        return jnp.array([rows * share // 16 for share in (3, 0, 5, 1, 2, 2, 1, 1)])

    def ours(self, x: jax.Array, key: jax.Array) -> Any:
        made = self._of_each(x, key, lambda laid, view, *how: cast_rows(laid, view, *how, amax=self.given_factor))
        return casts.Fused(tuple(_codes(operand) for operand, _ in made), made[0][1], None)

    def theirs(self, x: jax.Array, key: jax.Array) -> Any:
        made = self._of_each(
            x, key, lambda laid, view, x, sizes, key, factor: KIND.quantize(laid, x, sizes, factor, key)
        )
        return tuple(_codes(q).T if view.summed == 0 else _codes(q) for view, q in zip(self.views, made, strict=True))

    def largest(self, x: jax.Array) -> jax.Array:
        return sd.amax(x[: self.sizes(x.shape[0]).sum()])

    def _of_each(self, x: jax.Array, key: jax.Array, cast: Callable[..., Any]) -> list[Any]:
        factor = jnp.float32(3.0) if self.given_factor else None
        keys = [k if view.stochastic else None for view, k in zip(self.views, jax.random.split(key, 2), strict=True)]
        return [
            cast(self._laid(view), view, x, self.sizes(x.shape[0]), each, factor)
            for view, each in zip(self.views, keys, strict=True)
        ]

    def _laid(self, view: View) -> Any:
        product, block = ("dgrad", view.tile) if view.summed else ("wgrad", view.tile[::-1])
        rounding = "stochastic" if view.stochastic else "nearest"
        return KIND.lay(sd.Cast(view.format, block, rounding, view.rotation), product, "g")


KIND = Groups(casts.LINE)


def _codes(q: Any) -> Any:
    return q.codes if isinstance(q, PerGroup) else q


def _pair(format: str, tile: int, square: bool = False, **changed) -> tuple[View, ...]:
    row = sd.FORMATS[format]
    lines = ((1, tile), (tile, 1)) if tile and not square else ((tile, tile), (tile, tile))
    return tuple(View(row, line, summed, **changed) for line, summed in zip(lines, (1, 0), strict=True))


ROTATED = sd.Hadamard()
NV, INT8 = sd.FORMATS["nvfp4"], sd.FORMATS["int8"]
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
        (View(INT8, (1, 128), 1, rotation=ROTATED), View(INT8, (128, 1), 0, True)),
    ),
    Case(
        "int8 w: rotated lines down columns, lines along rows",
        jnp.float32,
        (View(INT8, (128, 1), 0, rotation=ROTATED), View(INT8, (1, 128), 1, True)),
    ),
    Case("mxfp8, both orientations, codes", jnp.bfloat16, _pair("mxfp8", 32, kept=True), 0.75),
    Case("mxfp8, both orientations, values", jnp.bfloat16, _pair("mxfp8", 32), 0.75),
    Case(
        "nvfp4 x: values, rotated codes",
        jnp.bfloat16,
        (View(NV, (1, 16), 1), View(NV, (16, 1), 0, True, False, ROTATED)),
    ),
    Case("nvfp4 w: 16x16, values and codes", jnp.float32, (View(NV, (16, 16), 0), View(NV, (16, 16), 1, True))),
    Case("nvfp4 w: lines, values and codes", jnp.float32, (View(NV, (16, 1), 0), View(NV, (1, 16), 1, True))),
    Case(
        "nvfp4 g: stochastic, values, rotated values",
        jnp.bfloat16,
        (View(NV, (1, 16), 1, False, True), View(NV, (16, 1), 0, False, True, ROTATED)),
    ),
    GroupCase("e4m3 rows in groups, given factor, with amax", jnp.bfloat16, _pair("fp8_e4m3", 0), given_factor=True),
    GroupCase("e4m3 rows in groups, current scaling", jnp.bfloat16, _pair("fp8_e4m3", 0)),
    GroupCase("e4m3 rows in groups, lines of 128", jnp.bfloat16, _pair("fp8_e4m3", 128)),
    GroupCase("e4m3 rows in groups, lines of 128, float32", jnp.float32, _pair("fp8_e4m3", 128)),
    GroupCase("int8 rows in groups, lines of 128, stochastic", jnp.bfloat16, _pair("int8", 128, stochastic=True)),
    GroupCase(
        "int8 rows in groups, rotated lines along rows, lines down columns",
        jnp.bfloat16,
        (View(INT8, (1, 128), 1, rotation=ROTATED), View(INT8, (128, 1), 0, True)),
    ),
)


def check(case: Case, shape: tuple[int, int] = (415, 1072)) -> None:
    """Raise unless our bytes are the reference's, of NaN and infinities, too.

    What is rotated has whole groups of rows and columns.
    """
    if any(view.rotation is not None for view in case.views):
        shape = shape[0] // 16 * 16, shape[1] // 16 * 16
    x = jax.random.normal(jax.random.key(11), shape, jnp.float32)
    x = x * jnp.exp(2 * jax.random.normal(jax.random.key(12), shape))
    x = x.astype(case.dtype).at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan).at[100].set(0)
    key = jax.random.key(5)
    made = case.ours(x, key)
    for ours, theirs in zip(made.arrays, case.theirs(x, key), strict=True):
        _require_same(case.name, ours, theirs)
    if case.given_factor and made.amax != case.largest(x):
        raise AssertionError(f"{case.name}: saw {made.amax} for the largest magnitude, which is {case.largest(x)}")


def _require_same(what: str, ours: Any, theirs: sd.ScaledArray) -> None:
    if isinstance(ours, casts.Transposed):
        ours = ours.stored
    if isinstance(ours, sd.ScaledArray) and ours.format == theirs.format:
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    else:
        ours = casts.logical(ours)
        pairs = [(ours.data, casts.values_of(theirs))]
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

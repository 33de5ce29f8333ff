"""Cast kernels: bandwidth relative to a device-to-device copy, compared with XLA's casts to the same results.

Bytes are those of the input and of the results, each counted once. Codes and scales are compared with the reference,
byte for byte, on other data before anything is timed.
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
from benchmarks.gpu.implementations import jax_implementation, measure
from scaledot.kernels import xla_casts
from scaledot.kernels.hopper import cast_8bit, cast_four_bit, cast_microscaled
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.layouts import PerGroup, Transposed, bfloat16_values, logical
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem, CastResult
from scaledot.numerics import blocks
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.hadamard import random_signs
from scaledot.ops.cast_spec import propagate_nonfinite

SHAPE = (16384, 16384)
COPY = "copy on the device (float32)"


@dataclasses.dataclass(frozen=True)
class MatrixCast:
    """One cast of a matrix to a format in blocks of (rows, columns), for a matmul that contracts an axis.

    contracted: the contracting dim, or None for the layout of `sd.quantize`.
    """

    format: sd.Format
    tile: tuple[int, int]
    contracted: int | None
    is_residual: bool = False
    stochastic: bool = False
    rotation: sd.Hadamard | None = None
    eden: bool = False

    def output(self, dtype, key: int, input_dtype=None) -> CastOutput:
        rotation = self.rotation
        if rotation is not None:
            rotation = dataclasses.replace(rotation, axis=-2 if self.contracted == 0 else -1)
        dtype, absmax = np.dtype(dtype), Calibration("absmax")
        input_dtype = np.dtype(input_dtype or dtype)
        spec = CastSpec(self.format, blocks.trim(self.tile), input_dtype, dtype, absmax, rotation, eden=self.eden)
        spec = spec if self.contracted is None else propagate_nonfinite(spec, 2)
        signs = key if rotation is not None and rotation.draws_signs else None
        return CastOutput(spec, key if self.stochastic or self.eden else None, self.contracted, self.is_residual, signs)


@dataclasses.dataclass(frozen=True)
class Case:
    """Casts of one matrix, in one kernel launch if not grouped.

    target: the minimum bandwidth relative to a copy.
    multiplier: whether the quantisation multiplier is an argument, as in delayed scaling; the kernel then returns amax.
    mean: whether the mean over rows is subtracted first.
    """

    name: str
    dtype: Any
    casts: tuple[MatrixCast, ...]
    target: float | None = None
    multiplier: bool = False
    mean: bool = False

    def problems(self, x: jax.Array) -> tuple[CastProblem, ...]:
        """One CastProblem per kernel launch."""
        input_dtype = jnp.float32 if self.mean else self.dtype
        outputs = tuple(cast.output(self.dtype, i, input_dtype) for i, cast in enumerate(self.casts))
        passed = frozenset(name for name in ("multiplier", "mean") if getattr(self, name))
        return (CastProblem(x.shape, outputs, passed, amax=self.multiplier),)

    def arguments(self, x: jax.Array, key: jax.Array) -> CastArguments:
        multiplier = jnp.full((1, 1), 3.0, jnp.float32) if self.multiplier else None
        keys = tuple(jax.random.split(key, len(self.casts)))
        drawn = (
            random_signs(jax.random.fold_in(k, 1), cast.rotation.size)
            if cast.rotation is not None and cast.rotation.draws_signs
            else None
            for k, cast in zip(keys, self.casts, strict=True)
        )
        mean = None
        if self.mean:
            finite = jnp.where(jnp.isfinite(x), x, 0)  # otherwise all differences to the mean would be NaN
            mean = jnp.mean(finite, axis=0, keepdims=True, dtype=jnp.float32)
        return CastArguments(keys, multiplier=multiplier, signs=tuple(drawn), mean=mean)

    def by_kernel(self, x: jax.Array, key: jax.Array) -> CastResult:
        """Casts by the Hopper kernels."""
        results = [kernel_for(problem).run(problem, x, self.arguments(x, key)) for problem in self.problems(x)]
        return CastResult(tuple(_codes(array) for result in results for array in result.arrays), results[0].amax)

    def by_xla(self, x: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        """Casts by XLA, transposed where the kernel's results are."""
        results = [xla_casts.run(problem, x, self.arguments(x, key)) for problem in self.problems(x)]
        arrays = (_codes(array) for result in results for array in result.arrays)
        return tuple(
            q.T if cast.contracted == 0 and cast.format.scale == "float32" else q
            for cast, q in zip(self.casts, arrays, strict=True)
        )

    def amax(self, x: jax.Array) -> jax.Array:
        return sd.amax(x)


@dataclasses.dataclass(frozen=True)
class GroupCase(Case):
    """Casts of a matrix with row groups of uneven sizes, one of them empty, and some trailing rows in no group."""

    def sizes(self, rows: int) -> jax.Array:
        return jnp.array([rows * share // 16 for share in (3, 0, 5, 1, 2, 2, 1, 1)])

    def problems(self, x: jax.Array) -> tuple[CastProblem, ...]:
        (problem,) = super().problems(x)
        groups = self.sizes(x.shape[0]).size
        return tuple(
            dataclasses.replace(
                problem, outputs=(output,), groups=groups, group_multiple=SCALE_BLOCK if output.contracted == 0 else 1
            )
            for output in problem.outputs
        )

    def arguments(self, x: jax.Array, key: jax.Array) -> CastArguments:
        return super().arguments(x, key)._replace(group_sizes=self.sizes(x.shape[0]))

    def amax(self, x: jax.Array) -> jax.Array:
        return sd.amax(x[: self.sizes(x.shape[0]).sum()])


def kernel_for(problem: CastProblem) -> Any:
    """Returns the module of `kernels.hopper` whose kernel supports these casts."""
    reasons = {kernel: kernel.problem_reason(problem) for kernel in (cast_8bit, cast_microscaled, cast_four_bit)}
    supporting = [kernel for kernel, reason in reasons.items() if reason is None]
    if not supporting:
        raise ValueError(f"no kernel supports {problem}: {'; '.join(map(str, reasons.values()))}")
    return supporting[0]


def _codes(q: Any) -> Any:
    return q.codes if isinstance(q, PerGroup) else q


def _pair(format: str, block: int, square: bool = False, **fields) -> tuple[MatrixCast, ...]:
    """Casts for matmuls that contract dim 1 and dim 0."""
    tiles = ((1, block), (block, 1)) if block and not square else ((block, block), (block, block))
    return tuple(MatrixCast(sd.FORMATS[format], tile, axis, **fields) for tile, axis in zip(tiles, (1, 0), strict=True))


def _one(format: str, tile: tuple[int, int], **fields) -> tuple[MatrixCast, ...]:
    return (MatrixCast(sd.FORMATS[format], tile, None, **fields),)


def _of_recipe(recipe: sd.Recipe, operand: str, axis: int, is_residual: bool = False) -> MatrixCast:
    """The cast of an operand such as "x of fwd" in 1-D blocks along a contracting dim."""
    cast = next(cast for matmul, tensor, cast in recipe.casts() if f"{tensor} of {matmul}" == operand)
    tile = (1, 16) if axis == 1 else (16, 1)
    return MatrixCast(cast.format, tile, axis, is_residual, False, cast.rotation, cast.rounding == "ms_eden")


# Names of cases are keys of the results. Casts of a pair are for the matmuls that contract dim 1 and dim 0. "codes" are
# stored with scales, as residuals; "dequantised" results are bfloat16 values of the codes.
ROTATED = sd.Hadamard()
NV, INT8 = sd.FORMATS["nvfp4"], sd.FORMATS["int8"]
# Casts of `sd.quantize`: untransposed codes, in which NaN and infinities saturate.
QUANTIZE_CASES = (
    Case("quantize e4m3, per-tensor scale", jnp.bfloat16, _one("fp8_e4m3", (0, 0))),
    Case("quantize e4m3, 1x128 blocks", jnp.bfloat16, _one("fp8_e4m3", (1, 128))),
    Case("quantize mxfp8, 1x32 blocks", jnp.bfloat16, _one("mxfp8", (1, 32))),
    Case("quantize nvfp4, 1x16 blocks", jnp.bfloat16, _one("nvfp4", (1, 16))),
)
CASES = (
    Case("e4m3, row-major and transposed, delayed scaling", jnp.bfloat16, _pair("fp8_e4m3", 0), 0.85, True),
    Case("e4m3, row-major and transposed, delayed scaling, float32", jnp.float32, _pair("fp8_e4m3", 0), 0.85, True),
    Case("e4m3, row-major and transposed, current scaling", jnp.bfloat16, _pair("fp8_e4m3", 0)),
    Case(
        "e5m2, row-major and transposed, current scaling, stochastic rounding",
        jnp.bfloat16,
        _pair("fp8_e5m2", 0, stochastic=True),
    ),
    Case("e4m3, 1x128 and 128x1 blocks", jnp.bfloat16, _pair("fp8_e4m3", 128)),
    Case("e4m3, 1x128 and 128x1 blocks, float32", jnp.float32, _pair("fp8_e4m3", 128)),
    Case("e4m3, 128x128 blocks, row-major and transposed", jnp.float32, _pair("fp8_e4m3", 128, square=True)),
    Case("int8, 1x128 and 128x1 blocks, stochastic rounding", jnp.bfloat16, _pair("int8", 128, stochastic=True)),
    Case("int8, 128x128 blocks, row-major and transposed", jnp.float32, _pair("int8", 128, square=True)),
    Case(
        "int8 x: Hadamard-rotated 1x128 blocks, 128x1 blocks",
        jnp.bfloat16,
        (MatrixCast(INT8, (1, 128), 1, rotation=ROTATED), MatrixCast(INT8, (128, 1), 0, True)),
    ),
    Case(
        "int8 w: Hadamard-rotated 128x1 blocks, 1x128 blocks",
        jnp.float32,
        (MatrixCast(INT8, (128, 1), 0, rotation=ROTATED), MatrixCast(INT8, (1, 128), 1, True)),
    ),
    Case("mxfp8, 1x32 and 32x1 blocks, codes", jnp.bfloat16, _pair("mxfp8", 32, is_residual=True), 0.75),
    Case("mxfp8, 1x32 and 32x1 blocks, dequantised", jnp.bfloat16, _pair("mxfp8", 32), 0.75),
    Case(
        "nvfp4 x: 1x16 blocks, dequantised; Hadamard-rotated 16x1 blocks, codes",
        jnp.bfloat16,
        (MatrixCast(NV, (1, 16), 1), MatrixCast(NV, (16, 1), 0, True, False, ROTATED)),
    ),
    Case(
        "nvfp4 w: 16x16 blocks, dequantised and codes",
        jnp.float32,
        (MatrixCast(NV, (16, 16), 0), MatrixCast(NV, (16, 16), 1, True)),
    ),
    Case(
        "nvfp4 w: 16x1 blocks, dequantised; 1x16 blocks, codes",
        jnp.float32,
        (MatrixCast(NV, (16, 1), 0), MatrixCast(NV, (1, 16), 1, True)),
    ),
    Case(
        "nvfp4 g: stochastic rounding; 1x16 and Hadamard-rotated 16x1 blocks, dequantised",
        jnp.bfloat16,
        (MatrixCast(NV, (1, 16), 1, False, True), MatrixCast(NV, (16, 1), 0, False, True, ROTATED)),
    ),
    *(
        case
        for recipe in (sd.recipes.NVFP4_PLUS, sd.recipes.IF4)
        for case in (
            Case(
                f"{recipe.name} x: mean subtracted; searched 1x16 blocks, dequantised; "
                "rotated and corrected 16x1 blocks, codes",
                jnp.bfloat16,
                (_of_recipe(recipe, "x of fwd", 1), _of_recipe(recipe, "x of wgrad", 0, True)),
                mean=True,
            ),
            Case(
                f"{recipe.name} w: searched 16x1 blocks, dequantised; rotated and corrected 1x16 blocks, codes",
                jnp.float32,
                (_of_recipe(recipe, "w of fwd", 0), _of_recipe(recipe, "w of dgrad", 1, True)),
            ),
            Case(
                f"{recipe.name} g: rotated and corrected 1x16 and 16x1 blocks, dequantised",
                jnp.bfloat16,
                (_of_recipe(recipe, "g of dgrad", 1), _of_recipe(recipe, "g of wgrad", 0)),
            ),
        )
    ),
    Case(
        "quartet_ii x: four-over-six 1x16 blocks, dequantised",
        jnp.bfloat16,
        (_of_recipe(sd.recipes.QUARTET_II, "x of fwd", 1),),
    ),
    Case(
        "quartet_ii w: four-over-six 16x1 blocks, dequantised",
        jnp.float32,
        (_of_recipe(sd.recipes.QUARTET_II, "w of fwd", 0),),
    ),
    GroupCase("e4m3 row groups, delayed scaling", jnp.bfloat16, _pair("fp8_e4m3", 0), multiplier=True),
    GroupCase("e4m3 row groups, current scaling", jnp.bfloat16, _pair("fp8_e4m3", 0)),
    GroupCase("e4m3 row groups, 1x128 and 128x1 blocks", jnp.bfloat16, _pair("fp8_e4m3", 128)),
    GroupCase("e4m3 row groups, 1x128 and 128x1 blocks, float32", jnp.float32, _pair("fp8_e4m3", 128)),
    GroupCase(
        "int8 row groups, 1x128 and 128x1 blocks, stochastic rounding",
        jnp.bfloat16,
        _pair("int8", 128, stochastic=True),
    ),
    GroupCase(
        "int8 row groups, Hadamard-rotated 1x128 blocks, 128x1 blocks",
        jnp.bfloat16,
        (MatrixCast(INT8, (1, 128), 1, rotation=ROTATED), MatrixCast(INT8, (128, 1), 0, True)),
    ),
    *QUANTIZE_CASES,
    Case("quantize e5m2, per-tensor scale", jnp.bfloat16, _one("fp8_e5m2", (0, 0))),
    Case("quantize e4m3, per-tensor scale, delayed scaling", jnp.float32, _one("fp8_e4m3", (0, 0)), None, True),
    Case("quantize e4m3, 128x128 blocks", jnp.float32, _one("fp8_e4m3", (128, 128))),
    Case("quantize int8, per-tensor scale, stochastic rounding", jnp.bfloat16, _one("int8", (0, 0), stochastic=True)),
    Case("quantize int8, Hadamard-rotated 1x128 blocks", jnp.bfloat16, _one("int8", (1, 128), rotation=ROTATED)),
    Case("quantize mxfp8_e5m2, 32x1 blocks", jnp.bfloat16, _one("mxfp8_e5m2", (32, 1))),
    Case("quantize mxfp8, 32x32 blocks, stochastic rounding", jnp.float32, _one("mxfp8", (32, 32), stochastic=True)),
    Case("quantize nvfp4, 16x1 blocks, stochastic rounding", jnp.bfloat16, _one("nvfp4", (16, 1), stochastic=True)),
    Case("quantize nvfp4, 16x16 blocks", jnp.bfloat16, _one("nvfp4", (16, 16))),
    Case(
        "quantize nvfp4, 1x16 and 16x1 blocks",
        jnp.bfloat16,
        (MatrixCast(NV, (1, 16), None), MatrixCast(NV, (16, 1), None)),
    ),
    GroupCase("quantize e4m3 row groups, scale per group", jnp.bfloat16, _one("fp8_e4m3", (0, 0))),
    GroupCase("quantize int8 row groups, 1x128 blocks", jnp.bfloat16, _one("int8", (1, 128))),
)


def check(case: Case, shape: tuple[int, int] = (415, 1072)) -> None:
    """Raises AssertionError unless the kernel's codes and scales are bit-identical to XLA's.

    The input has NaN, infinities, zeros and subnormals.
    Rotations need dims that are multiples of their size.
    """
    rotated = [cast.rotation.size for cast in case.casts if cast.rotation is not None]
    multiple = max(rotated, default=1)
    shape = shape[0] // multiple * multiple, shape[1] // multiple * multiple
    x = jax.random.normal(jax.random.key(11), shape, jnp.float32)
    x = x * jnp.exp(2 * jax.random.normal(jax.random.key(12), shape))
    x = x.astype(case.dtype).at[3, 5].set(jnp.inf).at[7, 9].set(jnp.nan)
    x = x.at[100].set(0).at[101].set(1e-39).at[102].set(-1e-39)
    key = jax.random.key(5)
    result = case.by_kernel(x, key)
    for actual, expected in zip(result.arrays, case.by_xla(x, key), strict=True):
        require_same(case.name, actual, expected)
    if case.multiplier and result.amax != case.amax(x):
        raise AssertionError(f"{case.name}: the kernel's amax is {result.amax}, not {case.amax(x)}")


def require_same(name: str, actual: Any, expected: sd.ScaledArray) -> None:
    """Raises AssertionError unless codes and scales, or the dequantised values, are bit-identical."""
    if isinstance(actual, Transposed):
        actual = actual.stored
    if isinstance(actual, sd.ScaledArray) and actual.format == expected.format:
        pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    else:
        actual = logical(actual)
        pairs = [(actual.data, bfloat16_values(expected))]
    for a, b in pairs:
        if _canonical_bytes(a) != _canonical_bytes(b):
            differing = np.mean(np.asarray(a).astype(np.float32) != np.asarray(b).astype(np.float32))
            raise AssertionError(f"{name}: {differing:.2%} of {a.dtype}{a.shape} differ from the reference")


def _canonical_bytes(a: jax.Array) -> bytes:
    """The bytes of an array with one bit pattern for NaN; the GPU's conversion to e5m2 writes another one than XLA."""
    array = np.asarray(a)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.tobytes()
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).tobytes()


def bytes_accessed(f: Callable[..., Any], x: jax.Array, key: jax.Array) -> int:
    """The bytes of the input and of the results."""
    results = jax.tree.leaves(jax.eval_shape(f, x, key))
    return x.nbytes + sum(leaf.size * leaf.dtype.itemsize for leaf in results)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    key, rows = jax.random.key(0), []
    selected = [case for case in CASES if not cases or case.name in cases]
    for case in selected:
        check(case)
    print(f"{len(selected)} casts are bit-identical to the reference")
    for case in selected:
        x = jax.random.normal(jax.random.key(1), SHAPE, case.dtype)
        copied = jax.random.normal(jax.random.key(2), SHAPE, jnp.float32)
        implementations = [
            jax_implementation(COPY, lambda x: lax.neg(x), copied),
            jax_implementation("scaledot", case.by_kernel, x, key, ours=True),
            jax_implementation("XLA", case.by_xla, x, key),
        ]
        timed, not_run = measure(implementations, rounds, skipped)
        copy_rate = 2 * copied.nbytes / timed[COPY].median
        row = {
            "case": case.name,
            "dtype": np.dtype(case.dtype).name,
            "copy_gbs": copy_rate / 1e9,
            "target": case.target,
        }
        print(f"{case.name}, {row['dtype']}; bandwidth of a copy {copy_rate / 1e9:.0f} GB/s")
        accessed = bytes_accessed(case.by_kernel, x, key)
        row["implementations"] = {}
        for name in (name for name in ("scaledot", "XLA") if name in timed):
            rate = accessed / timed[name].median
            row["implementations"][name] = {**timed[name].as_dict(), "gbs": rate / 1e9, "of_copy": rate / copy_rate}
            target = case.target if name == "scaledot" else None
            print(report.result_line(name, timed[name], f"{rate / copy_rate:.0%} of copy", target, rate / copy_rate))
        rows.append({**row, "not_run": not_run})
        print(f"wrote {report.write('cast', rows, shape=SHAPE)}", flush=True)

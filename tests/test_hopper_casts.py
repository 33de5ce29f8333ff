"""Hopper cast kernels, compared with the reference in JAX's interpreter, on the cases of benchmarks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, output_of, quantize, selected_row
from tables import params_of

import scaledot as sd
from scaledot.kernels import xla_casts
from scaledot.kernels.hopper import (
    cast_8bit,
    cast_arithmetic,
    cast_four_bit,
    cast_four_bit_arithmetic,
    cast_microscaled,
    cast_support,
)
from scaledot.kernels.spec import CastOutput, CastProblem
from scaledot.numerics import scale_search
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.cast import CastSpec

pytestmark = pytest.mark.jax_versions

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16


def cast_cases():
    from benchmarks.gpu import cast

    # Each shares every code path with other cases, and is slow in the interpreter.
    exhaustive = {
        "if4 w: searched 16x1 blocks, dequantised; rotated and corrected 1x16 blocks, codes",
        "if4 g: rotated and corrected 1x16 and 16x1 blocks, dequantised",
        "e4m3, row-major and transposed, delayed scaling, float32",
        "quantize e5m2, per-tensor scale",
        "e4m3, 1x128 and 128x1 blocks, float32",
        "e4m3 row groups, 1x128 and 128x1 blocks, float32",
        "int8 row groups, 1x128 and 128x1 blocks, stochastic rounding",
        "quantize mxfp8, 32x32 blocks, stochastic rounding",
        "quantize nvfp4, 16x1 blocks, stochastic rounding",
        "quantize nvfp4, 1x16 and 16x1 blocks",
    }
    assert exhaustive <= {case.name for case in cast.CASES}
    return params_of(cast.CASES, exhaustive, name=lambda case: case.name)


@needs_mosaic
@pytest.mark.parametrize("case", cast_cases())
def test_casts_are_bit_identical_to_the_reference(hopper, case):
    from benchmarks.gpu import cast

    cast.check(case, (146, 300))


@pytest.mark.parametrize("grid", sd.FORMATS["if4"].grid_formats, ids=lambda grid: grid.element)
def test_search_errors_of_the_kernel_are_those_of_the_reference(grid):
    """For numbers up to the largest that a search considers, and without saturation up to the largest code.

    Ties of the grid and numbers next to them are among them.
    """
    limit = grid.largest_code + scale_search.LARGEST_ERROR
    ties = np.arange(0.25, limit, 0.25, np.float32).view(np.uint32)
    near = (ties[:, None] + np.arange(-300, 300)).astype(np.uint32).view(np.float32)
    magnitude = np.append(near.ravel(), np.linspace(0, limit, 100_001, dtype=np.float32))
    for largest, saturates in ((limit, True), (grid.largest_code, False)):
        below = jnp.asarray(magnitude[magnitude <= largest])
        errors = jax.jit(lambda x, s=saturates: cast_four_bit_arithmetic.error_of(x, grid.element, s) ** 2)(below)
        np.testing.assert_array_equal(errors, scale_search.squared_error(below, grid, scale_search.fraction_bits(16)))


@needs_mosaic
def test_four_over_six_of_small_blocks_is_bit_identical_to_the_reference(hopper):
    """The amaxes of blocks decrease to scales that are subnormal in E4M3, and 0 for 6, 4 or both."""
    from benchmarks.gpu import cast

    format = dataclasses.replace(sd.FORMATS["nvfp4"], search="four_over_six")
    case = cast.Case("", jnp.float32, (cast.MatrixCast(format, (1, 16), 1, is_residual=True),))
    x, key = normal(0, (128, 256)) * jnp.exp2(-jnp.arange(128) / 5)[:, None], jax.random.key(0)
    (found,), (expected,) = case.by_kernel(x, key).arrays, case.by_xla(x, key)
    cast.require_same("", found, expected)
    scale = np.asarray(expected.scale, np.float32)
    assert {0.0, 2.0**-9} < set(scale.ravel().tolist())


@needs_mosaic
def test_a_search_with_a_target_above_the_largest_code_is_bit_identical_to_the_reference(hopper):
    """Also scales above that of the amax saturate elements."""
    from benchmarks.gpu import cast

    format = dataclasses.replace(sd.FORMATS["nvfp4"], search="scales", target=12.0)
    case = cast.Case("", jnp.float32, (cast.MatrixCast(format, (1, 16), 1, is_residual=True),))
    x, key = normal(0, (128, 128)), jax.random.key(0)
    (found,), (expected,) = case.by_kernel(x, key).arrays, case.by_xla(x, key)
    cast.require_same("", found, expected)
    blocks = np.abs(np.asarray(x)).reshape(-1, 16).max(1) / (np.asarray(expected.scale, np.float32).ravel())
    assert np.any(blocks / float(expected.tensor_scale) > 6.5), "no chosen scale saturates elements"


@needs_mosaic
@pytest.mark.exhaustive  # slow in the interpreter
def test_the_grids_of_a_format_may_be_in_either_order(hopper):
    from benchmarks.gpu import cast

    if4 = sd.FORMATS["if4"]
    format = dataclasses.replace(if4, name="reversed", grids=if4.grids[::-1], search="scales")
    outputs = cast.MatrixCast(format, (1, 16), 1), cast.MatrixCast(format, (16, 1), 0, True)
    cast.check(cast.Case("", jnp.bfloat16, outputs), (146, 300))


@needs_mosaic
def test_a_mean_may_be_that_of_rows(hopper):
    """The tokens of x in "km,kn->mn" are columns."""
    from benchmarks.gpu import cast

    format = dataclasses.replace(sd.FORMATS["nvfp4"], scale_max=256.0)  # cast by `cast_four_bit`
    case = cast.Case("", jnp.bfloat16, (cast.MatrixCast(format, (16, 1), 0, True),), mean=True)
    x, key = 1 + normal(0, (48, 200)).astype(jnp.bfloat16), jax.random.key(0)
    (problem,), mean = case.problems(x), jnp.mean(x, axis=1, keepdims=True, dtype=jnp.float32)
    arguments = case.arguments(x, key)._replace(mean=mean)
    (found,) = cast.kernel_for(problem).run(problem, x, arguments).arrays
    (expected,) = xla_casts.run(problem, x, arguments).arrays
    cast.require_same("", found, expected)


@needs_mosaic
def test_rows_that_pad_a_tile_stay_zero_when_a_mean_is_subtracted(hopper):
    """Blocks down columns have 22 rows of the array and 10 of padding in their last two tiles of 16."""
    from benchmarks.gpu import cast

    format = dataclasses.replace(sd.FORMATS["nvfp4"], scale_max=256.0)  # cast by `cast_four_bit`
    cast.check(cast.Case("", jnp.bfloat16, (cast.MatrixCast(format, (16, 1), 0, True),), mean=True), (150, 72))


@needs_mosaic
@pytest.mark.parametrize(("format", "kernel"), [("fp8_e4m3", "hopper_cast_8bit"), ("mxfp8", "hopper_cast_microscaled")])
def test_quantize_uses_kernels_for_3d_arrays_under_vmap_and_grad(hopper, format, kernel):
    """Leading dims are merged into rows; the gradient of codes is zero, as without a kernel."""
    x = normal(0, (2, 64, 64), jnp.bfloat16).at[1, 2, 3].set(jnp.inf).at[0, 5, 6].set(jnp.nan)
    assert selected_row(sd.explain(sd.quantize, x, format)).startswith(kernel)
    require_equal(sd.quantize(x, format), quantize(x, format))
    deep = normal(1, (2, 128, 64), jnp.bfloat16)
    require_equal(jax.vmap(lambda x: sd.quantize(x, format))(deep), jax.vmap(lambda x: quantize(x, format))(deep))
    assert not np.any(jax.grad(lambda x: jnp.sum(sd.dequantize(sd.quantize(x, format))))(deep[0]))


def require_equal(found: sd.ScaledArray, expected: sd.ScaledArray) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@needs_mosaic
def test_the_scale_of_an_int8_tensor_is_nan_if_an_element_is_not_finite(hopper):
    """8-bit floats have NaN codes instead; the data of `cast.check` has NaN and an infinity."""
    from benchmarks.gpu import cast

    cast.check(cast.Case("int8, one scale", jnp.bfloat16, (cast.MatrixCast(sd.FORMATS["int8"], (0, 0), 1),)), (20, 40))


@pytest.mark.parametrize("rows", [5, 128, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("finite", [True, False])
def test_partial_amaxes_have_the_amax_of_the_tensor(finite, dtype, rows):
    x = np.asarray(normal(0, (rows, 40), dtype))
    special = x.copy()
    special[3, 7], special[0, 0], special[4, 1] = np.nan, -np.inf, 11.0
    subnormal = np.full((rows, 40), 1e-39, dtype)
    _, from_ordered_bits = cast_arithmetic.ordered_bits_conversions(finite)
    amaxes = [
        from_ordered_bits(jnp.max(cast_support.partial_amaxes(jnp.asarray(each), finite)))
        for each in (x, special, subnormal)
    ]
    largest = np.max(np.abs(x.astype(np.float32)))
    assert [float(amax) for amax in amaxes] == [largest, 11.0 if finite else np.inf, 0.0]


@needs_mosaic
def test_the_cast_kernel_returns_column_sums_and_amax(hopper):
    from benchmarks.gpu import cast

    x = normal(0, (300, 260), jnp.bfloat16)
    case = cast.Case("", jnp.bfloat16, tuple(cast.MatrixCast(sd.FORMATS["fp8_e5m2"], (0, 0), axis) for axis in (1, 0)))
    (problem,) = case.problems(x)
    problem = dataclasses.replace(problem, amax=True, column_sums=True)
    result = cast_8bit.run(problem, x, case.arguments(x, jax.random.key(0)))
    np.testing.assert_allclose(result.column_sums, jnp.sum(x.astype(jnp.float32), axis=0), rtol=1e-5, atol=1e-4)
    assert result.amax == sd.amax(x)


@needs_mosaic
@pytest.mark.parametrize("axis", [0, 1])
def test_the_four_bit_cast_kernel_returns_column_sums(hopper, axis):
    """Rows are copied to SMEM in another order if the first output is rotated down columns; there are two row tiles."""
    from benchmarks.gpu import cast

    g = next(each for _, tensor, each in sd.recipes.NVFP4_PLUS.casts() if tensor == "g")
    matrix_cast = cast.MatrixCast(g.format, (1, 16) if axis else (16, 1), axis, False, False, g.rotation, True)
    case, x = cast.Case("", jnp.bfloat16, (matrix_cast,)), normal(0, (256, 128), jnp.bfloat16)
    (problem,) = case.problems(x)
    problem = dataclasses.replace(problem, column_sums=True)
    key = jax.random.key(0)
    result = cast_four_bit.run(problem, x, case.arguments(x, key))
    cast.require_same("", result.arrays[0], case.by_xla(x, key)[0])
    np.testing.assert_allclose(result.column_sums, jnp.sum(x.astype(jnp.float32), axis=0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "format", "block", "passed", "needs_amax"),
    [
        (cast_8bit, "fp8_e4m3", (0, 0), (), True),
        (cast_8bit, "fp8_e4m3", (0, 0), ("multiplier",), False),
        (cast_8bit, "fp8_e4m3", (1, 128), (), False),
        (cast_microscaled, "mxfp8", (1, 32), (), False),
        (cast_microscaled, "nvfp4", (1, 16), (), True),
    ],
)
def test_descriptions_of_casts_say_whether_the_amax_is_computed_first(kernel, format, block, passed, needs_amax):
    output = output_of(sd.FORMATS[format], block, 1, None, jnp.bfloat16)
    description = kernel.describe(CastProblem((256, 256), (output,), frozenset(passed)))
    assert description.endswith("one pass on Hopper, after the amax" if needs_amax else "one pass on Hopper")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ((sd.FORMATS["int4"], (1, 128), 1, None), "is not an 8-bit float or integer"),
        ((sd.FORMATS["mxfp8"], (1, 16), 1, None), "is not an 8-bit float or integer"),
        ((sd.FORMATS["nvfp4"], (1, 16), 1, sd.Hadamard()), "down columns"),
        ((sd.FORMATS["int8"], (0, 0), 1, sd.Hadamard()), "along 1x128 blocks"),
        ((sd.FORMATS["int8"], (1, 128), 1, sd.Hadamard(32)), "at most 16 elements, not 32"),
        ((sd.FORMATS["int8"], (128, 1), 0, sd.Hadamard()), "72 is not a multiple of the rotation size 16"),
    ],
)
def test_unsupported_casts_have_reasons(output, reason):
    def reasons(shape, dtype) -> str:
        problem = CastProblem(shape, (output_of(*output, dtype),))
        return f"{cast_8bit.problem_reason(problem)} {cast_microscaled.problem_reason(problem)}"

    assert reason in reasons((72, 64), jnp.bfloat16)
    if "is not an" not in reason:
        assert "float64" in reasons((64, 64), np.float64)
        assert "matrices" in reasons((2, 64, 64), jnp.bfloat16)


FOUR_BIT, DRAWN = sd.FORMATS["nvfp4"], sd.Hadamard(128, mask=None, axis=-2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"format": sd.FORMATS["if4"]}, None),
        ({"format": sd.FORMATS["mxfp4"]}, "`scale` of mxfp4"),
        ({"format": dataclasses.replace(FOUR_BIT, guard=True)}, "`guard` of nvfp4 is True"),
        ({"format": dataclasses.replace(FOUR_BIT, search="four_over_six")}, None),
        ({"format": dataclasses.replace(FOUR_BIT, two_level=False)}, "`two_level` of nvfp4 is False"),
        ({"block": (16, 16)}, "16 elements along the contracting dim"),
        ({"calibration": Calibration("rms", (3.0,))}, "not by calibration 'rms'"),
        ({"rotation": sd.Hadamard(128, axis=-2)}, "with drawn signs, not Hadamard"),
        ({"rotation": dataclasses.replace(DRAWN, axis=-1)}, "along the contracting dim, with drawn signs"),
        ({"nonfinite": "saturate"}, "operands of matmuls in training"),
        ({"eden": False}, "it rounds codes to nearest"),
        ({"shape": (64, 128)}, "64 elements are not a multiple of the rotation size 128"),
        ({"shape": (2, 128, 128)}, "it casts non-empty matrices"),
        ({"groups": 2}, "row groups"),
        ({"passed_arguments": frozenset({"mean"})}, None),
        ({"passed_arguments": frozenset({"mean", "scale"})}, "`scale` is passed"),
    ],
)
def test_unsupported_casts_to_four_bits_have_reasons(changes, reason):
    dtype, of_problem = np.dtype(jnp.bfloat16), ("shape", "groups", "passed_arguments", "partitioning")
    spec = CastSpec(FOUR_BIT, (16, 1), dtype, dtype, Calibration("absmax"), DRAWN, nonfinite="nan_scales", eden=True)
    spec = dataclasses.replace(spec, **{name: value for name, value in changes.items() if name not in of_problem})
    problem = CastProblem((128, 128), (CastOutput(spec, 0, 0, signs=0),))
    problem = dataclasses.replace(problem, **{name: changes[name] for name in of_problem if name in changes})
    found = cast_four_bit.problem_reason(problem)
    assert found is None if reason is None else reason in str(found)

"""Hopper kernels, compared with the reference in JAX's interpreter, on the cases of tuning and benchmarks."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, quantize, relative, values
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.cli import main
from scaledot.kernels import xla_casts
from scaledot.kernels.hopper import (
    autotune,
    cast_8bit,
    cast_arithmetic,
    cast_four_bit,
    cast_microscaled,
    cast_support,
    support,
    tile_configs,
)
from scaledot.kernels.spec import CastOutput, CastProblem
from scaledot.kernels.table import CASTS
from scaledot.numerics.calibrate import Calibration
from scaledot.numerics.cast import CastSpec
from scaledot.parallel import types

pytestmark = pytest.mark.jax_versions

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
DIMENSIONS = (((1,), (0,)), ((), ()))


def selected_row(explained: str) -> str:
    """Returns the line of the kernel that is chosen."""
    (row,) = (line.strip() for line in explained.splitlines() if "  selected: " in line)
    return row


def exact(x: sd.ScaledArray, w: sd.ScaledArray) -> np.ndarray:
    return values(x) @ values(w)


MATMULS = [  # (M, N, K), dtypes, fields of the config, promote, k_first of either operand
    ((128, 256, 512), (E4M3, E4M3), {}, False, (False, False)),
    ((384, 256, 640), (E4M3, E5M2), {}, False, (False, False)),
    ((72, 48, 128), (E5M2, E5M2), {}, True, (False, False)),
    ((384, 512, 256), (E4M3, E4M3), {"cluster_along": "rows"}, False, (False, False)),
    ((128, 512, 384), (E4M3, E4M3), {"cluster_along": "columns"}, True, (False, False)),
    ((256, 256, 256), (E4M3, E4M3), {"wg_n": 128, "stages": 6, "n_splits": 1}, True, (False, False)),
    ((128, 256, 256), (E4M3, E4M3), {"wg_m": 64, "wg_n": 128, "wg_along": "columns"}, False, (False, False)),
    ((192, 256, 192), (BF16, BF16), {}, False, (True, False)),
    ((192, 256, 192), (BF16, BF16), {"cluster_along": "rows"}, False, (False, True)),
    ((192, 320, 128), (BF16, BF16), {}, False, (True, True)),
]


@needs_mosaic
@pytest.mark.parametrize(("sizes", "dtypes", "fields", "promote", "k_first"), MATMULS)
def test_matmuls_agree_with_float64(hopper, sizes, dtypes, fields, promote, k_first):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import Config

    m, n, k = sizes
    a, b = normal(0, (m, k), jnp.float32).astype(dtypes[0]), normal(1, (n, k), jnp.float32).astype(dtypes[1])
    scale = jnp.array([3.0], jnp.float32), jnp.array([0.25], jnp.float32)
    found = matmul(
        a.T if k_first[0] else a,
        b.T if k_first[1] else b,
        *scale,
        None,
        out_dtype=jnp.float32,
        config=dataclasses.replace(Config(), **fields),
        promote=promote,
        ctas=4,
        mn_major=k_first,
    )
    expected = 0.75 * np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    # The bound of float32 accumulation over k elements: k rounding errors of 2^-24.
    assert relative(found, expected) < k * 2.0**-24


@needs_mosaic
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_outer_product", [False, True])
def test_scales_per_row_and_column_and_a_bias_are_applied(hopper, is_outer_product, out):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import Config

    a, b = normal(0, (256, 128)).astype(E4M3), normal(1, (256, 128)).astype(E4M3)
    rows, columns, bias, bias_rows = (jnp.exp(normal(i, (256,))) for i in range(2, 6))
    term = np.outer(bias_rows if is_outer_product else np.ones(256), bias)
    bias_rows = bias_rows if is_outer_product else None
    found = matmul(a, b, rows, columns, bias, bias_rows, out_dtype=out, config=Config(), promote=False, ctas=2)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    expected = expected * np.asarray(rows)[:, None] * np.asarray(columns)[None] + term
    assert relative(found, expected) < {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6}[out]


@needs_mosaic
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize(
    ("shapes", "blocks"), [(((50, 200), (200, 70)), (None, (0,))), (((2, 3, 40), (40, 5)), ((0,), None))]
)
def test_the_fp8_kernel_is_chosen_for_all_sizes(hopper, precision, shapes, blocks):
    x = quantize(normal(0, shapes[0]), "fp8_e4m3", block=blocks[0])
    w = quantize(normal(1, shapes[1]), "fp8_e5m2", axis=0, block=blocks[1])
    assert selected_row(sd.explain(sd.matmul, x, w, precision=precision)).startswith("hopper_fp8")
    found = sd.matmul(x, w, precision=precision)
    assert found.dtype == jnp.float32
    assert relative(found, exact(x, w)) < 1e-6


@needs_mosaic
@pytest.mark.parametrize(
    ("x_block", "w_block"),
    [((1, 128), (128, 128)), ((1, 128), (128, 1)), ((128, 128), (128, 128)), ((128, 128), (0, 0)), ((1, 0), (128, 1))],
)
@pytest.mark.parametrize(("format", "kernel"), [("fp8_e4m3", "hopper_fp8"), ("int8", "hopper_int8")])
def test_blockwise_scales_are_applied_to_partial_accumulators(hopper, format, kernel, x_block, w_block):
    x = quantize(normal(0, (150, 700)), format, axis=(0, 1), block=x_block, pad=True)
    w = quantize(normal(1, (700, 300)), format, axis=(0, 1), block=w_block, pad=True)
    row = selected_row(sd.explain(sd.matmul, x, w))
    assert row.startswith(kernel)
    assert "float32 partial accumulators every 128 elements of K" in row
    assert relative(sd.matmul(x, w), exact(x, w)) < 1e-6


@needs_mosaic
@pytest.mark.parametrize(("x_format", "w_format"), [("int8", "int8"), ("int8", "int4")])
def test_integer_codes_accumulate_exactly(hopper, x_format, w_format):
    """int32 accumulation is exact; the product with each of two scales and the result are rounded."""
    x = quantize(normal(0, (50, 700)), x_format, axis=(0, 1), block=(1, 0))
    w = quantize(normal(1, (700, 70)), w_format, axis=(0, 1), block=(0, 1))
    assert selected_row(sd.explain(sd.matmul, x, w)).startswith("hopper_int8")
    left, right, by_row, by_column = (np.asarray(leaf, np.float64) for leaf in (x.data, w.data, x.scale, w.scale))
    np.testing.assert_allclose(sd.matmul(x, w), left @ right * by_row * by_column, rtol=3 * 2.0**-24)


@needs_mosaic
def test_microscaled_operands_are_multiplied_in_bfloat16(hopper):
    for format in ("mxfp8", "nvfp4"):
        x, w = quantize(normal(0, (96, 256)), format), quantize(normal(1, (256, 64)), format, axis=0)
        assert "hopper_bf16" in sd.explain(sd.matmul, x, w)
        assert relative(sd.matmul(x, w, kernel="hopper_bf16"), exact(x, w)) < 1e-6


@needs_mosaic
def test_vmap_agrees_with_a_loop(hopper):
    x = quantize(normal(0, (2, 64, 128)), "fp8_e4m3", axis=(1, 2), block=(0, 0))
    w = quantize(normal(1, (128, 32)), "fp8_e4m3")
    found = jax.vmap(lambda x: sd.matmul(x, w))(x)
    for i in range(2):
        assert relative(found[i], exact(x[i], w)) < 1e-6


@needs_mosaic
def test_delayed_and_current_scaling_of_one_tensor_are_not_fused(hopper):
    """x has delayed scaling in fwd and current scaling in wgrad."""
    current = sd.Cast("fp8_e4m3")
    delayed = sd.Cast("fp8_e4m3", delayed=sd.Delayed(4))
    recipe = sd.Recipe("mixed", sd.Gemm(delayed, current), sd.Gemm(current, current), sd.Gemm(current, current))
    x, w = 300 * normal(0, (8, 32), jnp.bfloat16), normal(1, (32, 16))  # overflows with the initial multiplier of 1

    def result(kernel):
        options = {"recipe": recipe, "kernel": kernel}
        return jax.vjp(lambda w, state: train.dense(x, w, state=state, **options)[0], w, sd.init_state(recipe))[0]

    assert relative(result(None), result("xla_codes")) < 2.0**-8


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(["fp8_block", "fp8_current"], ["fp8_current"]))
def test_gradients_under_vmap_and_in_a_shard_map_agree_with_the_reference(hopper, recipe):
    x, w, dy = normal(0, (2, 32, 64), jnp.bfloat16), normal(1, (64, 48)), normal(2, (2, 32, 48), jnp.bfloat16)

    def gradients(x, w, dy, kernel=None):
        return jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, kernel=kernel), x, w)[1](dy)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded_spec, replicated = jax.P("d"), jax.P()
    sharded = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(sharded_spec, replicated, sharded_spec),
        out_specs=(sharded_spec, replicated),
        check_vma=True,
    )
    mapped = jax.vmap(gradients, in_axes=(0, None, 0))
    for found, expected in (
        (jax.jit(sharded)(x, w, dy), gradients(x, w, dy, "xla_codes")),
        (jax.jit(mapped)(x, w, dy), jax.vmap(lambda x, dy: gradients(x, w, dy, "xla_codes"))(x, dy)),
    ):
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 2.0**-8


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


SCALED = [  # format, blocks of x and w, kernel
    ("fp8_e4m3", (1, 128), (128, 128), "hopper_fp8"),
    ("int8", (1, 0), (0, 1), "hopper_int8"),
    ("mxfp8", (1, 32), (32, 1), "hopper_bf16"),
]


@needs_mosaic
@pytest.mark.parametrize(("format", "x_block", "w_block", "kernel"), SCALED)
def test_nan_scales_give_nan_results(hopper, format, x_block, w_block, kernel):
    """Also if the codes are zeros, as those of integers with a NaN scale are."""
    x = quantize(normal(0, (16, 256)).at[3].set(0), format, axis=(0, 1), block=x_block)
    w = quantize(normal(1, (256, 16)), format, axis=(0, 1), block=w_block, pad=True)
    x = dataclasses.replace(x, scale=x.scale.at[3, -1].set(np.array(np.nan, x.scale.dtype)))
    found = np.asarray(sd.matmul(x, w, kernel=kernel))
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


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


RECIPES = {
    "fp8_current": "xla_codes",
    "fp8_delayed": "xla_codes",
    "fp8_block": "xla_codes",
    "mxfp8": "xla_upcast",
    "nvfp4": "xla_upcast",
    "int8_block": "xla_integer",
    "nvfp4_plus": "xla_upcast",
    "if4": "xla_upcast",
    "quartet_ii": "xla_upcast",
}
# Tokens, inputs and outputs of a layer, multiples of the rotation size.
ROTATED_SIZES = {
    **dict.fromkeys(("nvfp4", "int8_block"), (32, 80, 40)),
    **dict.fromkeys(("nvfp4_plus", "if4", "quartet_ii"), (128,) * 3),
}


def step(recipe: str | sd.Recipe, kernel: str | None, sizes: tuple[int, int, int] = (30, 72, 40)):
    """Returns the result, gradients and next state of a layer whose sizes are not multiples of a tile."""
    tokens, inputs, outputs = sizes
    batch = 3 if tokens < 128 else 1  # interpreted kernels are slow
    x, w = normal(0, (batch, tokens, inputs), jnp.bfloat16), normal(1, (inputs, outputs))
    dy = normal(2, (batch, tokens, outputs), jnp.bfloat16)
    state = sd.init_state(recipe)

    def loss(x, w, b, state):
        key = jax.random.key(7)
        y = train.dense(x, w, b, recipe=recipe, state=state or None, key=key, kernel=kernel)
        y = y[0] if state else y
        return jnp.vdot(y, dy).astype(jnp.float32), y

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, y), gradients = step(x, w, normal(3, (outputs,)), state)
    return y, gradients


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(RECIPES, ("fp8_current", "mxfp8", "if4", "quartet_ii")))
def test_a_training_step_agrees_with_the_reference(hopper, monkeypatch, recipe):
    casts = []
    for module in (cast_8bit, cast_microscaled, cast_four_bit):
        monkeypatch.setattr(
            module, "run", lambda *arguments, run=module.run: casts.append(arguments) or run(*arguments)
        )
    jax.clear_caches()  # so that the step is traced again
    sizes = ROTATED_SIZES.get(recipe, (30, 72, 40))
    found = step(recipe, None, sizes)
    # x and w of Quartet II are cast again for the backward pass.
    assert len(casts) == (5 if recipe == "quartet_ii" else 3), "a tensor was cast by XLA"
    expected = step(recipe, RECIPES[recipe], sizes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert other.dtype == leaf.dtype
        assert other.shape == leaf.shape
        # Codes are equal; float32 accumulation in another order may change a bfloat16 result by one ulp.
        np.testing.assert_allclose(
            np.asarray(other, np.float32), np.asarray(leaf, np.float32), rtol=2.0**-7, atol=1e-5, err_msg=str(path)
        )


def stochastic_recipe(cast: sd.Cast, weight_cast: sd.Cast) -> sd.Recipe:
    """Returns a recipe with stochastic rounding of gradients."""
    gradient = dataclasses.replace(cast, rounding="stochastic")
    gemms = sd.Gemm(cast, weight_cast), sd.Gemm(gradient, weight_cast), sd.Gemm(cast, gradient)
    return sd.Recipe("stochastic", *gemms)


@needs_mosaic
@pytest.mark.parametrize(
    "blocks", [pytest.param((None, None), marks=pytest.mark.exhaustive), ((1, 128), (128, 128))], ids=str
)
def test_gradients_with_stochastic_rounding_agree_with_the_reference(hopper, blocks):
    recipe = stochastic_recipe(*(sd.Cast("fp8_e4m3", block) for block in blocks))
    sizes = (50, 72, 40) if blocks[0] is None else (50, 300, 200)  # more than one block along every contracting dim
    found, expected = step(recipe, None, sizes), step(recipe, "xla_codes", sizes)
    for other, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(other, np.float32), np.asarray(leaf, np.float32), rtol=2.0**-7, atol=1e-5)


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(RECIPES, ("fp8_current", "mxfp8", "if4", "quartet_ii")))
def test_programs_on_a_gpu_machine_also_have_the_xla_kernels(monkeypatch, recipe):
    """They run if arrays are placed on the CPU, and must take operands in the layouts of the Hopper kernels."""
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jaxpr = str(jax.make_jaxpr(lambda: step(recipe, None))())
    assert "call_exported" in jaxpr
    assert "platform_index" in jaxpr


@needs_mosaic
def test_residuals_are_codes(hopper):
    bits = {"fp8_current": 8, "mxfp8": 8, "nvfp4": 4, "int8_block": 8}
    for recipe, each in bits.items():
        x, w = normal(0, (64, 512), jnp.bfloat16), normal(1, (512, 512))

        def backward(x, w, recipe=recipe):
            return jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, key=jax.random.key(0)), x, w)[1]

        residuals = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(backward, x, w)))
        codes = (x.size + w.size) * each // 8
        assert codes <= residuals < 1.3 * codes, recipe


def test_a_kernel_that_cannot_run_here_returns_a_reason():
    q = quantize(normal(0, (32, 32)), "fp8_e4m3")
    reason = "needs jax 0.11" if jax.__version_info__ < support.OLDEST_JAX else "needs a Hopper GPU"
    with pytest.raises(NotImplementedError, match=reason):
        sd.matmul(q, q, kernel="hopper_fp8")
    assert re.search(f"hopper_fp8 +unsupported: {reason}", sd.explain(sd.matmul, q, q))


@pytest.mark.parametrize(
    ("x", "w", "options", "reason"),
    [
        (("int8", None), ("fp8_e4m3", None), {}, "both operands must be 8-bit floats"),
        (("fp8_e4m3", (16,)), ("fp8_e4m3", None), {}, "the scale of lhs changes along the contracting dim"),
        (("fp8_e4m3", None), ("fp8_e4m3", None), {"preferred_element_type": jnp.float64}, "not float64"),
    ],
)
def test_unsupported_matmuls_have_reasons(monkeypatch, x, w, options, reason):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    x, w = (quantize(normal(0, (32, 32)), format, block=block) for format, block in (x, w))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=reason):
        sd.matmul(x, w, kernel="hopper_fp8", **options)


def output_of(format: sd.Format, block, contracted: int, rotation, dtype) -> CastOutput:
    from benchmarks.gpu.cast import MatrixCast

    return MatrixCast(format, block, contracted, rotation=rotation).output(dtype, 0)


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


def test_kernels_need_a_hopper_gpu_and_automatic_partitioning(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    class Device:
        compute_capability, device_kind = "9.0", "NVIDIA H200"

    with jax.default_device(jax.devices("cpu")[0]):
        assert "jax.default_device is" in str(support.mesh_reason())
    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    assert support.mesh_reason() is None
    assert "over 2 devices" in str(types.partition_reason(types.Partitioning(2, is_automatic=False)))
    with jax.enable_x64(True):
        assert "jax_enable_x64" in str(support.mesh_reason())
    monkeypatch.setattr(Device, "compute_capability", "10.0")
    assert "compute capability 9" in str(support.mesh_reason())


@needs_mosaic
def test_the_heuristic_uses_clusters_for_large_matmuls_only():
    wide = tile_configs.heuristic(tile_configs.GemmKey(16384, 32768, 8192, "float8", 2))
    assert (wide.wg_n, wide.cluster_along) == (256, "rows")
    assert (
        tile_configs.heuristic(tile_configs.GemmKey(128, 16384, 4096, "float8", 2)).cluster_along is None
    )  # one row of tiles cannot form clusters


TUNED = [  # one of each kind of shape
    tile_configs.GemmKey(128, 256, 128, "float8", 2),
    tile_configs.GemmKey(128, 128, 128, "float8", 2, "promoted"),
    tile_configs.GemmKey(128, 128, 256, "int8", 2, "blocks_128x128"),
    tile_configs.GemmKey(128, 128, 128, "float8", 2, row_groups=3),
    tile_configs.GemmKey(128, 128, 512, "float8", 4, "blocks_1x128", k_groups=3),
]


@pytest.fixture
def table(monkeypatch, tmp_path):
    """The file of tuned configs of a device that has none yet."""
    monkeypatch.setattr(tile_configs, "_path", lambda kind: tmp_path / "table.json")
    tile_configs._table.cache_clear()
    yield tmp_path / "table.json"
    tile_configs._table.cache_clear()


def tune(monkeypatch, shapes, table, seconds: list[float]) -> None:
    """Tunes with these times of the heuristic's config and of the only candidate."""
    times = itertools.cycle(seconds)
    monkeypatch.setattr(autotune, "_seconds", lambda program, arguments: next(times))
    autotune.tune(shapes, table)


@needs_mosaic
@pytest.mark.parametrize("shape", TUNED, ids=lambda s: f"{s.accumulation} {s.row_groups} {s.k_groups}")
def test_tuned_configs_are_used_for_their_shapes_only(hopper, monkeypatch, table, shape):
    faster = autotune.variants(shape)[0]
    monkeypatch.setattr(autotune, "variants", lambda shape: [faster])
    tune(monkeypatch, [shape], table, [2.0, 1.0])
    assert tile_configs.config_for(shape) == faster
    other = dataclasses.replace(shape, m=256)
    assert tile_configs.config_for(other) == tile_configs.heuristic(other)


@needs_mosaic
def test_tuning_another_shape_keeps_earlier_configs(hopper, monkeypatch, table):
    shape = TUNED[0]
    tuned = dataclasses.replace(tile_configs.heuristic(shape), grid_tile_width=2)
    other = dataclasses.replace(shape, n=512)
    monkeypatch.setattr(autotune, "best", lambda of: (tuned if of == shape else tile_configs.heuristic(of), 0.0))
    autotune.tune([shape], table)
    autotune.tune([other], table)
    assert tile_configs.config_for(shape) == tuned
    assert tile_configs.config_for(other) == tile_configs.heuristic(other)


@needs_mosaic
def test_tuning_raises_for_configs_with_wrong_results(hopper, monkeypatch, table):
    run = autotune._compile

    def compile_wrong(shape, config, arguments):
        program = run(shape, config, arguments)
        # One element of the last tile is wrong, if the config is not the heuristic's.
        is_wrong = config != tile_configs.heuristic(shape)
        return lambda *arrays: program(*arrays).at[-1, -1].multiply(2 if is_wrong else 1)

    monkeypatch.setattr(autotune, "_compile", compile_wrong)
    with pytest.raises(AssertionError, match="differs from"):
        tune(monkeypatch, TUNED[:1], table, [2.0, 1.0])
    assert not table.exists()


@needs_mosaic
def test_candidates_are_distinct_and_row_groups_have_no_clusters():
    for shape in autotune.gemm_keys(autotune.KINDS):
        variants = autotune.variants(shape)
        assert len(variants) > 1
        assert len({tile_configs.heuristic(shape), *variants}) == len(variants) + 1
        assert not shape.row_groups or all(config.cluster_along is None for config in variants)


TRAINED = [  # recipe, whether rows are grouped, and the kind of matmuls whose shapes are tuned for it
    ("fp8_current", False, "dense"),
    ("mxfp8", False, "dense"),
    ("fp8_block", False, "blocks"),
    ("int8_block", False, "blocks"),
    ("int8", False, "integers"),
    ("fp8_current", True, "groups"),
    ("fp8_block", True, "groups"),
]


@needs_mosaic
@pytest.mark.parametrize(("recipe", "is_grouped", "kind"), TRAINED)
def test_tuned_shapes_include_those_of_training(hopper, monkeypatch, recipe, is_grouped, kind):
    tokens, inputs, outputs, groups = layer = 200, 256, 384, 3
    requested, choose = [], tile_configs.config_for
    monkeypatch.setattr(tile_configs, "config_for", lambda shape: requested.append(shape) or choose(shape))

    def step(x, w, dy):
        options = {"recipe": recipe, "key": jax.random.key(0), "preferred_element_type": BF16}
        if is_grouped:
            y, backward = jax.vjp(lambda x, w: train.ragged_dot(x, w, jnp.array([90, 0, 100]), **options), x, w)
        else:
            y, backward = jax.vjp(lambda x, w: train.dot_general(x, w, DIMENSIONS, **options), x, w)
        return y, backward(dy)

    kernel = (groups, inputs, outputs) if is_grouped else (inputs, outputs)
    sizes = ((tokens, inputs), BF16), (kernel, jnp.float32), ((tokens, outputs), BF16)
    jax.eval_shape(step, *(jax.ShapeDtypeStruct(*each) for each in sizes))
    assert len(requested) == 3
    assert set(requested) <= set(autotune.gemm_keys([kind], [layer[:3]], groups))


@needs_mosaic
@pytest.mark.parametrize("kind", autotune.KINDS)
def test_tuning_runs_each_shape_through_its_kernel(hopper, monkeypatch, kind):
    requested: list[tile_configs.GemmKey] = []
    choose = tile_configs.config_for
    monkeypatch.setattr(tile_configs, "config_for", lambda shape: requested.append(shape) or choose(shape))
    shapes = autotune.gemm_keys([kind], [(200, 256, 384)], 3)
    for shape in shapes:
        result = jax.eval_shape(lambda shape=shape: autotune.run(shape, *autotune.operands(shape)))
        assert result.dtype.itemsize == shape.out_itemsize
    assert requested == shapes


@needs_mosaic
def test_the_configs_of_an_h200_are_of_tuned_shapes():
    from scaledot.kernels.hopper.tiles import Config

    rows = {tile_configs.GemmKey(**row["gemm"]): Config(**row["config"]) for row in tile_configs._table("NVIDIA H200")}
    assert rows.keys() <= set(autotune.gemm_keys(autotune.KINDS))
    assert len(rows) == len(tile_configs._table("NVIDIA H200"))


def test_the_command_line_chooses_kinds_and_layers(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(autotune, "tune", lambda shapes, path, log: called.append((shapes, path)))
    path = tmp_path / "table.json"
    layers = ["--layer", "256", "128", "384", "--layer", "512", "128", "384"]
    assert main(["tune", "--kind", "groups", "integers", *layers, "--groups", "4", "--output", str(path)]) == 0
    assert called == [(autotune.gemm_keys(["groups", "integers"], [(256, 128, 384), (512, 128, 384)], 4), path)]
    assert {shape.row_groups for shape in called[0][0]} == {0, 4}
    with pytest.raises(SystemExit):
        main(["tune", "--kind", "unheard"])


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_kernels_run_on_one_of_several_devices_if_nothing_is_partitioned(monkeypatch, kind):
    """Inside jit the type of an array has its mesh, with and without a mesh in the context."""
    monkeypatch.setattr(support, "device_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 2)
    axis_types = (jax.sharding.AxisType[kind],)
    several, one = (jax.make_mesh((n,), ("d",), axis_types=axis_types, devices=jax.devices()[:n]) for n in (8, 1))
    x = jnp.ones((128, 128))
    rows = jax.device_put(x, jax.NamedSharding(several, jax.P("d")))

    def kernels_of(*arrays, within=lambda f: f) -> set[str]:
        """Returns the kernel of the forward matmul, and "cast" if a Hopper kernel casts an operand."""
        found = set()

        def f(x, w):
            q = [quantize(a, "fp8_e4m3") for a in (x, w)]
            found.add(selected_row(sd.explain(sd.matmul, *q)).split(":")[0].split()[0])
            output = output_of(sd.FORMATS["fp8_e4m3"], (0, 0), 1, None, x.dtype)
            problems = (CastProblem(a.shape, (output,), partitioning=types.partitioning_of(a)) for a in (x, w))
            found.update("cast" for problem in problems if CASTS[0].unsupported_reason(problem) is None)
            return x

        jax.eval_shape(jax.jit(within(f)), *arrays)
        return found

    kernels = {"hopper_fp8", "cast"}
    assert jax.device_count() == 8
    assert kernels_of(x, jax.device_put(x, jax.devices()[1])) == kernels
    on_several = kernels if kind == "Auto" else {"xla_codes"}
    assert kernels_of(rows, rows) == on_several
    assert kernels_of(x, rows) == on_several | {"cast"}
    with jax.set_mesh(several):
        assert kernels_of(x, x) == on_several
        replicated = jax.P()
        assert (
            kernels_of(x, x, within=jax.shard_map(in_specs=(replicated, replicated), out_specs=replicated)) == kernels
        )
    with jax.set_mesh(one):
        assert kernels_of(x, x) == kernels
    assert types.partitioning_of(rows) == types.Partitioning(8, is_automatic=kind == "Auto")
    assert types.partitioning_of(x) == types.ONE_DEVICE

"""Formats whose block scales, or grids, are chosen by the squared error, against numpy, bit for bit."""

import json
from dataclasses import replace

import independent
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from reference import assert_one_rounding, decoded
from tables import params_of

import scaledot as sd
from scaledot import checkpoint

pytestmark = pytest.mark.optimized  # compares bits

GRIDS = independent.GRIDS
NVFP4 = sd.FORMATS["nvfp4"]
CASES = {  # format, its grids in numpy, whether neighbours of the abs-max scale are searched
    "nvfp4 four over six": (replace(NVFP4, search="four_over_six"), ("four_over_six",), False),
    "nvfp4 four over six 256": (replace(NVFP4, search="four_over_six", scale_max=256.0), ("four_over_six",), False),
    "nvfp4 scales": (replace(NVFP4, search="scales"), ("e2m1",), True),
    "nvfp4 scales 256": (replace(NVFP4, search="scales", scale_max=256.0), ("e2m1",), True),
    "nvint4": (sd.FORMATS["nvint4"], ("uniform",), False),
    "nvint4 scales": (replace(sd.FORMATS["nvint4"], search="scales"), ("uniform",), True),
    "if4": (sd.FORMATS["if4"], ("e2m1", "uniform"), False),
    "if4 scales": (replace(sd.FORMATS["if4"], search="scales"), ("e2m1", "uniform"), True),
}
# test_train compares steps of recipes with the other formats, and with scales of at most 256, with numpy.
STEPS = ("nvfp4 four over six", "nvfp4 scales", "nvint4", "if4", "if4 scales")
STEPS = params_of(STEPS, set(STEPS) - {"if4"})
NOT_SEARCHED_OR_256 = ("nvfp4 four over six 256", "nvfp4 scales 256", "nvint4")
each_case = pytest.mark.parametrize(
    ("format", "grids", "search"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.exhaustive if name in NOT_SEARCHED_OR_256 else ())
        for name, case in CASES.items()
    ],
)


def magnitudes(shape=(48, 96)) -> np.ndarray:
    """Blocks of every magnitude down to zeros, and in them elements from one to many times smaller than the amax."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 3, shape))
    x[:16] *= np.exp2(-np.arange(shape[1]) / 4)  # down to block scales that are subnormal, and 0
    x[16:20] = 0
    x[20:32] = np.rint(x[20:32])  # representable values, so that several scales have no error
    x[32:, 16:32] = 2.0**-140  # subnormal
    return x.astype(np.float32)


def non_finite() -> np.ndarray:
    x = magnitudes()
    x[1, 3], x[2, 40], x[2, 41], x[33, :16], x[47, 90] = np.inf, -np.inf, np.nan, np.nan, np.inf
    return x


DATA = {
    "magnitudes": magnitudes(),
    "huge": magnitudes() * np.float32(2.0**115),
    "tiny": magnitudes() * np.float32(2.0**-110),
    "zeros": np.zeros((48, 96), np.float32),
    "non-finite": non_finite(),
}


def assert_equals_numpy(q: sd.ScaledArray, expected: independent.Quantized, block):
    scale = np.asarray(q.scale).astype(np.float64)
    np.testing.assert_array_equal(independent.per_element(scale, block, q.shape), expected.scale)
    np.testing.assert_array_equal(np.asarray(q.tensor_scale, np.float64), expected.tensor_scale)
    np.testing.assert_array_equal(decoded(q), expected.codes)


@each_case
@pytest.mark.parametrize("block", [(1, 16), (16, 16), (16, 1)], ids=["1x16", "16x16", "16x1"])
def test_codes_and_scales_are_those_of_numpy(format, grids, search, block):
    for x in DATA.values():
        q = sd.quantize(x, format, block=block)
        expected = independent.quantize_searched(x, block, [GRIDS[g] for g in grids], format.scale_max, search)
        assert_equals_numpy(q, expected, block)


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_multiplies_the_values_of_numpy(name):
    """x and g in 1×16 blocks along the contracting dim, w in 16×16 blocks, all rounded to nearest."""
    format, grids, search = CASES[name]
    along, square = sd.Cast(format), sd.Cast(format, (16, 16))
    recipe = sd.Recipe(name, sd.Gemm(along, square), sd.Gemm(along, square), sd.Gemm(along, along))
    x, w, g = (normal(seed, (32, 32), spread=spread) for seed, spread in enumerate((1.0, 0.1, 1e-3)))
    y, vjp = jax.vjp(lambda x, w: sd.train.dense(x, w, recipe=recipe), x, w)
    dx, dw = vjp(g)

    def values(tensor, block):
        return independent.quantize_searched(tensor, block, [GRIDS[name] for name in grids], search=search).values

    for result, text, lhs, rhs in (
        (y, "mk,kn->mn", values(x, (1, 16)), values(w, (16, 16))),
        (dx, "mn,kn->mk", values(g, (1, 16)), values(w, (16, 16))),
        (dw, "mk,mn->kn", values(x, (16, 1)), values(g, (16, 1))),
    ):
        magnitude = np.einsum(text, np.abs(lhs), np.abs(rhs))
        assert_one_rounding(result, np.einsum(text, lhs, rhs), magnitude, 32)


def block_errors(x, format, **options) -> np.ndarray:
    """The root of the squared error of each block of 16, relative to its amax."""
    values = np.asarray(sd.dequantize(sd.quantize(x, format, **options)), np.float64)
    in_blocks = [a.reshape(48, -1, 16) for a in (values - x, x)]
    return np.sqrt(np.square(in_blocks[0]).sum(-1)) / np.maximum(np.abs(in_blocks[1]).max(-1), 1e-30)


def test_a_block_of_if4_has_the_smaller_error_of_both_grids():
    x = np.random.default_rng(0).standard_t(3, (48, 96)).astype(np.float32)
    tensor_scale = np.float32(np.abs(x).max() / 2688)
    either, *both = (block_errors(x, name, tensor_scale=tensor_scale) for name in ("if4", "nvfp4", "nvint4"))
    # The errors of 16 elements are rounded to multiples of 2^-8 code, which is at most a fourth of the amax (code 4).
    tolerance = 2 * 4 * 2.0**-9 / 4
    np.testing.assert_allclose(either, np.minimum(*both), rtol=0, atol=tolerance)


def test_stochastic_rounding_of_if4_keeps_the_grid_and_is_unbiased():
    x = normal(0, (32, 64))
    guarded = replace(sd.FORMATS["if4"], guard=True)  # so that no element saturates
    nearest = sd.quantize(x, guarded)
    draws = [sd.quantize(x, guarded, rounding="stochastic", key=jax.random.key(seed)) for seed in range(256)]
    np.testing.assert_array_equal(draws[0].scale, nearest.scale)
    values = np.stack([sd.dequantize(draw) for draw in draws]).astype(np.float64)
    # The step around a code is at most 2 scales. The mean of 256 draws is within 5 standard deviations of x.
    scale = np.abs(np.repeat(np.asarray(nearest.scale).astype(np.float64), 16, axis=1)) * float(nearest.tensor_scale)
    assert np.all(np.abs(values.mean(0) - np.asarray(x)) <= 5 * scale / np.sqrt(256))


@pytest.mark.parametrize("name", ["nvint4", "if4"])
def test_checkpoint_layouts_of_nvfp4_refuse_other_grids(tmp_path, name):
    weights = {"a.weight": sd.quantize(jnp.ones((16, 32)), name)}
    for layout in ("compressed-tensors", "modelopt"):
        with pytest.raises(ValueError, match=f"is {name} with block"):
            checkpoint.save(weights, tmp_path / layout, layout)
    checkpoint.save(weights, tmp_path / "own")
    found = checkpoint.load(tmp_path / "own")["a.weight"]
    assert found.format == sd.FORMATS[name]
    np.testing.assert_array_equal(found.data, weights["a.weight"].data)


def test_a_recipe_with_grids_survives_json():
    cast = sd.Cast(replace(sd.FORMATS["if4"], name="mine", search="scales"))
    recipe = sd.Recipe("mine", sd.Gemm(cast, cast))
    assert sd.Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_equal_errors_keep_the_scale_of_the_amax():
    """12, 6 and 3 are codes of several scales; all have no error."""
    q = sd.quantize(jnp.array([6.0, 3.0, 1.5] + [0.0] * 13), replace(NVFP4, search="scales"), tensor_scale=1.0)
    np.testing.assert_array_equal(q.scale.astype(jnp.float32), [1.0])


def test_a_block_scale_that_would_be_0_becomes_the_smallest():
    """A block whose abs-max scale rounds to 0 is not lost: 2^-9 is the smallest E4M3 scale."""
    x = jnp.full((16,), 2.0**-9)
    searched = sd.quantize(x, replace(NVFP4, search="scales"), tensor_scale=1.0)
    np.testing.assert_array_equal(sd.dequantize(searched), x)
    assert not np.any(sd.dequantize(sd.quantize(x, NVFP4, tensor_scale=1.0)))


def test_four_over_six_keeps_a_scale_of_0_if_both_candidates_are_0():
    """Of an amax of 2.5 * 2^-9, the scale of 6 rounds to 0 and that of 4 to 2^-9; of 2 * 2^-9, both round to 0."""
    x = jnp.array([[2.5] * 16, [2.0] * 16], jnp.float32) * np.float32(2.0**-9)
    q = sd.quantize(x, replace(NVFP4, search="four_over_six"), tensor_scale=1.0)
    np.testing.assert_array_equal(q.scale.astype(jnp.float32), [[2.0**-9], [0]])


def test_a_saturated_block_keeps_the_largest_scale():
    q = sd.quantize(jnp.full((16,), 1e6), replace(NVFP4, search="scales"), tensor_scale=1.0)
    np.testing.assert_array_equal(q.scale.astype(jnp.float32), [448.0])


@pytest.mark.parametrize("name", params_of(("nvfp4 scales", "if4"), ("nvfp4 scales",)))
def test_ragged_casts_are_those_of_each_group(name):
    format, x = CASES[name][0], DATA["magnitudes"][:, :32]
    q = sd.quantize_grouped(x, jnp.array([16, 0, 16, 16]), format)
    groups = [sd.dequantize(sd.quantize(group, format)) for group in np.split(x, 3)]
    np.testing.assert_array_equal(sd.dequantize(q), np.concatenate(groups))


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        (replace(sd.FORMATS["mxfp4"], search="scales"), {}, "is for float8_e4m3fn block scales"),
        (
            replace(sd.FORMATS["mxfp4"], search="four_over_six"),
            {},
            "is for float8_e4m3fn block scales of float4_e2m1fn",
        ),
        (replace(sd.FORMATS["if4"], grids=("int4", "int8")), {}, "must be two of float4_e2m1fn, int4, with uint4"),
        (replace(sd.FORMATS["if4"], grids=("int4", "int4")), {}, "must be two of float4_e2m1fn, int4, with uint4"),
        (replace(sd.FORMATS["if4"], scale="float32", rule="f_over_amax", two_level=False), {}, "whose sign says which"),
        (sd.FORMATS["if4"], {"calibration": "absmax,0.9"}, "whose scales are searched; drop it"),
        (replace(NVFP4, search="best"), {}, "use 'four_over_six', 'scales' or None"),
        (replace(NVFP4, search="scales"), {"calibration": "mse"}, "whose scales are searched; drop it"),
        (replace(NVFP4, search="four_over_six"), {"calibration": "mse"}, "whose scales are searched; drop it"),
        (replace(NVFP4, search="scales"), {"rounding": "stochastic", "key": jax.random.key(0)}, "would be biased"),
    ],
)
def test_a_search_that_does_not_apply_is_refused(format, options, message):
    with pytest.raises(ValueError, match=message):
        sd.quantize(jnp.ones((16, 32)), format, **options)

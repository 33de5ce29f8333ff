"""MS-EDEN: exact scales, an unbiased cast, refusals; rotations with new signs; operands cast from those of fwd."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from independent import GRIDS_OF, quantize_nvfp4, quantize_searched
from independent import quantize as reference_quantize
from reference import exact
from training import KEY, assert_same, dense, ragged_dot, vjp_of

import scaledot as sd
from benchmarks.convergence import bias
from scaledot import Cast, Gemm, Hadamard, Recipe
from scaledot.numerics.hadamard import random_signs, rotate, unrotate
from scaledot.recipes import QUARTET_II

NVFP4 = sd.FORMATS["nvfp4"]
EDEN = QUARTET_II.dgrad.lhs
TARGET = {"target": EDEN.format.target, "scale_max": EDEN.format.scale_max}
ROTATION = Hadamard(128, mask=0)
EDEN_FIELDS = {"rounding": "ms_eden", "rotation": Hadamard(128, mask=None)}


def samples():
    x = np.array(normal(0, (6, 256)))
    wide = x * 2.0 ** np.linspace(-20, 12, 256, dtype=np.float32)  # block scales from 0 and subnormals to the largest
    zeros = np.where(np.arange(256) < 128, 0, x).astype(np.float32)
    dominant = np.where(np.arange(256) % 128 == 5, 100 * np.abs(x), x).astype(np.float32)  # 128 equal magnitudes
    return {
        "normal": x,
        "wide": wide,
        "a group of zeros": zeros,
        "tiny": x * np.float32(1e-30),
        "dominant": dominant,
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", samples())
@pytest.mark.parametrize("search", [None, "scales"])
def test_codes_and_corrected_scales_are_those_of_an_independent_implementation(name, axis, search):
    x = samples()[name] if axis else samples()[name].T
    uniform = np.asarray(jax.random.uniform(jax.random.key(1), x.shape), np.float32)
    format = EDEN.format if search is None else dataclasses.replace(EDEN.format, search=search, target=None)
    q = sd.quantize(jnp.asarray(x), format, axis=axis, rounding="ms_eden", rotation=ROTATION, uniform=uniform)
    rounded = np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32))  # fixed signs: x rounds to bfloat16
    rotated = np.asarray(rotate(jnp.asarray(rounded), dataclasses.replace(ROTATION, axis=axis - 2)))
    group, block = ((1, 128), (1, 16)) if axis else ((128, 1), (16, 1))
    with np.errstate(all="ignore"):
        if search is None:
            expected = quantize_nvfp4(rotated, block, uniform, None, False, group=group, **TARGET)
        else:
            expected = quantize_searched(rotated, block, GRIDS_OF["nvfp4"], 256, True, uniform, group)
    np.testing.assert_array_equal(exact(q), expected.values)


@pytest.mark.usefixtures("standard_promotion")  # benchmarks mix dtypes
@pytest.mark.parametrize("sample", [bias.NORMAL, bias.STUDENT])
@pytest.mark.parametrize("search", [None, "scales"])
def test_the_cast_is_unbiased_over_its_signs(search, sample):
    format = dataclasses.replace(EDEN.format, search=search, target=None)
    case = bias.Case(dataclasses.replace(EDEN, format=format), sample=sample)
    row = bias._row(case, bias.errors(case, bias.sample_of(case)))
    assert row["unbiased"]
    assert row["as_expected"]


@pytest.mark.usefixtures("standard_promotion")
def test_the_correction_is_what_makes_it_unbiased():
    case = bias.Case(dataclasses.replace(EDEN, rounding="nearest"))
    assert not bias._row(case, bias.errors(case, bias.sample_of(case)))["unbiased"]


def test_drawn_signs_are_undone_exactly_by_the_inverse_up_to_float32():
    x, signs = normal(0, (4, 256)), random_signs(jax.random.key(3), 128)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    rotation = Hadamard(128, mask=None)
    back = unrotate(rotate(x, rotation, signs), rotation, signs)
    np.testing.assert_allclose(back, x, atol=14 * 2.0**-24 * float(jnp.max(jnp.abs(x))) * np.sqrt(128))


def test_both_operands_of_a_matmul_draw_the_same_signs_and_each_step_new_ones():
    cast = Cast("mxfp8", rotation=Hadamard(128, mask=None))
    recipe = Recipe("rotated", Gemm(cast, cast), Gemm(), Gemm())
    x, w = normal(0, (16, 256)), normal(1, (256, 8))
    y, other = (dense(x, w, recipe=recipe, key=jax.random.key(seed)) for seed in (0, 1))
    bound = 0.2 * float(jnp.linalg.norm(x @ w))  # two casts of 3 mantissa bits: 5 %; other signs would give 140 %
    assert float(jnp.linalg.norm(y - x @ w)) < bound
    assert np.any(np.asarray(y) != np.asarray(other))


def test_a_requantised_operand_is_cast_from_the_codes_of_fwd():
    """w of dgrad is cast from fwd's 4-bit codes: an element of w below half a step of them contributes nothing."""
    x, g = normal(0, (16, 128)), normal(2, (16, 16))
    w = jnp.zeros((128, 16)).at[0].set(6.0).at[1].set(0.01)
    again = dataclasses.replace(Cast("mxfp8"), requantized=True)
    recipe = Recipe("again", Gemm(Cast("nvfp4"), Cast("nvfp4")), Gemm(Cast("mxfp8"), again), Gemm())
    direct = dataclasses.replace(recipe, dgrad=Gemm(Cast("mxfp8"), Cast("mxfp8")))
    _, dx, _ = vjp_of(lambda x, w: dense(x, w, recipe=recipe, key=KEY), g, x, w)
    _, expected, _ = vjp_of(lambda x, w: dense(x, w, recipe=direct, key=KEY), g, x, w)
    assert not np.any(dx[:, 1])
    assert np.all(expected[:, 1] != 0)


def test_vmap_scan_and_recomputation_draw_the_signs_and_scales_of_a_loop():
    recipe = Recipe("eden", Gemm(), Gemm(), Gemm(EDEN, EDEN))
    layer = functools.partial(dense, recipe=recipe, key=KEY)
    x, w, g = normal(0, (2, 20, 32)), normal(1, (32, 16)), normal(2, (2, 20, 16))

    def grads(x, g, layer=layer):
        return jax.vjp(layer, x, w)[1](g)

    @jax.jit
    def run(x, g):
        mapped, scanned = jax.vmap(grads)(x, g), jax.lax.scan(lambda _, xg: (None, grads(*xg)), None, (x, g))[1]
        return (
            grads(x[1], g[1]),
            grads(x[1], g[1], jax.checkpoint(layer)),
            *(jax.tree.map(lambda a: a[1], each) for each in (mapped, scanned)),
        )

    expected, *others = run(x, g)
    for found in others:
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def test_groups_of_a_ragged_matmul_are_corrected_each_by_itself():
    """The random numbers of the first group are those of a matrix of its rows; the other groups have others."""
    recipe = Recipe("eden", Gemm(), Gemm(), Gemm(EDEN, EDEN))
    x, w, g, sizes = normal(0, (64, 32)), normal(1, (3, 32, 16)), normal(2, (64, 16)), np.array([26, 0, 38])
    x = x.at[26:].multiply(64)
    _, _, dw = vjp_of(lambda x, w: ragged_dot(x, w, sizes, recipe=recipe, key=KEY), g, x, w)
    _, _, expected = vjp_of(lambda x, w: dense(x, w, recipe=recipe, key=KEY), g[:26], x[:26], w[0])
    assert_same(dw[0], expected)
    assert not np.any(dw[1])
    error = jnp.linalg.norm(dw[2] - x[26:].T @ g[26:]) / jnp.linalg.norm(x[26:].T @ g[26:])
    assert 0.05 < error < 0.25  # two casts with an SNR of 20 dB: 14 %


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Cast(NVFP4, rounding="ms_eden"), "more than a block and at most 128 elements.* not none"),
        (lambda: Cast(NVFP4, rounding="ms_eden", rotation=Hadamard()), "not one of 16"),
        (lambda: Cast(NVFP4, rounding="ms_eden", rotation=Hadamard(128)), "mask=None"),
        (
            lambda: Cast("mxfp8", rounding="ms_eden", rotation=Hadamard(128, None)),
            "E4M3 block scales and E2M1 or int4 codes, .* not mxfp8",
        ),
        (
            lambda: Cast(
                dataclasses.replace(sd.FORMATS["nf4"], scale="float8_e4m3fn", block=(16,), rule="multiply"),
                **EDEN_FIELDS,
            ),
            "E2M1 or int4 codes, .* not nf4",
        ),
        (
            lambda: Cast(dataclasses.replace(NVFP4, target=7.5), **EDEN_FIELDS),
            "elements of at most 11 units of a code, but in nvfp4 they reach 11.25; lower its `target`, 7.5",
        ),
        (
            lambda: Cast(dataclasses.replace(sd.FORMATS["nvint4"], search="scales", bound="half"), **EDEN_FIELDS),
            "in nvint4 they reach 11.5",
        ),
        (lambda: Cast(NVFP4, calibration="absmax,0.25", **EDEN_FIELDS), "not calibration 'absmax,0.25'"),
        (
            lambda: sd.quantize(
                jnp.ones((2, 128)), NVFP4, rounding="ms_eden", rotation=ROTATION, key=KEY, tensor_scale=1e-3
            ),
            "from the amax of x; drop `tensor_scale`",
        ),
        (lambda: Cast(NVFP4, (16, 16), "ms_eden", Hadamard(128, None)), r"1-D blocks .* not of blocks of \(16, 16\)"),
        (lambda: sd.quantize(jnp.ones((2, 128)), NVFP4, rotation=Hadamard(128, None)), "drawn in each training step"),
        (
            lambda: Recipe("r", Gemm(Cast(NVFP4, requantized=True), None)),
            "x of fwd in r is `requantized`, which needs a forward cast",
        ),
        (
            lambda: Recipe("r", Gemm(), Gemm(None, Cast(NVFP4, requantized=True)), Gemm()),
            "w of dgrad in r is `requantized`, which needs a forward cast",
        ),
        (
            lambda: Recipe(
                "r",
                Gemm(Cast("fp8_e4m3", delayed=sd.Delayed()), Cast("fp8_e4m3")),
                Gemm(),
                Gemm(Cast("mxfp8", requantized=True), Cast("mxfp8")),
            ),
            "x of wgrad in r is `requantized` .* same `delayed`, not None and Delayed",
        ),
        (lambda: dense(jnp.ones((2, 128)), jnp.ones((128, 2)), recipe=ROTATED), "uses random numbers for x of fwd"),
    ],
)
def test_what_does_not_fit_is_explained(call, words):
    with pytest.raises(ValueError, match=words):
        call()


ROTATED = Recipe("rotated", *[Gemm(*[Cast("mxfp8", rotation=Hadamard(128, mask=None))] * 2)] * 3)


def test_the_independent_rotation_is_that_of_the_library():
    x, signs = normal(0, (5, 200)), random_signs(jax.random.key(3), 128)
    q = reference_quantize(np.asarray(x), "nvfp4", 1, rotation=np.asarray(signs))
    padded = jnp.pad(x, ((0, 0), (0, 56)))
    rotated = np.asarray(rotate(padded, Hadamard(128, mask=None), signs))
    assert np.max(np.abs(q.values - rotated)) <= np.max(np.abs(rotated)) / 6  # half a step of the largest codes

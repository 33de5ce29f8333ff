"""Weight-only matmuls in JAX's interpreter, compared with float64, for all codes and all 8-bit scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, quantize, relative, values
from jax import lax

import scaledot as sd
from scaledot.contraction import Contraction
from scaledot.kernels.hopper import support, weight_only
from scaledot.ops.operands import contract, make_problem

KERNEL = "hopper_weight_only"
BF16 = jnp.bfloat16
SM_COUNT = 4  # so that several CTAs share the K of a column tile

# XLA's CPU emitters under `--compilation cheap` cannot bitcast 4-bit floats.
pytestmark = [pytest.mark.jax_versions, pytest.mark.optimized, needs_mosaic]


WEIGHTS = [  # format, block size along K
    ("int4", 128),
    ("int4", 64),
    ("int4", 0),
    ("int3", 192),
    ("int8", 128),
    ("int8", 0),
    ("mxfp4", None),
    ("nvfp4", None),
    ("nf4", 192),
    ("nf4", 0),
]
SIZES = [(1, 256, 288), (17, 704, 300), (40, 200, 64)]  # rows, K, columns
# Blocks of 64 are in test_scales_change_from_block_to_block, one scale per column in the tests of every code.
COVERED = [("int4", 64), ("int8", 0), ("nf4", 0)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("format", "block"), [pytest.param(*w, marks=pytest.mark.exhaustive if w in COVERED else ()) for w in WEIGHTS]
)
def test_matmuls_agree_with_float64(hopper, format, block, sizes):
    rows, k, columns = sizes
    x = normal(0, (rows, k), BF16)
    w = quantize(normal(1, (k, columns)), format, axis=0, block=block, pad=True)
    assert f"{KERNEL}  selected" in sd.explain(sd.matmul, x, w)
    found = sd.matmul(x, w)
    assert found.dtype == jnp.float32
    # The error of k float32 additions is far below k roundings of 2^-24.
    assert relative(found, np.asarray(x, np.float64) @ values(w)) < k * 2.0**-24


def weights_in(w: sd.ScaledArray, out: str = "float32") -> np.ndarray:
    """The dequantised weights as the kernel computes them: the identity matrix times the weights."""
    units = np.eye(w.shape[0]).reshape(-1, 64, w.shape[0])
    options = {"preferred_element_type": out, "kernel": KERNEL}
    return np.concatenate([np.asarray(sd.matmul(jnp.asarray(rows, BF16), w, **options)) for rows in units])


def packed(format: str | sd.Format, codes: np.ndarray, scale: jax.Array, block: tuple[int, int]) -> sd.ScaledArray:
    row = sd.FORMATS[format] if isinstance(format, str) else format
    data = jnp.asarray(codes, row.code_dtype)
    return sd.ScaledArray(data, scale, format=row, block=block, dtype=np.dtype(np.float32))


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_every_integer_code_is_exact(hopper, format):
    count = 2 ** sd.FORMATS[format].bits
    codes = (np.arange(64)[:, None] + np.arange(256)[None]) % count - count // 2
    w = packed(format, codes, jnp.ones((1, 256), jnp.float32), (0, 1))
    np.testing.assert_array_equal(weights_in(w), codes)


NF4 = sd.FORMATS["nf4"]
UNEVEN = dataclasses.replace(NF4, name="uneven", codebook=(-0.001, 0.0, 0.3, 0.7, 1.1, 2.2, 3.3))
TWO_LEVEL = dataclasses.replace(NF4, name="two_level", scale="float8_e4m3fn", rule="multiply", two_level=True)
SLICES = {"bfloat16": 2, "float16": 3, "float32": 4}  # of a codebook entry, by dtype of the result


@pytest.mark.parametrize(("format", "out"), [*((NF4, out) for out in SLICES), (UNEVEN, "float32")])
def test_every_entry_of_a_codebook_is_looked_up(hopper, format, out):
    """Each slice leaves a remainder of less than 1/126 of the largest, and none for a zero entry."""
    entries = np.array(format.codebook, np.float32)
    codes = (np.arange(64)[:, None] + 3 * np.arange(256)[None]) % len(entries)
    found = weights_in(packed(format, codes, jnp.ones((1, 256), jnp.float32), (0, 1)), out).astype(np.float64)
    exact = entries[codes].astype(np.float64)
    roundings = 1 if out != "float32" else SLICES[out]  # to the output dtype, or in the sum of slices
    allowed = entries.max() * 126.0 ** -SLICES[out] + np.abs(exact) * roundings * float(jnp.finfo(out).eps) / 2
    assert (np.abs(found - exact) <= allowed).all()


def test_codebook_entries_have_more_slices_for_wider_results():
    from scaledot.kernels.hopper.codebook import split_into_terms

    assert len(split_into_terms((-1.0, 0.0, 1.0), 4)) == 1  # exact
    x, w = normal(0, (4, 64), BF16), quantize(normal(1, (64, 64)), "nf4", axis=0)
    problem = make_problem("dot", Contraction("mk", "kn", "mn"), x, w, preferred="bfloat16")
    for options, count in [
        *(({"preferred": np.dtype(out)}, count) for out, count in SLICES.items()),
        ({"precision": "highest"}, 4),
    ]:
        description = weight_only.describe(dataclasses.replace(problem, **options))
        assert f"sums of at most {count} bfloat16 terms" in description
        assert len(split_into_terms(NF4.codebook, count)) == count


def test_codebooks_may_have_two_level_scales(hopper):
    x, w = normal(0, (3, 192), BF16), quantize(normal(1, (192, 64)), TWO_LEVEL, axis=0)
    assert w.tensor_scale is not None
    assert relative(sd.matmul(x, w, kernel=KERNEL), np.asarray(x, np.float64) @ values(w)) < 192 * 2.0**-24


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4_VALUES = np.concatenate([E2M1, -E2M1])[(np.arange(64)[:, None] + np.arange(256)[None]) % 16]
FP4_SCALES = {"mxfp4": ("float8_e8m0fnu", 32), "nvfp4": ("float8_e4m3fn", 16)}


def all_scales(format: str) -> tuple[sd.ScaledArray, np.ndarray]:
    """Weights with every FP4 code in every column and a different one of 256 scales in each; and the scales."""
    dtype, size = FP4_SCALES[format]
    scale = lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.dtype(dtype))
    w = packed(format, FP4_VALUES, jnp.broadcast_to(scale, (64 // size, 256)), (size, 1))
    tensor_scale = jnp.float32(1) if w.format.two_level else None
    return dataclasses.replace(w, tensor_scale=tensor_scale), np.asarray(scale).astype(np.float64)


@pytest.mark.parametrize("format", FP4_SCALES)
def test_every_fp4_code_times_every_scale_is_exact(hopper, format):
    """Except in columns whose scale is NaN, or whose largest code overflows to infinity."""
    w, scales = all_scales(format)
    found, exact = weights_in(w), FP4_VALUES * scales
    finite = np.isfinite(scales) & (6 * scales < 2.0**128)
    subnormal = (np.abs(scales) < 2.0**-126) | (np.abs(exact) < 2.0**-126)
    exact = np.where(subnormal, 0, exact)  # flushed to zero by the CPU
    np.testing.assert_array_equal(found[:, finite], exact[:, finite])
    assert np.isnan(found[:, ~np.isfinite(scales)]).all()


@pytest.mark.parametrize(
    ("format", "block", "roundings"),
    [
        ("int4", 64, 2),
        pytest.param("int8", 64, 2, marks=pytest.mark.exhaustive),
        pytest.param("mxfp4", None, 2, marks=pytest.mark.exhaustive),
        ("nvfp4", None, 2),
        pytest.param("nf4", 64, 6, marks=pytest.mark.exhaustive),
    ],
)
def test_scales_change_from_block_to_block(hopper, format, block, roundings):
    """Weights grow with K, so that a scale taken from another block, word tile or K step gives a wrong result.

    roundings: of the kernel and of `values` together: of each product with a scale, and of the sum of slices.
    """
    growing = np.asarray(normal(1, (192, 288))) * 2.0 ** (np.arange(192)[:, None] // 16 % 7)
    w = quantize(jnp.asarray(growing, jnp.float32), format, axis=0, block=block)
    np.testing.assert_allclose(weights_in(w), values(w), rtol=roundings * 2.0**-24)


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_a_bias_is_added_before_the_one_rounding(hopper, out):
    x, bias = normal(0, (5, 128), BF16), normal(2, (96,))
    w = quantize(normal(1, (128, 96)), "int4", axis=0, block=128)
    options = {"preferred_element_type": out, "kernel": KERNEL}
    found = contract(Contraction("mk", "kn", "mn"), x, w, bias=bias, **options)
    assert found.dtype == out
    expected = np.asarray(x, np.float64) @ values(w) + np.asarray(bias, np.float64)
    allowed = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 128 * 2.0**-24}[out]
    assert relative(found, expected) < allowed


def test_einsum_with_several_free_dims_and_a_transposed_result(hopper):
    x, w = normal(0, (2, 3, 128), BF16), quantize(normal(1, (128, 5, 7)), "int4", axis=0, block=64)
    found = sd.einsum("bsk,khd->hbsd", x, w, kernel=KERNEL)
    expected = np.einsum("bsk,khd->hbsd", np.asarray(x, np.float64), values(w))
    assert relative(found, expected) < 128 * 2.0**-24


def test_ctas_share_k_and_some_have_no_steps(hopper):
    from scaledot.kernels.hopper import unpack, weight_only_matmul

    x, w = normal(0, (3, 320), BF16), quantize(normal(1, (320, 256)), "int4", axis=0, block=64)
    words = lax.bitcast_convert_type(w.data.reshape(320, 32, 8), jnp.int32)
    expected = np.asarray(x, np.float64) @ values(w)
    for config in (
        weight_only_matmul.Config(2, 2, 1, 4),
        weight_only_matmul.Config(3, 1, 4, 3),
        weight_only_matmul.Config(2, 1, 2, 2),
    ):
        partials = weight_only_matmul.split_k_partials(x, words, w.scale, unpacker=unpack.INT4, group=64, config=config)
        found = partials.sum(0)[0, :3]
        assert relative(found, expected) < 320 * 2.0**-24


REFUSED = [  # reason, rows and dtype of x, format and options of the weights (256, 64)
    ("lhs has 65 rows; at most 64 are supported", (65, BF16), ("int4", {})),
    ("lhs is float32[4,256]", (4, jnp.float32), ("int4", {})),
    ("rhs has zero points", (4, BF16), ("int4", {"calibration": "minmax"})),
    ("rhs has groups of 32 along K; they must be multiples of 64", (4, BF16), ("int4", {"block": 32})),
    ("rhs has groups of 32 along K; they must be multiples of 64", (4, BF16), ("nf4", {"block": 32})),
    ("rhs has 8-bit codes of a codebook", (4, BF16), (dataclasses.replace(sd.FORMATS["nf4"], element="uint8"), {})),
    (
        "rhs has a codebook with entries up to 4.0",
        (4, BF16),
        (dataclasses.replace(sd.FORMATS["nf4"], codebook=(0.0, 4.0)), {}),
    ),
    ("rhs is mxfp8[256,64]", (4, BF16), ("mxfp8", {})),
    ("float8_e8m0fnu scales must be in blocks of 32 along K", (4, BF16), ("mxfp4", {"block": 64})),
]


def refusal(f, *operands, **options) -> str:
    (line,) = (line for line in sd.explain(f, *operands, **options).splitlines() if KERNEL in line)
    return line


@pytest.mark.parametrize(("why", "rows", "weights"), REFUSED, ids=[f"{case[0]}: {case[2][0]}" for case in REFUSED])
def test_unsupported_operands_have_reasons(hopper, why, rows, weights):
    x, (format, options) = normal(0, (rows[0], 256), rows[1]), weights
    line = refusal(sd.matmul, x, quantize(normal(1, (256, 64)), format, axis=0, **options))
    assert "  unsupported: " in line
    assert why in line


def test_weights_must_be_stored_with_the_contracting_dim_first(hopper):
    x, w = normal(0, (4, 256), BF16), quantize(normal(1, (64, 256)), "int4", axis=1, block=128)
    dimensions = (((1,), (1,)), ((), ()))
    assert "must have its contracting dim 'b' first" in refusal(sd.dot_general, x, w, dimensions)
    assert relative(sd.matmul(x, w.T, kernel=KERNEL), np.asarray(x, np.float64) @ values(w).T) < 256 * 2.0**-24


def test_activations_have_gradients(hopper):
    """The gradients of a matmul with the dequantised weights, as LoRA adapters next to frozen weights need them."""
    x, w = normal(0, (5, 256), BF16), quantize(normal(1, (256, 128)), "int4", axis=0, block=128)
    dy = normal(2, (5, 128))
    assert f"{KERNEL}  selected" in sd.explain(sd.matmul, x, w)
    y, backward = jax.vjp(lambda x: sd.matmul(x, w), x)
    assert relative(y, np.asarray(x, np.float64) @ values(w)) < 256 * 2.0**-24
    (dx,) = backward(dy)
    assert dx.dtype == BF16
    assert (
        relative(dx, np.asarray(dy, np.float64) @ values(w).T) < 2.0**-7
    )  # dx is rounded to bfloat16, and so is dy before the matmul


def test_a_function_traced_for_a_gpu_has_an_xla_fallback(monkeypatch):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, w = normal(0, (5, 256), BF16), quantize(normal(1, (256, 128)), "nvfp4", axis=0)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: sd.matmul(x, w).sum()))(x))
    assert "call_exported" in jaxpr
    assert "platform_index" in jaxpr

"""Codes, scales and dequantised values of other libraries, bit for bit; tests/golden documents how each file was made.

Rows of the inputs are left out where scaledot differs on purpose: it flushes float32 subnormals on every backend, and
ignores infinities and NaN when it computes a scale.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import scaledot as sd
from scaledot import format_variants
from scaledot.numerics import pack

pytestmark = pytest.mark.optimized  # tests the bits of compiled programs

GOLDEN = Path(__file__).parent / "golden"
EXCEPTIONS = {"f32_subnormal_only", "f32_tiny_subnormals", "near_min_normal", "f32_max_outliers"}
RULES = {"floor": "floor", "rceil": "ceil", "even": "even", "ceil": "ceil_log2"}


class Golden:
    """One golden file: its arrays, and a mask of the rows of its edge-case input that are compared."""

    def __init__(self, name):
        self.arrays = np.load(GOLDEN / f"{name}.npz")
        self.rows = json.loads((GOLDEN / f"{name}.json").read_text()).get("rows", [])

    def __getitem__(self, name):
        return self.arrays[name]

    def compared_rows(self):
        return np.array([row not in EXCEPTIONS for row in self.rows])


def raw(codes):
    """Codes as bytes, two 4-bit codes per byte, as in the golden files."""
    codes = jnp.asarray(codes)
    if codes.dtype in (jnp.float4_e2m1fn, jnp.uint4):
        return np.asarray(pack.pack_nibbles(codes))
    return np.asarray(codes).view(np.uint8)


def assert_same(q, codes, scale, values, rows=slice(None), dtype=None):
    np.testing.assert_array_equal(raw(q.data)[rows], codes[rows])
    np.testing.assert_array_equal(np.asarray(q.scale).view(scale.dtype)[rows], scale[rows])
    if values is not None:
        got = np.asarray(sd.dequantize(q, dtype)).astype(np.float32)
        np.testing.assert_array_equal(got[rows], values[rows])


@pytest.mark.parametrize("theirs", RULES)
@pytest.mark.parametrize(
    ("file", "format"),
    [("e4m3", "mxfp8"), ("fp4", "mxfp4"), ("fp6_e2m3", "mxfp6_e2m3"), ("fp6_e3m2", "mxfp6_e3m2")],
)
def test_mx_matches_torchao(file, format, theirs):
    golden = Golden(f"torchaomain_mx_{file}")
    rows = golden.compared_rows()
    q = sd.quantize(golden["input"], format, rule=RULES[theirs])
    assert_same(q, golden[f"{theirs}__codes"], golden[f"{theirs}__scales_e8m0"], golden[f"{theirs}__dequant"], rows)
    q = sd.quantize(golden["input"].astype(ml_dtypes.bfloat16), format, rule=RULES[theirs])
    assert_same(q, golden[f"{theirs}__bf16in_codes"], golden[f"{theirs}__bf16in_scales_e8m0"], None, rows)


@pytest.mark.parametrize("case", ["normal", "weight", "moderate", "static_amax8_normal", "bf16_normal"])
def test_two_level_nvfp4_matches_torchao(case):
    golden = Golden("torchao018_nvfp4")
    x = golden["input_" + case.split("_")[-1]]
    if case == "bf16_normal":
        x = x.astype(ml_dtypes.bfloat16)
    options = {"tensor_scale": np.float32(8) / np.float32(2688)} if "static" in case else {}
    q = sd.quantize(x, format_variants.torchao.nvfp4, dtype=jnp.float32, **options)
    name = f"two_level_{case}"
    rows = slice(None)
    if case == "moderate":  # the rows of the full input without the two that overflow
        rows = np.delete(golden.compared_rows(), [golden.rows.index(r) for r in ("huge_x1e37", "f32_max_outliers")])
    assert_same(q, golden[f"{name}__codes"], golden[f"{name}__scales_e4m3"], golden[f"{name}__dequant"], rows)
    np.testing.assert_array_equal(q.tensor_scale, golden[f"{name}__per_tensor_scale"])


def test_nvfp4_per_expert_matches_torchao():
    golden = Golden("torchao018_nvfp4")
    q = jax.vmap(lambda x: sd.quantize(x, format_variants.torchao.nvfp4))(golden["input_experts"])
    assert_same(q, golden["per_expert__codes"], golden["per_expert__scales_e4m3"], golden["per_expert__dequant"])
    np.testing.assert_array_equal(q.tensor_scale, golden["per_expert__per_tensor_scale"].ravel())
    q = sd.quantize(
        golden["input_experts"], format_variants.torchao.nvfp4, tensor_scale=golden["per_expert__per_tensor_scale"]
    )
    assert_same(q, golden["per_expert__codes"], golden["per_expert__scales_e4m3"], golden["per_expert__dequant"])


@pytest.mark.parametrize("case", ["", "_normal"])
def test_single_level_nvfp4_matches_torchao(case):
    golden = Golden("torchao018_nvfp4")
    name = f"single_level{case}"
    rows = slice(None) if case else golden.compared_rows()
    q = sd.quantize(golden[f"input{case}"], format_variants.torchao.nvfp4_single_level)
    assert_same(q, golden[f"{name}__codes"], golden[f"{name}__scales_e4m3"], golden[f"{name}__dequant"], rows)


@pytest.mark.parametrize(
    ("case", "block"),
    [
        ("normal_per_tensor", (0, 0)),
        ("normal_per_row", (0,)),
        ("normal_block_1x128", (128,)),
        ("weight_per_tensor", (0, 0)),
        ("weight_per_row", (0,)),
        ("weight_block_1x128", (128,)),
        ("weight_block_128x128", (128, 128)),
    ],
)
def test_fp8_matches_torchao_inference(case, block):
    golden = Golden("torchao018_float8_inference")
    q = sd.quantize(golden["input_" + case.split("_")[0]], format_variants.torchao.fp8, block=block)
    assert_same(q, golden[f"{case}__codes"], golden[f"{case}__scale"], golden[f"{case}__dequant"])


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(("axis", "block"), [("tensor", (0, 0)), ("row", (0,)), ("col", (0,))])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("data", ["edge", "normal"])
def test_fp8_matches_torchao_training(data, element, axis, block, pow2):
    """Compares multipliers: torchao stores and divides by the multiplier, scaledot multiplies by its reciprocal."""
    golden = Golden("torchao018_float8_training")
    x = golden["input" if data == "edge" else "input_normal"]
    name = f"{data}_{element}_{axis}wise{'_pow2' if pow2 else ''}"
    variant = format_variants.torchao.fp8_training if element == "e4m3" else format_variants.torchao.fp8_training_e5m2
    format = replace(variant, pow2=pow2)
    q = sd.quantize(x, format, block=block, axis=0 if axis == "col" else -1)
    multiplier = golden[f"{name}__scale"].reshape(q.scale.shape)
    rows = golden.compared_rows() if data == "edge" else np.ones(len(x), bool)
    mask = np.broadcast_to(rows[:, None], x.shape)
    np.testing.assert_array_equal(raw(q.data)[mask], golden[f"{name}__codes"][mask])
    scales = np.broadcast_to(np.asarray(q.scale), x.shape)[mask]
    np.testing.assert_array_equal(scales, np.broadcast_to(np.float32(1) / multiplier, x.shape)[mask])


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(
    ("name", "block"),
    [("input", (128,)), ("input_act", (128,)), ("input_ragged", (128,)), ("input_weight", (128, 128))],
)
def test_fp8_matches_deepgemm(name, block, ue8m0):
    golden = Golden("deepgemm_casts")
    case = f"{name}_{'128x128' if len(block) == 2 else '1x128'}{'_ue8m0' if ue8m0 else ''}"
    format = format_variants.deepgemm.fp8_ue8m0 if ue8m0 else format_variants.deepgemm.fp8
    rows = golden.compared_rows() if name == "input" else slice(None)
    q = sd.quantize(golden[name], format, block=block, pad=True)
    if name == "input_weight":
        np.testing.assert_array_equal(q.scale, golden[f"{case}__scale"])
        np.testing.assert_array_equal(raw(q.data), golden[f"{case}__codes"])
        np.testing.assert_array_equal(sd.dequantize(q), golden[f"{case}__dequant"])
    else:
        assert_same(q, golden[f"{case}__codes"], golden[f"{case}__scale"], golden[f"{case}__dequant"], rows)


@pytest.mark.parametrize("block", [128, 32])
def test_packed_ue8m0_scales_match_deepgemm(block):
    golden = Golden("deepgemm_casts")
    q = sd.quantize(golden["input_act512"], format_variants.deepgemm.fp8_ue8m0, block=(block,))
    name = f"act512_1x{block}_packed_ue8m0"
    np.testing.assert_array_equal(raw(q.data), golden[f"{name}__codes"])
    exponents = (np.asarray(q.scale).view(np.uint32) >> 23).astype(np.uint8)
    np.testing.assert_array_equal(exponents, golden[f"{name}__scale_int32"].view(np.uint8))


CT = format_variants.compressed_tensors


def ct_input(golden, name, dtype):
    return golden[name].astype(np.float32 if dtype == "f32" else ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("preset", "format", "block"),
    [("W4A16", CT.int4, 128), ("W8A8", CT.int8, 0), ("W8A16", CT.int8, 128), ("W3A16", CT.int3, 128)],
)
def test_symmetric_integers_match_compressed_tensors(preset, format, block, dtype):
    golden = Golden("compressed_tensors")
    q = sd.quantize(ct_input(golden, "input_32x256", dtype), format, block=block)
    name = f"{preset}_{dtype}__"
    if preset == "W8A8":
        codes = golden[f"{name}weight"]
    else:
        codes = pack.unpack_bits(jnp.asarray(golden[f"{name}weight_packed"]), format.bits, 256)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.int8), codes)
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float32), golden[f"{name}weight_scale"])
    np.testing.assert_array_equal(np.asarray(sd.dequantize(q)).astype(np.float32), golden[f"{name}dequant"])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_asymmetric_int4_matches_compressed_tensors(dtype):
    golden = Golden("compressed_tensors")
    name = f"W4A16_ASYM_{dtype}__"
    q = sd.quantize(ct_input(golden, "input_32x256", dtype), CT.int4, block=128, calibration="minmax")
    codes = pack.unpack_bits(jnp.asarray(golden[f"{name}weight_packed"]), 4, 256)
    zero = pack.unpack_bits(jnp.asarray(golden[f"{name}weight_zero_point"]), 4, 32, axis=0)
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.int8), codes)
    np.testing.assert_array_equal(np.asarray(q.zero).astype(np.int8), zero)
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float32), golden[f"{name}weight_scale"])
    np.testing.assert_array_equal(np.asarray(sd.dequantize(q)).astype(np.float32), golden[f"{name}dequant"])


@pytest.mark.parametrize(
    ("preset", "data", "block", "dtype"),
    [
        ("FP8", "input_32x256", (0, 0), "f32"),
        ("FP8", "input_32x256", (0, 0), "bf16"),
        ("FP8_DYNAMIC", "input_32x256", (0,), "f32"),
        ("FP8_DYNAMIC", "input_32x256", (0,), "bf16"),
        ("FP8_BLOCK", "input_192x256", (128, 128), "bf16"),
    ],
)
def test_fp8_matches_compressed_tensors(preset, data, block, dtype):
    golden = Golden("compressed_tensors")
    name = f"{preset}_{dtype}__"
    q = sd.quantize(ct_input(golden, data, dtype), CT.fp8, block=block, pad=True)
    np.testing.assert_array_equal(raw(q.data), golden[f"{name}weight"])
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float32).ravel(), golden[f"{name}weight_scale"].ravel())
    np.testing.assert_array_equal(np.asarray(sd.dequantize(q)).astype(np.float32), golden[f"{name}dequant"])


@pytest.mark.parametrize("case", ["NVFP4A16_f32", "NVFP4A16_bf16", "NVFP4_bf16"])
def test_nvfp4_matches_compressed_tensors(case):
    """compressed-tensors stores the multiplier 2688 / amax instead of the scale, and always dequantises to bfloat16."""
    golden = Golden("compressed_tensors")
    q = sd.quantize(ct_input(golden, "input_32x128", case.split("_")[1]), CT.nvfp4)
    np.testing.assert_array_equal(q.tensor_scale, np.float32(1) / golden[f"{case}__weight_global_scale"][0])
    name = f"{case}__weight"
    assert_same(q, golden[f"{name}_packed"], golden[f"{name}_scale"], golden[f"{case}__dequant"], dtype=jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", ["MXFP4A16", "MXFP6A16", "MXFP8A16"])
def test_mx_matches_compressed_tensors(case, dtype):
    golden = Golden("compressed_tensors")
    q = sd.quantize(ct_input(golden, "input_32x128", dtype), getattr(CT, case[:5].lower()))
    name = f"{case}_{dtype}__"
    codes = raw(pack.pack_bits(q.data, 6, word=jnp.uint8) if case == "MXFP6A16" else q.data)
    np.testing.assert_array_equal(codes, golden[f"{name}weight" if case == "MXFP8A16" else f"{name}weight_packed"])
    np.testing.assert_array_equal(np.asarray(q.scale).view(np.uint8), golden[f"{name}weight_scale"])
    np.testing.assert_array_equal(np.asarray(sd.dequantize(q)).astype(np.float32), golden[f"{name}dequant"])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_streams_match_compressed_tensors(bits, axis):
    golden = Golden("compressed_tensors_packing")
    codes, packed = golden[f"int{bits}_values"], golden[f"int{bits}_packed_dim{axis}"]
    count = codes.shape[axis]

    @jax.jit
    def run(codes, packed):
        return pack.pack_bits(codes, bits, axis=axis), pack.unpack_bits(packed, bits, count, axis=axis)

    found_packed, found_codes = run(codes, packed)
    np.testing.assert_array_equal(found_packed, packed)
    np.testing.assert_array_equal(found_codes, codes)


def test_nibbles_match_compressed_tensors():
    golden = Golden("compressed_tensors_packing")
    codes = jnp.asarray(golden["fp4_values"].astype(ml_dtypes.float4_e2m1fn))
    np.testing.assert_array_equal(pack.pack_nibbles(codes), golden["fp4_packed"])
    unpacked = pack.unpack_nibbles(jnp.asarray(golden["fp4_packed"]), jnp.float4_e2m1fn)
    np.testing.assert_array_equal(np.asarray(unpacked).astype(np.float32), golden["fp4_unpacked"])


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (200, 10), (1, 1), (130, 3)])
def test_swizzled_scales_match_torchao(shape):
    golden = Golden("torchao018_scale_swizzle")
    name = "{}x{}".format(*shape)
    tiled = pack.tile_scales(jnp.asarray(golden[f"scales_{name}"]))
    np.testing.assert_array_equal(tiled, golden[f"blocked_{name}"])
    np.testing.assert_array_equal(pack.untile_scales(tiled, shape), golden[f"scales_{name}"])

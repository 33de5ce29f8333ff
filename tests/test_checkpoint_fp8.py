"""Fine-grained FP8 checkpoints of Hugging Face, DeepSeek-V3 and DeepSeek-V4."""

import numpy as np
import pytest
from checkpoint_files import (
    BF16,
    E4M3,
    E5M2,
    E8M0,
    GOLDEN,
    assert_dequantizes_to,
    assert_golden,
    assert_slices_agree,
    golden,
    nibbles,
    random_codes,
    random_scales,
    repeated,
    write,
)

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError

pytestmark = pytest.mark.optimized  # compares exact bits

CHECKPOINTS = golden("hf_fp8_", "deepseek_v4_")
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PER_TENSOR = {**CONFIG, "weight_block_size": None}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_golden_checkpoint_dequantises_to_the_bits_of_its_library(name):
    assert_golden(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_slice_is_that_of_the_whole_array(name):
    assert_slices_agree(GOLDEN / name, seed=len(name))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale_dtype", [np.float32, BF16, np.uint8], ids=["float32", "bfloat16", "uint8"])
def test_blocks_at_the_edges_may_be_short(tmp_path, dtype, scale_dtype):
    shape = (130, 200)
    codes = random_codes(shape, E4M3).astype(dtype)
    scale = random_scales((2, 2), scale_dtype)
    write(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale}, CONFIG)
    values = codes.astype(np.float32) * repeated(scale, (128, 128), shape)
    assert_dequantizes_to(tmp_path, "x.weight", values)


def test_blocks_are_128_by_128_without_a_configuration(tmp_path):
    codes, scale = random_codes((192, 256), E4M3), random_scales((2, 2), np.float32)
    write(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale})
    values = codes.astype(np.float32) * repeated(scale, (128, 128), codes.shape)
    assert_dequantizes_to(tmp_path, "x.weight", values)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_scale_may_be_that_of_the_tensor(tmp_path, shape):
    codes, scale = random_codes((4, 6), E4M3), random_scales(shape, np.float32)
    tensors = {"x.weight": codes, "x.weight_scale_inv": scale, "x.activation_scale": np.asarray(3, np.float32)}
    write(tmp_path, tensors, {**PER_TENSOR, "activation_scheme": "static"})
    assert_dequantizes_to(tmp_path, "x.weight", codes.astype(np.float32) * scale.reshape(()))
    assert checkpoint.load(tmp_path)["x.activation_scale"] == 3


@pytest.mark.parametrize("scale_name", ["x.scale", "x.qscale_weight"])
def test_scales_have_other_names(tmp_path, scale_name):
    codes, scale = random_codes((128, 256), E4M3), random_scales((1, 2), np.uint8).view(E8M0)
    write(tmp_path, {"x.weight": codes, scale_name: scale}, CONFIG)
    values = codes.astype(np.float32) * repeated(scale.view(np.uint8), (128, 128), codes.shape)
    assert_dequantizes_to(tmp_path, "x.weight", values)
    assert set(checkpoint.load(tmp_path)) == {"x.weight"}


def test_experts_may_be_stacked(tmp_path):
    codes, scale = random_codes((3, 160, 256), E4M3), random_scales((3, 2, 2), np.float32)
    write(tmp_path, {"x.gate_up_proj": codes, "x.gate_up_proj_scale_inv": scale}, CONFIG)
    values = codes.astype(np.float32) * repeated(scale, (1, 128, 128), codes.shape)
    assert_dequantizes_to(tmp_path, "x.gate_up_proj", values)


def test_int8_tensors_are_packed_fp4_codes(tmp_path):
    packed, scale = random_codes((8, 32), np.int8), random_scales((8, 2), np.uint8)
    write(tmp_path, {"x.weight": packed, "x.scale": scale}, CONFIG)
    assert_dequantizes_to(tmp_path, "x.weight", nibbles(packed) * repeated(scale, (1, 32), (8, 64)))


def test_a_scale_in_full_precision_without_codes_is_a_parameter(tmp_path):
    parameter = np.arange(4, dtype=np.float32)
    codes, scale = random_codes((4, 4), E4M3), random_scales((1, 1), np.float32)
    write(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale, "norm.scale": parameter}, CONFIG)
    np.testing.assert_array_equal(checkpoint.load(tmp_path)["norm.scale"], parameter)


CODES, SCALE = random_codes((256, 256), E4M3), random_scales((2, 2), np.float32)
BAD = {
    "no scale": ({"x.weight": CODES}, CONFIG, "'x.weight': expected one tensor of scales, found none of"),
    "two scales": (
        {"x.weight": CODES, "x.weight_scale_inv": SCALE, "x.scale": SCALE},
        CONFIG,
        "'x.weight': expected one tensor of scales, found x.weight_scale_inv, x.scale",
    ),
    "scale without codes": (
        {"x.weight": CODES, "x.weight_scale_inv": SCALE, "y.weight_scale_inv": SCALE},
        CONFIG,
        "'y.weight_scale_inv': no weight",
    ),
    "scale that does not fit": (
        {"x.weight": CODES, "x.weight_scale_inv": random_scales((3, 2), np.float32)},
        CONFIG,
        r"'x.weight': its scales have shape \[3, 2\], which does not fit \[256, 256\] in blocks of \[128, 128\]",
    ),
    "scale of another rank": (
        {"x.weight": CODES, "x.weight_scale_inv": random_scales((2, 2, 1), np.float32)},
        CONFIG,
        r"'x.weight': its scales have shape \[2, 2, 1\]",
    ),
    "scale dtype": (
        {"x.weight": CODES, "x.weight_scale_inv": SCALE.astype(np.float64)},
        CONFIG,
        "'x.weight_scale_inv': the dtype is F64; expected F32 or BF16",
    ),
    "float scales of packed codes": (
        {"x.weight": CODES.view(np.int8), "x.scale": SCALE},
        CONFIG,
        "'x.scale': the dtype is F32; expected F8_E8M0 or U8",
    ),
    "scales of no elements": (
        {"x.weight": CODES[:0], "x.weight_scale_inv": SCALE},
        CONFIG,
        r"'x.weight': its scales have shape \[2, 2\], which does not fit \[0, 256\]",
    ),
    "vector": (
        {"x.weight": CODES[0], "x.weight_scale_inv": SCALE[0, :1]},
        CONFIG,
        r"'x.weight': the shape is \[256\]; a quantised weight has at least 2 axes",
    ),
    "block size": (
        {"x.weight": CODES, "x.weight_scale_inv": SCALE},
        {**CONFIG, "weight_block_size": [128]},
        "`weight_block_size` must be two positive integers",
    ),
    "method": (
        {"x.weight": CODES, "x.weight_scale_inv": SCALE},
        {**CONFIG, "quant_method": "fp9"},
        "the quantisation method 'fp9' is not supported",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_an_error_names_the_file_and_the_tensor(tmp_path, case):
    tensors, config, message = BAD[case]
    write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(tmp_path)
    assert str(tmp_path) in str(error.value)

"""torchao checkpoints: every class of tensors, tiled scales, and bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import (
    BF16,
    E2M1,
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
)

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError, dtypes, safetensors

pytestmark = pytest.mark.optimized  # compares exact bits

CHECKPOINTS = golden("torchao_")
Parts = dict[str, np.ndarray]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def torch_dtype(name: str) -> dict:
    return {"_type": "torch.dtype", "_data": name}


def record(kind: str, parts: Parts, **attributes) -> str:
    return json.dumps({"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)})


def write(folder: Path, kind: str, parts: Parts, *, packed: tuple[str, ...] = (), **attributes) -> Path:
    """Writes `a.weight`; the tensors `packed` have bytes of the dtype F4."""
    pending = []
    for part, array in parts.items():
        dtype, shape = dtypes.NAMES[array.dtype], array.shape
        if part in packed:
            dtype, shape = "F4", (*shape[:-1], 2 * shape[-1])
        pending.append(safetensors.Pending(f"a._weight_{part}", dtype, shape, [array]))
    pending.append(safetensors.Pending("a.bias", "BF16", (2,), [np.ones(2, BF16)]))
    metadata = {
        "a.weight": record(kind, parts, **attributes),
        "a.bias": json.dumps({"_type": "Tensor"}),
        "tensor_names": json.dumps(["a.weight", "a.bias"]),
        "format": "pt",
    }
    with (folder / "model.safetensors").open("wb") as file:
        safetensors.write(file, pending, metadata)
    return folder


def tiled(scale: np.ndarray) -> np.ndarray:
    """Scales at the flat index tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4."""
    rows, columns = scale.shape
    tile_columns = -(-columns // 4)
    flat = np.zeros(-(-rows // 128) * tile_columns * 512, np.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = r // 128 * tile_columns + c // 4
            flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c : c + 1].view(np.uint8)[0]
    return flat.view(scale.dtype).reshape(-1, 16)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_have_the_values_that_torchao_decodes(name):
    assert_golden(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_slices_of_every_leaf_agree_with_the_whole_array(name):
    assert_slices_agree(GOLDEN / name, seed=0)


@pytest.mark.parametrize("block", [(1, 64), (6, 64), (1, 32), (3, 16)], ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_float8_tensors_have_blocks_of_any_shape(element, block, tmp_path):
    codes = random_codes((6, 64), element) if element == E4M3 else rng().normal(size=(6, 64)).astype(E5M2)
    scale = random_scales((6 // block[0], 64 // block[1]), np.float32)
    parts = {"qdata": codes, "scale": scale}
    write(tmp_path, "Float8Tensor", parts, block_size=list(block), dtype=torch_dtype("bfloat16"))
    assert_dequantizes_to(
        tmp_path, "a.weight", codes.astype(np.float32) * repeated(scale, block, codes.shape), np.float32
    )


@pytest.mark.parametrize("scale_dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_with_zero_points_are_decoded(bits, scale_dtype, tmp_path):
    half = 2 ** (bits - 1)
    codes = rng().integers(-half, half, (6, 64)).astype(np.int8)
    zero = rng(1).integers(-half, half, (6, 2)).astype(np.int8)
    scale = random_scales((6, 2), scale_dtype)
    parts = {"qdata": codes, "scale": scale, "zero_point": zero}
    attributes = {"block_size": [1, 32], "dtype": torch_dtype("bfloat16"), "target_dtype": torch_dtype(f"int{bits}")}
    write(tmp_path, "IntxUnpackedToInt8Tensor", parts, **attributes)
    differences = codes.astype(np.float32) - np.repeat(zero, 32, axis=1)
    assert_dequantizes_to(tmp_path, "a.weight", differences * repeated(scale, (32,), codes.shape[1:]), np.float32)
    assert_slices_agree(tmp_path, seed=bits, count=5)


def test_scales_of_rows_may_lack_the_last_axis(tmp_path):
    codes, scale = rng().integers(-128, 128, (6, 64)).astype(np.int8), random_scales((6,), np.float32)
    parts = {"qdata": codes, "scale": scale}
    write(tmp_path, "Int8Tensor", parts, block_size=[1, 64], dtype=torch_dtype("float16"))
    loaded = checkpoint.load(tmp_path)["a.weight"]
    assert (loaded.dtype, loaded.block, loaded.zero) == (np.float16, (0,), None)
    assert_dequantizes_to(tmp_path, "a.weight", codes.astype(np.float32) * scale[:, None], np.float32)


@pytest.mark.parametrize("leading", [(), (3,)], ids=["matrix", "experts"])
def test_int4_tensors_are_codes_times_scale_plus_zero_point(leading, tmp_path):
    packed = random_codes((*leading, 8, 32), np.int8)
    scale, zero = (random_scales((*leading, 2, 8), BF16, seed) for seed in (1, 2))
    parts = {"qdata": packed, "scale": scale, "zero_point": zero}
    write(tmp_path, "Int4Tensor", parts, block_size=[1] * len(leading) + [1, 32], shape=[*leading, 8, 64])
    octets = packed.view(np.uint8).astype(np.int32)
    codes = np.stack([octets & 15, octets >> 4], axis=-1).reshape(*leading, 8, 64)
    codes = codes - 16 * (codes > 7)
    scale, zero = (np.repeat(array.swapaxes(-1, -2).astype(np.float32), 32, axis=-1) for array in (scale, zero))
    assert isinstance(checkpoint.load(tmp_path)["a.weight"], checkpoint.Offset)
    assert_dequantizes_to(tmp_path, "a.weight", codes.astype(np.float32) * scale + zero, np.float32)
    assert_slices_agree(tmp_path, seed=4)


MX_ELEMENTS: dict[str, Any] = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float4_e2m1fn_x2": E2M1}


@pytest.mark.parametrize("is_tiled", [True, False], ids=["tiled", "plain"])
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_mx_tensors_are_decoded(element, is_tiled, tmp_path):
    rows, columns = 130, 160
    scale = random_scales((rows, columns // 32), np.uint8)
    if element == "float4_e2m1fn_x2":
        codes = random_codes((rows, columns // 2), np.uint8)
        values = nibbles(codes)
    else:
        codes = rng().normal(size=(rows, columns)).astype(MX_ELEMENTS[element])
        values = codes.astype(np.float32)
    parts = {"qdata": codes, "scale": (tiled(scale) if is_tiled else scale).view(E8M0)}
    attributes = {"elem_dtype": torch_dtype(element), "block_size": 32, "orig_dtype": torch_dtype("bfloat16")}
    packed = ("qdata",) if is_tiled and element == "float4_e2m1fn_x2" else ()
    write(tmp_path, "MXTensor", parts, packed=packed, is_swizzled_scales=is_tiled, **attributes)
    assert_dequantizes_to(tmp_path, "a.weight", values * repeated(scale, (32,), (columns,)))
    assert_slices_agree(tmp_path, seed=5, count=8)


@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["no tensor scale", "scalar", "one element"])
def test_nvfp4_tensors_may_have_a_tensor_scale(shape, tmp_path):
    packed, scale = random_codes((6, 32), np.uint8), random_scales((6, 4), E4M3)
    parts = {"qdata": packed, "scale": tiled(scale)}
    tensor_scale = np.float32(1)
    if shape is not None:
        tensor_scale = np.float32(0.3)
        parts |= {"per_tensor_scale": np.full(shape, tensor_scale)}
        parts |= {"act_per_tensor_scale": np.full((), 2, np.float32)}
    attributes = {"block_size": 16, "orig_dtype": torch_dtype("bfloat16"), "is_swizzled_scales": True}
    write(tmp_path, "NVFP4Tensor", parts, **attributes)
    scales = scale.astype(np.float32) * tensor_scale
    assert_dequantizes_to(tmp_path, "a.weight", nibbles(packed) * np.repeat(scales, 16, axis=1), np.float32)
    others = {"a.bias"} if shape is None else {"a.bias", "a._weight_act_per_tensor_scale"}
    assert set(checkpoint.load(tmp_path)) == {"a.weight"} | others


INT8 = {"qdata": np.ones((6, 64), np.int8), "scale": np.ones((6, 1), np.float32)}
NVFP4 = {"qdata": np.ones((6, 32), np.uint8), "scale": np.ones((32, 16), E4M3)}
WITH_DTYPE = {"dtype": torch_dtype("bfloat16"), "orig_dtype": torch_dtype("bfloat16")}
OF_ROWS = {"block_size": [1, 64], **WITH_DTYPE}
TILED = {"block_size": 16, "is_swizzled_scales": True, **WITH_DTYPE}
INTX = {"target_dtype": torch_dtype("int4"), **OF_ROWS}
WRONG = {
    "tile-packed": (
        "Int4TilePackedTo4dTensor",
        INT8,
        OF_ROWS,
        "'a.weight': the class 'Int4TilePackedTo4dTensor' is not",
    ),
    "int32 words": ("Int4PlainInt32Tensor", INT8, OF_ROWS, "'a.weight': the class 'Int4PlainInt32Tensor' is not"),
    "no dtype": ("Int8Tensor", INT8, {"block_size": [1, 64]}, "'a.weight': Int8Tensor: `dtype` is None"),
    "no block": ("Int8Tensor", INT8, WITH_DTYPE, "'a.weight': Int8Tensor: `block_size` None does not fit"),
    "wrong block": (
        "Int8Tensor",
        INT8,
        WITH_DTYPE | {"block_size": [1, 48]},
        r"'a._weight_scale': the shape is \[6, 1\]; expected \[6, 2\]",
    ),
    "nf4": (
        "IntxUnpackedToInt8Tensor",
        INT8,
        INTX | {"target_dtype": torch_dtype("nf4")},
        "'a.weight': .* 'nf4' is not",
    ),
    "int1": (
        "IntxUnpackedToInt8Tensor",
        INT8,
        INTX | {"target_dtype": torch_dtype("int1")},
        "'a.weight': .* 'int1' is not",
    ),
    "float zero point": (
        "IntxUnpackedToInt8Tensor",
        INT8 | {"zero_point": np.ones((6, 1), np.float32)},
        INTX,
        "'a._weight_zero_point': the dtype is F32; expected I8",
    ),
    "codes out of range": (
        "IntxUnpackedToInt8Tensor",
        INT8 | {"qdata": np.full((6, 64), 9, np.int8)},
        INTX,
        r"'a.weight': .* outside \[-8, 7\]",
    ),
    "zero point shape": (
        "Int8Tensor",
        INT8 | {"zero_point": np.ones((6, 2), np.int8)},
        OF_ROWS,
        r"'a._weight_zero_point': the shape is \[6, 2\]; expected \[6, 1\]",
    ),
    "few tiles": (
        "NVFP4Tensor",
        NVFP4 | {"scale": np.ones((6, 4), E4M3)},
        TILED,
        "'a._weight_scale': the tensor has 24",
    ),
    "block of 0": ("NVFP4Tensor", NVFP4, TILED | {"block_size": 0}, "'a.weight': NVFP4Tensor: `block_size` 0 does not"),
    "block of 48": (
        "NVFP4Tensor",
        NVFP4,
        TILED | {"block_size": 48},
        "'a.weight': NVFP4Tensor: `block_size` 48 does not",
    ),
    "tiled experts": (
        "NVFP4Tensor",
        NVFP4 | {"qdata": np.ones((2, 6, 32), np.uint8)},
        TILED,
        "'a.weight': NVFP4Tensor: .* only of matrices",
    ),
    "two tensor scales": (
        "NVFP4Tensor",
        NVFP4 | {"per_tensor_scale": np.ones(2, np.float32)},
        TILED,
        r"'a.weight': NVFP4Tensor: `per_tensor_scale` has shape \[2\]",
    ),
    "fp6": (
        "MXTensor",
        NVFP4,
        TILED | {"elem_dtype": "fp6_e2m3"},
        "'a.weight': MXTensor: `elem_dtype` 'fp6_e2m3' is not",
    ),
    "int4 scales": (
        "Int4Tensor",
        {**INT8, "zero_point": np.ones((2, 6), np.float32)},
        WITH_DTYPE | {"block_size": [1, 128]},
        r"'a._weight_zero_point': the shape is \[2, 6\]; expected \[1, 6\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_an_error_that_names_the_weight(case, tmp_path):
    kind, parts, attributes, message = WRONG[case]
    with pytest.raises(CheckpointError, match=rf"{tmp_path.name}.*: tensor {message}"):
        checkpoint.load(write(tmp_path, kind, parts, **attributes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the metadata of tensor 'a.weight' is not valid JSON"),
        ('{"_type": 5}', "tensor 'a.weight': the class 5 is not supported"),
        ('{"_type": [1]}', r"tensor 'a.weight': the class \[1\] is not supported"),
        ('{"_type": "Int8Tensor"}', "tensor 'a.weight': `_data` and `_tensor_data_names` are missing"),
        (
            record("Int8Tensor", INT8, **OF_ROWS),
            "tensor 'a._weight_qdata': 'a._weight_qdata', which belongs to it, is missing",
        ),
    ],
    ids=["not JSON", "number", "list", "no data", "no tensors"],
)
def test_wrong_metadata_is_an_error_that_names_the_weight(text, message, tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        safetensors.write(file, [], {"a.weight": text, "tensor_names": '["a.weight"]'})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path)


def test_codes_without_metadata_are_an_error_that_names_them(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        pending = [safetensors.Pending("a._weight_qdata", "F32", (1,), [np.ones(1, np.float32)])]
        safetensors.write(file, pending, {"tensor_names": "[]"})
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'a\._weight_qdata': no weight uses this tensor"
    ):
        checkpoint.load(tmp_path)

"""bitsandbytes checkpoints: NF4, FP4, double quantisation, storage dtypes, LLM.int8, and bad input."""

import json

import numpy as np
import pytest
from checkpoint_files import BF16, GOLDEN, assert_dequantizes_to, assert_same_bits, assert_slices_agree, write

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError
from scaledot.formats import NF4_CODEBOOK

pytestmark = pytest.mark.optimized  # compares exact bits

CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# The values of bitsandbytes' FP4 codes: a sign, two bits of exponent and one of mantissa, relative to 12.
FP4_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
TABLES = {"nf4": np.array(NF4_CODEBOOK, np.float32), "fp4": np.concatenate([FP4_MAGNITUDES, -FP4_MAGNITUDES])}
STATE = "x.weight.quant_state.bitsandbytes__"


def state_bytes(**entries) -> np.ndarray:
    return np.frombuffer(json.dumps(entries).encode(), np.uint8)


class Weight:
    """A random 4-bit weight; `values` are float32."""

    def __init__(self, quant_type: str = "nf4", shape=(6, 128), block: int = 64, is_double: bool = False):
        rng = np.random.default_rng(0)
        size = int(np.prod(shape))
        codes = rng.integers(0, 16, size + size % 2, np.uint8)
        table = TABLES[quant_type]
        count = -(-size // block)
        entries = {"quant_type": quant_type, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        self.tensors = {"x.weight": (codes[::2] << 4 | codes[1::2])[:, None], "x.weight.quant_map": table}
        scales = rng.uniform(0.01, 1, count).astype(np.float32)
        if is_double:
            entries |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.3}
            absmax, nested_table = rng.integers(0, 256, count, np.uint8), np.sort(rng.uniform(-1, 1, 256))
            nested = rng.uniform(0.01, 0.1, -(-count // 8)).astype(np.float32)
            parts = {"absmax": absmax, "nested_absmax": nested, "nested_quant_map": nested_table.astype(np.float32)}
            self.tensors |= {f"x.weight.{part}": array for part, array in parts.items()}
            products = nested_table.astype(np.float32)[absmax] * np.repeat(nested, 8)[:count]
            scales = products + np.float32(0.3)
        else:
            self.tensors["x.weight.absmax"] = scales
        self.tensors[STATE + quant_type] = state_bytes(**entries)
        self.values = (table[codes[:size]] * np.repeat(scales, block)[:size]).reshape(shape)


def test_weights_have_the_values_that_bitsandbytes_decodes():
    expected = np.load(GOLDEN / "bnb_nf4" / "expected.npz")
    (name,) = expected
    assert_dequantizes_to(GOLDEN / "bnb_nf4", name, expected[name], BF16)
    assert checkpoint.load(GOLDEN / "bnb_nf4")[name].format.name == "nf4"


@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "no config"])
@pytest.mark.parametrize("is_double", [False, True], ids=["float32 scales", "double"])
@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 128), (5, 100), (3, 7)], ids=str)
@pytest.mark.parametrize("quant_type", TABLES)
def test_four_bit_weights_are_decoded(quant_type, shape, is_double, config, tmp_path):
    weight = Weight(quant_type, shape, is_double=is_double)
    write(tmp_path, weight.tensors, config)
    loaded = checkpoint.load(tmp_path)["x.weight"]
    assert isinstance(loaded, checkpoint.Flat) == (shape[-1] % 64 != 0)
    assert loaded.shape == shape
    assert_dequantizes_to(tmp_path, "x.weight", weight.values, np.float32)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int8, np.float16, BF16, np.float32], ids=lambda dtype: np.dtype(dtype).name
)
def test_codes_may_be_stored_in_any_dtype(dtype, tmp_path):
    weight = Weight()
    octets = weight.tensors["x.weight"].reshape(-1)
    write(tmp_path, weight.tensors | {"x.weight": octets.view(dtype)[:, None]}, CONFIG)
    assert_dequantizes_to(tmp_path, "x.weight", weight.values, np.float32)


def test_another_table_of_values_is_a_format_with_that_codebook(tmp_path):
    weight = Weight()
    table = np.random.default_rng(1).normal(size=16).astype(np.float32)
    write(tmp_path, weight.tensors | {"x.weight.quant_map": table}, CONFIG)
    codes = weight.tensors["x.weight"].reshape(-1)
    values = table[np.stack([codes >> 4, codes & 15], axis=-1)].reshape(-1, 64)
    values = (values * weight.tensors["x.weight.absmax"][:, None]).reshape(6, 128)
    assert_dequantizes_to(tmp_path, "x.weight", values, np.float32)
    assert checkpoint.load(tmp_path)["x.weight"].format.codebook == tuple(map(float, np.sort(table)))


@pytest.mark.parametrize("shape", [(6, 128), (5, 100)], ids=["rows of blocks", "flat"])
@pytest.mark.parametrize("is_double", [False, True], ids=["float32 scales", "double"])
def test_slices_of_every_leaf_agree_with_the_whole_array(shape, is_double, tmp_path):
    assert_slices_agree(write(tmp_path, Weight("fp4", shape, is_double=is_double).tensors, CONFIG), seed=2)


def test_llm_int8_weights_are_rounded_as_in_bitsandbytes(tmp_path):
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, (6, 32), np.int8)
    amax = rng.uniform(0.01, 3, 6).astype(np.float32)
    tensors = {"x.weight": codes, "x.SCB": amax, "x.weight_format": np.array(0, np.uint8)}
    write(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    expected = codes.astype(np.float32) * amax[:, None] * np.float32(1 / 127)
    assert_same_bits(checkpoint.load(tmp_path, dequantize=np.float32)["x.weight"], expected, np.float32)
    assert sorted(checkpoint.load(tmp_path)) == ["x.weight"]
    assert_slices_agree(tmp_path, seed=3)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"x.weight_format": np.array(2, np.uint8)}, r"'x.weight_format': the format is \[2\]; only row-major"),
        ({"x.SCB": np.ones(5, np.float32)}, r"'x.SCB': the shape is \[5\]; expected \[6\]"),
        ({"x.weight": np.ones(6, np.int8)}, r"'x.weight': the shape is \[6\]; expected \[outputs, inputs\]"),
        ({"x.weight": None}, "'x.SCB': 'x.weight', which belongs to it, is missing"),
        ({"x.SCB": None}, "'x.weight': no weight uses this tensor of dtype I8"),
    ],
    ids=["tiled", "scales", "vector", "no codes", "no scales"],
)
def test_wrong_llm_int8_tensors_are_an_error_that_names_file_and_tensor(replaced, message, tmp_path):
    tensors = {"x.weight": np.ones((6, 32), np.int8), "x.SCB": np.ones(6, np.float32)} | replaced
    tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {message}"):
        checkpoint.load(write(tmp_path, tensors, CONFIG))


def state(**replaced) -> dict[str, np.ndarray]:
    entries = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [6, 128]} | replaced
    return {f"{STATE}nf4": state_bytes(**entries)}


WRONG = {
    "no codes": ({"x.weight": None}, "'x.weight.quant_state.bitsandbytes__nf4': 'x.weight', which belongs to it"),
    "no scales": ({"x.weight.absmax": None}, "'x.weight': 'x.weight.absmax', which belongs to it, is missing"),
    "no table": ({"x.weight.quant_map": None}, "'x.weight': 'x.weight.quant_map', which belongs to it, is missing"),
    "no state": ({f"{STATE}nf4": None}, "'x.weight(.absmax|.quant_map)?': no weight uses this tensor"),
    "few codes": ({"x.weight": np.ones((8, 1), np.uint8)}, "'x.weight': the tensor has 8 bytes; expected 384"),
    "few scales": (
        {"x.weight.absmax": np.ones(3, np.float32)},
        r"'x.weight.absmax': the shape is \[3\]; expected \[12\]",
    ),
    "8-bit scales": ({"x.weight.absmax": np.ones(12, np.uint8)}, "'x.weight.absmax': the dtype is U8; expected F32"),
    "short table": ({"x.weight.quant_map": np.ones(8, np.float32)}, r"'x.weight.quant_map': the shape is \[8\]"),
    "NaN": ({"x.weight.quant_map": np.full(16, np.nan, np.float32)}, "'x.weight.quant_map': .* must be finite"),
    "nested": (
        {"x.weight.nested_absmax": np.ones(1, np.float32)},
        "'x.weight': `nested_blocksize` and `nested_offset`",
    ),
    "not JSON": (
        {f"{STATE}nf4": np.frombuffer(b"{]", np.uint8)},
        "'x.weight.quant_state.bitsandbytes__nf4' is not valid",
    ),
    "a list": ({f"{STATE}nf4": np.frombuffer(b"[]", np.uint8)}, ".* must be a JSON object, not list"),
    "long": ({f"{STATE}nf4": np.zeros(65537, np.uint8)}, ".*: the state has 65537 bytes; at most 65536"),
    "no shape": (state(shape=None), ".*: `shape` must be a list of positive integers, not None"),
    "negative shape": (state(shape=[-6, 128]), ".*: `shape` must be a list of positive integers"),
    "huge shape": (state(shape=[2**40, 2**40]), ".*: `shape` must be a list of positive integers"),
    "block of 0": (state(blocksize=0), ".*: `blocksize` must be a positive even integer, not 0"),
    "odd block": (state(blocksize=63), ".*: `blocksize` must be a positive even integer, not 63"),
    "dtype": (state(dtype="complex64"), ".*: `dtype` must be float32, float16 or bfloat16, not 'complex64'"),
    "nested block": (state(nested_blocksize="8"), ".*: `nested_blocksize` must be a positive integer, not '8'"),
    "nested offset": (state(nested_blocksize=8, nested_offset=[]), r".*: `nested_offset` must be a number, not \[\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_four_bit_tensors_are_an_error_that_names_file_and_tensor(case, tmp_path):
    replaced, message = WRONG[case]
    tensors = {name: array for name, array in (Weight().tensors | replaced).items() if array is not None}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {message}"):
        checkpoint.load(write(tmp_path, tensors, CONFIG))

"""GPTQ and AWQ checkpoints: bits, versions, activation order, packings, and bad input."""

import numpy as np
import pytest
from checkpoint_files import GOLDEN, assert_dequantizes_to, assert_golden, assert_slices_agree, golden, write

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError

pytestmark = pytest.mark.optimized  # compares exact bits

CHECKPOINTS = golden("gptq_", "awq_")
OUTPUTS, INPUTS = 32, 96


def gptq(**entries) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **entries}


def awq(**entries) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **entries}


def packed_along_columns(codes: np.ndarray, bits: int) -> np.ndarray:
    """Columns of codes as the little-endian digits of one integer each, in int32 words."""
    count = -(-codes.shape[0] * bits // 32)
    numbers = [sum(int(code) << bits * i for i, code in enumerate(column)) for column in codes.T]
    return np.frombuffer(b"".join(n.to_bytes(4 * count, "little") for n in numbers), np.int32).reshape(-1, count).T


class Weight:
    """A random weight of GPTQ or AWQ; `values` are float32 (outputs, inputs)."""

    def __init__(self, bits: int = 4, groups: int = 3, group_of_input: np.ndarray | None = None):
        rng = np.random.default_rng(bits)
        self.codes = rng.integers(0, 2**bits, (INPUTS, OUTPUTS))
        self.zeros = rng.integers(0, 2**bits, (groups, OUTPUTS))
        self.scales = rng.uniform(0.01, 1, (groups, OUTPUTS)).astype(np.float16)
        size = -(-INPUTS // groups)
        self.group_of_input = np.arange(INPUTS) // size if group_of_input is None else group_of_input
        differences = self.codes - self.zeros[self.group_of_input]
        self.values = (differences.astype(np.float32) * self.scales[self.group_of_input].astype(np.float32)).T
        self.bits = bits

    def gptq(self, version: int = 1) -> dict[str, np.ndarray]:
        stored_zeros = (self.zeros - (version == 1)) % 2**self.bits
        return {
            "x.qweight": np.ascontiguousarray(packed_along_columns(self.codes, self.bits)),
            "x.qzeros": np.ascontiguousarray(packed_along_columns(stored_zeros.T, self.bits).T),
            "x.scales": self.scales,
            "x.g_idx": self.group_of_input.astype(np.int32),
        }

    def awq(self) -> dict[str, np.ndarray]:
        order = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each slot of a word
        words = []
        for codes in (self.codes, self.zeros):
            slots = codes.reshape(len(codes), -1, 8)[..., order].astype(np.uint32)
            words.append(np.bitwise_or.reduce(slots << np.arange(0, 32, 4, dtype=np.uint32), axis=-1).view(np.int32))
        return {"x.qweight": words[0], "x.qzeros": words[1], "x.scales": self.scales}


def activation_order() -> np.ndarray:
    return np.random.default_rng(5).permutation(np.arange(INPUTS) // 32)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_have_the_values_that_their_library_decodes(name):
    assert_golden(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_scales_keep_float16_and_codes_have_four_bits(name):
    weight = checkpoint.load(GOLDEN / name)["model.layers.0.mlp.up_proj.weight"]
    assert (weight.scale.dtype, weight.format.bits, weight.data.dtype) == (np.float16, 4, weight.zero.dtype)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_of_any_bits_and_version_is_decoded(bits, version, tmp_path):
    weight = Weight(bits)
    config = gptq(bits=bits, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    assert_dequantizes_to(write(tmp_path, weight.gptq(version), config), "x.weight", weight.values, np.float32)


@pytest.mark.parametrize("library", [gptq, awq])
@pytest.mark.parametrize(
    ("size", "groups"), [(-1, 1), (96, 1), (40, 3)], ids=["all inputs", "one group", "short group"]
)
def test_groups_may_be_all_inputs_or_end_with_a_short_one(library, size, groups, tmp_path):
    weight = Weight(groups=groups, group_of_input=np.arange(INPUTS) // (INPUTS if size == -1 else size))
    tensors = weight.gptq() if library is gptq else weight.awq()
    assert_dequantizes_to(write(tmp_path, tensors, library(group_size=size)), "x.weight", weight.values, np.float32)


def test_sorted_groups_need_no_g_idx(tmp_path):
    weight = Weight()
    tensors = weight.gptq()
    del tensors["x.g_idx"]
    assert_dequantizes_to(write(tmp_path, tensors, gptq()), "x.weight", weight.values, np.float32)


@pytest.mark.parametrize("bits", [3, 4])
def test_activation_order_gives_a_permuted_weight(bits, tmp_path):
    weight = Weight(bits, group_of_input=activation_order())
    write(tmp_path, weight.gptq(), gptq(bits=bits, desc_act=True))
    loaded = checkpoint.load(tmp_path)["x.weight"]
    assert isinstance(loaded, checkpoint.Permuted)
    np.testing.assert_array_equal(loaded.permutation, np.argsort(weight.group_of_input, kind="stable"))
    assert_dequantizes_to(tmp_path, "x.weight", weight.values, np.float32)
    in_order = checkpoint.dequantize(loaded.array, np.float32)
    np.testing.assert_array_equal(in_order, weight.values[:, np.asarray(loaded.permutation)])


@pytest.mark.parametrize("library", ["gptq", "activation order", "gptq of 3 bits", "awq"])
def test_slices_of_every_leaf_agree_with_the_whole_array(library, tmp_path):
    if library == "awq":
        write(tmp_path, Weight().awq(), awq())
    else:
        order = activation_order() if library == "activation order" else None
        bits = 3 if library == "gptq of 3 bits" else 4
        write(tmp_path, Weight(bits, group_of_input=order).gptq(), gptq(bits=bits))
    assert_slices_agree(tmp_path, seed=1)


UNSUPPORTED = {
    "gptq of 5 bits": (gptq(bits=5), "`bits` 5 is not supported; expected one of 2, 3, 4, 8"),
    "gptq without bits": (gptq(bits=None), "`bits` None is not supported"),
    "marlin": (gptq(checkpoint_format="marlin"), "`checkpoint_format` 'marlin' is not supported"),
    "marlin of an old file": (gptq(is_marlin_format=True), "`is_marlin_format` True is not supported"),
    "words of 16 bits": (gptq(pack_dtype="int16"), "`pack_dtype` 'int16' is not supported"),
    "modules of other bits": (gptq(dynamic={"+:.*up.*": {"bits": 8}}), "`dynamic` settings of modules"),
    "group size 0": (gptq(group_size=0), "`group_size` must be a positive integer or -1, not 0"),
    "awq of 8 bits": (awq(bits=8), "`bits` 8 is not supported"),
    "gemv": (awq(version="gemv"), "`version` 'gemv' is not supported"),
    "gemv_fast": (awq(version="gemv_fast"), "`version` 'gemv_fast' is not supported"),
    "llm-awq": (awq(version="llm-awq"), "`version` 'llm-awq' is not supported"),
    "awq without zero points": (awq(zero_point=False), "`zero_point` False is not supported"),
    "awq group size": (awq(group_size="128"), "`group_size` must be a positive integer or -1, not '128'"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_an_unsupported_setting_is_an_error_that_names_it(case, tmp_path):
    config, message = UNSUPPORTED[case]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(write(tmp_path, Weight().gptq(), config))


def test_excluded_modules_are_no_dynamic_settings(tmp_path):
    weight = Weight()
    write(tmp_path, weight.gptq(), gptq(dynamic={"-:.*lm_head.*": {}}))
    assert_dequantizes_to(tmp_path, "x.weight", weight.values, np.float32)


WRONG = {
    "no scales": ({"x.scales": None}, "'x.qweight': 'x.scales', which belongs to it, is missing"),
    "no zero points": ({"x.qzeros": None}, "'x.qweight': 'x.qzeros', which belongs to it, is missing"),
    "no codes": ({"x.qweight": None}, "'x.(qzeros|scales)': no weight uses this tensor"),
    "scales of other groups": ({"x.scales": np.ones((4, 32), np.float16)}, r"'x.scales': the shape is \[4, 32\]"),
    "zero points of other outputs": ({"x.qzeros": np.ones((3, 5), np.int32)}, r"'x.qzeros': the shape is \[3, 5\]"),
    "codes as a vector": ({"x.qweight": np.ones(8, np.int32)}, r"'x.qweight': the shape is \[8\]"),
    "no elements": ({"x.qweight": np.ones((0, 4), np.int32)}, r"'x.qweight': the shape is \[0, 4\]"),
    "int64 codes": ({"x.qweight": np.ones((12, 32), np.int64)}, "'x.qweight': the dtype is I64; expected I32"),
}


@pytest.mark.parametrize("library", [gptq, awq])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_an_error_that_names_file_and_tensor(case, library, tmp_path):
    replaced, message = WRONG[case]
    tensors = (Weight().gptq() if library is gptq else Weight().awq()) | replaced
    tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {message}"):
        checkpoint.load(write(tmp_path, tensors, library()))


@pytest.mark.parametrize(
    ("group_of_input", "message"),
    [
        (np.zeros(INPUTS, np.int32), "'x.g_idx': the groups do not have 32 inputs each"),
        (np.arange(INPUTS, dtype=np.int32) // 32 - 1, "'x.g_idx': the groups do not have 32 inputs each"),
        (np.zeros(8, np.int32), r"'x.g_idx': the shape is \[8\]; expected \[96\]"),
        (None, "'x.qweight': 'x.g_idx', which belongs to it, is missing"),
    ],
    ids=["one group", "negative", "short", "missing"],
)
def test_wrong_groups_are_an_error_that_names_file_and_tensor(group_of_input, message, tmp_path):
    tensors = Weight().gptq() | {"x.g_idx": group_of_input}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {message}"):
        checkpoint.load(write(tmp_path, tensors, gptq(desc_act=True)))

"""Files that the gguf package writes are loaded with the values that it decodes."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from scaledot import checkpoint

Type = gguf.GGMLQuantizationType
# Types that gguf can encode, and those of which it can only decode random bytes.
ENCODED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.BF16]
DECODED = [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.NVFP4]
PLAIN = [np.float32, np.float16, np.int8, np.int16, np.int32]


def written(path, name: str, array: np.ndarray, type: gguf.GGMLQuantizationType | None = None):
    """Writes a file with metadata of several types and one tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a model")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ĉ"])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_bool("flag", True)
    writer.add_uint64("count", 2**40)
    writer.add_tensor(name, array, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_loaded_with_the_values_of_gguf(path, name: str = "a.weight") -> None:
    (tensor,) = gguf.GGUFReader(path).tensors
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    found = np.asarray(checkpoint.load(path, dequantize=jnp.float32)[name], np.float32)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type", ENCODED, ids=lambda type: type.name)
def test_a_weight_that_gguf_quantises_is_loaded_with_its_values(type, tmp_path):
    values = np.random.default_rng(0).normal(size=(12, 256)).astype(np.float32)
    values *= np.exp2(np.arange(12, dtype=np.float32) - 6)[:, None]
    values[-1] = 0
    path = written(tmp_path / "model.gguf", "a.weight", gguf.quantize(values, type), type)
    assert_loaded_with_the_values_of_gguf(path)


@pytest.mark.parametrize("type", DECODED, ids=lambda type: type.name)
def test_random_codes_of_a_type_are_loaded_with_their_values(type, tmp_path):
    elements, octets = GGML_QUANT_SIZES[type]
    records = np.random.default_rng(1).integers(0, 256, (8, 512 // elements, octets), np.uint8)
    # float16 scales d and dmin of small exponents, so that none is infinite or NaN; scales of NVFP4 have no sign.
    if type == Type.NVFP4:
        records[..., :4] &= 0x77
    else:
        scales = slice(octets - 2, octets) if type == Type.Q6_K else slice(0, 4)
        records[..., scales.start + 1 : scales.stop : 2] &= 0x2F
    path = written(tmp_path / "model.gguf", "a.weight", records.reshape(8, -1), type)
    assert_loaded_with_the_values_of_gguf(path)


@pytest.mark.parametrize("dtype", PLAIN, ids=lambda dtype: np.dtype(dtype).name)
def test_plain_tensors_are_loaded_in_their_dtype(dtype, tmp_path):
    array = np.arange(-12, 12).astype(dtype).reshape(2, 3, 4)
    found = checkpoint.load(written(tmp_path / "model.gguf", "x", array))["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)

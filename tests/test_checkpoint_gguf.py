"""GGUF files: every type against gguf-py's values or an independent decoder, headers, and bad input."""

import struct
from pathlib import Path

import gguf_files
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import assert_same_bits, assert_slices_agree
from gguf_files import Tensor, file_bytes, pair, plain, record, string, write

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError, gguf
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.source import open_source

pytestmark = pytest.mark.optimized  # compares exact bits

GOLDEN = Path(__file__).parent / "golden"
VECTORS = np.load(GOLDEN / "gguf_blocks.npz")
BLOCKED = {block_type.name: block_type for block_type in gguf.TYPES.values() if block_type.elements > 1}


def dequantized(path: Path, name: str = "x.weight") -> np.ndarray:
    return np.asarray(checkpoint.load(path, dequantize=np.float32)[name])


def random_tensor(type: str, shape: tuple[int, ...], name: str = "x.weight", seed: int = 0) -> Tensor:
    """Random codes, with float16 scales that are finite."""
    rng = np.random.default_rng(seed)
    _, elements, nbytes = BLOCKED[type]
    octets = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), np.uint8)
    places = {"Q6_K": (208,), "MXFP4": (), "NVFP4": ()}.get(type, (0,) if type in ("Q8_0", "Q4_0", "Q5_0") else (0, 2))
    for place in places:
        octets[..., place : place + 2] = rng.normal(size=(*octets.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    if type == "MXFP4":
        octets[..., 0] = rng.integers(100, 140, octets.shape[:-1])
    return Tensor(name, type, shape, octets.tobytes())


@pytest.mark.parametrize("key", [key for key in VECTORS if key.endswith("__blocks")])
def test_blocks_have_the_values_that_gguf_decodes(key, tmp_path):
    type = next(name for name in (*BLOCKED, "BF16") if key.endswith(f"_{name}__blocks"))
    expected = VECTORS[key.replace("__blocks", "__dequant")]
    values = dequantized(write(tmp_path, Tensor("x.weight", type, expected.shape, VECTORS[key].tobytes())))
    if type == "MXFP4":
        is_nan = np.repeat(VECTORS[key][:, ::17] == 255, 32, axis=1)  # E8M0 has NaN there; gguf decodes it as 2^128
        assert np.isnan(values[is_nan]).all()
        values, expected = values[~is_nan], expected[~is_nan]
    assert_same_bits(values, expected, values.dtype)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "mxfp4", "f32"])
def test_a_file_written_by_gguf_has_the_values_that_it_decodes(name):
    key = f"input_weight_{name.upper()}__dequant"
    expected = VECTORS[key] if key in VECTORS else VECTORS["input_weight"]
    assert_same_bits(dequantized(GOLDEN / "tiny.gguf", f"blk.0.{name}.weight"), expected, np.float32)


def decoded_q5_1(block: np.ndarray) -> list[np.float32]:
    d, m = block[:4].view(np.float16).astype(np.float32)
    high = int.from_bytes(block[4:8].tobytes(), "little")
    codes = [(int(block[8 + j % 16]) >> 4 * (j // 16) & 15) + 16 * (high >> j & 1) for j in range(32)]
    return [np.float32(d * code) + m for code in codes]


def scale_and_minimum(packed: np.ndarray, group: int) -> tuple[int, int]:
    packed = packed.astype(int)
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    high_scale, high_minimum = packed[group - 4] >> 6, packed[group] >> 6
    return packed[group + 4] & 15 | high_scale << 4, packed[group + 4] >> 4 | high_minimum << 4


def decoded_q4_k(block: np.ndarray, high_bits: np.ndarray | None = None) -> list[np.float32]:
    d, dmin = block[:4].view(np.float16).astype(np.float32)
    values = []
    for j in range(256):
        scale, minimum = scale_and_minimum(block[4:16], j // 32)
        code = int(block[-128 + 32 * (j // 64) + j % 32]) >> 4 * (j // 32 % 2) & 15
        if high_bits is not None:
            code += 16 * (int(high_bits[j % 32]) >> j // 32 & 1)
        values.append(np.float32(d * scale) * np.float32(code) - np.float32(dmin * minimum))
    return values


def decoded_q5_k(block: np.ndarray) -> list[np.float32]:
    return decoded_q4_k(block, high_bits=block[16:48])


def decoded_q6_k(block: np.ndarray) -> list[np.float32]:
    low, high, scales = block[:128].astype(int), block[128:192].astype(int), block[192:208].view(np.int8)
    d = np.float32(block[208:].view(np.float16)[0])
    values = []
    for j in range(256):
        half, quarter = j // 128, j // 32 % 4
        nibble = low[64 * half + j % 64] >> 4 * (quarter // 2) & 15
        code = nibble + 16 * (high[32 * half + j % 32] >> 2 * quarter & 3) - 32
        values.append(d * np.float32(scales[j // 16]) * np.float32(code))
    return values


DECODERS = {"Q5_1": decoded_q5_1, "Q4_K": decoded_q4_k, "Q5_K": decoded_q5_k, "Q6_K": decoded_q6_k}


@pytest.mark.parametrize("type", DECODERS)
def test_blocks_without_vectors_have_the_values_of_a_scalar_decoder(type, tmp_path):
    tensor = random_tensor(type, (3, 512))
    blocks = np.frombuffer(tensor.octets, np.uint8).reshape(-1, BLOCKED[type].nbytes)
    expected = np.array([DECODERS[type](block) for block in blocks], np.float32).reshape(tensor.shape)
    assert_same_bits(dequantized(write(tmp_path, tensor)), expected, np.float32)


@pytest.mark.parametrize("type", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_types_with_minima_are_offset_arrays(type, tmp_path):
    weight = checkpoint.load(write(tmp_path, random_tensor(type, (2, 256))))["x.weight"]
    assert isinstance(weight, checkpoint.Offset)
    assert weight.offset.shape == weight.array.scale.shape == (2, 8)


def test_the_sibling_scale_of_an_nvfp4_tensor_is_its_tensor_scale(tmp_path):
    blocks = Tensor("x.weight", "NVFP4", (4, 192), VECTORS["random_NVFP4__blocks"].tobytes())
    path = write(tmp_path, blocks, plain("x.scale", "F32", np.array([0.3], np.float32)))
    assert list(checkpoint.load(path)) == ["x.weight"]
    expected = VECTORS["random_NVFP4__dequant"] * np.float32(0.3)
    assert_same_bits(dequantized(path), expected, np.float32)


def test_stacked_nvfp4_tensors_have_a_tensor_scale_each(tmp_path):
    scales = np.array([0.3, 7], np.float32)
    blocks = Tensor("x.weight", "NVFP4", (2, 2, 192), VECTORS["random_NVFP4__blocks"].tobytes())
    path = write(tmp_path, blocks, plain("x.scale", "F32", scales))
    expected = VECTORS["random_NVFP4__dequant"].reshape(2, 2, 192) * scales[:, None, None]
    assert_same_bits(dequantized(path), expected, np.float32)


def test_a_scale_beside_another_type_is_returned(tmp_path):
    path = write(tmp_path, random_tensor("Q8_0", (2, 32)), plain("x.scale", "F32", np.array([3], np.float32)))
    assert checkpoint.load(path)["x.scale"] == 3


@pytest.mark.parametrize(
    ("type", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", ml_dtypes.bfloat16), ("F64", "float64")]
    + [(f"I{bits}", f"int{bits}") for bits in (8, 16, 32, 64)],
    ids=lambda value: value if isinstance(value, str) else "bfloat16",
)
def test_plain_tensors_are_returned_as_they_are(type, dtype, tmp_path):
    array = np.arange(-6, 6).reshape(2, 3, 2).astype(dtype)
    loaded = checkpoint.load(write(tmp_path, plain("x", type, array)))["x"]
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(loaded), array)


def test_slices_of_every_leaf_agree_with_the_whole_array(tmp_path):
    tensors = [random_tensor(type, (2, 5, 512), f"{type}.weight") for type in BLOCKED]
    assert_slices_agree(write(tmp_path, *tensors, plain("f", "F16", np.ones((3, 4), np.float16))), seed=0, count=8)


@pytest.mark.parametrize("type", BLOCKED)
def test_a_slice_reads_the_blocks_that_hold_it(type, tmp_path):
    source = open_source(write(tmp_path, random_tensor(type, (8, 1024))))
    weight = entries(source)["x.weight"]
    codes = (weight.array if isinstance(weight, checkpoint.Offset) else weight).data
    codes.read((slice(3, 5), slice(256, 512)))
    assert 0 < source.reader.bytes_read <= 2 * 256 // BLOCKED[type].elements * BLOCKED[type].nbytes


def test_key_value_pairs_of_every_type_are_read(tmp_path):
    codes = (("B", 200), ("b", -5), ("H", 60000), ("h", -300), ("I", 2**31), ("i", -7), ("f", 0.5), ("?", True))
    numbers = [(code, *pair) for code, pair in enumerate(codes)] + [(10, "Q", 2**63), (11, "q", -1), (12, "d", 0.1)]
    pairs = [string(kind) + struct.pack(f"<I{kind}", code, number) for code, kind, number in numbers]
    pairs += [pair("text", "naïve"), pair("nested", (("a", "b"), ("c",))), pair("numbers", (1, 2, 3))]
    metadata = gguf.read_header(write(tmp_path, pairs=(*pairs, pair("part of a character", b"\xc3")))).metadata
    assert {kind: metadata[kind] for _, kind, _ in numbers} == {kind: number for _, kind, number in numbers}
    assert (metadata["text"], metadata["nested"]) == ("naïve", [["a", "b"], ["c"]])
    np.testing.assert_array_equal(metadata["numbers"], np.array([1, 2, 3], np.uint32))
    assert metadata["part of a character"].encode(errors="surrogateescape") == b"\xc3"


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_begin_at_multiples_of_the_alignment(version, tmp_path):
    arrays = [np.arange(3, dtype=np.float32) + i for i in range(3)]
    tensors = [plain(f"x{i}", "F32", array) for i, array in enumerate(arrays)]
    pairs = (pair("general.alignment", 128),)
    loaded = checkpoint.load(write(tmp_path, *tensors, pairs=pairs, alignment=128, version=version))
    for i, array in enumerate(arrays):
        np.testing.assert_array_equal(loaded[f"x{i}"], array)


X = plain("x", "F32", np.ones(8, np.float32))
EMPTY = file_bytes()
WRONG_TENSORS = {
    "an unsupported type": (Tensor("x", 16, (256,), bytes(66)), r"type IQ2_XXS \(16\)"),
    "an unknown type": (Tensor("x", 99, (256,), bytes(66)), r"type unknown \(99\)"),
    "a removed type": (Tensor("x", 4, (256,), bytes(66)), r"type unknown \(4\)"),
    "five axes": (Tensor("x", "F32", (1,) * 5, bytes(4)), "5 axes; at most 4"),
    "too many elements": (Tensor("x", "F32", (2**32, 2**32), bytes(4)), r"more than 2\^60 - 1"),
    "part of a block": (Tensor("x", "Q8_0", (2, 16), bytes(34)), "no multiple of the 32 elements"),
    "a scalar in blocks": (Tensor("x", "Q8_0", (), bytes(34)), "no multiple of the 32 elements"),
    "an unaligned offset": (Tensor("x", "F32", (1,), bytes(64), offset=4), "offset 4 is no multiple of the alignment"),
    "an offset past the end": (Tensor("x", "F32", (8,), bytes(32), offset=32), "ends at byte 128; the file has 96"),
    "an offset of 2^64 - 32": (Tensor("x", "F32", (8,), bytes(32), offset=2**64 - 32), "the file has 96 bytes"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_a_wrong_tensor_is_an_error_that_names_file_and_tensor(case, tmp_path):
    tensor, message = WRONG_TENSORS[case]
    with pytest.raises(CheckpointError, match=rf"model\.gguf: tensor 'x': .*{message}"):
        checkpoint.load(write(tmp_path, tensor))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((X, X._replace(octets=b"", offset=32)), "the name occurs twice"),
        ((X._replace(name="a"), X._replace(offset=0)), "overlap the tensor before it, which ends at"),
    ],
    ids=["duplicate", "overlap"],
)
def test_two_tensors_with_one_name_or_common_bytes_are_an_error(tensors, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"model\.gguf: tensor 'x': .*{message}"):
        checkpoint.load(write(tmp_path, *tensors, X._replace(name="last")))


def counts(tensors: int, pairs: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def deep(levels: int) -> bytes:
    arrays = struct.pack("<IQ", 9, 1) * levels + struct.pack("<IQ", 4, 0)
    return counts(0, 1) + string("k") + struct.pack("<I", 9) + arrays


def huge_array(code: int) -> bytes:
    return counts(0, 1) + string("k") + struct.pack("<IIQ", 9, code, 2**60) + bytes(64)


WRONG_FILES = {
    "empty": (b"", "magic number takes 4 bytes"),
    "other magic": (b"GGML" + EMPTY[4:], "begins with b'GGUF', not b'GGML'"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + EMPTY[8:], "the version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + EMPTY[8:], "big-endian"),
    "2^63 tensors": (counts(2**63, 0), "9223372036854775808 tensors take at least"),
    "2^63 keys": (counts(0, 2**63), "9223372036854775808 keys take at least"),
    "a key past the end": (counts(0, 1) + struct.pack("<Q", 1000) + bytes(64), "a key takes 1000 bytes"),
    "a long key": (counts(0, 1) + string(b"k" * 65536), "65536 bytes; at most 65535"),
    "a key that is not UTF-8": (counts(0, 1) + string(b"\xff") + bytes(8), "not UTF-8"),
    "an unknown value type": (counts(0, 1) + string("k") + struct.pack("<I", 13), "unknown type 13"),
    "an unknown item type": (huge_array(13), "items of the unknown type 13"),
    "a string past the end": (counts(0, 1) + string("k") + struct.pack("<IQ", 8, 2**62), "takes 4611686018427387904"),
    "2^60 bytes": (huge_array(0), "items of 'k' take at least"),
    "2^60 strings": (huge_array(8), "items of 'k' take at least"),
    "2^60 arrays": (huge_array(9), "items of 'k' take at least"),
    "deep arrays": (deep(9), "more than 8 levels"),
    "duplicate keys": (file_bytes(pairs=(pair("k", 1), pair("k", 2))), "'k' occurs twice"),
    "alignment 48": (file_bytes(pairs=(pair("general.alignment", 48),)), "power of two, not 48"),
    "alignment 0": (file_bytes(pairs=(pair("general.alignment", 0),)), "power of two, not 0"),
    "one of two parts": (file_bytes(pairs=(pair("split.count", 2), pair("split.no", 0))), r"part 0 \(from 0 on\) of 2"),
    "a cut record": (counts(1, 0) + record(X, 0)[:-4], "record of tensor 'x' takes 8 bytes"),
    "a name that is not UTF-8": (counts(1, 0) + string(b"\xff") + bytes(32), "name of a tensor .* is not UTF-8"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_header_is_an_error_that_names_the_file(case, tmp_path):
    octets, message = WRONG_FILES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(octets)
    with pytest.raises(CheckpointError, match=rf"model\.gguf: .*{message}"):
        checkpoint.load(path)


def test_every_truncation_of_a_file_is_an_error(tmp_path):
    octets = file_bytes(random_tensor("Q8_0", (2, 32)), pairs=(pair("k", ("a", "b")), pair("n", 1)))
    octets = octets[: len(octets) - 28]  # without the padding after the last tensor, which may be absent
    path = tmp_path / "model.gguf"
    for size in range(len(octets)):
        path.write_bytes(octets[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            gguf.read_header(path)
    path.write_bytes(octets)
    assert list(gguf.read_header(path).tensors) == ["x.weight"]


def test_the_number_of_strings_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "MAX_STRINGS", 3)
    assert gguf.read_header(write(tmp_path, pairs=(pair("k", ("a",) * 3),))).metadata["k"] == ["a"] * 3
    with pytest.raises(CheckpointError, match="arrays have 4 strings and arrays; at most 3"):
        gguf.read_header(write(tmp_path, pairs=(pair("k", ("a", "b")), pair("l", ("c", "d")))))


@pytest.mark.parametrize(
    "scale", [np.ones(2, np.float32), np.ones((4, 1), np.float32), np.ones(1, np.float16)], ids=repr
)
def test_a_tensor_scale_that_does_not_fit_is_an_error_that_names_it(scale, tmp_path):
    blocks = Tensor("x.weight", "NVFP4", (4, 192), VECTORS["random_NVFP4__blocks"].tobytes())
    type = "F32" if scale.dtype == np.float32 else "F16"
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'x\.scale': the (shape|dtype) is"):
        checkpoint.load(write(tmp_path, blocks, plain("x.scale", type, scale)))


def test_the_writer_of_these_tests_knows_the_types_of_the_reader():
    assert {number: name for name, number in gguf_files.TYPE_NUMBERS.items()} == {
        number: block_type.name for number, block_type in gguf.TYPES.items()
    }

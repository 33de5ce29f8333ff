"""Checkpoints of compressed-tensors: all formats and strategies, mixed precision, sharded loads, and bad input."""

import jax
import numpy as np
import pytest
from checkpoint_files import (
    BF16,
    E4M3,
    E8M0,
    GOLDEN,
    assert_dequantizes_to,
    assert_golden,
    assert_same_bits,
    assert_slices_agree,
    golden,
    nibbles,
    random_codes,
    random_scales,
    repeated,
    write,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError

pytestmark = pytest.mark.optimized  # compares exact bits

CHECKPOINTS = golden("ct_")
PACKING = np.load(GOLDEN.parent / "compressed_tensors_packing.npz")


def group(format: str, num_bits: int = 8, type: str = "float", strategy: str = "tensor", **weights) -> dict:
    arguments = {"num_bits": num_bits, "type": type, "strategy": strategy, "symmetric": True, **weights}
    return {"targets": ["Linear"], "weights": arguments, "format": format}


def config(*groups: dict, **entries) -> dict:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named, **entries}


FP8 = group("float-quantized")
NVFP4 = group("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16)
INT4 = group("pack-quantized", 4, "int", "group", group_size=32)
INT3 = group("pack-quantized", 3, "int", "channel", symmetric=False)
INT8 = group("int-quantized", 8, "int", "channel", symmetric=False)
MXFP4 = group("mxfp4-pack-quantized", 4, strategy="group", group_size=32)
MXFP6 = group("mxfp6-pack-quantized", 6, strategy="group", group_size=32)
MXFP8 = group("mxfp8-quantized", 8, strategy="group", group_size=32)


def packed_integers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes + 2^(bits-1) as the little-endian digits of one integer each, in int32 words."""
    count = -(-codes.shape[-1] * bits // 32)
    numbers = [sum(int(code) + 2 ** (bits - 1) << bits * i for i, code in enumerate(row)) for row in codes]
    return np.frombuffer(b"".join(n.to_bytes(4 * count, "little") for n in numbers), np.int32).reshape(-1, count)


def nvfp4_tensors(module: str, divisor: float, shape=(16, 64)) -> dict[str, np.ndarray]:
    rows, inputs = shape
    return {
        f"{module}.weight_packed": random_codes((rows, inputs // 2), np.uint8),
        f"{module}.weight_scale": random_scales((rows, inputs // 16), np.float32).astype(E4M3),
        f"{module}.weight_global_scale": np.array([divisor], np.float32),
    }


def nvfp4_values(tensors: dict[str, np.ndarray], module: str) -> np.ndarray:
    scale = tensors[f"{module}.weight_scale"].astype(np.float32) / tensors[f"{module}.weight_global_scale"]
    codes = nibbles(tensors[f"{module}.weight_packed"])
    return codes * repeated(scale, (1, 16), codes.shape)


def survives(divisor: int) -> bool:
    one = np.float32(1)
    return one / (one / np.float32(divisor)) == divisor


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_golden_checkpoint_dequantises_to_the_bits_of_its_library(name):
    assert_golden(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_values_are_the_same_without_a_configuration(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    loaded = checkpoint.load(GOLDEN / name / "model.safetensors", dequantize=BF16)
    for weight in expected:
        assert_same_bits(loaded[weight], expected[weight], BF16)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_slice_is_that_of_the_whole_array(name):
    assert_slices_agree(GOLDEN / name, seed=len(name))


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P("y", "x")], ids=str)
@pytest.mark.parametrize("name", ["ct_nvfp4", "ct_w4a16"])
def test_a_sharded_load_has_the_leaves_of_a_load_on_one_device(name, spec):
    mesh = jax.make_mesh((8,), ("x",)) if "y" not in spec else jax.make_mesh((4, 2), ("x", "y"))
    place = {"*.up_proj.weight": NamedSharding(mesh, spec), "*": None}
    sharded, single = (checkpoint.load(GOLDEN / name, sharding=s) for s in (place, None))
    weight = "model.layers.0.mlp.up_proj.weight"
    assert sharded[weight].data.sharding.spec == spec
    for leaf, expected in zip(jax.tree.leaves(sharded[weight]), jax.tree.leaves(single[weight]), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


def test_one_scale_is_that_of_the_tensor_without_a_configuration():
    loaded = checkpoint.load(GOLDEN / "ct_fp8" / "model.safetensors")
    assert loaded["model.layers.0.mlp.up_proj.weight"].block == (0, 0)


def test_statistics_of_activations_are_returned():
    loaded = checkpoint.load(GOLDEN / "ct_nvfp4")
    assert loaded["model.layers.0.mlp.up_proj.input_global_scale"].shape == (1,)


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_and_zero_points_are_those_that_the_library_packs(tmp_path, bits):
    values = PACKING[f"int{bits}_values"]
    tensors = {
        "x.weight_packed": PACKING[f"int{bits}_packed_dim1"],
        "x.weight_shape": np.array(values.shape, np.int64),
        "x.weight_scale": np.ones(values.shape, BF16),
        "x.weight_zero_point": PACKING[f"int{bits}_packed_dim0"],
    }
    scheme = group("pack-quantized", bits, "int", "group", group_size=1, symmetric=False)
    q = checkpoint.load(write(tmp_path, tensors, config(scheme)))["x.weight"]
    assert q.data.dtype == q.format.code_dtype
    np.testing.assert_array_equal(np.asarray(q.data).astype(np.int8), values)
    np.testing.assert_array_equal(np.asarray(q.zero).astype(np.int8), values)
    assert_slices_agree(tmp_path, seed=bits)


@pytest.mark.parametrize("scale_dtype", [BF16, np.float16, np.float32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_are_subtracted_from_codes(tmp_path, bits, scale_dtype):
    rng, half = np.random.default_rng(bits), 2 ** (bits - 1)
    codes, zero = rng.integers(-half, half, (10, 48)), rng.integers(-half, half, (10, 3))
    scale = random_scales((10, 3), scale_dtype)
    tensors = {
        "x.weight_packed": packed_integers(codes, bits),
        "x.weight_shape": np.array(codes.shape, np.int32),
        "x.weight_scale": scale,
        "x.weight_zero_point": packed_integers(zero.T, bits).T,
    }
    write(tmp_path, tensors, config(group("pack-quantized", bits, "int", "group", group_size=16, symmetric=False)))
    difference = (codes - np.repeat(zero, 16, 1)).astype(np.float32)
    assert_dequantizes_to(tmp_path, "x.weight", difference * repeated(scale, (1, 16), codes.shape))


@pytest.mark.parametrize("zero_shape", [(6, 1), (6,)], ids=str)
def test_int8_codes_have_int8_zero_points(tmp_path, zero_shape):
    codes, zero, scale = random_codes((6, 8), np.int8), random_codes((6, 1), np.int8, 2), random_scales((6, 1), BF16)
    tensors = {"x.weight": codes, "x.weight_scale": scale, "x.weight_zero_point": zero.reshape(zero_shape)}
    write(tmp_path, tensors, config(INT8))
    difference = codes.astype(np.float32) - zero.astype(np.float32)
    assert_dequantizes_to(tmp_path, "x.weight", difference * scale.astype(np.float32))


STRATEGIES = {  # arguments, shape of the scales, block
    "tensor": ({"strategy": "tensor"}, (1,), (20, 48)),
    "tensor, scalar": ({"strategy": None, "group_size": None}, (), (20, 48)),
    "channel": ({"strategy": "channel"}, (20, 1), (1, 48)),
    "channel, vector": ({"strategy": None, "group_size": -1}, (20,), (1, 48)),
    "group": ({"strategy": "group", "group_size": 16}, (20, 3), (1, 16)),
    "group, short": ({"strategy": None, "group_size": 32}, (20, 2), (1, 32)),
    "block": ({"strategy": "block", "block_structure": [8, 16]}, (3, 3), (8, 16)),
    "block, string": ({"strategy": "block", "block_structure": "16x32"}, (2, 2), (16, 32)),
}


@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_strategy_tells_the_block_of_a_scale(tmp_path, strategy, format):
    arguments, scale_shape, block = STRATEGIES[strategy]
    codes, scale = random_codes((20, 48), E4M3), random_scales(scale_shape, BF16)
    write(tmp_path, {"x.weight": codes, "x.weight_scale": scale}, config(group(format, **arguments)))
    grid = scale.reshape(tuple(-(-size // b) for size, b in zip(codes.shape, block, strict=True)))
    assert_dequantizes_to(tmp_path, "x.weight", codes.astype(np.float32) * repeated(grid, block, codes.shape))


def test_a_file_may_mix_all_formats(tmp_path):
    rng = np.random.default_rng(0)
    codes4, codes8 = rng.integers(-8, 8, (16, 64)), rng.integers(-128, 128, (16, 64))
    codes3, zero3 = rng.integers(-4, 4, (16, 64)), rng.integers(-4, 4, (16, 1))
    shape = np.array([16, 64], np.int64)
    scale32, exponents = random_scales((16, 2), BF16), random_scales((16, 2), np.uint8)
    fp8, fp4, fp6 = (random_codes((16, n), dtype, n) for n, dtype in ((64, E4M3), (32, np.uint8), (48, np.uint8)))
    channel = random_scales((16, 1), BF16)
    modules = {
        "fp8": {"weight": fp8, "weight_scale": channel[:1, 0]},
        "mxfp8": {"weight": fp8, "weight_scale": exponents.view(E8M0)},
        "mxfp4": {"weight_packed": fp4, "weight_scale": exponents},
        "mxfp6": {"weight_packed": fp6, "weight_scale": exponents},
        "int8": {"weight": codes8.astype(np.int8), "weight_scale": channel, "weight_zero_point": zero3.astype(np.int8)},
        "int4": {"weight_packed": packed_integers(codes4, 4), "weight_shape": shape, "weight_scale": scale32},
        "int3": {"weight_packed": packed_integers(codes3, 3), "weight_shape": shape, "weight_scale": channel},
    }
    tensors = {f"{module}.{end}": array for module, ends in modules.items() for end, array in ends.items()}
    tensors |= nvfp4_tensors("nvfp4", 3.0)
    tensors["int3.weight_zero_point"] = packed_integers(zero3.T, 3).T
    tensors |= {"norm.weight": np.ones(8, BF16), "attn.k_scale": np.ones(1, BF16)}
    write(tmp_path, tensors, config(FP8, NVFP4, INT4, INT3, INT8, MXFP4, MXFP6, MXFP8, FP8))
    by_exponent, by_group = repeated(exponents, (1, 32), (16, 64)), repeated(scale32, (1, 32), (16, 64))
    by_channel = channel.astype(np.float32)
    bits6 = np.unpackbits(fp6, axis=1, bitorder="little").reshape(16, 64, 6) @ (1 << np.arange(6))
    fraction, exponent = bits6 % 8, bits6 // 8 % 4
    e2m3 = np.where(exponent == 0, fraction / 8, (1 + fraction / 8) * 2.0 ** (exponent - 1)) * (1 - bits6 // 32 * 2.0)
    expected = {
        "fp8.weight": fp8.astype(np.float32) * by_channel[0],
        "mxfp8.weight": fp8.astype(np.float32) * by_exponent,
        "mxfp4.weight": nibbles(fp4) * by_exponent,
        "mxfp6.weight": e2m3.astype(np.float32) * by_exponent,
        "nvfp4.weight": nvfp4_values(tensors, "nvfp4"),
        "int4.weight": codes4.astype(np.float32) * by_group,
        "int8.weight": (codes8 - zero3).astype(np.float32) * by_channel,
        "int3.weight": (codes3 - zero3).astype(np.float32) * by_channel,
    }
    loaded = checkpoint.load(tmp_path, dequantize=True)
    assert set(loaded) == {*expected, "norm.weight", "attn.k_scale"}
    for name, values in expected.items():
        assert_same_bits(loaded[name], values.astype(BF16), BF16)
    assert_slices_agree(tmp_path, seed=0, count=5)


def test_dequantising_nvfp4_while_loading_divides_by_the_stored_number(tmp_path):
    divisor = next(n for n in range(3, 999) if not survives(n))
    tensors = nvfp4_tensors("x", divisor)
    write(tmp_path, tensors, config(NVFP4))
    expected = nvfp4_values(tensors, "x")
    assert_same_bits(checkpoint.load(tmp_path, dequantize=np.float32)["x.weight"], expected, np.float32)
    by_reciprocal = np.asarray(checkpoint.dequantize(checkpoint.load(tmp_path)["x.weight"], np.float32))
    assert np.any(by_reciprocal != expected)  # the reciprocal has a rounding error
    np.testing.assert_allclose(by_reciprocal, expected, rtol=2**-22)  # of two roundings


@pytest.mark.parametrize("experts", [(), (3,)], ids=["one", "stacked"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_global_scale_is_returned_if_its_reciprocal_does_not_determine_it(tmp_path, is_kept, experts):
    divisor = next(n for n in range(3, 999) if survives(n) != is_kept)
    tensors = nvfp4_tensors("x", divisor)
    tensors = {name: np.broadcast_to(array, (*experts, *array.shape)) for name, array in tensors.items()}
    loaded = checkpoint.load(write(tmp_path, tensors, config(NVFP4)))
    assert loaded["x.weight"].tensor_scale.shape == experts
    np.testing.assert_array_equal(loaded["x.weight"].tensor_scale, np.float32(1) / np.float32(divisor))
    assert ("x.weight_global_scale" in loaded) == is_kept
    if is_kept:
        np.testing.assert_array_equal(loaded["x.weight_global_scale"], tensors["x.weight_global_scale"])


def tensors_of(scheme: dict) -> dict[str, np.ndarray]:
    """The tensors of a weight `x` of shape (16, 64)."""
    if scheme is NVFP4:
        return nvfp4_tensors("x", 3.0)
    if scheme is INT4:
        return {
            "x.weight_packed": packed_integers(np.zeros((16, 64), int), 4),
            "x.weight_shape": np.array([16, 64], np.int64),
            "x.weight_scale": random_scales((16, 2), BF16),
        }
    return {"x.weight": random_codes((16, 64), E4M3), "x.weight_scale": random_scales((1,), BF16)}


BAD_TENSORS = {  # scheme, tensors that are replaced or, by None, removed, and the message
    "no scale": (FP8, {"x.weight_scale": None}, "'x.weight': 'x.weight_scale', which belongs to it, is missing"),
    "no packed scale": (NVFP4, {"x.weight_scale": None}, "'x.weight_packed': 'x.weight_scale', which belongs to it"),
    "no divisor": (NVFP4, {"x.weight_global_scale": None}, "'x.weight_packed': 'x.weight_global_scale', which belongs"),
    "no shape": (INT4, {"x.weight_shape": None}, "'x.weight_packed': 'x.weight_shape', which belongs to it"),
    "scale without codes": (FP8, {"y.weight_scale": np.ones(1, BF16)}, "'y.weight_scale': no weight"),
    "zero point of floats": (FP8, {"x.weight_zero_point": np.ones(1, np.float32)}, "'x.weight_zero_point': no weight"),
    "permutation": (INT4, {"x.weight_g_idx": np.zeros(64, np.int32)}, "'x.weight_g_idx': groups of permuted inputs"),
    "code dtype": (FP8, {"x.weight": np.zeros((16, 64), np.int8)}, "'x.weight': the dtype is I8; expected F8_E4M3"),
    "other code dtype": (FP8, {"y.weight": np.zeros((16, 64), np.uint8)}, "'y.weight': no weight"),
    "scale dtype": (NVFP4, {"x.weight_scale": np.ones((16, 4), BF16)}, "'x.weight_scale': the dtype is BF16; expected"),
    "scale shape": (NVFP4, {"x.weight_scale": np.ones((16, 5), E4M3)}, r"the shape is \[16, 5\].* need \[16, 4\]"),
    "tensor scale shape": (FP8, {"x.weight_scale": np.ones((16, 1), BF16)}, r"the shape is \[16, 1\].* need \[1, 1\]"),
    "divisor shape": (NVFP4, {"x.weight_global_scale": np.ones(16, np.float32)}, r"the shape is \[16\]; a weight of"),
    "divisor zero": (NVFP4, {"x.weight_global_scale": np.zeros(1, np.float32)}, "_global_scale': 0.0 is no divisor"),
    "divisor nan": (NVFP4, {"x.weight_global_scale": np.full(1, np.nan, np.float32)}, "nan is no divisor"),
    "words": (INT4, {"x.weight_shape": np.array([16, 65])}, "rows have 8 words; 65 codes of 4 bits take 9 words"),
    "outputs": (INT4, {"x.weight_shape": np.array([8, 64])}, r"weight_shape': \[8, 64\] does not fit .* \[16, 8\]"),
    "negative": (INT4, {"x.weight_shape": np.array([16, -64])}, r"weight_shape': \[16, -64\] does not fit"),
    "shape of the shape": (
        INT4,
        {"x.weight_shape": np.array([16])},
        r"weight_shape': expected 2 integers, not I64\[1\]",
    ),
    "two weights": (NVFP4, {"x.weight": np.ones((16, 64), BF16)}, "'x.weight' is another tensor of the same weight"),
    "vector": (
        FP8,
        {"x.weight": np.ones(64, E4M3)},
        r"'x.weight': the shape is \[64\]; a quantised weight has at least 2 axes",
    ),
}


@pytest.mark.parametrize("case", list(BAD_TENSORS))
def test_an_error_names_the_file_and_the_tensor(tmp_path, case):
    scheme, changes, message = BAD_TENSORS[case]
    tensors = {name: array for name, array in (tensors_of(scheme) | changes).items() if array is not None}
    write(tmp_path, tensors, config(scheme))
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    assert "tensor '" in str(error.value)


@pytest.mark.parametrize("name", ["x.weight", "x.weight_packed"])
def test_a_scalar_is_no_weight(tmp_path, name):
    tensors = {name: np.ones((), E4M3 if name == "x.weight" else np.uint8), "x.weight_scale": np.ones(1, BF16)}
    with pytest.raises(CheckpointError, match=r"the shape is \[\]; a quantised weight has at least 2 axes"):
        checkpoint.load(write(tmp_path, tensors))


def test_asymmetric_codes_need_zero_points(tmp_path):
    tensors = {"x.weight": random_codes((4, 8), np.int8), "x.weight_scale": random_scales((4, 1), BF16)}
    with pytest.raises(CheckpointError, match=r"'x.weight_zero_point', which belongs to it, is missing"):
        checkpoint.load(write(tmp_path, tensors, config(INT8)))


def test_rows_of_6_bit_codes_have_whole_groups_of_bytes(tmp_path):
    tensors = {"x.weight_packed": np.zeros((4, 25), np.uint8), "x.weight_scale": np.zeros((4, 1), np.uint8)}
    with pytest.raises(CheckpointError, match="rows have 25 bytes; those of 6-bit codes are multiples of 3"):
        checkpoint.load(write(tmp_path, tensors, config(MXFP6)))


def test_codes_that_no_group_declares_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="none of the formats nvfp4-pack-quantized, pack-quantized has codes of"):
        checkpoint.load(write(tmp_path, tensors_of(FP8), config(NVFP4, INT4)))
    with pytest.raises(CheckpointError, match="declares no quantised weights"):
        checkpoint.load(write(tmp_path, tensors_of(FP8), config()))


BAD_CONFIGS = {
    "rotation": (config(FP8, transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "`transform_config`"),
    "sparsity": (config(FP8, sparsity_config={"format": "sparse-24-bitmask"}), "sparse format 'sparse-24-bitmask'"),
    "format": (
        config(group("marlin-24")),
        "`config_groups.group_0` has the format 'marlin-24', which is not supported",
    ),
    "no format": (config(FP8 | {"format": None}), "has the format 'mixed-precision', which is not supported"),
    "strategy": (config(group("float-quantized", strategy="token")), "the strategy 'token', which is not supported"),
    "type": (config(group("float-quantized", type="complex")), "codes of type 'complex' with 8 bits"),
    "bits": (config(group("pack-quantized", 1, "int")), "codes of type 'int' with 1 bits"),
    "group size": (
        config(group("float-quantized", strategy="group", group_size=[])),
        "`group_size` must be a positive",
    ),
    "block": (config(group("float-quantized", strategy="block", block_structure="8")), "must be two positive integers"),
    "groups": (config(FP8) | {"config_groups": []}, r"`config_groups` must be an object, not \[\]"),
    "group": (config([]), r"`config_groups.group_0` must be an object, not \[\]"),
}


@pytest.mark.parametrize("case", list(BAD_CONFIGS))
def test_an_unsupported_configuration_is_refused_by_name(tmp_path, case):
    quantization, message = BAD_CONFIGS[case]
    write(tmp_path, tensors_of(FP8), quantization)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("entry", ["transform_config", "sparsity_config"])
@pytest.mark.parametrize("value", [None, {}], ids=str)
def test_empty_entries_of_the_configuration_are_accepted(tmp_path, entry, value):
    write(tmp_path, tensors_of(FP8), config(FP8, {"targets": ["re:.*attn"], "weights": None}, **{entry: value}))
    assert checkpoint.load(tmp_path)["x.weight"].shape == (16, 64)

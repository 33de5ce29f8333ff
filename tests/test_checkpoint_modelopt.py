"""Checkpoints of NVIDIA ModelOpt: all algorithms, mixed precision, both places of the configuration, and bad input."""

import json

import jax
import numpy as np
import pytest
from checkpoint_files import (
    BF16,
    E4M3,
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

CHECKPOINTS = golden("modelopt_")
SHAPE = (16, 64)


def config(algorithm: str | None, **entries) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **entries}


def fp8(scale_shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Tensors of a module, and the values of its weight."""
    codes, scale = random_codes(SHAPE, E4M3), random_scales(scale_shape, np.float32)
    values = codes.astype(np.float32) * scale.reshape(-1, 1)
    return {"weight": codes, "weight_scale": scale, "input_scale": random_scales((), np.float32)}, values


def nvfp4() -> tuple[dict[str, np.ndarray], np.ndarray]:
    packed, scale = random_codes((16, 32), np.uint8), random_scales((16, 4), np.float32).astype(E4M3)
    second = random_scales((), np.float32, 7)
    codes = nibbles(packed) + np.float32(0)  # ModelOpt's table has +0 for both codes of 0
    values = codes * repeated(scale.astype(np.float32) * second, (1, 16), SHAPE)
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": second}, values


def mxfp8() -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, scale = random_codes(SHAPE, E4M3), random_scales((16, 2), np.uint8)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * repeated(scale, (1, 32), SHAPE)


def mxfp4() -> tuple[dict[str, np.ndarray], np.ndarray]:
    packed, scale = random_codes((16, 32), np.uint8), random_scales((16, 2), np.uint8)
    return {"weight": packed, "weight_scale": scale}, nibbles(packed) * repeated(scale, (1, 32), SHAPE)


def int4(scale_dtype=np.float32) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes = np.random.default_rng(3).integers(-8, 8, SHAPE)
    packed = ((codes[::2] & 15) | (codes[1::2] & 15) << 4).astype(np.uint8)
    scale = random_scales((16, 4), scale_dtype)
    values = codes.astype(np.float32) * repeated(scale, (1, 16), SHAPE)
    return {"weight": packed, "weight_scale": scale, "pre_quant_scale": random_scales((64,), BF16)}, values


def int8() -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, scale = random_codes(SHAPE, np.int8), random_scales((16,), np.float32)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale[:, None]


ALGORITHMS = {
    "FP8": lambda: fp8(()),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda: fp8((16,)),
    "NVFP4": nvfp4,
    "W4A16_NVFP4": nvfp4,
    "NVFP4_AWQ": nvfp4,
    "W4A8_NVFP4_FP8": nvfp4,
    "MXFP8": mxfp8,
    "W4A8_MXFP4_FP8": mxfp4,
    "W4A16_AWQ": lambda: int4(BF16),
    "W4A8_AWQ": int4,
    "W8A16": int8,
    "W8A8_SQ_PER_CHANNEL": int8,
}


def named(tensors: dict[str, np.ndarray], module: str = "x") -> dict[str, np.ndarray]:
    return {f"{module}.{end}": array for end, array in tensors.items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_golden_checkpoint_dequantises_to_the_bits_of_its_library(name):
    assert_golden(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_slice_is_that_of_the_whole_array(name):
    assert_slices_agree(GOLDEN / name, seed=len(name))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_values_are_the_same_without_a_configuration(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    dtype = np.float32 if name == "modelopt_fp8" else BF16
    loaded = checkpoint.load(GOLDEN / name / "model.safetensors", dequantize=dtype)
    for weight in expected:
        assert_same_bits(loaded[weight], expected[weight], dtype)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_configuration_may_be_in_hf_quant_config(tmp_path, name):
    for file in ("model.safetensors", "hf_quant_config.json"):
        (tmp_path / file).write_bytes((GOLDEN / name / file).read_bytes())
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    both = [checkpoint.load(folder) for folder in (tmp_path, GOLDEN / name)]
    assert jax.tree.structure(both[0]) == jax.tree.structure(both[1])
    assert all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*map(jax.tree.leaves, both), strict=True)
    )


def test_statistics_of_activations_and_caches_are_returned():
    loaded = checkpoint.load(GOLDEN / "modelopt_fp8")
    layer = "model.layers.0"
    scales = {
        f"{layer}.mlp.up_proj.input_scale",
        f"{layer}.self_attn.k_proj.k_scale",
        f"{layer}.self_attn.v_proj.v_scale",
    }
    assert set(loaded) == {f"{layer}.mlp.up_proj.weight", "model.norm.weight", *scales}


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_an_algorithm_dequantises_to_codes_times_scales(tmp_path, algorithm):
    tensors, values = ALGORITHMS[algorithm]()
    write(tmp_path, named(tensors), config(algorithm))
    assert_dequantizes_to(tmp_path, "x.weight", values)
    assert_slices_agree(tmp_path, seed=len(algorithm))


@pytest.mark.parametrize(("algorithm", "block"), [("FP8", (0, 0)), ("FP8_PER_CHANNEL_PER_TOKEN", (0,))])
def test_scales_of_fp8_are_those_of_the_tensor_or_of_outputs(tmp_path, algorithm, block):
    tensors, _ = ALGORITHMS[algorithm]()
    assert checkpoint.load(write(tmp_path, named(tensors), config(algorithm)))["x.weight"].block == block


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x")], ids=str)
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_AWQ"])
def test_a_sharded_load_has_the_leaves_of_a_load_on_one_device(tmp_path, algorithm, spec):
    tensors, _ = ALGORITHMS[algorithm]()
    write(tmp_path, named(tensors), config(algorithm))
    placed = {"x.weight": NamedSharding(jax.make_mesh((8,), ("x",)), spec), "*": None}
    sharded, single = (checkpoint.load(tmp_path, sharding=s)["x.weight"] for s in (placed, None))
    assert sharded.data.sharding.spec == spec
    for leaf, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


def test_scales_that_are_not_of_weights_are_returned(tmp_path):
    tensors, _ = int4()
    tensors["weight_scale_2"] = np.asarray(2, np.float32)
    loaded = checkpoint.load(write(tmp_path, named(tensors), config("W4A8_AWQ")))
    np.testing.assert_array_equal(loaded["x.pre_quant_scale"], tensors["pre_quant_scale"])
    assert loaded["x.weight_scale_2"] == 2


def test_experts_may_be_stacked(tmp_path):
    tensors, values = nvfp4()
    second = np.array([1, 0.5, 0.25], np.float32)
    stacked = {end: np.stack([array] * 3) for end, array in tensors.items()}
    stacked["weight_scale_2"] = stacked["weight_scale_2"] * second
    write(tmp_path, named(stacked), config("NVFP4", group_size=16))
    assert_dequantizes_to(tmp_path, "x.weight", values * second[:, None, None])


@pytest.mark.parametrize("has_layers", [True, False])
def test_mixed_precision_has_an_algorithm_per_module(tmp_path, has_layers):
    modules = {algorithm: make() for algorithm, make in ALGORITHMS.items()}
    tensors = {name: array for module, made in modules.items() for name, array in named(made[0], module).items()}
    layers = {algorithm: {"quant_algo": algorithm} for algorithm in ALGORITHMS}
    write(tmp_path, tensors, config("MIXED_PRECISION", **({"quantized_layers": layers} if has_layers else {})))
    loaded = checkpoint.load(tmp_path, dequantize=True)
    for algorithm, (_, values) in modules.items():
        assert_same_bits(loaded[f"{algorithm}.weight"], values.astype(BF16), BF16)


NVFP4, FP8 = nvfp4()[0], fp8(())[0]
BAD_TENSORS = {  # algorithm, tensors, and the message
    "no scale": ("FP8", {"weight": FP8["weight"]}, "'x.weight': 'x.weight_scale', which belongs to it, is missing"),
    "no second scale": (
        "NVFP4",
        NVFP4 | {"weight_scale_2": None},
        "'x.weight': 'x.weight_scale_2', which belongs to it",
    ),
    "scale without codes": ("FP8", {"weight_scale": FP8["weight_scale"]}, "'x.weight_scale': no weight"),
    "second scale of FP8": ("FP8", FP8 | {"weight_scale_2": np.ones((), np.float32)}, "'x.weight_scale_2': no weight"),
    "low-rank term": ("NVFP4", NVFP4 | {"svdquant_lora_a": np.ones((4, 64), BF16)}, "'x.svdquant_lora_a': no weight"),
    "scale shape": (
        "NVFP4",
        NVFP4 | {"weight_scale": np.ones((16, 2), E4M3)},
        r"'x.weight_scale': the shape is \[16, 2\]; codes of shape \[16, 64\] in blocks of \[16\] need \[16, 4\]",
    ),
    "channel scale shape": (
        "FP8",
        FP8 | {"weight_scale": np.ones(15, np.float32)},
        r"'x.weight_scale': the shape is \[15, 1\]; codes of shape \[16, 64\] in blocks of \[0\] need \[16, 1\]",
    ),
    "second scale shape": (
        "NVFP4",
        NVFP4 | {"weight_scale_2": np.ones(2, np.float32)},
        r"'x.weight_scale_2': the shape is \[2\]; a weight of shape \[16, 64\] needs",
    ),
    "second scale dtype": ("NVFP4", NVFP4 | {"weight_scale_2": np.ones((), BF16)}, "the dtype is BF16; expected F32"),
    "scale dtype": (
        "FP8",
        FP8 | {"weight_scale": np.ones((), np.float64)},
        "'x.weight': ModelOpt does not write codes",
    ),
    "other algorithm": ("FP8", NVFP4, "'x.weight': .* are NVFP4, but the configuration declares FP8, which has codes"),
    "vector": (
        "FP8",
        FP8 | {"weight": np.ones(64, E4M3)},
        r"'x.weight': the shape is \[64\]; a quantised weight has at least 2",
    ),
}


@pytest.mark.parametrize("case", list(BAD_TENSORS))
def test_an_error_names_the_file_and_the_tensor(tmp_path, case):
    algorithm, tensors, message = BAD_TENSORS[case]
    write(tmp_path, {k: v for k, v in named(tensors).items() if v is not None}, config(algorithm))
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(error.value)
    assert "tensor '" in str(error.value)


BAD_CONFIGS = {
    "algorithm": (config("FP9"), "`quant_algo` 'FP9' is not supported; there are FP8"),
    "low-rank term": (config("NVFP4_SVD"), "`quant_algo` 'NVFP4_SVD' is not supported"),
    "algorithm of a layer": (
        config("MIXED_PRECISION", quantized_layers={"x": {"quant_algo": "FP9"}}),
        "`quant_algo` 'FP9' is not supported",
    ),
    "layers": (config("MIXED_PRECISION", quantized_layers=["x"]), "`quantized_layers` must be an object of objects"),
    "type": (config(None) | {"quant_algo": [8]}, r"`quant_algo` \[8\] is not supported"),
}


@pytest.mark.parametrize("case", list(BAD_CONFIGS))
def test_an_unsupported_configuration_is_refused_by_name(tmp_path, case):
    quantization, message = BAD_CONFIGS[case]
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(write(tmp_path, named(FP8), quantization))
    assert str(tmp_path) in str(error.value)


def test_the_quantisation_of_hf_quant_config_must_be_an_object(tmp_path):
    write(tmp_path, named(FP8))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(CheckpointError, match="`quantization` must be an object"):
        checkpoint.load(tmp_path)

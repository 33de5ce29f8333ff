"""compressed-tensors accepts our configurations and decodes our files to our values, and the inverse."""

import json

import jax.numpy as jnp
import numpy as np
import peers
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file

import scaledot as sd
from scaledot import checkpoint, format_variants

LAYOUT = "compressed-tensors"
IN_BFLOAT16 = vars(format_variants.compressed_tensors)  # formats whose scales have the dtype of the weight
INTEGERS = [f"int{bits}" for bits in range(2, 9)]


def decompressed(state: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]


def saved(tree, folder, activations=None) -> QuantizationConfig:
    """Saves a tree; returns the configuration as compressed-tensors parses it."""
    checkpoint.save(tree, folder, LAYOUT, config={"torch_dtype": "bfloat16"}, activations=activations)
    config = QuantizationConfig.model_validate(peers.quantization_config(folder))
    assert config.quantization_status == "compressed"
    return config


# The format that the configuration names, and a quantised weight: its shape, and arguments of `quantize`.
WRITTEN = {
    "fp8 per tensor": ("float-quantized", (96, 256), "fp8_e4m3", {}),
    "fp8 per channel": ("float-quantized", (96, 256), "fp8_e4m3", {"block": (0,)}),
    "fp8 in blocks": ("float-quantized", (256, 384), "fp8_e4m3", {"block": (128, 128)}),
    "fp8 in short blocks": ("float-quantized", (200, 300), "fp8_e4m3", {"block": (128, 128), "pad": True}),
    "fp8 with bfloat16 scales": ("float-quantized", (96, 256), IN_BFLOAT16["fp8"], {"block": (0,)}),
    "nvfp4": ("nvfp4-pack-quantized", (96, 256), "nvfp4", {}),
    "nvfp4 in blocks of 16x16": ("nvfp4-pack-quantized", (96, 256), "nvfp4", {"block": (16, 16)}),
    "mxfp4": ("mxfp4-pack-quantized", (96, 256), "mxfp4", {}),
    "mxfp6": ("mxfp6-pack-quantized", (96, 256), "mxfp6_e2m3", {}),
    "mxfp8": ("mxfp8-quantized", (96, 256), "mxfp8", {}),
}
for name in INTEGERS:
    for calibration in ("absmax", "minmax"):
        grouped, channels = ({"block": block, "calibration": calibration} for block in ((64,), (0,)))
        WRITTEN[f"{name} in groups, {calibration}"] = ("pack-quantized", (96, 256), name, grouped)
        # 100 codes do not fill their last word, nor do 30 zero points.
        WRITTEN[f"{name} per channel, {calibration}"] = ("pack-quantized", (30, 100), IN_BFLOAT16[name], channels)


def assert_decompressed_as_loaded(folder, module: str, scheme: QuantizationScheme) -> torch.Tensor:
    """Compares in the dtype of compressed-tensors, which that of the scales determines; returns its values."""
    found = decompressed(peers.of_module(peers.tensors(folder), module), scheme)
    name = f"{module}.weight"
    peers.assert_same_bits(found, checkpoint.load(folder, dequantize=peers.jax_dtype(found), include=name)[name])
    return found


@pytest.mark.parametrize("case", WRITTEN)
def test_a_saved_weight_is_decompressed_to_its_values(case, tmp_path):
    format, shape, name, arguments = WRITTEN[case]
    weight = sd.quantize(peers.example(shape), name, **arguments)
    config = saved({"a.weight": weight, "lm_head.weight": peers.example()}, tmp_path / "model")
    (scheme,) = config.config_groups.values()
    assert (config.format, scheme.format, config.ignore) == (format, format, ["lm_head"])
    found = assert_decompressed_as_loaded(tmp_path / "model", "a", scheme)
    if weight.tensor_scale is None:
        peers.assert_same_bits(found, checkpoint.dequantize(weight, peers.jax_dtype(found)))
    else:  # the file holds its reciprocal, which is rounded to float32; values are rounded to bfloat16
        peers.assert_close(found, checkpoint.dequantize(weight, jnp.float32), 2.0**-8 + 2.0**-20)


@pytest.mark.parametrize("calibration", ["absmax", "minmax"])
@pytest.mark.parametrize("block", [(0, 0), (0,)], ids=["per tensor", "per channel"])
def test_int8_weights_with_quantised_activations_are_not_packed(block, calibration, tmp_path):
    weight = sd.quantize(peers.example(), "int8", block=block, calibration=calibration)
    config = saved({"a.weight": weight}, tmp_path / "model", activations="dynamic")
    (scheme,) = config.config_groups.values()
    assert (scheme.format, scheme.input_activations.strategy) == ("int-quantized", "token")
    found = assert_decompressed_as_loaded(tmp_path / "model", "a", scheme)
    peers.assert_same_bits(found, checkpoint.dequantize(weight, peers.jax_dtype(found)))


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "block"),
    [("fp8_e4m3", (0, 0)), ("fp8_e4m3", (0,)), ("fp8_e4m3", (32, 32)), ("int8", (0,)), ("int4", (64,))]
    + [(name, None) for name in ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8")],
)
def test_the_activations_of_a_configuration_are_accepted(name, block, activations, tmp_path):
    weight = sd.quantize(peers.example(), name, block=block)
    tree = {"a.weight": weight}
    if activations == "static" or name == "nvfp4":
        tree["a.input_global_scale" if name == "nvfp4" else "a.input_scale"] = np.ones(1, np.float32)
    (scheme,) = saved(tree, tmp_path / "model", activations).config_groups.values()
    assert scheme.input_activations.num_bits == (8 if weight.format.is_integer else weight.format.bits)
    assert scheme.input_activations.dynamic == ("local" if name == "nvfp4" else activations == "dynamic")


def test_each_module_of_a_mixed_checkpoint_is_decompressed_by_its_group(tmp_path):
    formats = {"a": "nvfp4", "b": "mxfp8", "c": "int4", "d": "fp8_e4m3", "e": "mxfp4", "f": "mxfp8"}
    tree = {
        f"{module}.weight": sd.quantize(peers.example(seed=i), name) for i, (module, name) in enumerate(formats.items())
    }
    config = saved(tree, tmp_path / "model")
    assert config.format == "mixed-precision"
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    assert schemes.keys() == formats.keys()
    for module, scheme in schemes.items():
        assert_decompressed_as_loaded(tmp_path / "model", module, scheme)


def compressed(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """The tensors of a module as llm-compressor computes them, with scales of the amax or of the range."""
    args = scheme.weights
    block = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": args.block_structure}
    rows, inputs = block.get(args.strategy) or (1, args.group_size)
    blocks = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // inputs, inputs)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(*weight.float().aminmax())
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale.squeeze(0) if args.strategy == "tensor" else scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return {name: x.contiguous() for name, x in compressor.compress(state, scheme).items()}


PUBLISHED = {
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "W8A8": "int-quantized",
    "W4A16_ASYM": "pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP6A16": "mxfp6-pack-quantized",
    "MXFP8A16": "mxfp8-quantized",
} | {f"W{bits}A16": "pack-quantized" for bits in range(2, 9)}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_weight_that_compressed_tensors_compresses_is_loaded_with_its_values(preset, tmp_path):
    scheme = preset_name_to_scheme(preset, ["Linear"]).model_copy(update={"format": PUBLISHED[preset]})
    state = compressed(peers.as_torch(peers.example((256, 384))), scheme)
    save_file({f"a.{name}": x for name, x in state.items()}, tmp_path / "model.safetensors")
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=scheme.format, quantization_status="compressed"
    )
    content = {"torch_dtype": "bfloat16", "quantization_config": json.loads(config.model_dump_json())}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert_decompressed_as_loaded(tmp_path, "a", scheme)

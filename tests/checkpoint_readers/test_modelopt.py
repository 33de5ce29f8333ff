"""ModelOpt decodes our files to our values, and the inverse. transformers has no reader for this layout."""

import json

import jax.numpy as jnp
import numpy as np
import peers
import pytest
import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file

import scaledot as sd
from scaledot import checkpoint

ALGORITHMS = {"fp8_e4m3": "FP8", "nvfp4": "NVFP4", "mxfp8": "MXFP8"}
DTYPES = {
    "FP8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "NVFP4": {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
    "MXFP8": {"weight": torch.float8_e4m3fn, "weight_scale": torch.uint8},
}
SHAPES = {
    "FP8": {"weight": (96, 256), "weight_scale": ()},
    "NVFP4": {"weight": (96, 128), "weight_scale": (96, 16), "weight_scale_2": ()},
    "MXFP8": {"weight": (96, 256), "weight_scale": (96, 8)},
}


def dequantized(algorithm: str, state: dict[str, torch.Tensor], shape, dtype: torch.dtype) -> torch.Tensor:
    codes, scale = state["weight"], state["weight_scale"]
    if algorithm == "NVFP4":
        scales = {"scale": scale, "double_scale": state["weight_scale_2"], "block_sizes": {-1: 16}}
        return NVFP4QTensor(shape, dtype, codes).dequantize(dtype, **scales)
    return {"FP8": FP8QTensor, "MXFP8": MXFP8QTensor}[algorithm](shape, dtype, codes).dequantize(dtype, scale=scale)


@pytest.mark.parametrize("format", ALGORITHMS)
def test_a_saved_weight_is_dequantised_to_its_values(format, tmp_path):
    folder, algorithm = tmp_path / "model", ALGORITHMS[format]
    weight = sd.quantize(peers.example(), format)
    tree = {"a.weight": weight, "a.input_scale": np.float32(0.5), "lm_head.weight": peers.example()}
    checkpoint.save(tree, folder, "modelopt")
    state = peers.of_module(peers.tensors(folder), "a")
    del state["input_scale"]
    assert {name: x.dtype for name, x in state.items()} == DTYPES[algorithm]
    assert {name: tuple(x.shape) for name, x in state.items()} == SHAPES[algorithm]
    found = dequantized(algorithm, state, weight.shape, torch.float32)
    peers.assert_same_bits(found, checkpoint.load(folder, dequantize=jnp.float32)["a.weight"])
    expected = checkpoint.dequantize(weight, jnp.float32)
    if weight.tensor_scale is None:
        peers.assert_same_bits(found, expected)
    else:  # ModelOpt multiplies the two scales first, which is another rounding, and has no negative zero
        peers.assert_close(found, expected, 2.0**-22)


@pytest.mark.parametrize("format", ALGORITHMS)
def test_both_configurations_say_the_same(format, tmp_path):
    weight = sd.quantize(peers.example(), format)
    tree = {"a.weight": weight, "a.input_scale": np.float32(0.5), "lm_head.weight": peers.example()}
    checkpoint.save(tree, tmp_path / "model", "modelopt")
    own = json.loads((tmp_path / "model" / "hf_quant_config.json").read_text())
    mirrored = peers.quantization_config(tmp_path / "model")
    assert mirrored == convert_hf_quant_config_format(own)


def quantized(algorithm: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a module as ModelOpt computes them."""
    if algorithm == "NVFP4":
        codes, scale, scale_2 = NVFP4QTensor.quantize(weight, 16)
        return {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    if algorithm == "MXFP8":
        codes, scale = MXFP8QTensor.quantize(weight)
    else:
        codes, scale = FP8QTensor.quantize(weight.float())
    return {"weight": codes._quantized_data, "weight_scale": scale}


@pytest.mark.parametrize("algorithm", DTYPES)
def test_a_weight_that_modelopt_quantises_is_loaded_with_its_values(algorithm, tmp_path):
    weight = peers.as_torch(peers.example())
    state = quantized(algorithm, weight)
    assert {name: x.dtype for name, x in state.items()} == DTYPES[algorithm]
    save_file({f"a.{name}": x for name, x in state.items()}, tmp_path / "model.safetensors")
    config = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config))
    found = dequantized(algorithm, state, tuple(weight.shape), torch.float32)
    peers.assert_same_bits(found, checkpoint.load(tmp_path, dequantize=jnp.float32)["a.weight"])

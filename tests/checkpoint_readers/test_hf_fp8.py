"""transformers accepts our `fp8` configurations and dequantises our weights to our values."""

import peers
import pytest
import torch
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoQuantizationConfig

import scaledot as sd
from scaledot import checkpoint


@pytest.mark.parametrize(
    ("format", "shape", "block"),
    [
        ("fp8_e4m3", (96, 256), (0, 0)),
        ("fp8_e4m3", (256, 384), (128, 128)),
        ("fp8_e4m3", (96, 256), (32, 64)),
        ("mxfp8", (96, 256), (1, 32)),
        ("mxfp8", (96, 256), (32, 32)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_saved_weight_is_dequantised_to_its_values(format, shape, block, dtype, tmp_path):
    weight = sd.quantize(peers.example(shape), format, block=block)
    checkpoint.save({"a.weight": weight, "lm_head.weight": peers.example()}, tmp_path / "model", "hf-fp8")
    config = AutoQuantizationConfig.from_dict(peers.quantization_config(tmp_path / "model"))
    assert isinstance(config, FineGrainedFP8Config)
    assert (config.activation_scheme, config.modules_to_not_convert) == ("dynamic", ["lm_head"])
    expected_block = None if block == (0, 0) else list(block)
    assert config.weight_block_size == expected_block
    state = peers.of_module(peers.tensors(tmp_path / "model"), "a")
    found = Fp8Dequantize(None)._dequantize_one(state["weight"], state["weight_scale_inv"], dtype)
    peers.assert_same_bits(found, checkpoint.dequantize(weight, peers.jax_dtype(found)))
    peers.assert_same_bits(found, checkpoint.load(tmp_path / "model", dequantize=peers.jax_dtype(found))["a.weight"])

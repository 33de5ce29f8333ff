"""transformers loads a tiny Llama that we save, and computes our logits from the same weights."""

import functools

import jax
import jax.numpy as jnp
import llama
import numpy as np
import peers
import pytest
import torch
from compressed_tensors.quantization import disable_quantization
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

import scaledot as sd
from scaledot import checkpoint

# Without a GPU, transformers computes with dequantised weights. It has no reader for ModelOpt's layout.
DEQUANTIZED = {
    "compressed-tensors": CompressedTensorsConfig(dequantize=True),
    "hf-fp8": FineGrainedFP8Config(dequantize=True),
}
# A matmul over K elements has an error of at most K 2^-24 of sum |x w| in float32. 13 matmuls of at most 256 elements
# follow each other: six per layer, and the output layer. Each library has such errors. They average out to less than
# sqrt(K) 2^-24, which makes up for sum |x w| being larger than the logits.
BOUND = 2 * 13 * 256 * 2.0**-24

original = functools.cache(llama.example)


def quantized(formats: dict[str, tuple]) -> dict:
    """Quantises each kernel to the format of the first key of `formats` that is a substring of its path."""
    _, params, _ = original()

    def cast(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        key = next((key for key in formats if key in path), None)
        if key is None or not path.endswith("kernel"):
            return leaf
        format, block = formats[key]
        return sd.quantize(leaf, format, axis=0 if block is None else (0, 1), block=block)

    return jax.tree_util.tree_map_with_path(cast, params)


def loaded(folder, layout: str | None = None) -> torch.nn.Module:
    """The model as transformers loads it; every tensor of the files has a parameter, and every parameter a tensor."""
    arguments = {} if layout is None else {"quantization_config": DEQUANTIZED[layout]}
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **arguments)
    assert not any(report.values()), report
    return model.apply(disable_quantization)  # of activations


def assert_same_model(folder, model: torch.nn.Module) -> None:
    """Compares all weights bit for bit, in the dtype to which transformers dequantises them, and the logits."""
    dtype = peers.jax_dtype(model.model.layers[0].mlp.up_proj.weight)
    state = model.state_dict()
    for name, array in checkpoint.load(folder, dequantize=dtype).items():
        peers.assert_same_bits(state[name], array)
    linen, _, tokens = original()
    params = checkpoint.load(folder, dequantize=dtype, rename=checkpoint.LLAMA)
    expected = linen.apply({"params": jax.tree.map(lambda x: x.astype(jnp.float32), params)}, tokens)
    with torch.no_grad():
        logits = model.float()(peers.as_torch(tokens).long()).logits
    assert np.max(np.abs(logits.numpy() - expected)) <= BOUND * np.max(np.abs(expected))


def test_an_unquantised_model_has_our_logits(tmp_path):
    _, params, _ = original()
    checkpoint.save(params, tmp_path / "model", config=llama.CONFIG, rename=checkpoint.LLAMA)
    assert_same_model(tmp_path / "model", loaded(tmp_path / "model"))


PROJECTIONS = "_proj"
MIXED = {"q_proj": ("fp8_e4m3", (0, 1)), "self_attn": ("int8", None), "mlp": ("int4", (32, 1))}
CASES = [
    ("compressed-tensors", None, {PROJECTIONS: case})
    for case in [
        ("fp8_e4m3", None),
        ("fp8_e4m3", (128, 128)),
        ("int8", None),
        ("int4", (32, 1)),
        ("int3", (64, 1)),
        ("nvfp4", None),
        ("mxfp4", None),
        ("mxfp6_e2m3", None),
        ("mxfp8", None),
    ]
]
CASES += [("compressed-tensors", "dynamic", {PROJECTIONS: (name, None)}) for name in ("fp8_e4m3", "int8")]
CASES += [("compressed-tensors", None, MIXED)]
CASES += [("hf-fp8", None, {PROJECTIONS: ("fp8_e4m3", block)}) for block in (None, (128, 128), (64, 32))]


@pytest.mark.parametrize(("layout", "activations", "formats"), CASES, ids=str)
def test_a_quantised_model_has_the_logits_of_our_dequantised_weights(layout, activations, formats, tmp_path):
    checkpoint.save(
        quantized(formats),
        tmp_path / "model",
        layout,
        config=llama.CONFIG,
        rename=checkpoint.LLAMA,
        activations=activations,
        max_shard_bytes=200_000,
    )
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    assert_same_model(tmp_path / "model", loaded(tmp_path / "model", layout))

"""A Llama-style model through every writable layout: saved, loaded back, and run with quantised kernels."""

import functools

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest

import scaledot as sd
from scaledot import checkpoint

CASES = {
    "compressed-tensors": [
        ("fp8_e4m3", None),
        ("fp8_e4m3", (0, 1)),
        ("fp8_e4m3", (128, 128)),
        ("int8", None),
        ("int4", (32, 1)),
        ("int3", (64, 1)),
        ("nvfp4", None),
        ("mxfp4", None),
        ("mxfp6_e2m3", None),
        ("mxfp8", None),
    ],
    "modelopt": [("fp8_e4m3", None), ("nvfp4", None), ("mxfp8", None)],
    "hf-fp8": [("fp8_e4m3", None), ("fp8_e4m3", (128, 128))],
    "scaledot": [("nf4", None), ("int2", (16, 1)), ("mxfp6_e3m2", None), ("nvfp4", (16, 16))],
}
# A matmul over K elements accumulates in float32 with a relative error of at most K 2^-24 of sum |x w|. Ten matmuls
# of at most 256 elements follow each other from the embedding to the logits.
BOUND = 10 * 256 * 2.0**-24


@functools.cache
def original():
    return llama.example()


def quantized(format: str, block) -> dict:
    """The parameters with quantised kernels, except the output layer."""
    _, params, _ = original()

    def cast(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith("kernel") or name.startswith("lm_head"):
            return leaf
        if block is None:
            return sd.quantize(leaf, format, axis=0)
        return sd.quantize(leaf, format, axis=(0, 1), block=block)

    return jax.tree_util.tree_map_with_path(cast, params)


def is_weight(node) -> bool:
    return isinstance(node, sd.ScaledArray)


# `make test` runs these, which have each kind of codes and scales once; `make test-all` runs every case.
USUAL = {
    ("compressed-tensors", "int4"),
    ("compressed-tensors", "mxfp6_e2m3"),
    ("modelopt", "nvfp4"),
    ("hf-fp8", "fp8_e4m3"),
    ("scaledot", "nf4"),
}


def case(layout: str, format: str, block):
    marks = () if (layout, format) in USUAL else pytest.mark.exhaustive
    return pytest.param(layout, format, block, marks=marks)


@pytest.mark.parametrize(
    ("layout", "format", "block"), [case(layout, *row) for layout, rows in CASES.items() for row in rows]
)
def test_logits_are_those_of_the_dequantised_weights(layout, format, block, tmp_path, standard_promotion):
    model, _, tokens = original()
    params = quantized(format, block)
    options = {"config": llama.CONFIG, "rename": checkpoint.LLAMA}
    if layout == "modelopt":
        options["activations"] = "dynamic"
    checkpoint.save(params, tmp_path / "model", layout, **options)
    loaded = checkpoint.load(tmp_path / "model", rename=checkpoint.LLAMA)
    plain = jax.tree.map(lambda q: checkpoint.dequantize(q) if is_weight(q) else q, loaded, is_leaf=is_weight)
    saved = jax.tree.map(lambda q: sd.dequantize(q) if is_weight(q) else q, params, is_leaf=is_weight)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        # The two scales of NVFP4 are multiplied in the order of the library; compressed-tensors stores a reciprocal.
        tolerance = 2.0**-22 if format == "nvfp4" else 0
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=0)
    expected = model.apply({"params": plain}, tokens)
    logits = sd.linen.with_quantized_params(model).apply({"params": loaded}, tokens)
    assert jnp.max(jnp.abs(logits - expected)) <= BOUND * jnp.max(jnp.abs(expected))


def test_matmuls_take_the_scaled_operands(tmp_path):
    checkpoint.save(quantized("nvfp4", None), tmp_path / "model", "modelopt", rename=checkpoint.LLAMA)
    kernel = checkpoint.load(tmp_path / "model", rename=checkpoint.LLAMA)["layers_0"]["mlp"]["up_proj"]["kernel"]
    lines = sd.explain(sd.matmul, jnp.ones((4, llama.WIDTH), jnp.bfloat16), kernel).splitlines()
    assert "nvfp4" in lines[0]
    assert any(line.split()[:2] == ["xla_upcast", "selected:"] for line in lines), lines

"""Compiles weight-only matmuls for an H200 on a machine without a GPU: `make test-gpu-compile`."""

import re

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

import scaledot as sd
from scaledot.kernels.hopper import support

if not gpu_compile.is_possible():
    pytest.skip(gpu_compile.MISSING, allow_module_level=True)

pytestmark = needs_mosaic
BF16 = jnp.bfloat16
WEIGHTS = {
    "int4": 128,
    "int8": 0,
    "mxfp4": None,
    "nvfp4": None,
    "nf4": None,
}  # block sizes along K; 0: one scale per column; None: the format's default


@pytest.fixture
def ptxas_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return gpu_compile.ptxas_reports(monkeypatch, tmp_path)


def compiled(format: str, rows: int, k: int, columns: int, count: int = 1, out=BF16) -> str:
    """The optimised HLO of x (rows, k) @ w (k, columns), for `count` weights."""
    block = WEIGHTS[format]
    weights = jax.eval_shape(
        lambda: [sd.quantize(jnp.zeros((k, columns)), format, axis=0, block=block, pad=True) for _ in range(count)]
    )
    leaves, tree = jax.tree.flatten(weights)
    x = jax.ShapeDtypeStruct((rows, k), BF16)

    def matmuls(x, *leaves):
        return [
            sd.matmul(x, w, preferred_element_type=out, kernel="hopper_weight_only")
            for w in jax.tree.unflatten(tree, leaves)
        ]

    return gpu_compile.compiled_for("H200", matmuls, x, *leaves)


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("format", WEIGHTS)
def test_weight_only_matmuls_do_not_spill(ptxas_folder, format, rows):
    compiled(format, rows, 4096, 14336)
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("out", ["float16", "float32"])
def test_codebooks_with_more_terms_do_not_spill(ptxas_folder, out, rows):
    compiled("nf4", rows, 4096, 14336, out=out)
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("format", WEIGHTS)
def test_packed_weights_reach_the_kernel_without_a_copy(ptxas_folder, format, rows):
    """A matmul is the kernel and one fusion, which adds its split-K results."""
    text = compiled(format, rows, 4096, 14336, count=2)
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r'custom_call_target="mosaic_gpu', entry)) == 2
    assert len(re.findall(r" fusion\(", entry)) == 2
    assert not re.search(r" (transpose|copy|convert)\(", entry)


def test_sizes_that_are_no_multiple_of_a_tile_are_padded(ptxas_folder):
    compiled("int4", 17, 4136, 1000)
    compiled("nvfp4", 3, 2064, 520)
    assert gpu_compile.spills(ptxas_folder) == [0, 0]

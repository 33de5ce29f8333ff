"""What the compiler makes of products with packed weights for an H200, without one: `make test-gpu-compile`."""

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
WEIGHTS = {"int4": 128, "int8": 0, "mxfp4": None, "nvfp4": None, "nf4": None}  # blocks along the sum


@pytest.fixture
def listed(monkeypatch, tmp_path):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return gpu_compile.listings(monkeypatch, tmp_path)


def compiled(format: str, rows: int, terms: int, columns: int, count: int = 1, out=BF16) -> str:
    """x times `count` weights, as HLO."""
    block = WEIGHTS[format]
    weights = jax.eval_shape(
        lambda: [sd.quantize(jnp.zeros((terms, columns)), format, axis=0, block=block, pad=True) for _ in range(count)]
    )
    leaves, kind = jax.tree.flatten(weights)
    x = jax.ShapeDtypeStruct((rows, terms), BF16)

    def products(x, *leaves):
        return [
            sd.matmul(x, w, preferred_element_type=out, kernel="hopper_weight_only")
            for w in jax.tree.unflatten(kind, leaves)
        ]

    return gpu_compile.compiled_for("H200", products, x, *leaves)


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("format", WEIGHTS)
def test_products_with_packed_weights_spill_nothing(listed, format, rows):
    compiled(format, rows, 4096, 14336)
    assert gpu_compile.spills(listed) == [0]


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("out", ["float16", "float32"])
def test_entries_of_more_parts_spill_nothing(listed, out, rows):
    compiled("nf4", rows, 4096, 14336, out=out)
    assert gpu_compile.spills(listed) == [0]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("format", WEIGHTS)
def test_weights_reach_the_kernel_as_they_are_stored(listed, format, rows):
    """A product is the kernel and one pass over its sums."""
    text = compiled(format, rows, 4096, 14336, count=2)
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r'custom_call_target="mosaic_gpu', entry)) == 2
    assert len(re.findall(r" fusion\(", entry)) == 2
    assert not re.search(r" (transpose|copy|convert)\(", entry)


def test_sizes_that_suit_no_tile_are_filled_up(listed):
    compiled("int4", 17, 4136, 1000)
    compiled("nvfp4", 3, 2064, 520)
    assert gpu_compile.spills(listed) == [0, 0]

"""What the compiler makes of layers on eight H200s, without one: `make test-gpu-compile`."""

import re

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from hopper import needs_mosaic
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scaledot import train
from scaledot.kernels.hopper import support

if not gpu_compile.is_possible():
    pytest.skip(gpu_compile.MISSING, allow_module_level=True)

pytestmark = needs_mosaic
ROWS, INPUTS, OUTPUTS, DEVICES = 8192, 4096, 8192, 8
COLUMN = train.Specs(P("tp"), P(None, "tp"), P(None, "tp"))
ROW = train.Specs(P(None, "tp"), P("tp"), P("tp"))


@pytest.fixture
def mesh(monkeypatch, tmp_path):
    """With our kernels, as on a machine that has these devices."""
    gpu_compile.listings(monkeypatch, tmp_path)
    for reason in ("device_reason", "machine_reason"):
        monkeypatch.setattr(support, reason, lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return topologies.make_mesh(gpu_compile.devices_of("H200", DEVICES), (DEVICES,), ("tp",))


def schedule(mesh, recipe: str, specs: train.Specs, overlap: str | tuple[str, ...]) -> str:
    """The order of a layer's forward program: ( and ) where a transfer to a neighbour starts and is done, k for a
    product of ours, g for anything gathered or scattered by itself."""
    shapes = ((ROWS, INPUTS), specs.x), ((INPUTS, OUTPUTS), specs.w)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes)
    with jax.set_mesh(mesh):
        f = jax.jit(lambda x, w: train.dense(x, w, recipe=recipe, specs=specs, overlap=overlap))
        text = f.lower(x, w).compile().as_text()
    marks = {
        r" collective-permute-start\(": "(",
        r" collective-permute-done\(": ")",
        r" collective-permute\(": "()",
        r" (all-gather|reduce-scatter)(-start)?\(": "g",
        r"custom_call_target=\"mosaic_gpu[^\n]*matmul": "k",
    }
    entry = text[text.index("\nENTRY") :].splitlines()
    return "".join(mark for line in entry for pattern, mark in marks.items() if re.search(pattern, line))


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("specs", [COLUMN, ROW], ids=["column", "row"])
def test_products_are_computed_between_the_start_of_a_transfer_and_its_end(mesh, recipe, specs):
    found = schedule(mesh, recipe, specs, "tp")
    assert found.count("k") == DEVICES
    assert "g" not in found
    assert len(re.findall(r"\([^)]*k[^)]*\)", found)) >= DEVICES // 2, found


@pytest.mark.parametrize(("recipe", "kernels"), [("fp8_current", 9), ("fp8_block", 6), ("nvfp4", 9)])
def test_casts_of_parts_are_kernels_that_share_a_scale(mesh, recipe, kernels):
    """As on one device: for fp8 with one scale, largest magnitudes, casts and products of three tensors each."""
    shapes = ((ROWS, INPUTS), P("tp"), jnp.bfloat16), ((INPUTS, OUTPUTS), P(), jnp.float32)
    x, w = (jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, spec)) for s, spec, dtype in shapes)
    specs = train.Specs(P("tp"), P(), P("tp"))

    def step(x, w):
        y, pull = jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, specs=specs, key=jax.random.key(0)), x, w)
        return pull(y)

    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(x, w).compile().as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels


@pytest.mark.parametrize("specs", [COLUMN, ROW], ids=["column", "row"])
def test_kernels_run_on_parts(mesh, specs):
    assert sorted(schedule(mesh, "fp8_current", specs, ())) == ["g", "k"]

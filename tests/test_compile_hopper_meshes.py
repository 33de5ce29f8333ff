"""Compiles layers for a mesh of eight H200s on a machine without a GPU: `make test-gpu-compile`."""

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
    """A mesh of eight H200s; the Hopper kernels are enabled, as on a machine that has these devices."""
    gpu_compile.ptxas_reports(monkeypatch, tmp_path)
    for reason in ("mesh_reason", "device_reason"):
        monkeypatch.setattr(support, reason, lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return topologies.make_mesh(gpu_compile.devices_of("H200", DEVICES), (DEVICES,), ("tp",))


def schedule(mesh, recipe: str, specs: train.Specs, overlap: str | tuple[str, ...]) -> str:
    """The order of operations in a layer's forward program.

    "(" and ")" are the start and end of a collective-permute, "k" is a Hopper matmul kernel, and "g" an all-gather or
    reduce-scatter.
    """
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
def test_matmuls_overlap_collective_permutes(mesh, recipe, specs):
    order = schedule(mesh, recipe, specs, "tp")
    assert order.count("k") == DEVICES
    assert "g" not in order
    assert len(re.findall(r"\([^)]*k[^)]*\)", order)) >= DEVICES // 2, order


@pytest.mark.parametrize(("recipe", "kernels"), [("fp8_current", 6), ("fp8_block", 6), ("nvfp4", 12)])
def test_casts_of_shards_are_kernels_that_share_a_scale(mesh, recipe, kernels):
    """As many kernels as on one device: a cast of each of three tensors and three matmuls.

    nvfp4 has six more: the amaxes of x and g, with and without rotation, three tensor scales, and the seeds of g.
    """
    shapes = ((ROWS, INPUTS), P("tp"), jnp.bfloat16), ((INPUTS, OUTPUTS), P(), jnp.float32)
    x, w = (jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, spec)) for s, spec, dtype in shapes)
    specs = train.Specs(P("tp"), P(), P("tp"))

    def step(x, w):
        y, vjp = jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, specs=specs, key=jax.random.key(0)), x, w)
        return vjp(y)

    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(x, w).compile().as_text()
    assert len(re.findall(r'custom_call_target="mosaic_gpu', text)) == kernels


@pytest.mark.parametrize("specs", [COLUMN, ROW], ids=["column", "row"])
def test_kernels_run_on_shards(mesh, specs):
    assert sorted(schedule(mesh, "fp8_current", specs, ())) == ["g", "k"]

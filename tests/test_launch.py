"""Kernels are lowered once per process, and stored for other processes in JAX's persistent cache."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import interpreted, lowered_for_hopper, needs_mosaic

from scaledot import state as states
from scaledot import train
from scaledot.kernels import table
from scaledot.parallel.types import ONE_DEVICE
from scaledot.recipes import RECIPES

pytestmark = [needs_mosaic, pytest.mark.jax_versions]


@pytest.fixture
def exported(monkeypatch):
    """Signatures of the kernels that are exported, in a process that has lowered none yet."""
    from scaledot.kernels.hopper import launch

    signatures, export = [], launch._export
    monkeypatch.setattr(launch, "_EXPORTED", {})
    monkeypatch.setattr(launch, "_export", lambda *arguments: signatures.append(arguments[0]) or export(*arguments))
    jax.clear_caches()
    with lowered_for_hopper(monkeypatch):
        yield signatures


def lowered(rows: int = 256) -> str:
    x, w = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    traced = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_current")).trace(x, w)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def forget_kernels(monkeypatch):
    """Resets the state of a process that has lowered nothing."""
    from scaledot.kernels.hopper import launch

    monkeypatch.setattr(launch, "_EXPORTED", {})
    jax.clear_caches()


def test_programs_of_a_process_share_kernels(exported):
    """Two casts and a matmul; with more rows, the cast of x and the matmul are new."""
    lowered()
    first = len(exported)
    jax.clear_caches()
    lowered()
    assert len(exported) == first == 3
    lowered(512)
    assert len(exported) == first + 2


def test_kernels_are_compiled_in_the_background_on_a_gpu(exported, monkeypatch):
    from scaledot.kernels.hopper import launch

    submitted, device = [], types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(launch, "_COMPILERS", types.SimpleNamespace(submit=submitted.append))
    lowered()
    assert exported
    assert not submitted  # there is no GPU
    forget_kernels(monkeypatch)
    exported.clear()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    lowered()
    assert len(submitted) == len(exported) > 0


@pytest.fixture
def cache(tmp_path):
    """The directory of JAX's persistent cache."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path
    for name, value in zip(("jax_compilation_cache_dir", "jax_enable_compilation_cache"), before, strict=True):
        jax.config.update(name, value)


def test_the_next_process_loads_kernels_from_jaxs_cache(exported, monkeypatch, cache):
    pytest.importorskip("flatbuffers", reason="jax.export needs it for serialisation")
    text = lowered()
    files = sorted((cache / "scaledot_kernels").iterdir())
    assert len(files) == len(exported) == 3
    forget_kernels(monkeypatch)
    assert lowered() == text
    assert len(exported) == 3
    files[0].write_bytes(b"not a kernel")
    forget_kernels(monkeypatch)
    with pytest.warns(UserWarning, match=f"{files[0].name} is damaged and is replaced"):
        assert "mosaic_gpu" in lowered()
    assert len(exported) == 4


@pytest.mark.parametrize("amax", [0.0, 1e-30, 3.0, 1e30])
def test_multipliers_of_delayed_scaling_are_bit_identical_to_the_reference(monkeypatch, amax):
    """On a GPU a kernel computes them."""
    cast = RECIPES["fp8_delayed"].fwd.lhs
    state = states.init_state("fp8_delayed")["x"]
    for observed in (amax, 2.0):
        expected = states.advance(cast, state, jnp.float32(observed))
        with interpreted(monkeypatch):
            found = states.advance(cast, state, jnp.float32(observed), table.scalar_runner(ONE_DEVICE))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        state = expected

"""Kernels are lowered once in a process, and stored for others beside what JAX compiles."""

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
    """The problems that were exported, in a process that has lowered nothing yet."""
    from scaledot.kernels.hopper import launch

    found, export = [], launch._export
    monkeypatch.setattr(launch, "_EXPORTED", {})
    monkeypatch.setattr(launch, "_export", lambda *arguments: found.append(arguments[0]) or export(*arguments))
    jax.clear_caches()
    with lowered_for_hopper(monkeypatch):
        yield found


def lowered(rows: int = 256) -> str:
    x, w = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)
    traced = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_current")).trace(x, w)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def forgotten(monkeypatch):
    """As in a process that has lowered nothing."""
    from scaledot.kernels.hopper import launch

    monkeypatch.setattr(launch, "_EXPORTED", {})
    jax.clear_caches()


def test_programs_of_a_process_share_kernels(exported):
    """Two amaxes, two casts and a matmul; for more rows those of x and the matmul are other ones."""
    lowered()
    first = len(exported)
    jax.clear_caches()
    lowered()
    assert len(exported) == first == 5
    lowered(512)
    assert len(exported) == first + 3


@pytest.fixture
def cache(tmp_path):
    """A folder for JAX's persistent cache."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    yield tmp_path
    for name, value in zip(("jax_compilation_cache_dir", "jax_enable_compilation_cache"), before, strict=True):
        jax.config.update(name, value)


def test_the_next_process_finds_kernels_in_jaxs_cache(exported, monkeypatch, cache):
    pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
    text = lowered()
    files = sorted((cache / "scaledot_kernels").iterdir())
    assert len(files) == len(exported) == 5
    forgotten(monkeypatch)
    assert lowered() == text
    assert len(exported) == 5
    files[0].write_bytes(b"not a kernel")
    forgotten(monkeypatch)
    with pytest.warns(UserWarning, match=f"{files[0].name} is damaged and is replaced"):
        assert "mosaic_gpu" in lowered()
    assert len(exported) == 6


@pytest.mark.parametrize("amax", [0.0, 1e-30, 3.0, 1e30])
def test_factors_of_histories_are_those_of_the_reference(monkeypatch, amax):
    """A kernel computes them on a GPU: the same arithmetic, to the bit."""
    cast = RECIPES["fp8_delayed"].fwd.lhs
    state = states.init_state("fp8_delayed")["x"]
    for seen in (amax, 2.0):
        expected = states.advance(cast, state, jnp.float32(seen))
        with interpreted(monkeypatch):
            found = states.advance(cast, state, jnp.float32(seen), table.scalar_program(ONE_DEVICE))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        state = expected

"""Fixtures that tests ask for by name."""

import jax
import pytest

collect_ignore = ["conftest.py"]  # holds no examples, and docs has one of the same name


@pytest.fixture
def standard_promotion():
    """JAX's own promotion rules, for code that is not ours."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def hopper(request, monkeypatch, capfd):
    """Kernels for Hopper are taken, for as many MULTIPROCESSORS as a module says, and no race may be found."""
    from hopper import interpreted

    with interpreted(monkeypatch, getattr(request.module, "MULTIPROCESSORS", 2)):
        yield
    assert "RACE DETECTED" not in capfd.readouterr().out

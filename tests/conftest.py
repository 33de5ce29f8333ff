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
    """Enables interpreted Hopper kernels on `SM_COUNT` SMs, a constant of the test module, and fails on races."""
    from hopper import interpreted

    with interpreted(monkeypatch, getattr(request.module, "SM_COUNT", 2)):
        yield
    assert "RACE DETECTED" not in capfd.readouterr().out

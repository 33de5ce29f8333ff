"""Fixtures of several test modules."""

import jax
import pytest

collect_ignore = ["conftest.py"]  # this file has no doctests, and docs/conftest.py has the same module name


@pytest.fixture
def standard_promotion():
    """Restores JAX's default promotion rules, for code of other libraries."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def hopper(request, monkeypatch, capfd):
    """Runs Hopper kernels in JAX's interpreter, with the number of SMs of the module's MULTIPROCESSORS; races fail."""
    from hopper import interpreted

    with interpreted(monkeypatch, getattr(request.module, "MULTIPROCESSORS", 2)):
        yield
    assert "RACE DETECTED" not in capfd.readouterr().out

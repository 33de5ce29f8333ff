"""Fixtures of several test modules."""

import jax
import pytest

# This file has no doctests, and docs/conftest.py has the same module name. Tests with MaxText and tests with readers of
# checkpoints have environments of their own.
collect_ignore = ["conftest.py", "maxtext_training", "checkpoint_readers"]


@pytest.fixture
def standard_promotion():
    """Restores JAX's default promotion rules, for code of other libraries."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def hopper(request, monkeypatch, capfd):
    """Enables interpreted Hopper kernels on `SM_COUNT` SMs, a constant of the test module, and fails on races."""
    from hopper import interpreted

    with interpreted(monkeypatch, getattr(request.module, "SM_COUNT", 2)):
        yield
    assert "RACE DETECTED" not in capfd.readouterr().out

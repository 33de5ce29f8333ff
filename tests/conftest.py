"""Strictness for every test: no silent promotion, eight CPU devices, warnings are errors (pyproject)."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import pytest

collect_ignore = ["conftest.py"]  # holds no examples, and docs has one of the same name

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes first examples slow; derandomised so that a run can be repeated.
hypothesis.settings.register_profile("scaledot", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("scaledot")


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="also run what is marked `every`: whole products of tables")


def pytest_collection_modifyitems(config, items):
    left_out = [] if config.getoption("--every") else [item for item in items if item.get_closest_marker("every")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("every")]


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

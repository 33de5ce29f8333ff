"""Runs the code of documentation pages with JAX's default promotion rules, as readers would."""

import jax
import pytest

collect_ignore = ["conftest.py"]  # this file has no doctests


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield

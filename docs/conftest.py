"""Documents are run as readers run them, with JAX's own promotion rules."""

import jax
import pytest

collect_ignore = ["conftest.py"]  # this file holds no examples


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield

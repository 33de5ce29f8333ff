"""The examples run and learn, and the two frameworks agree on how much."""

import importlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch, standard_promotion):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    for name in ("source", "gpt_training", "gpt_linen", "gpt_nnx"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["gpt_linen", "gpt_nnx"])
def test_a_tiny_gpt_learns_with_delayed_scaling(example, name):
    excess = example(name).train("fp8_delayed", steps=40, quiet=True)
    assert np.all(np.isfinite(excess))
    assert np.mean(excess[-5:]) < np.mean(excess[:5]) - 0.2


def test_the_source_has_the_entropy_it_says(example):
    """The mean surprise of 100k symbols under the true transitions; one standard error is about 0.004 nats."""
    source = example("source").Source()
    symbols = np.asarray(source.batch(jax.random.key(0), 256, 402))
    surprise = -np.log(source.transitions[symbols[:, :-2], symbols[:, 1:-1], symbols[:, 2:]])
    assert abs(surprise.mean() - source.entropy) < 0.02

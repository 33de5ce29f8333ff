"""The Equinox code of docs/howto/equinox-and-plain-jax.md, if Equinox is installed."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal

import scaledot as sd
from scaledot import train

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "equinox-and-plain-jax.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_equinox_code_of_the_page_trains_and_serves(tmp_path):
    eqx = pytest.importorskip("equinox")
    blocks = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if ">>>" not in code]
    assert len(blocks) == 2
    names = {"jax": jax, "jnp": jnp, "sd": sd, "train": train, "x": normal(0, (8, 64))}
    for code in blocks:
        exec(code, names)
    served = names["served"]
    assert names["grads"].weight.shape == (64, 32)
    assert isinstance(served.weight, sd.ScaledArray)
    expected = names["x"] @ sd.dequantize(served.weight) + served.bias
    # A float32 sum of 64 elements has 63 roundings of 2^-24, and each element 4; both sides have them.
    allowed = 2 * 68 * 2.0**-24 * (jnp.abs(names["x"]) @ jnp.abs(sd.dequantize(served.weight)))
    assert (jnp.abs(names["y"] - expected) <= allowed).all()
    assert all(isinstance(each.weight, sd.ScaledArray) for each in names["served_layers"])
    ocp = pytest.importorskip("orbax.checkpoint")
    arrays = sd.orbax.to_saveable(eqx.filter(served, eqx.is_array))
    with warnings.catch_warnings(), ocp.StandardCheckpointer() as checkpointer:
        warnings.simplefilter("ignore")  # Orbax's own deprecations
        checkpointer.save(tmp_path / "saved", arrays)
        checkpointer.wait_until_finished()
        restored = sd.orbax.from_saveable(checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: arrays)))
    np.testing.assert_array_equal(eqx.combine(restored, served)(names["x"]), served(names["x"]))

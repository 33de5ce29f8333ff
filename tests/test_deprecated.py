"""Renamed public names: each still works, and warns with the new name."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

import scaledot as sd
from scaledot import deprecated
from scaledot.kernels import table


@pytest.mark.parametrize(("old", "new"), deprecated.ATTRIBUTES.items())
def test_old_attributes_of_the_package_warn_and_work(old, new):
    module, _, attribute = f"scaledot.{new}".rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"'{old}' was renamed to '{new}'"):
        found = getattr(sd, old)
    assert found is getattr(importlib.import_module(module), attribute)
    assert old not in sd.__all__


@pytest.mark.parametrize(("old", "new"), deprecated.KERNELS.items())
def test_old_names_of_kernels_warn_and_select_the_renamed_kernel(old, new):
    names = {row.name for rows in table.tables() for row in rows}
    assert new in names
    assert old not in names
    x = jnp.ones((4, 32))
    call = (lambda: sd.quantize(x, "mxfp8", kernel=old)) if "cast" in old else (lambda: sd.matmul(x, x.T, kernel=old))
    with (
        pytest.warns(DeprecationWarning, match=f"'{old}' was renamed to '{new}'"),
        pytest.raises((NotImplementedError, ValueError), match=f"`kernel` '{new}'"),  # no GPU, or no groups
    ):
        call()


@pytest.mark.parametrize(("old", "new"), deprecated.SCALE_RULES.items())
def test_old_names_of_scale_rules_warn_and_work(old, new):
    with pytest.warns(DeprecationWarning, match=f"'{old}' was renamed to '{new}'"):
        format = sd.Format("custom", "float4_e2m1fn", scale="float8_e4m3fn", block=(16,), rule=old, two_level=True)
    assert format.rule == new


def test_factor_is_the_old_name_of_multiplier():
    x = jnp.array([1.0, 2.0])
    with pytest.warns(DeprecationWarning, match="`factor` of quantize was renamed to `multiplier`"):
        old = sd.quantize(x, "fp8_e4m3", factor=np.float32(8))
    new = sd.quantize(x, "fp8_e4m3", multiplier=np.float32(8))
    np.testing.assert_array_equal(old.data, new.data)
    assert float(old.scale[0]) == float(new.scale[0]) == 1 / 8
    history = sd.init_state("fp8_delayed")["x"]
    with pytest.warns(DeprecationWarning, match="renamed to `multiplier`"):
        assert history.factor is history.multiplier


def test_tile_is_the_old_name_of_the_block_2d_of_a_cast():
    cast = sd.Cast("mxfp8")
    with pytest.warns(DeprecationWarning, match="`Cast.tile` was renamed to `block_2d`"):
        assert cast.tile == cast.block_2d == (1, 32)


def test_warnings_point_at_the_caller():
    x, history, cast = jnp.ones(2), sd.init_state("fp8_delayed")["x"], sd.Cast("mxfp8")
    for use in (
        lambda: sd.collective,
        lambda: sd.quantize(x, "fp8_e4m3", factor=np.float32(8)),
        lambda: history.factor,
        lambda: cast.tile,
    ):
        with pytest.warns(DeprecationWarning, match="was renamed to") as caught:
            use()
        assert caught[0].filename == __file__

"""Unquantised float64 operands accumulate in float64, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import vjp_of

import scaledot as sd
from scaledot import train
from scaledot.recipes import UNQUANTISED

LARGE = 1e60  # beyond float32


def array(seed: int, *shape: int) -> np.ndarray:
    return LARGE * np.random.default_rng(seed).normal(size=shape)


def assert_float64(actual, *expected):
    """Allows for roundings to float64 only; a rounding to float32 would have a relative error of 2^-24."""
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=2.0**-40, atol=2.0**-45 * np.max(np.abs(b)))


@pytest.fixture
def x64_mesh():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.enable_x64(True), jax.set_mesh(mesh):
        yield


SPLIT = {"specs": train.Specs(P(None, "tp"), P("tp"), P("tp"))}


@pytest.mark.parametrize("options", [{}, SPLIT, SPLIT | {"overlap": "tp"}], ids=["one device", "all-reduce", "ring"])
def test_dense_layers_and_their_biases(x64_mesh, options):
    """Also with the contracting dim sharded over a mesh."""
    x, w, b, g = array(0, 8, 16), array(1, 16, 8) / LARGE, array(2, 8), array(3, 8, 8)
    results = vjp_of(lambda x, w, b: train.dense(x, w, b, recipe=UNQUANTISED, **options), g, x, w, b)
    assert_float64(results, x @ w + b, g @ w.T, x.T @ g, g.sum(0))


SPLIT_EXPERTS = {"specs": train.Specs(P(None, "tp"), P(None, "tp"), P())}


@pytest.mark.parametrize("options", [{}, SPLIT_EXPERTS], ids=["one device", "all-reduce"])
def test_experts_and_their_biases(x64_mesh, options):
    """Also with the contracting dim of every expert sharded over a mesh."""
    x, w, b, g = array(0, 8, 16), array(1, 2, 16, 8) / LARGE, array(2, 2, 8), array(3, 8, 8)
    sizes = np.array([3, 5])
    results = vjp_of(lambda x, w, b: train.ragged_dot(x, w, sizes, b, recipe=UNQUANTISED, **options), g, x, w, b)
    member = np.eye(2)[np.repeat([0, 1], sizes)]  # (rows, groups)
    y = np.einsum("tg,tk,gkn->tn", member, x, w) + member @ b
    dx, dw = np.einsum("tg,tn,gkn->tk", member, g, w), np.einsum("tg,tk,tn->gkn", member, x, g)
    assert_float64(results, y, dx, dw, member.T @ g)


def test_convolutions(x64_mesh):
    x, w, g = array(0, 4, 5, 3), array(1, 1, 3, 2) / LARGE, array(3, 4, 5, 2)
    options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "recipe": UNQUANTISED}
    results = vjp_of(lambda x, w: train.conv_general_dilated(x, w, (1,), "SAME", **options), g, x, w)
    assert_float64(results, x @ w[0], g @ w[0].T, np.einsum("nsc,nso->co", x, g)[None])


def test_numpy_arrays_are_converted_as_by_jax():
    """To float32 without jax_enable_x64, in `quantize` and `matmul`."""
    x = array(0, 4, 32) / LARGE
    q = sd.quantize(x, "mxfp8")
    assert q.dtype == sd.matmul(x, q.T).dtype == np.float32
    np.testing.assert_array_equal(q.data, sd.quantize(jnp.asarray(x), "mxfp8").data)


def test_dbias_of_float64_is_float64():
    x = array(0, 8, 32) / LARGE
    with jax.enable_x64(True):
        _, dbias = sd.quantize_dbias(jnp.asarray(x), "mxfp8")
    assert_float64([dbias], x.sum(0))

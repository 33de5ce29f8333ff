"""Delayed scaling of groups: `ragged_dot` with a history and a quantisation multiplier for each group."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import SHORT_HISTORY, assert_same, delayed

import scaledot as sd
from scaledot import train
from scaledot.recipes import Gemm, Recipe
from scaledot.state import AmaxHistory, merge

SIZES = np.array([10, 0, 20, 10])  # an empty group, and 8 rows of no group
GROUPS, ROWS, K, N = 4, 48, 32, 16
BOUNDS = list(itertools.pairwise([0, *np.cumsum(SIZES).tolist()]))


def arrays():
    """x (rows, k), w (groups, k, n), bias (groups, n) and g (rows, n), of different magnitudes in each group."""
    magnitude = 4.0 ** jnp.arange(GROUPS, dtype=jnp.float32)
    by_row = jnp.repeat(magnitude, SIZES, total_repeat_length=ROWS)[:, None]
    x, g = normal(0, (ROWS, K)) * by_row, normal(1, (ROWS, N)) / by_row
    return x, normal(2, (GROUPS, K, N)) * magnitude[:, None, None], normal(3, (GROUPS, N)), g


def step(matmul, recipe, **options):
    """A jitted function (x, w, bias, g, state, *args) -> y, dx, dw, dbias and the next state."""

    @jax.jit
    def run(x, w, bias, g, state, *args):
        def layer(x, w, bias, state):
            return matmul(x, w, *args, bias, recipe=recipe, state=state, **options)[0]

        y, vjp = jax.vjp(layer, x, w, bias, state)
        return y, *vjp(g)

    return run


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(SHORT_HISTORY, id="max"),
        # the function of the algorithm and the margin is the same with and without groups
        pytest.param(delayed(length=3, algorithm="most_recent", margin=1), id="last", marks=pytest.mark.exhaustive),
    ],
)
def test_a_ragged_dot_with_a_state_per_group_is_a_dense_per_group(recipe):
    """Three steps: the second and third use the multipliers of the first."""
    x, w, bias, g = arrays()
    grouped, alone = step(train.ragged_dot, recipe), step(train.dense, recipe)
    state = sd.init_state(recipe, groups=GROUPS)
    states = [sd.init_state(recipe) for _ in range(GROUPS)]
    for scale in (1.0, 3.0, 0.5):
        y, dx, dw, db, state = grouped(x * scale, w, bias, g, state, jnp.asarray(SIZES))
        for i, (start, stop) in enumerate(BOUNDS):
            rows = slice(start, stop)
            *expected, states[i] = alone(x[rows] * scale, w[i], bias[i], g[rows], states[i])
            for found, e in zip((y[rows], dx[rows], dw[i], db[i]), expected, strict=True):
                assert_same(found, e)
            for tensor, history in states[i].items():
                for found, e in zip(state[tensor], history, strict=True):
                    np.testing.assert_array_equal(found[i], e)
    assert not np.any(y[BOUNDS[-1][1] :])


def test_a_state_of_one_group_is_that_of_dense():
    x, w, bias, g = (a[:10] if a.shape[0] == ROWS else a[0] for a in arrays())
    state = sd.init_state(SHORT_HISTORY, groups=1)
    *found, next_state = step(train.ragged_dot, SHORT_HISTORY)(x, w[None], bias[None], g, state, jnp.array([10]))
    *expected, next_expected = step(train.dense, SHORT_HISTORY)(x, w, bias, g, sd.init_state(SHORT_HISTORY))
    for a, e in zip(found, expected, strict=True):
        assert_same(a.reshape(e.shape), e)
    for a, e in zip(jax.tree.leaves(next_state), jax.tree.leaves(next_expected), strict=True):
        assert a.shape == (1, *e.shape)
        np.testing.assert_array_equal(a[0], e)


@pytest.mark.parametrize(
    ("x_spec", "w_spec", "y_spec"),
    [
        (P("ep"), P("ep"), P("ep")),
        (P("ep", "tp"), P("ep", "tp"), P("ep")),
        (P("ep"), P(None, None, "tp"), P("ep", "tp")),
    ],
    ids=["experts", "row parallel", "column parallel"],
)
def test_shards_of_experts_advance_the_state_of_every_group_as_one_device_does(x_spec, w_spec, y_spec):
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2)
    x, w, bias, g = arrays()
    sizes, state = jnp.asarray(SIZES), sd.init_state(SHORT_HISTORY, groups=GROUPS)
    one_device = step(train.ragged_dot, SHORT_HISTORY)
    sharded = step(train.ragged_dot, SHORT_HISTORY, specs=train.Specs(x_spec, w_spec, y_spec))
    for _ in range(2):
        *expected, next_state = one_device(x, w, bias, g, state, sizes)
        with jax.set_mesh(mesh):
            *found, found_state = sharded(x, w, bias, g, state, sizes)
        for a, e in zip(found, expected, strict=True):
            assert_same(a, e)
        for a, e in zip(jax.tree.leaves(found_state), jax.tree.leaves(next_state), strict=True):
            np.testing.assert_array_equal(a, e)
        state = next_state


def test_straight_through_gradients_are_zero_where_the_multiplier_of_a_group_clips():
    recipe = Recipe("x", Gemm(SHORT_HISTORY.fwd.lhs, None))
    x = jnp.full((4, 8), 4.0)
    state = {"x": sd.init_state(recipe, groups=2)["x"]._replace(multiplier=jnp.array([1.0, 256.0]))}
    w, sizes = jnp.stack([jnp.eye(8)] * 2), jnp.array([3, 1])
    dx = jax.jit(jax.grad(lambda x: train.ragged_dot(x, w, sizes, recipe=recipe, state=state)[0].sum()))(x)
    np.testing.assert_array_equal(dx, jnp.ones((4, 8)).at[3].set(0))


def test_quantize_grouped_multiplies_each_group_by_its_multiplier():
    x = np.array([[1.0, 2.0], [3.0, 500.0], [0.5, -0.25], [7.0, 7.0]], np.float32)
    q = sd.quantize_grouped(x, jnp.array([2, 0, 1]), "fp8_e4m3", block=(0, 0), multiplier=jnp.array([1.0, 5.0, 64.0]))
    codes = np.array([[1, 2], [3, 448], [32, -16], [0, 0]], np.float32)
    np.testing.assert_array_equal(np.asarray(q.data, np.float32), codes)
    np.testing.assert_array_equal(q.scale[:3, 0], [1, 1, 1 / 64])
    np.testing.assert_array_equal(sd.dequantize(q)[:3], codes[:3] * np.array([[1], [1], [1 / 64]], np.float32))
    one = sd.quantize_grouped(x, jnp.array([3]), "fp8_e4m3", block=(0, 0), multiplier=jnp.array([2.0]))
    np.testing.assert_array_equal(one.scale[:3, 0], [0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"multiplier": jnp.ones(3)}, r"has shape \(3,\); it must have one entry per group, \(2,\)"),
        ({"block": (1, 0)}, r"needs one scale per group, block=\(0, 0\)"),
        ({"format": "mxfp8", "block": (0, 0)}, "is for formats with float32 scales"),
    ],
    ids=["groups", "block", "format"],
)
def test_a_multiplier_that_does_not_fit_groups_is_refused(changes, words):
    arguments = {"format": "fp8_e4m3", "block": (0, 0), "multiplier": jnp.ones(2)} | changes
    with pytest.raises(ValueError, match=words):
        sd.quantize_grouped(jnp.ones((4, 32)), jnp.array([2, 2]), **arguments)


def test_a_state_of_another_number_of_groups_is_refused():
    x, w, _, _ = arrays()
    with pytest.raises(ValueError, match=r"at 'x/history' it has float32\[3,4\] and should have float32\[4,4\]"):
        train.ragged_dot(x, w, jnp.asarray(SIZES), recipe=SHORT_HISTORY, state=sd.init_state(SHORT_HISTORY, groups=3))
    with pytest.raises(ValueError, match=r"at 'x/history' it has float32\[4,4\] and should have float32\[4\]"):
        train.dense(x, w[0], recipe=SHORT_HISTORY, state=sd.init_state(SHORT_HISTORY, groups=4))
    with pytest.raises(ValueError, match="`groups` must be at least 1, not 0"):
        sd.init_state(SHORT_HISTORY, groups=0)


def test_states_of_groups_are_merged_by_group():
    a, b = (
        {"x": AmaxHistory(jnp.array([[0.0, amax], [0.0, 0.0]]), jnp.array([448 / amax, 9.0]))} for amax in (2.0, 8.0)
    )
    np.testing.assert_array_equal(merge(a, b)["x"].multiplier, [56.0, 9.0])

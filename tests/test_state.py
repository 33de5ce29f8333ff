"""Delayed scaling: multipliers over steps, merging of states, and misuse that would corrupt a history."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from independent import Delayed as Reference
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training import SHORT_HISTORY, delayed

import scaledot as sd
from scaledot import state as state_module
from scaledot import train
from scaledot.recipes import FP8_DELAYED, Cast, Delayed, Gemm, Recipe
from scaledot.state import AmaxHistory, merge

pytestmark = pytest.mark.jax_versions

TINY = np.float32(2.0**-10)


def references(**options):
    options.setdefault("length", 4)
    return {t: Reference(largest=largest, **options) for t, largest in (("x", 448), ("w", 448), ("g", 57344))}


def with_amax(amax, shape=(4, 8)):
    """An array of the given amax."""
    x = np.full(shape, amax * TINY, np.float32)
    x[0, 0] = amax
    return jnp.asarray(x)


def next_state(recipe, state, x, w, g):
    """The next state after a step of y = x w with cotangent g."""

    def loss(w, state):
        y, state = train.dense(x, w, recipe=recipe, state=state)
        return jnp.sum(y * g)

    return jax.grad(loss, argnums=1)(w, state)


def assert_state(state, reference):
    for tensor, expected in reference.items():
        np.testing.assert_array_equal(state[tensor].history, expected.history, tensor)
        np.testing.assert_array_equal(state[tensor].multiplier, expected.multiplier, tensor)


AMAXES = [2.0, 8.0, 1.0, 1.0, 1.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    "options",
    [
        {"length": 4},
        {"length": 4, "margin": 2},
        {"length": 4, "algorithm": "most_recent"},
        {"length": 2},
    ],
    ids=str,
)
def test_multipliers_over_several_steps(options):
    recipe = delayed(**options)
    expected = references(
        length=options["length"],
        margin=options.get("margin", 0),
        most_recent=options.get("algorithm") == "most_recent",
    )
    state = sd.init_state(recipe)
    run = jax.jit(lambda state, x, w, g: next_state(recipe, state, x, w, g))
    used = []
    for amax in AMAXES:
        used.append(float(state["x"].multiplier))
        state = run(state, with_amax(amax), with_amax(2 * amax, (8, 2)), with_amax(3 * amax, (4, 2)))
        for tensor, ratio in zip("xwg", (1, 2, 3), strict=True):
            expected[tensor].step(np.float32(ratio * amax))
        assert_state(state, expected)
    if options == {"length": 4}:
        assert used[:7] == [1, 224, 56, 56, 56, 56, 448]


def test_a_history_of_length_1_uses_the_last_step():
    recipe, state = delayed(length=1), sd.init_state(delayed(length=1))
    for amax, multiplier in ((2.0, 224.0), (8.0, 56.0), (0.0, 56.0), (1.0, 448.0)):
        state = next_state(recipe, state, with_amax(amax), with_amax(1.0, (8, 2)), with_amax(1.0, (4, 2)))
        assert float(state["x"].multiplier) == multiplier


def test_casts_use_the_multiplier_of_their_state():
    state = {t: AmaxHistory(jnp.array([0, 0, 0, 4.0]), jnp.float32(100.0)) for t in "xwg"}
    x, w = jnp.array([[1.0, -4.7]]), jnp.eye(2)
    y, _ = train.dense(x, w, recipe=SHORT_HISTORY, state=state)
    codes = np.float32([[96, -448]])  # 100 is half way between 96 and 104; 470 saturates
    np.testing.assert_allclose(y, codes / 100 * 0.96, rtol=2.0**-20)  # and the ones of w are dequantised to 96 / 100
    q = sd.quantize(x, "fp8_e4m3", multiplier=jnp.float32(100.0))
    np.testing.assert_array_equal(q.data.astype(jnp.float32), codes)
    assert q.scale.item() == np.float32(1) / np.float32(100)


def chained(recipe, xs, ws, gs):
    """A loss of several matmuls, each of which takes the state that the previous one returned."""

    def loss(state):
        total = 0.0
        for x, w, g in zip(xs, ws, gs, strict=True):
            y, state = train.dense(x, w, recipe=recipe, state=state)
            total += jnp.sum(y * g)
        return total

    return loss


USES = [(2.0, 1.0, 5.0), (8.0, 3.0, 1.0), (4.0, 2.0, 7.0)]
XS, WS, GS = (
    [with_amax(a, s) for a in amaxes]
    for amaxes, s in zip(zip(*USES, strict=True), ((4, 8), (8, 2), (4, 2)), strict=True)
)


def largest_of_uses():
    expected = references()
    for tensor, amax in (("x", 8.0), ("w", 3.0), ("g", 7.0)):
        expected[tensor].step(np.float32(amax))
    return expected


def test_a_layer_used_three_times_records_the_largest_amax():
    assert_state(jax.jit(jax.grad(chained(SHORT_HISTORY, XS, WS, GS)))(sd.init_state(SHORT_HISTORY)), largest_of_uses())


def test_rematerialised_uses_record_the_largest_amax():
    loss = jax.checkpoint(chained(SHORT_HISTORY, XS, WS, GS))
    assert_state(jax.jit(jax.grad(loss))(sd.init_state(SHORT_HISTORY)), largest_of_uses())


def test_a_scan_over_micro_batches_records_the_largest_amax():
    def loss(state):
        def body(carry, batch):
            total, state = carry
            x, w, g = batch
            y, state = train.dense(x, w, recipe=SHORT_HISTORY, state=state)
            return (total + jnp.sum(y * g), state), None

        (total, _), _ = jax.lax.scan(body, (0.0, state), (jnp.stack(XS), jnp.stack(WS), jnp.stack(GS)))
        return total

    assert_state(jax.jit(jax.grad(loss))(sd.init_state(SHORT_HISTORY)), largest_of_uses())


def test_a_scan_over_layers_has_a_state_per_layer():
    w = jnp.stack([with_amax(a, (8, 8)) for a in (1.0, 2.0, 4.0)])
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), sd.init_state(SHORT_HISTORY))

    def loss(states):
        def layer(x, w_and_state):
            y, _ = train.dense(x, w_and_state[0], recipe=SHORT_HISTORY, state=w_and_state[1])
            return y, None

        return jax.lax.scan(layer, with_amax(1.0), (w, states))[0].sum()

    stepped = jax.jit(jax.grad(loss))(states)
    np.testing.assert_array_equal(stepped["w"].multiplier, np.float32(448) / np.float32([1, 2, 4]))


def test_merged_states_of_micro_batches_equal_that_of_one_large_batch():
    start = next_state(SHORT_HISTORY, sd.init_state(SHORT_HISTORY), XS[0], WS[0], GS[0])
    micro_batches = [next_state(SHORT_HISTORY, start, x, WS[1], g) for x, g in zip(XS, GS, strict=True)]
    large_batch = next_state(SHORT_HISTORY, start, jnp.concatenate(XS), WS[1], jnp.concatenate(GS))
    for a, b in zip(jax.tree.leaves(merge(*micro_batches)), jax.tree.leaves(large_batch), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_of_models_are_merged_if_their_structures_match():
    start = sd.init_state(SHORT_HISTORY)
    models = [{"a": next_state(SHORT_HISTORY, start, x, WS[0], GS[0]), "b": start} for x in XS]
    assert float(merge(*models)["a"]["x"].multiplier) == 448 / 8
    with pytest.raises(ValueError, match="at 'b/g/history' it has nothing"):
        merge(models[0], {"a": models[1]["a"]})


def test_merging_with_a_step_of_zeros_keeps_the_multiplier_of_the_other():
    """A step of zeros keeps the previous multiplier, which may be smaller although no amax requires it."""
    start = sd.init_state(SHORT_HISTORY)
    zeros = next_state(SHORT_HISTORY, start, 0 * XS[0], 0 * WS[0], 0 * GS[0])
    other = next_state(SHORT_HISTORY, start, XS[0], WS[0], GS[0])
    for order in ((zeros, other), (other, zeros)):
        assert float(merge(*order)["x"].multiplier) == 224
    assert float(merge(zeros, zeros)["x"].multiplier) == 1


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_nonfinite_elements_do_not_enter_the_history(bad):
    state = next_state(SHORT_HISTORY, sd.init_state(SHORT_HISTORY), XS[0], WS[0], GS[0])
    state = next_state(SHORT_HISTORY, state, XS[1].at[1, 1].set(bad), WS[1], jnp.full_like(GS[1], bad))
    expected = references()
    for tensor, amaxes in (("x", (2.0, 8.0)), ("w", (1.0, 3.0)), ("g", (5.0, 0.0))):
        for amax in amaxes:
            expected[tensor].step(np.float32(amax))
    assert_state(state, expected)


def test_a_forward_pass_returns_its_state_unchanged():
    state = next_state(SHORT_HISTORY, sd.init_state(SHORT_HISTORY), XS[0], WS[0], GS[0])
    _, after = jax.jit(lambda state: train.dense(XS[1], WS[1], recipe=SHORT_HISTORY, state=state))(state)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_added_by_mistake_do_not_cause_saturation():
    """Two uses of the same state give the sum of two next states; multipliers still do not exceed format max / amax."""
    state = sd.init_state(SHORT_HISTORY)
    for _ in range(12):
        a, b = (next_state(SHORT_HISTORY, state, x, w, g) for x, w, g in zip(XS[:2], WS, GS, strict=False))
        state = jax.tree.map(jnp.add, a, b)
    for tensor, largest, amax in (("x", 448, 8.0), ("w", 448, 3.0), ("g", 57344, 5.0)):
        x = with_amax(amax)
        recipe = Recipe("one", Gemm(SHORT_HISTORY.dgrad.lhs if tensor == "g" else SHORT_HISTORY.fwd.lhs, None))
        y, _ = train.dense(x, jnp.eye(8), recipe=recipe, state={"x": state[tensor]})
        np.testing.assert_allclose(y[0, 0], amax, rtol=2.0**-3, err_msg=f"{tensor} {largest} is clipped")
        assert np.all(state[tensor].history <= 2 * amax * 1.01)


def test_a_state_that_a_step_did_not_use_is_reset():
    """The gradient of an unused state is zero; casts with a multiplier of zero would give NaN in the next step."""

    @jax.jit
    def step(state, use):
        def loss(state):
            y = jax.lax.cond(
                use, lambda: train.dense(XS[0], WS[0], recipe=SHORT_HISTORY, state=state)[0], lambda: 0 * GS[0]
            )
            return jnp.sum(y * GS[0])

        return jax.grad(loss)(state)

    used = step(sd.init_state(SHORT_HISTORY), True)
    unused = step(used, False)
    assert float(unused["x"].multiplier) == 0
    expected = references()["x"]
    expected.step(np.float32(2))
    assert_state(step(unused, True), {"x": expected})


def test_straight_through_gradients_are_zero_where_a_delayed_scale_clips():
    recipe = Recipe("x", Gemm(SHORT_HISTORY.fwd.lhs, None))
    x = XS[0].at[0, 0].set(1000.0)
    dx = jax.grad(lambda x: train.dense(x, jnp.eye(8), recipe=recipe, state=sd.init_state(recipe))[0].sum())(x)
    assert dx[0, 0] == 0
    assert np.all(dx[1:] == 1)
    grouped = jax.grad(
        lambda x: train.ragged_dot(x, jnp.eye(8)[None], jnp.array([4]), recipe=recipe, state=sd.init_state(recipe))[
            0
        ].sum()
    )(x)
    np.testing.assert_array_equal(grouped, dx)


def test_ragged_dot_uses_stochastic_rounding_with_delayed_scaling():
    cast = dataclasses.replace(SHORT_HISTORY.fwd.lhs, rounding="stochastic")
    recipe = Recipe("x", Gemm(cast, None), Gemm(), Gemm())
    x, state = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), sd.init_state(recipe)
    one, other = (
        train.ragged_dot(x, jnp.eye(8)[None], jnp.array([8]), recipe=recipe, state=state, key=jax.random.key(k))[0]
        for k in (0, 1)
    )
    assert np.any(one != other)


def test_data_parallel_shards_all_reduce_their_amax():
    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3], axis_types=(AxisType.Auto,))

    def step(x, w, g, state):
        def loss(state):
            y, _ = train.dense(x, w, recipe=SHORT_HISTORY, state=state)
            return jax.lax.psum(jnp.sum(y * g), "data")

        return jax.grad(loss)(state)

    specs = (P("data"), P(), P("data"), P())
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
    got = sharded(jnp.concatenate(XS), WS[1], jnp.concatenate(GS), sd.init_state(SHORT_HISTORY))
    assert_state(got, largest_of_uses())


def test_amaxes_of_ragged_dot_ignore_rows_of_no_group():
    x, w, sizes = jnp.concatenate(XS), jnp.stack(WS[:2]), jnp.array([4, 4])

    def loss(state):
        return train.ragged_dot(x, w, sizes, recipe=SHORT_HISTORY, state=state)[0].sum()

    state = jax.grad(loss)(sd.init_state(SHORT_HISTORY))
    assert float(state["x"].multiplier) == 448 / 8
    assert float(state["w"].multiplier) == np.float32(448) / np.float32(3)


def test_training_resumes_from_a_saved_state():
    state = sd.init_state(SHORT_HISTORY)
    for x, w, g in zip(XS, WS, GS, strict=True):
        state = next_state(SHORT_HISTORY, state, x, w, g)
    saved = jax.tree.map(np.asarray, state)
    continued = next_state(SHORT_HISTORY, state, XS[0], WS[0], GS[0])
    resumed = next_state(SHORT_HISTORY, jax.tree.map(jnp.asarray, saved), XS[0], WS[0], GS[0])
    for a, b in zip(jax.tree.leaves(continued), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (sd.init_state(FP8_DELAYED), r"at 'x/history' it has float32\[1024\] and should have float32\[4\]"),
        ({k: v for k, v in sd.init_state(SHORT_HISTORY).items() if k != "g"}, "at 'g/history' it has nothing"),
        (sd.init_state(SHORT_HISTORY) | {"y": jnp.zeros(3)}, r"at 'y' it has float32\[3\] and should have nothing"),
        ((1, 2), "must be a state from init_state"),
    ],
)
def test_a_state_of_another_recipe_is_refused(state, message):
    with pytest.raises((ValueError, TypeError), match=message):
        train.dense(XS[0], WS[0], recipe=SHORT_HISTORY, state=state)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Delayed(length=0), "at least 1"),
        (lambda: Delayed(algorithm="mean"), "'max' or 'most_recent'"),
        (lambda: Delayed(margin=float("nan")), "finite number"),
        (lambda: Cast("mxfp8", delayed=Delayed()), "one float32 scale per tensor"),
        (lambda: Cast("int8", (0, 0), delayed=Delayed()), "one float32 scale per tensor"),
        (lambda: merge(), "at least one state"),
        (
            lambda: Recipe("two", SHORT_HISTORY.fwd, None, Gemm(FP8_DELAYED.fwd.lhs, None)),
            "x of two has one amax history, but two delayed casts",
        ),
    ],
)
def test_invalid_delayed_casts_are_refused(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def _loss(w, state):
    return train.dense(XS[0], w, recipe=SHORT_HISTORY, state=state)[0].sum()


def _scanned(w, state):
    def body(carry, x):
        total, state = carry
        y, state = train.dense(x, w, recipe=SHORT_HISTORY, state=state)
        return (total + y.sum(), state), None

    return jax.lax.scan(body, (0.0, state), jnp.stack(XS))[0][0]


def _stacked(w, state):
    ws, states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (w, state))
    return jax.vmap(_loss)(ws, states).sum()


LOSSES = {"plain": _loss, "jit": jax.jit(_loss), "remat": jax.checkpoint(_loss), "scan": _scanned, "vmap": _stacked}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_weight_differentiated_without_its_state_is_refused(loss):
    """The history would stay empty and the multiplier 1, at which a gradient of 1e-9 underflows in e5m2."""
    state = sd.init_state(SHORT_HISTORY)
    with pytest.raises(ValueError, match=r"not with respect to its `state`.*argnums=\(0, 1\)"):
        jax.eval_shape(jax.grad(loss), WS[0], state)
    jax.eval_shape(jax.grad(loss, argnums=(0, 1)), WS[0], state)


def test_a_gradient_through_a_frozen_layer_needs_no_state():
    def loss(x, w, state):
        return train.dense(x, w, recipe=SHORT_HISTORY, state=state)[0].sum()

    jax.eval_shape(jax.grad(loss), XS[0], WS[0], sd.init_state(SHORT_HISTORY))


def test_ragged_dot_and_convolution_refuse_gradients_without_the_state():
    sizes, state = jnp.array([4]), sd.init_state(SHORT_HISTORY)

    def grouped(w):
        return train.ragged_dot(XS[0], w, sizes, recipe=SHORT_HISTORY, state=state)[0].sum()

    def convolved(w):
        return train.conv_general_dilated(jnp.ones((1, 1, 4)), w, (1,), "VALID", recipe=SHORT_HISTORY, state=state)[
            0
        ].sum()

    for loss, shape in ((grouped, (1, 8, 2)), (convolved, (1, 1, 2))):
        with pytest.raises(ValueError, match="not with respect to its `state`"):
            jax.eval_shape(jax.grad(loss), jnp.ones(shape))


def test_an_empty_history_outside_jit_warns_once():
    state_module._warn_once.cache_clear()
    empty, full = sd.init_state(SHORT_HISTORY), {t: AmaxHistory(jnp.ones(4), jnp.float32(448)) for t in "xwg"}

    def forward(state):  # only w and state must be concrete for the check; x is traced
        jax.eval_shape(lambda x: train.dense(x, WS[0], recipe=SHORT_HISTORY, state=state), XS[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(full)
    with pytest.warns(UserWarning, match="all-zero amax history and casts with quantisation multiplier 1"):
        forward(empty)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(empty)

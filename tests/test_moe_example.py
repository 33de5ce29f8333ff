"""examples/moe.py: the grouped layer equals a loop over experts for any routing, and the model learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import params_of

from examples import moe

pytestmark = pytest.mark.usefixtures("standard_promotion")

TOKENS, WIDTH, HIDDEN, EXPERTS = 160, 128, 64, 3


def layer_and_tokens():
    x = jax.random.normal(jax.random.key(1), (TOKENS, WIDTH), jnp.bfloat16)
    return moe.init_model(jax.random.key(0), WIDTH, HIDDEN, EXPERTS).experts, x


ROWS = np.arange(TOKENS * moe.TOP_K).reshape(TOKENS, moe.TOP_K)
ROUTING = {"one expert has no token": np.where(ROWS % 3 == 0, 0, 2), "one expert has all": np.full_like(ROWS, 1)}


@pytest.mark.end_to_end
@pytest.mark.parametrize("recipe", params_of(moe.RECIPES, ("fp8_current", "mxfp8")))
@pytest.mark.parametrize("case", params_of(ROUTING, ("one expert has all",)))
def test_the_grouped_layer_equals_a_loop_over_experts(recipe, case):
    """The largest groups have more than 128 rows, the size of a block, and no group is a multiple of it."""
    layer, x = layer_and_tokens()
    chosen = jnp.asarray(ROUTING[case])
    found = moe.differences(layer, x, chosen, recipe, jax.random.key(2))
    limit = moe.allowed(layer, recipe, int(np.bincount(np.asarray(chosen).reshape(-1)).max()))
    assert set(found) == {"y", "dx", "d router", "d up", "d down"}
    assert {name: difference for name, difference in found.items() if not difference <= limit} == {}


def test_the_comparison_detects_a_loop_in_another_precision_in_every_tensor(monkeypatch):
    layer, _ = layer_and_tokens()
    dense_matmul = moe.dense_matmul
    monkeypatch.setattr(moe, "dense_matmul", lambda _, precision: dense_matmul("bfloat16", precision))
    with pytest.raises(SystemExit, match="differs from the loop over experts in: y, dx, d router, d up, d down"):
        moe.print_comparison(layer, "fp8_current", TOKENS, jax.random.key(0))


def test_each_token_is_the_weighted_sum_of_its_experts():
    """Compared with the formula in float64, without sorting and groups."""
    layer, x = layer_and_tokens()
    probabilities = moe.probabilities_of(layer.router, x)
    chosen = moe.choose(probabilities)
    shares = moe.expert_weights(probabilities, chosen)
    y = moe.grouped(layer, x, shares, chosen, moe.grouped_matmul("bfloat16"))
    rows, up, down = (np.asarray(a, np.float64) for a in (x, layer.up, layer.down))
    z = np.einsum("tw,ewh->teh", rows, up)
    z *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    all_experts = np.einsum("teh,ehw->tew", z, down)
    expected = np.einsum("tc,tcw->tw", shares, np.take_along_axis(all_experts, np.asarray(chosen)[..., None], axis=1))
    # Six roundings to bfloat16, each a relative error in norm of less than 2^-9 on random data (of one element: up to
    # 2^-8): the weights `up` and `down`, input and output of the activation, an expert's result, and y.
    assert np.linalg.norm(np.float64(y) - expected) < 6 * 2**-9 * np.linalg.norm(expected)


def test_imbalance_is_1_for_equal_loads_and_the_number_of_experts_if_one_has_all_tokens():
    equal, certain = jnp.full((6, 3), 1 / 3), jax.nn.one_hot(jnp.full(6, 2), 3)
    np.testing.assert_allclose(moe.imbalance(equal, moe.load_of(jnp.arange(6) % 3, 3)), 1, rtol=1e-6)
    np.testing.assert_allclose(moe.imbalance(certain, moe.load_of(jnp.full(6, 2), 3)), 3, rtol=1e-6)


@pytest.mark.end_to_end
def test_the_example_learns_and_prints_its_results(capsys):
    sizes = {"tokens": 256, "width": 64, "hidden": 64, "experts": 2, "steps": 40}
    moe.main(["--recipe=fp8_current", *(f"--{name}={size}" for name, size in sizes.items())])
    table, comparison, kernels = (text.splitlines() for text in capsys.readouterr().out.split("\n\nThe "))
    steps, excess, *_ = zip(*(map(float, line.replace("%", "").split()) for line in table[3:]), strict=True)
    assert steps == (1, *range(4, 41, 4))
    assert excess[-1] < excess[0] - 0.5
    assert [line.split("  ")[0] for line in comparison[3:]] == ["y", "dx", "d router", "d up", "d down"]
    problems, selected = kernels[2::2], kernels[3::2]
    assert [problem.split()[0] for problem in problems].count("ragged_dot") == 3
    assert {problem.split()[0] for problem in problems} == {"cast", "ragged_dot"}
    assert all("selected" in line for line in selected)


def test_too_few_experts_are_an_error_with_both_numbers(capsys):
    with pytest.raises(SystemExit):
        moe.main(["--experts", "1"])
    assert "--experts is 1, but each token goes to 2" in capsys.readouterr().err

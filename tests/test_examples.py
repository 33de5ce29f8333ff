"""The examples run and learn, and the source has the entropy that it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scaledot as sd
from examples import demo, demo_layers, gpt_linen, gpt_nnx
from examples.source import Source

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("example", [gpt_linen, gpt_nnx])
def test_a_tiny_gpt_learns_with_delayed_scaling(example):
    excess, curve = example.train("fp8_delayed", steps=40)
    assert np.all(np.isfinite(curve))
    assert excess < np.mean(curve[:5]) - 0.2


def test_the_source_has_the_entropy_it_says():
    """The mean surprise of 100k symbols under the true transitions; one standard error is about 0.004 nats."""
    source = Source()
    surprise = source.surprise(source.draw(jax.random.key(0), (256, 402)))
    assert abs(float(surprise.mean()) - source.entropy) < 0.02


@pytest.fixture(scope="module")
def layers():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return demo_layers.linear_layers(gpt_linen.start(gpt_linen.Gpt(), jax.random.key(0), steps=1))


def test_the_layers_of_the_demo_are_those_of_the_model(layers):
    assert list(layers) == [f"block_{i}/{name}" for i in range(2) for name in ("qkv", "out", "up", "down")]
    state = gpt_linen.start(gpt_linen.Gpt(), jax.random.key(0), steps=1)
    tokens = demo_layers.batches(jax.random.key(1), 1)[0]
    loss = lambda v: demo_layers.loss_and_excess(state.apply_fn(v, tokens[:, :-1]), tokens)[0]  # noqa: E731
    gradients = jax.grad(loss)(state.params)["params"]
    for name, (x, _, g) in layers.items():
        block, layer = name.split("/")
        expected = gradients[block][layer]["kernel"]
        np.testing.assert_allclose(jnp.einsum("bsk,bsn->kn", x, g), expected, atol=1e-5 * np.abs(expected).max())


def test_bytes_that_the_demo_counts(layers):
    """x is (16, 32, 64) and w (64, 192): a byte each in fp8, and 9/16 of one with scales and squares of 16 in nvfp4."""
    layer, x, w = layers["block_0/qkv"], 16 * 32 * 64, 64 * 192
    assert demo_layers.kept_bytes("float32", layer) == 4 * x
    assert demo_layers.kept_bytes("bfloat16", layer) == 2 * x
    for recipe in ("fp8_current", "fp8_delayed"):
        assert x + w <= demo_layers.kept_bytes(recipe, layer) <= x + w + 100
    assert demo_layers.kept_bytes("mxfp8", layer) == (x + w) * 33 // 32
    assert 0 <= demo_layers.kept_bytes("nvfp4", layer) - (x * 9 // 16 + w // 2 + w // 256) <= 100


@pytest.mark.parametrize(("recipe", "low", "high"), [("fp8_delayed", 22, 35), ("mxfp8", 26, 35), ("nvfp4", 12, 23)])
def test_ratios_are_those_of_the_formats(layers, recipe, low, high):
    """A product of two casts has 3 dB less than each: e4m3 31.5, e5m2 25.6, nvfp4 20.4 or, stochastic, 17.3 dB."""
    found = demo_layers.snr(recipe, layers["block_1/up"])
    assert set(found) == {"y", "dx", "dw"}
    assert all(low < ratio < high for ratio in found.values())


def test_the_demo_prints_a_table_and_writes_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "RECIPES", ("mxfp8",))
    monkeypatch.setattr("sys.argv", ["demo", "--steps", "12"])
    demo.main()
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[3:6]] == ["float32", "bfloat16", "mxfp8"]
    page = (tmp_path / "demo.html").read_text()
    assert page.count("<svg") == 2
    assert f"scaledot {sd.__version__}" in page
    assert "{" not in page.split("</style>")[1].split("<svg")[0]

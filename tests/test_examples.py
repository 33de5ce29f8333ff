"""The examples run and learn, and the data source has the entropy that it states."""

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

import scaledot as sd
from examples import demo, demo_layers, demo_page, demo_times, gpt_linen, gpt_nnx
from examples.source import Source

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.end_to_end
@pytest.mark.parametrize("example", [gpt_linen, pytest.param(gpt_nnx, marks=pytest.mark.exhaustive)])
def test_a_tiny_gpt_learns_with_delayed_scaling(example, monkeypatch):
    monkeypatch.setattr(example, "Gpt", functools.partial(example.Gpt, blocks=1))
    monkeypatch.setattr(gpt_linen, "HELD_OUT", 8)
    excess, curve = example.train("fp8_delayed", steps=12)
    assert np.all(np.isfinite(curve))
    assert excess < np.mean(curve[:5]) - 0.2


def test_the_source_has_the_stated_entropy():
    """It is the mean surprisal of 100k symbols under the true transitions; one standard error is about 0.004 nats."""
    source = Source()
    surprise = source.surprise(source.draw(jax.random.key(0), (256, 402)))
    assert abs(float(surprise.mean()) - source.entropy) < 0.02


@pytest.fixture(scope="module")
def state():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return gpt_linen.init_train_state(gpt_linen.Gpt(), jax.random.key(0), steps=1)


@pytest.fixture(scope="module")
def layers(state):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return demo_layers.linear_layers(state)


def test_the_layers_of_the_demo_are_those_of_the_model(state, layers):
    assert list(layers) == [f"block_{i}/{name}" for i in range(2) for name in ("qkv", "out", "up", "down")]
    tokens = demo_layers.batches(jax.random.key(1), 1)[0]
    loss = lambda v: demo_layers.loss_and_excess(state.apply_fn(v, tokens[:, :-1]), tokens)[0]  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(state.params)["params"]
    for name, (x, _, g) in layers.items():
        block, layer = name.split("/")
        expected = gradients[block][layer]["kernel"]
        np.testing.assert_allclose(jnp.einsum("bsk,bsn->kn", x, g), expected, atol=1e-5 * np.abs(expected).max())


def test_the_demo_counts_bytes_of_residuals(layers):
    """x is (16, 32, 64), w (64, 192). Bytes per element: 1 in FP8, 33/32 in MXFP8, 9/16 in NVFP4 (w: 16x16 blocks)."""
    layer, x, w = layers["block_0/qkv"], 16 * 32 * 64, 64 * 192
    assert demo_layers.residual_bytes("float32", layer) == 4 * x
    assert demo_layers.residual_bytes("bfloat16", layer) == 2 * x
    for recipe in ("fp8_current", "fp8_delayed"):
        assert x + w <= demo_layers.residual_bytes(recipe, layer) <= x + w + 100
    assert demo_layers.residual_bytes("mxfp8", layer) == (x + w) * 33 // 32
    assert 0 <= demo_layers.residual_bytes("nvfp4", layer) - (x * 9 // 16 + w // 2 + w // 256) <= 100


@pytest.mark.parametrize(("recipe", "low", "high"), [("fp8_delayed", 22, 35), ("mxfp8", 26, 35), ("nvfp4", 12, 23)])
def test_snr_of_the_demo_is_that_of_the_formats(layers, recipe, low, high):
    """A matmul has 3 dB less than each operand: E4M3 31.5, E5M2 25.6, NVFP4 20.4, stochastically rounded 17.3 dB."""
    found = demo_layers.snr(recipe, layers["block_1/up"])
    assert set(found) == {"y", "dx", "dw"}
    assert all(low < ratio < high for ratio in found.values())


class Bar(tqdm):
    """A progress bar that records its final state."""

    ends: ClassVar[list] = []

    def close(self):
        self.ends.append((self.n, self.total))
        super().close()


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Runs the demo with one block, in float32 and mxfp8, as on a GPU; returns what it printed and its page."""
    directory, printed, steps = tmp_path_factory.mktemp("demo"), io.StringIO(), 4
    small = {"Gpt": functools.partial(gpt_linen.Gpt, blocks=1), "LAYERS": 4, "PLAIN": ("float32",)}
    timed = [demo_times.Timed(name, ms, 1e3 / ms) for name, ms in (("bfloat16", 4.0), ("mxfp8", 2.5))]
    replaced = {**small, "RECIPES": ("mxfp8",), "tqdm": Bar, "on_gpu": lambda: True, "times": lambda recipes: timed}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(directory)
        patch.setattr("sys.argv", ["demo", "--steps", str(steps)])
        patch.setattr(gpt_linen, "HELD_OUT", 2)
        for name, value in replaced.items():
            patch.setattr(demo, name, value)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            demo.main()
    return printed.getvalue(), (directory / "demo.html").read_text()


@pytest.mark.end_to_end
def test_the_demo_prints_its_expected_time_and_a_table(output):
    printed, _ = output
    assert "about five minutes on two idle cores" in printed.splitlines()[1]
    assert [line.split()[0] for line in printed.splitlines()[4:6]] == ["float32", "mxfp8"]


@pytest.mark.end_to_end
def test_the_progress_bar_of_the_demo_ends_at_its_total(output):
    (done, total), *_ = Bar.ends
    assert done == total == demo.COMPILING * 2 + 4 * 2 + demo.LAYER * 4 + demo.TIMING * 2


@pytest.mark.end_to_end
def test_the_page_of_the_demo_has_all_its_parts(output):
    _, page = output
    assert page.count("<svg") == 2
    assert f"scaledot {sd.__version__}" in page
    assert "{" not in page.split("</style>")[1].split("<svg")[0]
    times = page.split("How fast is it?")[1].split("What next?")[0]
    assert "4096&nbsp;→&nbsp;14336 on 8192 tokens" in times
    assert "mxfp8</td><td>2.50</td><td>400</td><td>1.60 ×</td>" in times


@pytest.mark.end_to_end
def test_links_and_commands_on_the_page_of_the_demo_exist(output):
    _, page = output
    root, advice = Path(demo.__file__).parents[1], page.split("What next?")[1]
    assert all((root / link).is_file() for link in re.findall('<a href="(.*?)"', page))
    assert all((root / "examples" / f"{name}.py").is_file() for name in re.findall(r"-m examples\.(\w+)", advice))
    assert all(f"\n{target}:" in (root / "Makefile").read_text() for target in re.findall(r"\nmake (\w+)", advice))


def test_without_a_gpu_the_page_links_to_measured_times():
    assert "docs/notes/performance.md" in demo_page.times_section([], "cpu")


def test_the_demo_times_every_recipe():
    found = list(demo_times.times(("fp8_delayed",), demo_times.Shape(32, 64, 32), repeats=1))
    assert [timed.name for timed in found] == ["bfloat16", "fp8_delayed"]
    for timed in found:
        assert timed.teraflops * timed.milliseconds == pytest.approx(3 * 2 * 32 * 64 * 32 / 1e9)

"""examples/decode.py: decoding with a cache equals a full forward pass, 4-bit weights stay packed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import decode

pytestmark = pytest.mark.usefixtures("standard_promotion")

logits_of = jax.jit(decode.logits_of)
WIDTH, HIDDEN, LAYERS = 128, 256, 2
KERNEL_ELEMENTS = LAYERS * (192 * 128 + 128 * 128 + 512 * 128 + 128 * 256)


@pytest.fixture(scope="module")
def weights():
    return decode.init_weights(jax.random.key(0), WIDTH, HIDDEN, LAYERS)


@pytest.fixture(scope="module")
def tokens():
    return decode.SOURCE.draw(jax.random.key(1), (3, 12))


def assert_near(found, expected):
    """Asserts equality up to the order of float32 accumulation over at most `HIDDEN` elements in every matmul."""
    matmuls = 6 * LAYERS + 1  # six in each layer, and the head
    np.testing.assert_allclose(found, expected, rtol=0, atol=matmuls * HIDDEN * 2**-23 * np.abs(expected).max())


@pytest.mark.parametrize("prompt", [1, 5])
def test_decoding_with_a_cache_equals_a_full_forward_pass(weights, tokens, prompt):
    """`prompt` tokens in one step, the others one by one."""
    caches = decode.empty_caches(weights, *tokens.shape)
    step, outputs = jax.jit(decode.forward), []
    for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, 12))]:
        logits, caches = step(weights, tokens[:, begin:end], caches, begin)
        outputs.append(logits)
    assert_near(np.concatenate(outputs, axis=1), logits_of(weights, tokens))


def test_logits_do_not_depend_on_later_tokens(weights, tokens):
    changed = tokens.at[:, 7].set((tokens[:, 7] + 1) % decode.SOURCE.vocab)
    before, after = (logits_of(weights, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_greedy_decoding_equals_argmax_of_full_forward_passes(weights, tokens):
    found, seconds = decode.complete(weights, tokens[:, :4], jax.random.key(2), count=6, temperature=0.0)
    text = tokens[:, :10]
    for i in range(4, 10):
        text = text.at[:, i].set(jnp.argmax(logits_of(weights, text)[:, i - 1], axis=-1))
    np.testing.assert_array_equal(found, text[:, 4:])
    assert seconds > 0


def test_sampled_tokens_have_the_frequencies_of_softmax():
    """30000 draws at temperature 2: five standard errors of a frequency are at most 0.0145."""
    logits = jnp.array([0.0, 2.0, -2.0])
    found = decode.sample(jnp.broadcast_to(logits, (30_000, 3)), jax.random.key(0), 2.0)
    np.testing.assert_allclose(jnp.bincount(found, length=3) / 30_000, jax.nn.softmax(logits / 2), atol=0.0145)


@pytest.mark.parametrize(("format", "bits"), [("int4", 4 + 32 / 128), ("nvfp4", 4 + 8 / 16)])
def test_size_counts_packed_codes_and_scales(weights, format, bits):
    plain = decode.in_bfloat16(weights)
    tensor_scales = 4 * 4 * LAYERS if format == "nvfp4" else 0  # float32, of four kernels per layer
    saved = KERNEL_ELEMENTS * (16 - bits) / 8 - tensor_scales
    assert decode.size_of(plain) - decode.size_of(decode.quantized(plain, format)) == saved


@pytest.mark.optimized
@pytest.mark.parametrize(("format", "element"), [("int4", "s4"), ("nvfp4", "f4e2m1fn")])
def test_the_compiled_decoding_loop_carries_packed_codes(weights, tokens, format, element):
    quantised = decode.quantized(decode.in_bfloat16(weights), format)
    caches = jax.eval_shape(lambda: decode.empty_caches(quantised, 3, 16))
    key, position = jax.random.key(0), jnp.int32(4)
    lowered = decode.generate.lower(quantised, caches, tokens[:, 0], position, key, count=4, temperature=1.0)
    loops = [line for line in lowered.compile().as_text().splitlines() if ") while(" in line]
    carried = max(loops, key=len).split(" while(")[0]
    assert len(re.findall(rf"\b{element}\[\d+,\d+\]", carried)) == 4 * LAYERS


def test_quality_is_kl_divergence_and_excess_loss(weights, tokens):
    """Compared with their formulas in float64."""
    weights = weights._replace(layers=weights.layers[:1])
    int4 = decode.quantized(weights, "int4")
    found = decode.quality(int4, weights, tokens)
    logits, expected = (np.asarray(logits_of(w, tokens[:, :-1]), np.float64) for w in (int4, weights))
    logits, expected = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (logits, expected))
    np.testing.assert_allclose(found.divergence, (np.exp(expected) * (expected - logits)).sum(-1).mean(), rtol=1e-3)
    following = np.take_along_axis(logits[:, 1:], np.asarray(tokens)[:, 2:, None], axis=-1)
    excess = -following.mean() - float(decode.SOURCE.surprise(tokens).mean())
    np.testing.assert_allclose(found.excess, excess, rtol=1e-4)


@pytest.mark.end_to_end
def test_the_example_prints_a_row_per_format_and_the_kernels(monkeypatch, capsys):
    monkeypatch.setattr(decode, "FORMATS", ("bfloat16", "nvfp4"))
    sizes = {"width": 128, "hidden": 128, "layers": 1, "batch": 2, "tokens": 6, "steps": 30}
    decode.main([f"--{name}={size}" for name, size in sizes.items()])
    head, table, *_, kernels = capsys.readouterr().out.strip().split("\n\n")
    assert head.startswith("1 layers of 128 x 128, trained, 2 x 6 tokens")
    rows = [re.sub("[%,]|MiB", "", line).split() for line in table.splitlines()[1:]]
    assert [row[0] for row in rows] == ["bfloat16", "nvfp4"]
    plain, nvfp4 = ([float(word) for word in row[1:]] for row in rows)
    size, share, speed, ratio, same, divergence, excess = plain
    assert (share, ratio, same, divergence) == (100, 1, 100, 0)
    assert excess < 1.2  # nats; above 1.4 before training
    np.testing.assert_allclose(nvfp4[0], size * nvfp4[1] / 100, atol=0.006)
    np.testing.assert_allclose(nvfp4[2], speed * nvfp4[3], atol=0.006 * speed)
    assert nvfp4[5] > 0
    assert kernels.count("selected") == 2


def test_a_width_that_is_no_multiple_of_the_block_is_an_error_with_both_numbers(capsys):
    with pytest.raises(SystemExit):
        decode.main(["--width", "192"])
    assert "--width is 192, which is no multiple of int4's block of 128" in capsys.readouterr().err

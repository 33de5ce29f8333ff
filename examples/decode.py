"""Autoregressive decoding with 4-bit weights.

    python -m examples.decode
    python -m examples.decode --untrained --width 4096 --hidden 14336 --layers 8 --batch 1      # for a GPU

A decoder-only transformer generates tokens with a KV cache, in one jitted loop. A step multiplies a few rows by every
weight, so on a GPU it is bound by the bandwidth of reading weights, and fewer bits are faster. A CPU has to unpack them
first: there, compare accuracy, not speed.

The same weights are compared in bfloat16, in int4 with blocks of 128 and in nvfp4, both with blocks along the
contracting dim. Activations are bfloat16.
"""

import argparse
import functools
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

import scaledot as sd
from examples.gpt_training import LENGTH, SOURCE, batches, loss_and_excess, make_optimizer

BLOCKS = {"int4": 128, "nvfp4": 16}  # elements along the contracting dim that share a scale
FORMATS = ("bfloat16", *BLOCKS)
PROMPT = 8  # tokens
RUNS = 5
Matrix = jax.Array | sd.ScaledArray


class Layer(NamedTuple):
    """Weights of a decoder layer; matrices are (inputs, outputs)."""

    attention_norm: jax.Array
    qkv: Matrix
    out: Matrix
    mlp_norm: jax.Array
    gate_up: Matrix  # gate and up projections, concatenated along outputs
    down: Matrix


class Weights(NamedTuple):
    embedding: jax.Array  # (vocab, width)
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    head: jax.Array  # (width, vocab)


class Cache(NamedTuple):
    """The KV cache of a layer, each (batch, capacity, KV heads, head_dim)."""

    keys: jax.Array
    values: jax.Array


def heads_of(width: int) -> tuple[int, int]:
    """Returns the numbers of query heads and of KV heads; four query heads share a KV head."""
    heads = max(4, width // 128)
    return heads, heads // 4


def init_weights(key: jax.Array, width: int, hidden: int, layers: int, dtype=jnp.float32) -> Weights:
    keys = iter(jax.random.split(key, 2 + 4 * layers))
    heads, kv_heads = heads_of(width)
    ones = jnp.ones(width, dtype)

    def matrix(inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs), dtype) * jnp.asarray(inputs**-0.5, dtype)

    def layer() -> Layer:
        qkv, out = matrix(width, (heads + 2 * kv_heads) * (width // heads)), matrix(width, width)
        return Layer(ones, qkv, out, ones, matrix(width, 2 * hidden), matrix(hidden, width))

    return Weights(
        jax.random.normal(next(keys), (SOURCE.vocab, width), dtype) / 2,
        tuple(layer() for _ in range(layers)),
        ones,
        matrix(width, SOURCE.vocab),
    )


def in_bfloat16(weights: Weights) -> Weights:
    return jax.tree.map(lambda array: array.astype(jnp.bfloat16), weights)


def quantized(weights: Weights, format: str) -> Weights:
    """Quantises the matrices of all layers; embeddings, norms and the head stay in bfloat16."""

    def quantized_layer(layer: Layer) -> Layer:
        matrices = {name: getattr(layer, name) for name in ("qkv", "out", "gate_up", "down")}
        return layer._replace(**{n: sd.quantize(w, format, axis=0, block=BLOCKS[format]) for n, w in matrices.items()})

    return weights._replace(layers=tuple(map(quantized_layer, weights.layers)))


def size_of(weights: Weights) -> int:
    """Bytes of all weights, with packed codes and all scales."""
    arrays = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, sd.ScaledArray))
    return sum(array.nbytes for array in arrays)


def linear(x: jax.Array, w: Matrix) -> jax.Array:
    """x (..., inputs) · w (inputs, outputs) -> (..., outputs)."""
    return sd.matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """RMSNorm, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
    return (y * gain.astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary position embeddings to x (batch, length, heads, head_dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :].astype(x.dtype), jnp.sin(angles)[:, None, :].astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def attention(layer: Layer, x: jax.Array, cache: Cache, position: jax.Array | int) -> tuple[jax.Array, Cache]:
    batch, length, width = x.shape
    heads, kv_heads = heads_of(width)
    q, k, v = jnp.split(linear(x, layer.qkv).reshape(batch, length, -1, width // heads), (heads, heads + kv_heads), 2)
    positions = position + jnp.arange(length)
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(cached, new, position, axis=1)
        for cached, new in zip(cache, (rotary(k, positions), v), strict=True)
    )
    causal = jnp.arange(keys.shape[1]) <= positions[:, None]
    attended = jax.nn.dot_product_attention(rotary(q, positions), keys, values, mask=causal[None, None])
    return linear(attended.reshape(x.shape), layer.out), Cache(keys, values)


def mlp(layer: Layer, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(linear(x, layer.gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, layer.down)


def forward(weights: Weights, tokens: jax.Array, caches: tuple[Cache, ...], position: jax.Array | int):
    """Returns the logits (batch, length, vocab) of `tokens` (batch, length), the first at `position`, and caches."""
    x = weights.embedding[tokens]
    updated = []
    for layer, cache in zip(weights.layers, caches, strict=True):
        attended, cache = attention(layer, rms_norm(x, layer.attention_norm), cache, position)
        x = x + attended
        x = x + mlp(layer, rms_norm(x, layer.mlp_norm))
        updated.append(cache)
    return linear(rms_norm(x, weights.final_norm), weights.head).astype(jnp.float32), tuple(updated)


def empty_caches(weights: Weights, batch: int, capacity: int) -> tuple[Cache, ...]:
    width, dtype = weights.embedding.shape[1], weights.embedding.dtype
    heads, kv_heads = heads_of(width)
    zeros = jnp.zeros((batch, capacity, kv_heads, width // heads), dtype)
    return tuple(Cache(zeros, zeros) for _ in weights.layers)


def logits_of(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Returns the logits of all positions in one forward pass, as in training."""
    return forward(weights, tokens, empty_caches(weights, *tokens.shape), 0)[0]


@functools.partial(jax.jit, static_argnames="capacity")
def prefill(weights: Weights, prompt: jax.Array, capacity: int) -> tuple[Cache, ...]:
    """Returns the caches of all tokens of the prompt but the last."""
    return forward(weights, prompt[:, :-1], empty_caches(weights, prompt.shape[0], capacity), 0)[1]


@functools.partial(jax.jit, static_argnames=("count", "temperature"), donate_argnames="caches")
def generate(
    weights: Weights,
    caches: tuple[Cache, ...],
    token: jax.Array,
    position: jax.Array,
    key: jax.Array,
    *,
    count: int,
    temperature: float,
) -> tuple[jax.Array, tuple[Cache, ...]]:
    """Generates (batch, count) tokens after a token (batch,) at `position`; updates the donated caches."""

    def step(carry, key: jax.Array):
        token, caches, position = carry
        # Without a barrier XLA may hoist the unpacking of weights out of the loop and read bfloat16 in every step.
        packed, token = jax.lax.optimization_barrier((weights, token))
        logits, caches = forward(packed, token[:, None], caches, position)
        token = sample(logits[:, 0], key, temperature)
        return (token, caches, position + 1), token

    (_, caches, _), tokens = jax.lax.scan(step, (token, caches, position), jax.random.split(key, count))
    return tokens.T, caches


def sample(logits: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Samples tokens from softmax(logits / temperature); argmax at temperature 0."""
    if not temperature:
        return jnp.argmax(logits, axis=-1)
    return jax.random.categorical(key, logits / temperature)


def complete(weights: Weights, prompt: jax.Array, key: jax.Array, count: int, temperature: float):
    """Returns `count` tokens after the prompt, and the seconds of the decoding loop."""
    length = prompt.shape[1]
    caches = jax.block_until_ready(prefill(weights, prompt, capacity=length - 1 + count))
    started = time.perf_counter()
    tokens, _ = generate(
        weights, caches, prompt[:, -1], jnp.int32(length - 1), key, count=count, temperature=temperature
    )
    jax.block_until_ready(tokens)
    return tokens, time.perf_counter() - started


def train(width: int, hidden: int, layers: int, steps: int, seed: int = 0) -> Weights:
    """Trains float32 weights on the source."""
    init_key, data_key = jax.random.split(jax.random.key(seed))
    weights, optimizer = init_weights(init_key, width, hidden, layers), make_optimizer(steps)

    @jax.jit
    def step(weights: Weights, state, tokens: jax.Array):
        def loss(weights: Weights):
            return loss_and_excess(logits_of(weights, tokens[:, :-1]), tokens)

        gradients, excess = jax.grad(loss, has_aux=True)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, excess

    state = optimizer.init(weights)
    for tokens in (progress := tqdm(batches(data_key, steps), desc="training", unit="step", leave=False)):
        weights, state, excess = step(weights, state, tokens)
        progress.set_postfix(excess=f"{float(excess):.3f}", refresh=False)
    return weights


class Quality(NamedTuple):
    """Accuracy on held-out sequences, in nats per symbol."""

    divergence: jax.Array  # Kullback-Leibler divergence from the predictions of bfloat16
    excess: jax.Array  # loss above the entropy of the source


@jax.jit
def quality(weights: Weights, bfloat16: Weights, tokens: jax.Array) -> Quality:
    logits, expected = logits_of(weights, tokens[:, :-1]), jax.nn.log_softmax(logits_of(bfloat16, tokens[:, :-1]))
    divergence = jnp.sum(jnp.exp(expected) * (expected - jax.nn.log_softmax(logits)), axis=-1)
    return Quality(jnp.mean(divergence), loss_and_excess(logits, tokens)[1])


class Row(NamedTuple):
    name: str
    nbytes: int
    speed: float  # tokens per second
    tokens: jax.Array
    quality: Quality


def measure(name: str, weights: Weights, bfloat16: Weights, prompt: jax.Array, count: int, temperature: float) -> Row:
    text_key, held_out_key = jax.random.split(jax.random.key(1))
    tokens, _ = complete(weights, prompt, text_key, count, temperature)  # compiles
    seconds = statistics.median(complete(weights, prompt, text_key, count, temperature)[1] for _ in range(RUNS))
    held_out = quality(weights, bfloat16, SOURCE.draw(held_out_key, (64, LENGTH + 1)))
    return Row(name, size_of(weights), tokens.size / seconds, tokens, held_out)


HEADER = f"{'':<10}{'weights':>13}{'of bf16':>9}{'tokens/s':>11}{'× bf16':>8}{'same':>7}{'divergence':>12}{'excess':>9}"
NOTES = (
    f"tokens/s: of all sequences, median of {RUNS} runs.\n"
    "same: generated tokens that equal those of bfloat16, with the same random numbers.\n"
    "divergence: Kullback-Leibler divergence from bfloat16's predictions; excess: loss above the entropy of the\n"
    "source; both in nats per symbol, on held-out sequences."
)


def line(row: Row, bfloat16: Row) -> str:
    size = f"{row.nbytes / 2**20:,.2f} MiB{row.nbytes / bfloat16.nbytes:>9.1%}"
    speed = f"{row.speed:>11,.0f}{row.speed / bfloat16.speed:>8.2f}"
    same = float(jnp.mean(row.tokens == bfloat16.tokens))
    return f"{row.name:<10}{size:>22}{speed}{same:>7.0%}{row.quality.divergence:>12.4f}{row.quality.excess:>9.4f}"


def selected_kernel(weights: Weights, batch: int) -> str:
    """The explain lines of the MLP's first matmul and of the kernel that it selects."""
    x = jax.ShapeDtypeStruct((batch, weights.embedding.shape[1]), weights.embedding.dtype)
    problem, *kernels = sd.explain(sd.matmul, x, weights.layers[0].gate_up).splitlines()
    return "\n".join([problem, *(kernel for kernel in kernels if "  selected: " in kernel)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m examples.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=256, help="model width (default: 256)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden features of the MLP (default: 512)")
    parser.add_argument("--layers", type=int, default=2, help="number of layers (default: 2)")
    parser.add_argument("--batch", type=int, default=8, help="number of sequences (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per sequence (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: argmax (default: 1)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (default: 500)")
    parser.add_argument("--untrained", action="store_true", help="random weights, to measure speed only")
    args = parser.parse_args(arguments)
    for name, size in (("width", args.width), ("hidden", args.hidden)):
        if size % BLOCKS["int4"]:
            parser.error(f"--{name} is {size}, which is no multiple of int4's block of {BLOCKS['int4']}")
    print(
        f"{args.layers} layers of {args.width} x {args.hidden}, {'random' if args.untrained else 'trained'}, "
        f"{args.batch} x {args.tokens} tokens after a prompt of {PROMPT}.\n",
        flush=True,
    )
    sizes = args.width, args.hidden, args.layers
    if args.untrained:
        bfloat16 = init_weights(jax.random.key(0), *sizes, jnp.bfloat16)
    else:
        bfloat16 = in_bfloat16(train(*sizes, args.steps))
    prompt = SOURCE.draw(jax.random.key(3), (args.batch, PROMPT))
    rows, kernels = [], []
    print(HEADER)
    for name in FORMATS:
        weights = quantized(bfloat16, name) if name in BLOCKS else bfloat16
        rows.append(measure(name, weights, bfloat16, prompt, args.tokens, args.temperature))
        kernels.append(selected_kernel(weights, args.batch))
        print(line(rows[-1], rows[0]), flush=True)
    print("\n".join(["", NOTES, "", "The first matmul of the MLP:", "", *kernels]))


if __name__ == "__main__":
    main()

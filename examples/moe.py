"""A mixture-of-experts layer in low precision.

    python -m examples.moe --recipe fp8_block

A router sends each token to its two most probable experts, whose outputs are added with normalised router weights.
Tokens are sorted by expert, so that the layer is two grouped matmuls, `scaledot.train.ragged_dot`, with an activation
between them. Group sizes are traced: experts have no capacity limit, no token is dropped, and nothing is recompiled.

The layer is trained to predict a symbol of `examples.source` from the two before it. Then its output and all gradients
are compared with a loop over experts that calls `scaledot.train.dense` on the rows of one expert at a time.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import scaledot as sd
from examples.gpt_training import SOURCE
from scaledot import train

TOP_K = 2  # experts per token
BALANCE = 0.01  # weight of the load-balancing loss
RECIPES = ("fp8_block", "fp8_current", "mxfp8", "bfloat16")
Matmul = Callable[..., Any]


class Experts(NamedTuple):
    """The float32 weights of the layer."""

    router: jax.Array  # (width, experts)
    up: jax.Array  # (experts, width, hidden)
    down: jax.Array  # (experts, hidden, width)


class Model(NamedTuple):
    embeddings: jax.Array  # (2, vocab, width): a table for each of the two input tokens
    experts: Experts
    head: jax.Array  # (width, vocab)


def init_model(key: jax.Array, width: int, hidden: int, experts: int) -> Model:
    keys = iter(jax.random.split(key, 5))

    def normal(*shape: int, std: float) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    return Model(
        normal(2, SOURCE.vocab, width, std=0.7),
        Experts(
            normal(width, experts, std=width**-0.5),
            normal(experts, width, hidden, std=width**-0.5),
            normal(experts, hidden, width, std=hidden**-0.5),
        ),
        normal(width, SOURCE.vocab, std=width**-0.5),
    )


def grouped_matmul(recipe: str, precision: str | None = None) -> Matmul:
    """Returns a function of (rows, weights, group sizes), with bfloat16 results."""
    if recipe == "bfloat16":
        return functools.partial(_grouped_in_bfloat16, precision=precision)
    return functools.partial(train.ragged_dot, recipe=recipe, precision=precision, preferred_element_type=jnp.bfloat16)


def _grouped_in_bfloat16(rows, kernels, sizes, *, precision=None, kernel=None) -> jax.Array:
    return sd.ragged_dot(rows, kernels.astype(jnp.bfloat16), sizes, precision, kernel=kernel)


def dense_matmul(recipe: str, precision: str | None = None) -> Matmul:
    """Returns a function of (rows, weight), with bfloat16 results."""
    if recipe == "bfloat16":
        return lambda rows, kernel: sd.matmul(rows, kernel.astype(jnp.bfloat16), precision=precision)
    return functools.partial(train.dense, recipe=recipe, precision=precision)


def probabilities_of(router: jax.Array, x: jax.Array) -> jax.Array:
    """The router's probabilities (tokens, experts) for x (tokens, width)."""
    return jax.nn.softmax(jnp.dot(x.astype(jnp.float32), router, precision="highest"))


def choose(probabilities: jax.Array) -> jax.Array:
    """The most probable experts of each token, (tokens, TOP_K)."""
    return jax.lax.top_k(probabilities, TOP_K)[1]


def expert_weights(probabilities: jax.Array, chosen: jax.Array | np.ndarray) -> jax.Array:
    """The weights of each token's expert outputs, (tokens, TOP_K); they add up to one."""
    chosen_probabilities = jnp.take_along_axis(probabilities, chosen, axis=-1)
    return chosen_probabilities / jnp.sum(chosen_probabilities, axis=-1, keepdims=True)


def activation(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype)


def grouped(layer: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array, matmul: Matmul) -> jax.Array:
    """Applies all experts by grouped matmuls, x (tokens, width) -> (tokens, width)."""
    order = jnp.argsort(chosen.reshape(-1))  # stable: within a group, rows stay in the order of tokens
    sizes = jnp.bincount(chosen.reshape(-1), length=layer.up.shape[0])
    rows = reordered(jnp.repeat(x, TOP_K, axis=0), order)
    rows = matmul(activation(matmul(rows, layer.up, sizes)), layer.down, sizes)
    outputs = reordered(rows, jnp.argsort(order)).reshape(*chosen.shape, -1)
    return jnp.sum(weights[:, :, None] * outputs.astype(jnp.float32), axis=1).astype(x.dtype)


def reordered(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Permutes rows. Indices are unique, so the backward pass is a scatter without additions."""
    return rows.at[order].get(unique_indices=True)


def looped(layer: Experts, x: jax.Array, weights: jax.Array, chosen: np.ndarray, matmul: Matmul) -> jax.Array:
    """Applies the experts in a loop, as a reference; `chosen` must be concrete."""
    y = jnp.zeros(x.shape, jnp.float32)
    for expert, (up, down) in enumerate(zip(layer.up, layer.down, strict=True)):
        token, rank = np.nonzero(chosen == expert)
        if not token.size:
            continue
        rows = matmul(activation(matmul(x[token], up)), down)
        y = y.at[token].add(weights[token, rank][:, None] * rows.astype(jnp.float32))
    return y.astype(x.dtype)


def load_of(chosen: jax.Array, experts: int) -> jax.Array:
    """The fraction of rows that each expert has, (experts,)."""
    return jnp.bincount(chosen.reshape(-1), length=experts) / chosen.size


def imbalance(probabilities: jax.Array, load: jax.Array) -> jax.Array:
    """The load-balancing loss: 1 if probabilities or loads are uniform, more if probable experts have more load."""
    return load.size * jnp.sum(load * jnp.mean(probabilities, axis=0))


class Report(NamedTuple):
    """Results of a step. excess: nats per symbol above the entropy of the source. busiest: the largest load."""

    excess: jax.Array
    imbalance: jax.Array
    busiest: jax.Array


def loss_and_report(model: Model, symbols: jax.Array, matmul: Matmul) -> tuple[jax.Array, Report]:
    """Returns the loss and the report for symbols (tokens, 3): two inputs and the target."""
    x = (model.embeddings[0, symbols[:, 0]] + model.embeddings[1, symbols[:, 1]]).astype(jnp.bfloat16)
    probabilities = probabilities_of(model.experts.router, x)
    chosen = choose(probabilities)
    x = x + grouped(model.experts, x, expert_weights(probabilities, chosen), chosen, matmul)
    logits = x.astype(jnp.float32) @ model.head
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 2]).mean()
    load = load_of(chosen, probabilities.shape[-1])
    balance_loss = imbalance(probabilities, load)
    return loss + BALANCE * balance_loss, Report(loss - SOURCE.surprise(symbols).mean(), balance_loss, jnp.max(load))


def fit(model: Model, recipe: str, tokens: int, steps: int, key: jax.Array) -> Iterator[tuple[Model, Report]]:
    """Yields the model after each step, whose buffers the next step donates, and the step's report."""
    width = model.head.shape[0]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.3 / width, steps))  # updates of outputs grow with the width
    state, matmul = optimizer.init(model), grouped_matmul(recipe)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model: Model, state, key: jax.Array):
        symbols = SOURCE.draw(key, (tokens, 3))
        gradients, report = jax.grad(loss_and_report, has_aux=True)(model, symbols, matmul)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(model, updates), state, report

    for i in range(steps):
        model, state, report = step(model, state, jax.random.fold_in(key, i))
        yield model, report


def differences(layer: Experts, x: jax.Array, chosen: jax.Array, recipe: str, key: jax.Array) -> dict[str, float]:
    """Relative differences between the grouped layer and the loop over experts, of the output and all gradients."""
    g = jax.random.normal(key, x.shape, x.dtype)
    grouped_dot, dense_dot = (rounded(matmul(recipe, "highest")) for matmul in (grouped_matmul, dense_matmul))
    reference = functools.partial(output_and_gradients, looped, dense_dot, np.asarray(chosen))
    actual = jax.jit(output_and_gradients, static_argnums=(0, 1))(grouped, grouped_dot, chosen, layer, x, g)
    expected = jax.jit(reference)(layer, x, g)
    names = ("y", "dx", "d router", "d up", "d down")
    return {name: float(_relative_difference(a, b)) for name, a, b in zip(names, actual, expected, strict=True)}


def output_and_gradients(experts: Callable[..., jax.Array], matmul: Matmul, chosen, layer: Experts, x, g) -> tuple:
    """Returns y, and the gradients of x and of each weight for the output gradient g."""

    def forward(layer: Experts, x: jax.Array) -> jax.Array:
        return experts(layer, x, expert_weights(probabilities_of(layer.router, x), chosen), chosen, matmul)

    y, vjp = jax.vjp(forward, layer, x)
    layer, dx = vjp(g)
    return y, dx, *layer


def rounded(matmul: Matmul) -> Matmul:
    """Adds barriers, so that rows are rounded to bfloat16 forward and backward: XLA may otherwise fuse in float32."""
    barrier = jax.lax.optimization_barrier
    return lambda rows, *others: barrier(matmul(barrier(rows), *others))


@jax.jit
def _relative_difference(actual: jax.Array, expected: jax.Array) -> jax.Array:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((actual - expected) ** 2) / jnp.sum(expected**2))


def allowed(layer: Experts, recipe: str, rows: int) -> float:
    """The bound of `differences` that the order of float32 accumulation explains. rows: of the largest group.

    Two float32 accumulations of n elements in different orders differ by up to n · 2^-22, relatively. A number that
    differs by d rounds to another code of a cast with spacing s with probability d / s, and then differs by s: a mean
    square of d · s. Results of matmuls that contract `width` are quantised: the activation, and its gradient, which
    depends on the activation's difference besides its own. Results that contract `hidden` are rounded to bfloat16,
    those that contract rows are not rounded.
    """
    _, width, hidden = layer.up.shape
    per_element = 2.0**-22
    bfloat16_spacing = 2.0**-7
    casts = [] if recipe == "bfloat16" else sd.RECIPES[recipe].casts()
    spacing = max((2.0**-cast.format.mantissa_bits for _, _, cast in casts), default=bfloat16_spacing)
    mean_square = 2 * per_element * width * spacing + per_element * hidden * bfloat16_spacing
    return math.sqrt(mean_square) + per_element * max(hidden, rows)


def print_training(model: Model, recipe: str, tokens: int, steps: int, key: jax.Array) -> Model:
    print(f"\n{'step':>6}{'excess loss':>14}{'imbalance':>12}{'busiest expert':>17}{'seconds':>10}")
    started = time.perf_counter()
    for i, (latest, report) in enumerate(fit(model, recipe, tokens, steps, key), 1):
        model = latest
        if i == 1 or i % max(1, steps // 10) == 0:
            excess, imbalance, busiest = map(float, report)
            seconds = time.perf_counter() - started
            print(f"{i:>6}{excess:>14.4f}{imbalance:>12.3f}{busiest:>17.1%}{seconds:>10.1f}", flush=True)
    return model


def print_comparison(layer: Experts, recipe: str, tokens: int, key: jax.Array) -> None:
    """Compares the grouped layer with the loop over experts; raises SystemExit if they differ by more than allowed."""
    x_key, g_key = jax.random.split(key)
    x = jax.random.normal(x_key, (tokens, layer.router.shape[0]), jnp.bfloat16)
    chosen = choose(probabilities_of(layer.router, x))
    sizes = np.bincount(np.asarray(chosen).reshape(-1), minlength=layer.router.shape[1])
    print(f"\nThe same layer by a loop over experts, which have {', '.join(map(str, sizes))} rows:\n", flush=True)
    relative, limit = differences(layer, x, chosen, recipe, g_key), allowed(layer, recipe, int(sizes.max()))
    print(f"{'':<10}{'difference':>12}{'allowed':>10}")
    for name, difference in relative.items():
        print(f"{name:<10}{difference:>12.1e}{limit:>10.1e}")
    exceeding = [name for name, difference in relative.items() if not difference <= limit]
    if exceeding:
        raise SystemExit(f"the grouped layer differs from the loop over experts in: {', '.join(exceeding)}")


def print_kernels(layer: Experts, recipe: str, tokens: int) -> None:
    experts, width, _ = layer.up.shape
    rows, sizes = ((tokens * TOP_K, width), jnp.bfloat16), ((experts,), jnp.int32)
    shapes = (jax.ShapeDtypeStruct(*kind) for kind in (rows, (layer.up.shape, layer.up.dtype), sizes))
    lines = sd.explain(grouped_matmul(recipe), *shapes).splitlines()
    selected = [line for line in lines if not line.startswith(" ") or "selected" in line]
    print("\nThe kernels of the first grouped matmul, of its casts and of its gradients:\n", *selected, sep="\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m examples.moe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="fp8_block", choices=RECIPES, help="of the two grouped matmuls")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per step (default: 1024)")
    parser.add_argument("--width", type=int, default=128, help="model width (default: 128)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden features of an expert (default: 256)")
    parser.add_argument("--experts", type=int, default=8, help=f"experts, {TOP_K} per token (default: 8)")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    args = parser.parse_args(arguments)
    if args.experts < TOP_K:
        parser.error(f"--experts is {args.experts}, but each token goes to {TOP_K}")
    print(
        f"{args.experts} experts of {args.width} x {args.hidden}, {TOP_K} for each of {args.tokens} tokens, in "
        f"{args.recipe}, on a source of {SOURCE.entropy:.4f} nats per symbol."
    )
    start_key, data_key, comparison_key = jax.random.split(jax.random.key(0), 3)
    model = init_model(start_key, args.width, args.hidden, args.experts)
    model = print_training(model, args.recipe, args.tokens, args.steps, data_key)
    print_comparison(model.experts, args.recipe, args.tokens, comparison_key)
    print_kernels(model.experts, args.recipe, args.tokens)


if __name__ == "__main__":
    main()

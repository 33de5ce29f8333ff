"""A mixture of experts in low precision.

    python -m examples.moe --recipe fp8_block

Each token goes to the two experts that a router finds likeliest and comes back as their weighted sum. Tokens are
sorted by expert, so that the layer is two grouped products, `scaledot.train.ragged_dot`, around an activation. The
sizes of groups are data: no expert has a capacity, no token is dropped, and nothing is compiled twice.

The layer learns to predict a symbol of `examples.source` from the two before it. Then its result and all of its
gradients are compared with a loop over experts in which `scaledot.train.dense` sees the rows of one expert at a time.
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

CHOSEN = 2  # experts for each token
BALANCE = 0.01  # the weight of the imbalance in the loss
RECIPES = ("fp8_block", "fp8_current", "mxfp8", "bfloat16")
Product = Callable[..., Any]


class Experts(NamedTuple):
    """The weights of the layer, in float32."""

    router: jax.Array  # (width, experts)
    up: jax.Array  # (experts, width, hidden)
    down: jax.Array  # (experts, hidden, width)


class Model(NamedTuple):
    symbols: jax.Array  # (2, symbols, width): a table for each of the two symbols that are known
    experts: Experts
    head: jax.Array  # (width, symbols)


def start(key: jax.Array, width: int, hidden: int, experts: int) -> Model:
    keys = iter(jax.random.split(key, 5))

    def normal(*shape: int, spread: float) -> jax.Array:
        return spread * jax.random.normal(next(keys), shape)

    return Model(
        normal(2, SOURCE.symbols, width, spread=0.7),
        Experts(
            normal(width, experts, spread=width**-0.5),
            normal(experts, width, hidden, spread=width**-0.5),
            normal(experts, hidden, width, spread=hidden**-0.5),
        ),
        normal(width, SOURCE.symbols, spread=width**-0.5),
    )


def grouped_product(recipe: str, precision: str | None = None) -> Product:
    """(rows, kernels, sizes of groups) -> rows, in bfloat16."""
    if recipe == "bfloat16":
        return functools.partial(_grouped_in_bfloat16, precision=precision)
    return functools.partial(train.ragged_dot, recipe=recipe, precision=precision, preferred_element_type=jnp.bfloat16)


def _grouped_in_bfloat16(rows, kernels, sizes, *, precision=None, kernel=None) -> jax.Array:
    return sd.ragged_dot(rows, kernels.astype(jnp.bfloat16), sizes, precision, kernel=kernel)


def single_product(recipe: str, precision: str | None = None) -> Product:
    """(rows, kernel) -> rows, in bfloat16."""
    if recipe == "bfloat16":
        return lambda rows, kernel: sd.matmul(rows, kernel.astype(jnp.bfloat16), precision=precision)
    return functools.partial(train.dense, recipe=recipe, precision=precision)


def probabilities_of(router: jax.Array, x: jax.Array) -> jax.Array:
    """x (tokens, width) -> (tokens, experts)."""
    return jax.nn.softmax(jnp.dot(x.astype(jnp.float32), router, precision="highest"))


def choose(probabilities: jax.Array) -> jax.Array:
    """The experts of each token: (tokens, CHOSEN)."""
    return jax.lax.top_k(probabilities, CHOSEN)[1]


def shares_of(probabilities: jax.Array, chosen: jax.Array | np.ndarray) -> jax.Array:
    """The weights of each token's sum, which add up to one: (tokens, CHOSEN)."""
    taken = jnp.take_along_axis(probabilities, chosen, axis=-1)
    return taken / jnp.sum(taken, axis=-1, keepdims=True)


def activation(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x.astype(jnp.float32)).astype(x.dtype)


def grouped(layer: Experts, x: jax.Array, shares: jax.Array, chosen: jax.Array, product: Product) -> jax.Array:
    """Tokens through their experts, all experts at once: x (tokens, width) -> (tokens, width)."""
    order = jnp.argsort(chosen.reshape(-1))  # stable: within a group, rows stay in the order of tokens
    sizes = jnp.bincount(chosen.reshape(-1), length=layer.up.shape[0])
    rows = reordered(jnp.repeat(x, CHOSEN, axis=0), order)
    rows = product(activation(product(rows, layer.up, sizes)), layer.down, sizes)
    results = reordered(rows, jnp.argsort(order)).reshape(*chosen.shape, -1)
    return jnp.sum(shares[:, :, None] * results.astype(jnp.float32), axis=1).astype(x.dtype)


def reordered(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Rows in that order. Each is taken once, so the backward pass writes each gradient once and adds none."""
    return rows.at[order].get(unique_indices=True)


def one_by_one(layer: Experts, x: jax.Array, shares: jax.Array, chosen: np.ndarray, product: Product) -> jax.Array:
    """The same by a loop over experts; which rows each of them has must be known before it is compiled."""
    y = jnp.zeros(x.shape, jnp.float32)
    for expert, (up, down) in enumerate(zip(layer.up, layer.down, strict=True)):
        token, place = np.nonzero(chosen == expert)
        if not token.size:
            continue
        rows = product(activation(product(x[token], up)), down)
        y = y.at[token].add(shares[token, place][:, None] * rows.astype(jnp.float32))
    return y.astype(x.dtype)


def parts_of(chosen: jax.Array, experts: int) -> jax.Array:
    """The part of all rows that each expert has."""
    return jnp.bincount(chosen.reshape(-1), length=experts) / chosen.size


def imbalance(probabilities: jax.Array, parts: jax.Array) -> jax.Array:
    """1 where experts are equally likely or have equal parts, more where the likely ones have more."""
    return parts.size * jnp.sum(parts * jnp.mean(probabilities, axis=0))


class Report(NamedTuple):
    """What a step saw. excess: nats per symbol above the entropy of the source. busiest: the largest part."""

    excess: jax.Array
    imbalance: jax.Array
    busiest: jax.Array


def loss_and_report(model: Model, symbols: jax.Array, product: Product) -> tuple[jax.Array, Report]:
    """symbols (tokens, 3): two that are known and the one that follows."""
    x = (model.symbols[0, symbols[:, 0]] + model.symbols[1, symbols[:, 1]]).astype(jnp.bfloat16)
    probabilities = probabilities_of(model.experts.router, x)
    chosen = choose(probabilities)
    x = x + grouped(model.experts, x, shares_of(probabilities, chosen), chosen, product)
    logits = x.astype(jnp.float32) @ model.head
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, symbols[:, 2]).mean()
    parts = parts_of(chosen, probabilities.shape[-1])
    uneven = imbalance(probabilities, parts)
    return loss + BALANCE * uneven, Report(loss - SOURCE.surprise(symbols).mean(), uneven, jnp.max(parts))


def fit(model: Model, recipe: str, tokens: int, steps: int, key: jax.Array) -> Iterator[tuple[Model, Report]]:
    """The model after each step, which the next one uses up, and what the step saw; every step has fresh tokens."""
    width = model.head.shape[0]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.3 / width, steps))  # a wider sum moves as far
    state, product = optimizer.init(model), grouped_product(recipe)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model: Model, state, key: jax.Array):
        symbols = SOURCE.draw(key, (tokens, 3))
        gradients, report = jax.grad(loss_and_report, has_aux=True)(model, symbols, product)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(model, updates), state, report

    for i in range(steps):
        model, state, report = step(model, state, jax.random.fold_in(key, i))
        yield model, report


def differences(layer: Experts, x: jax.Array, chosen: jax.Array, recipe: str, key: jax.Array) -> dict[str, float]:
    """The grouped layer and the loop over experts: the norm of their difference over that of the loop's."""
    g = jax.random.normal(key, x.shape, x.dtype)
    many, one = (as_stored(product(recipe, "highest")) for product in (grouped_product, single_product))
    by_loop = functools.partial(result_and_gradients, one_by_one, one, np.asarray(chosen))
    found = jax.jit(result_and_gradients, static_argnums=(0, 1))(grouped, many, chosen, layer, x, g)
    expected = jax.jit(by_loop)(layer, x, g)
    names = ("y", "dx", "d router", "d up", "d down")
    return {name: float(_distance(a, b)) for name, a, b in zip(names, found, expected, strict=True)}


def result_and_gradients(mix: Callable[..., jax.Array], product: Product, chosen, layer: Experts, x, g) -> tuple:
    """y, and the gradients of x and of each weight for a gradient g of y."""

    def forward(layer: Experts, x: jax.Array) -> jax.Array:
        return mix(layer, x, shares_of(probabilities_of(layer.router, x), chosen), chosen, product)

    y, vjp = jax.vjp(forward, layer, x)
    layer, dx = vjp(g)
    return y, dx, *layer


def as_stored(product: Product) -> Product:
    """A product whose rows are bfloat16 for certain, both ways: XLA may otherwise keep the bits that rounding drops."""
    barrier = jax.lax.optimization_barrier
    return lambda rows, *others: barrier(product(barrier(rows), *others))


@jax.jit
def _distance(found: jax.Array, expected: jax.Array) -> jax.Array:
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((found - expected) ** 2) / jnp.sum(expected**2))


def allowed(layer: Experts, recipe: str, rows: int) -> float:
    """How large `differences` may be if nothing but the order of float32 sums differs; rows: of the largest group.

    Two float32 sums of n terms drift apart by up to n · 2^-22 of their size. A number that has drifted by d crosses a
    boundary of a cast whose steps are s in d / s of all cases, and then is a step away: a mean square of d · s. Sums
    over `width` are cast: the activation and its gradient, which has the slope of the one beside the drift of its own.
    Those over `hidden` are rounded to bfloat16, and those over rows are not.
    """
    _, width, hidden = layer.up.shape
    drift = 2.0**-22
    bfloat16_step = 2.0**-7
    casts = [] if recipe == "bfloat16" else sd.RECIPES[recipe].casts()
    step = max((2.0**-cast.format.mantissa_bits for _, _, cast in casts), default=bfloat16_step)
    return math.sqrt(2 * drift * width * step + drift * hidden * bfloat16_step) + drift * max(hidden, rows)


def print_training(model: Model, recipe: str, tokens: int, steps: int, key: jax.Array) -> Model:
    print(f"\n{'step':>6}{'excess loss':>14}{'imbalance':>12}{'busiest expert':>17}{'seconds':>10}")
    began = time.perf_counter()
    for i, (latest, report) in enumerate(fit(model, recipe, tokens, steps, key), 1):
        model = latest
        if i == 1 or i % max(1, steps // 10) == 0:
            excess, uneven, busiest = map(float, report)
            seconds = time.perf_counter() - began
            print(f"{i:>6}{excess:>14.4f}{uneven:>12.3f}{busiest:>17.1%}{seconds:>10.1f}", flush=True)
    return model


def print_comparison(layer: Experts, recipe: str, tokens: int, key: jax.Array) -> None:
    """Raises SystemExit where the grouped layer is not the loop over experts."""
    x_key, g_key = jax.random.split(key)
    x = jax.random.normal(x_key, (tokens, layer.router.shape[0]), jnp.bfloat16)
    chosen = choose(probabilities_of(layer.router, x))
    sizes = np.bincount(np.asarray(chosen).reshape(-1), minlength=layer.router.shape[1])
    print(f"\nThe same layer by a loop over experts, which have {', '.join(map(str, sizes))} rows:\n", flush=True)
    found, limit = differences(layer, x, chosen, recipe, g_key), allowed(layer, recipe, int(sizes.max()))
    print(f"{'':<10}{'difference':>12}{'allowed':>10}")
    for name, difference in found.items():
        print(f"{name:<10}{difference:>12.1e}{limit:>10.1e}")
    apart = [name for name, difference in found.items() if not difference <= limit]
    if apart:
        raise SystemExit(f"the grouped layer is not the loop over experts: {', '.join(apart)} are too far apart")


def print_kernels(layer: Experts, recipe: str, tokens: int) -> None:
    experts, width, _ = layer.up.shape
    rows, sizes = ((tokens * CHOSEN, width), jnp.bfloat16), ((experts,), jnp.int32)
    shapes = (jax.ShapeDtypeStruct(*kind) for kind in (rows, (layer.up.shape, layer.up.dtype), sizes))
    lines = sd.explain(grouped_product(recipe), *shapes).splitlines()
    taken = [line for line in lines if not line.startswith(" ") or "TAKEN" in line]
    print("\nThe kernels of the first grouped matmul, of its casts and of its gradients:\n", *taken, sep="\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m examples.moe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="fp8_block", choices=RECIPES, help="of the two grouped products")
    parser.add_argument("--tokens", type=int, default=1024, help="in each step (default: 1024)")
    parser.add_argument("--width", type=int, default=128, help="of a token (default: 128)")
    parser.add_argument("--hidden", type=int, default=256, help="between an expert's two products (default: 256)")
    parser.add_argument("--experts", type=int, default=8, help=f"each token has {CHOSEN} of them (default: 8)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    args = parser.parse_args(arguments)
    if args.experts < CHOSEN:
        parser.error(f"--experts is {args.experts}, but each token goes to {CHOSEN}")
    print(
        f"{args.experts} experts of {args.width} x {args.hidden}, {CHOSEN} for each of {args.tokens} tokens, in "
        f"{args.recipe}, on a source of {SOURCE.entropy:.4f} nats per symbol."
    )
    start_key, data_key, comparison_key = jax.random.split(jax.random.key(0), 3)
    model = start(start_key, args.width, args.hidden, args.experts)
    model = print_training(model, args.recipe, args.tokens, args.steps, data_key)
    print_comparison(model.experts, args.recipe, args.tokens, comparison_key)
    print_kernels(model.experts, args.recipe, args.tokens)


if __name__ == "__main__":
    main()

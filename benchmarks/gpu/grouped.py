"""Tokens in groups, each with its own matrix, as in a mixture of experts: beside our own dense product and lax's.

Errors are of float32 results against float64 on some rows of every group, beside those of XLA's kernel for the same
operands on a smaller problem.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scaledot as sd
from benchmarks.gpu import gemm, report
from benchmarks.gpu.sides import Side, jax_side, measure
from benchmarks.table import verdict
from scaledot import train
from scaledot.kernels.hopper.sizes import LINE
from scaledot.ops.ragged import contract_groups

GROUPS = (3000, 1000, 500, 5000, 2500, 700, 3300, 384)  # tokens of each expert, and none left over
INPUTS, OUTPUTS = 4096, 14336
OURS, DENSE, PEER = "scaledot", "scaledot, one matrix for all", "lax.ragged_dot bfloat16"
TARGETS = {"fp8": {"of_dense": 0.85, "of_lax": 3.0}}
SMALL_GROUPS, SMALL = (130, 0, 57, 300), (528, 320)  # inputs and outputs that suit no tile
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
RECIPES = ("fp8_current", "fp8_block")


class Blocks(NamedTuple):
    """What shares a scale in x (tokens, inputs) and w (groups, inputs, outputs), and the error that is allowed."""

    x: tuple[int, int]
    w: tuple[int, int, int]
    allowed: float


PRODUCTS = {
    "fp8": Blocks((0, 0), (1, 0, 0), gemm.ALLOWED["fast (default)"]),
    "fp8, 1x128 and 128x128": Blocks((1, LINE), (1, LINE, LINE), gemm.ALLOWED["promoted"]),
}
SUMS, STEP = "gradient of kernels, fp8", "step"
CASES = (*PRODUCTS, SUMS, STEP)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def operands(blocks: Blocks, groups: tuple[int, ...], inputs: int, outputs: int) -> tuple[Any, Any, jax.Array]:
    """x, w stored with the summed axis last, and the sizes of groups."""
    x = sd.quantize(normal(0, sum(groups), inputs), "fp8_e4m3", axis=(0, 1), block=blocks.x, pad=True)
    turned = (blocks.w[0], blocks.w[2], blocks.w[1])
    w = sd.quantize(normal(1, len(groups), outputs, inputs), "fp8_e4m3", axis=(0, 1, 2), block=turned, pad=True)
    return x, w, jnp.array(groups)


def product(x, w, groups, dtype=jnp.bfloat16, kernel: str | None = "hopper_grouped") -> jax.Array:
    return sd.ragged_dot(x, w.transpose(0, 2, 1), groups, preferred_element_type=dtype, kernel=kernel)


def error(found: jax.Array, x, w, groups: tuple[int, ...]) -> float:
    """Relative, of the first, the middle and the last row of every group."""
    off, exact = [], []
    for group, (size, end) in enumerate(zip(groups, np.cumsum(groups), strict=True)):
        if not size:
            continue
        rows = np.array([end - size, end - size // 2 - 1, end - 1])
        matrix = np.asarray(sd.dequantize(w[group], jnp.float32), np.float64)
        exact.append(np.asarray(sd.dequantize(x[rows], jnp.float32), np.float64) @ matrix.T)
        off.append(np.asarray(found[rows], np.float64) - exact[-1])
    return float(np.linalg.norm(np.concatenate(off)) / np.linalg.norm(np.concatenate(exact)))


def errors(blocks: Blocks) -> dict[str, float]:
    found = {}
    small, large = (SMALL_GROUPS, *SMALL), (GROUPS, INPUTS, OUTPUTS)
    for what, kernel, sizes in (
        (OURS, "hopper_grouped", small),
        ("XLA", "xla_codes", small),
        (OURS, "hopper_grouped", large),
    ):
        x, w, groups = operands(blocks, *sizes)
        result = jax.jit(lambda x, w, g, kernel=kernel: product(x, w, g, jnp.float32, kernel))(x, w, groups)
        found[f"{what}, K = {sizes[1]}"] = error(result, x, w, sizes[0])
    if not max(off for name, off in found.items() if name.startswith(OURS)) <= blocks.allowed:
        raise AssertionError(f"groups of {blocks} are off by {found}, over {blocks.allowed:.1e}")
    return found


def product_sides(blocks: Blocks) -> Iterator[Side]:
    x, w, groups = operands(blocks, GROUPS, INPUTS, OUTPUTS)
    yield jax_side(OURS, product, x, w, groups, ours=True)
    yield jax_side(DENSE, lambda x, w: gemm.product(x, w), x, w[0], ours=True)
    plain = normal(0, *x.shape), normal(1, len(GROUPS), INPUTS, OUTPUTS)
    yield jax_side(PEER, lax.ragged_dot, *plain, groups)


def sum_sides() -> Iterator[Side]:
    """x (tokens, inputs) and g (tokens, outputs), stored with tokens last, whole steps of them in each group."""
    steps = [-(-size // LINE) for size in GROUPS]
    sizes, tokens = jnp.array(steps) * LINE, sum(steps) * LINE
    x, g = (sd.quantize(normal(i, n, tokens), "fp8_e4m3") for i, n in ((0, INPUTS), (1, OUTPUTS)))

    def sums(x, g, sizes):  # as training calls it, which knows that steps are whole
        known = {"preferred": jnp.float32, "group_multiple": LINE}
        return contract_groups(x.T, g.T, sizes, SUMMED, "hopper_grouped", **known)

    yield jax_side(OURS, sums, x, g, sizes, ours=True)
    yield jax_side(DENSE, lambda x, g: gemm.product(x, g, dtype=jnp.float32), x, g, ours=True)
    plain = normal(0, sum(GROUPS), INPUTS), normal(1, sum(GROUPS), OUTPUTS)

    def peer(x, g, sizes):
        return lax.ragged_dot_general(x, g, sizes, SUMMED, preferred_element_type=jnp.float32)

    yield jax_side(PEER, peer, *plain, jnp.array(GROUPS))


def step_of(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Result and gradients of a layer."""

    def step(x, w, groups, dy):
        y, backward = jax.vjp(lambda x, w: layer(x, w, groups), x, w)
        return y, *backward(dy)

    return step


def step_sides() -> Iterator[Side]:
    tokens, groups = sum(GROUPS), jnp.array(GROUPS)
    w = jax.random.normal(jax.random.key(1), (len(GROUPS), INPUTS, OUTPUTS))
    data = normal(0, tokens, INPUTS), w, groups, normal(2, tokens, OUTPUTS)
    for recipe in RECIPES:

        def layer(x, w, groups, recipe=recipe) -> Any:
            return train.ragged_dot(x, w, groups, recipe=recipe, preferred_element_type=jnp.bfloat16)

        yield jax_side(f"{OURS} {recipe}", step_of(layer), *data, ours=True)
    yield jax_side(PEER, step_of(lambda x, w, groups: lax.ragged_dot(x, w.astype(x.dtype), groups)), *data)


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    rows = []
    for name in cases or CASES:
        off = errors(PRODUCTS[name]) if name in PRODUCTS else {}
        print(f"{name}: errors {', '.join(f'{what} {error:.2e}' for what, error in off.items())}" if off else name)
        sides = product_sides(PRODUCTS[name]) if name in PRODUCTS else sum_sides() if name == SUMS else step_sides()
        rows.append(_row(name, off, *measure(sides, turns, skipped)))
        print(f"wrote {report.write('grouped', rows)}", flush=True)


def _row(name: str, off: dict[str, float], timed, missing) -> dict[str, Any]:
    flop = 2.0 * sum(GROUPS) * INPUTS * OUTPUTS * (3 if name == STEP else 1)
    sides = {}
    for side, times in timed.items():
        ratios = {key: timed[other].median / times.median for key, other in _OTHERS.items() if other in timed}
        targets = TARGETS.get(name, {}) if side == OURS else {}
        sides[side] = {**times.as_dict(), "tflops": flop / times.median / 1e12, **ratios, "targets": targets}
        print(report.side_line(side, times, f"{flop / times.median / 1e12:.0f} TFLOP/s"), flush=True)
        for key, target in targets.items():
            if key in ratios:
                print(f"    {key} {ratios[key]:.2f}, target {target:g} {verdict(ratios[key] >= target)}")
    about = {"groups": GROUPS, "inputs": INPUTS, "outputs": OUTPUTS}
    return {"case": name, **about, "errors": off, "sides": sides, "missing": missing}


_OTHERS = {"of_dense": DENSE, "of_lax": PEER}

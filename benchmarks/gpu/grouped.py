"""Grouped FP8 matmuls, as in a mixture of experts, compared with scaledot's dense matmul and lax.ragged_dot.

Errors are those of float32 results relative to a float64 matmul of the dequantised operands, on three rows of every
group; on a smaller problem those of XLA's kernel are recorded too.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scaledot as sd
from benchmarks.gpu import gemm, report
from benchmarks.gpu.implementations import Implementation, jax_implementation, measure
from benchmarks.table import verdict
from scaledot import train
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.ops.ragged import contract_groups

GROUPS = (3000, 1000, 500, 5000, 2500, 700, 3300, 384)  # tokens per expert
INPUTS, OUTPUTS = 4096, 14336
OURS, DENSE, LAX = "scaledot", "scaledot, dense", "lax.ragged_dot bfloat16"
TARGETS = {"fp8": {"of_dense": 0.85, "of_lax": 3.0}}
SMALL_GROUPS, SMALL = (130, 0, 57, 300), (528, 320)  # inputs and outputs, not multiples of a tile's size
RAGGED_CONTRACTING = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
RECIPES = ("fp8_current", "fp8_block")


class Blocks(NamedTuple):
    """Block shapes of x (tokens, inputs) and w (groups, inputs, outputs), and the largest permitted relative error."""

    x: tuple[int, int]
    w: tuple[int, int, int]
    max_error: float


MATMULS = {
    "fp8": Blocks((0, 0), (1, 0, 0), gemm.MAX_ERROR[gemm.FAST]),
    "fp8, 1x128 and 128x128": Blocks((1, SCALE_BLOCK), (1, SCALE_BLOCK, SCALE_BLOCK), gemm.MAX_ERROR[gemm.PROMOTED]),
}
WGRAD, STEP = "wgrad, fp8", "step"
CASES = (*MATMULS, WGRAD, STEP)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def operands(blocks: Blocks, groups: tuple[int, ...], inputs: int, outputs: int) -> tuple[Any, Any, jax.Array]:
    """Returns x (tokens, inputs), w (groups, outputs, inputs) with the contracting dim last, and group sizes."""
    x = sd.quantize(normal(0, sum(groups), inputs), "fp8_e4m3", axis=(0, 1), block=blocks.x, pad=True)
    block = (blocks.w[0], blocks.w[2], blocks.w[1])
    w = sd.quantize(normal(1, len(groups), outputs, inputs), "fp8_e4m3", axis=(0, 1, 2), block=block, pad=True)
    return x, w, jnp.array(groups)


def grouped_matmul(x, w, groups, dtype=jnp.bfloat16, kernel: str | None = "hopper_grouped") -> jax.Array:
    return sd.ragged_dot(x, w.transpose(0, 2, 1), groups, preferred_element_type=dtype, kernel=kernel)


def error(actual: jax.Array, x, w, groups: tuple[int, ...]) -> float:
    """The relative error of the first, the middle and the last row of every group."""
    differences, exact = [], []
    for group, (size, end) in enumerate(zip(groups, np.cumsum(groups), strict=True)):
        if not size:
            continue
        rows = np.array([end - size, end - size // 2 - 1, end - 1])
        matrix = np.asarray(sd.dequantize(w[group], jnp.float32), np.float64)
        exact.append(np.asarray(sd.dequantize(x[rows], jnp.float32), np.float64) @ matrix.T)
        differences.append(np.asarray(actual[rows], np.float64) - exact[-1])
    return float(np.linalg.norm(np.concatenate(differences)) / np.linalg.norm(np.concatenate(exact)))


def errors(blocks: Blocks) -> dict[str, float]:
    relative = {}
    small, large = (SMALL_GROUPS, *SMALL), (GROUPS, INPUTS, OUTPUTS)
    for implementation, kernel, sizes in (
        (OURS, "hopper_grouped", small),
        ("XLA", "xla_codes", small),
        (OURS, "hopper_grouped", large),
    ):
        x, w, groups = operands(blocks, *sizes)
        result = jax.jit(lambda x, w, g, kernel=kernel: grouped_matmul(x, w, g, jnp.float32, kernel))(x, w, groups)
        relative[f"{implementation}, K = {sizes[1]}"] = error(result, x, w, sizes[0])
    if not max(e for name, e in relative.items() if name.startswith(OURS)) <= blocks.max_error:
        raise AssertionError(f"{blocks}: relative errors {relative} exceed {blocks.max_error:.1e}")
    return relative


def matmul_implementations(blocks: Blocks) -> Iterator[Implementation]:
    x, w, groups = operands(blocks, GROUPS, INPUTS, OUTPUTS)
    yield jax_implementation(OURS, grouped_matmul, x, w, groups, ours=True)
    yield jax_implementation(DENSE, lambda x, w: gemm.matmul(x, w), x, w[0], ours=True)
    bfloat16 = normal(0, *x.shape), normal(1, len(GROUPS), INPUTS, OUTPUTS)
    yield jax_implementation(LAX, lax.ragged_dot, *bfloat16, groups)


def wgrad_implementations() -> Iterator[Implementation]:
    """The wgrad matmul of x (tokens, inputs) and g (tokens, outputs), both stored with tokens last.

    Each group is padded to a multiple of 128 tokens.
    """
    blocks = [-(-size // SCALE_BLOCK) for size in GROUPS]
    sizes, tokens = jnp.array(blocks) * SCALE_BLOCK, sum(blocks) * SCALE_BLOCK
    x, g = (sd.quantize(normal(i, n, tokens), "fp8_e4m3") for i, n in ((0, INPUTS), (1, OUTPUTS)))

    def wgrad(x, g, sizes):  # as `scaledot.train` calls it: group sizes are known to be multiples of 128
        options = {"preferred": jnp.float32, "group_multiple": SCALE_BLOCK}
        return contract_groups(x.T, g.T, sizes, RAGGED_CONTRACTING, "hopper_grouped", **options)

    yield jax_implementation(OURS, wgrad, x, g, sizes, ours=True)
    yield jax_implementation(DENSE, lambda x, g: gemm.matmul(x, g, dtype=jnp.float32), x, g, ours=True)
    bfloat16 = normal(0, sum(GROUPS), INPUTS), normal(1, sum(GROUPS), OUTPUTS)

    def lax_wgrad(x, g, sizes):
        return lax.ragged_dot_general(x, g, sizes, RAGGED_CONTRACTING, preferred_element_type=jnp.float32)

    yield jax_implementation(LAX, lax_wgrad, *bfloat16, jnp.array(GROUPS))


def step_of(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a step that computes a layer's result and gradients."""

    def step(x, w, groups, dy):
        y, backward = jax.vjp(lambda x, w: layer(x, w, groups), x, w)
        return y, *backward(dy)

    return step


def step_implementations() -> Iterator[Implementation]:
    tokens, groups = sum(GROUPS), jnp.array(GROUPS)
    w = jax.random.normal(jax.random.key(1), (len(GROUPS), INPUTS, OUTPUTS))
    data = normal(0, tokens, INPUTS), w, groups, normal(2, tokens, OUTPUTS)
    for recipe in RECIPES:

        def layer(x, w, groups, recipe=recipe) -> Any:
            return train.ragged_dot(x, w, groups, recipe=recipe, preferred_element_type=jnp.bfloat16)

        yield jax_implementation(f"{OURS} {recipe}", step_of(layer), *data, ours=True)
    yield jax_implementation(LAX, step_of(lambda x, w, groups: lax.ragged_dot(x, w.astype(x.dtype), groups)), *data)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    rows = []
    for name in cases or CASES:
        relative = errors(MATMULS[name]) if name in MATMULS else {}
        listed = ", ".join(f"{of} {error:.2e}" for of, error in relative.items())
        print(f"{name}: relative errors {listed}" if relative else name)
        rows.append(_row(name, relative, *measure(implementations_of(name), rounds, skipped)))
        print(f"wrote {report.write('grouped', rows)}", flush=True)


def implementations_of(name: str) -> Iterator[Implementation]:
    if name in MATMULS:
        return matmul_implementations(MATMULS[name])
    return wgrad_implementations() if name == WGRAD else step_implementations()


def _row(name: str, relative: dict[str, float], timed, not_run) -> dict[str, Any]:
    flop = 2.0 * sum(GROUPS) * INPUTS * OUTPUTS * (3 if name == STEP else 1)
    results = {}
    for implementation, times in timed.items():
        ratios = {key: timed[base].median / times.median for key, base in _BASES.items() if base in timed}
        targets = TARGETS.get(name, {}) if implementation == OURS else {}
        tflops = flop / times.median / 1e12
        results[implementation] = {**times.as_dict(), "tflops": tflops, **ratios, "targets": targets}
        print(report.result_line(implementation, times, f"{tflops:.0f} TFLOP/s"), flush=True)
        for key, target in targets.items():
            if key in ratios:
                print(f"    {key} {ratios[key]:.2f}, target {target:g} {verdict(ratios[key] >= target)}")
    about = {"groups": GROUPS, "inputs": INPUTS, "outputs": OUTPUTS}
    return {"case": name, **about, "errors": relative, "implementations": results, "not_run": not_run}


_BASES = {"of_dense": DENSE, "of_lax": LAX}

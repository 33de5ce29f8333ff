"""Scales for lines and squares of 128: the products beside torch's, and the dense step of the recipe fp8_block.

Errors are of float32 results against float64 on some rows, beside those of XLA's kernel for the same operands.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import dense, gemm, report
from benchmarks.gpu.sides import Side, jax_side, measure, torch_side
from scaledot.kernels.mosaic.casts import LINE

SIZE = 8192  # rows, columns and terms of a product
# Blocks of x (M, K) and w (N, K), and the least part of torch's rate.
PRODUCTS = {"1x128 and 128x128": ((1, LINE), (LINE, LINE), 1.1), "1x128 and 1x128": ((1, LINE), (1, LINE), None)}
STEPS = ("A", "B")
OURS, PEER, STEP = "scaledot", "torch._scaled_mm", "scaledot fp8_block"
STEP_TARGET = 1.45  # of bfloat16
SMALL = (300, 712, 528)  # M, N, K of the comparison with XLA, multiples of nothing


def operands(blocks: tuple, m: int, n: int, k: int) -> tuple[sd.ScaledArray, sd.ScaledArray]:
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((m, k), (n, k)))]
    x, w = (sd.quantize(a, "fp8_e4m3", axis=(0, 1), block=b, pad=True) for a, b in zip(arrays, blocks, strict=True))
    return x, w


def errors(blocks: tuple) -> dict[str, float]:
    """Ours and that of XLA's kernel, on a small product and for ours on the timed one."""
    allowed, found = gemm.ALLOWED["promoted"], {}  # sums of every 128 terms are promoted, too
    for kernel, what in (("mosaic_float8", OURS), ("xla_codes", "XLA")):
        found[f"{what}, K = {SMALL[2]}"] = gemm.error(None, *operands(blocks, *SMALL), kernel=kernel)
    found[f"{OURS}, K = {SIZE}"] = gemm.error(None, *operands(blocks, SIZE, SIZE, SIZE))
    if not max(error for name, error in found.items() if name.startswith(OURS)) <= allowed:
        raise AssertionError(f"products of blocks {blocks} are off by {found}, over {allowed:.1e}")
    return found


def product_sides(blocks: tuple) -> Iterator[Side]:
    yield jax_side(OURS, gemm.product, *operands(blocks, SIZE, SIZE, SIZE), ours=True)
    yield torch_side(PEER, lambda: _scaled_mm(square=blocks[1] == (LINE, LINE)))


def _scaled_mm(square: bool):
    import torch  # pyright: ignore[reportMissingImports]

    steps = SIZE // LINE
    a, b = ((torch.randn(SIZE, SIZE, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(2))
    rows = torch.rand(steps, SIZE, device="cuda").T
    columns = torch.rand(steps, steps, device="cuda").T if square else torch.rand(steps, SIZE, device="cuda")
    return lambda: torch._scaled_mm(a, b.T, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16)


def step_sides(case: dense.Case) -> Iterator[Side]:
    data = dense.data_of(case)
    yield jax_side(dense.BASE, dense.step_of(dense.plain_layer), *data)
    yield jax_side(STEP, dense.step_of(dense.scaledot_layer("fp8_block")), *data, ours=True)


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    checked, rows = {"fp8_block": dense.check("fp8_block")}, []
    print(f"gradients beside XLA's: {checked}")
    for name, (*blocks, target) in PRODUCTS.items():
        if not cases or name in cases:
            rows.append(_product_row(name, tuple(blocks), target, turns, skipped))
            print(f"wrote {report.write('block', rows, checks=checked)}", flush=True)
    for case in dense.CASES:
        if case.name in STEPS and (not cases or case.name in cases):
            print(f"{case.name}: {case.batch} x {case.sequence}, {case.inputs} -> {case.outputs}")
            timed, missing = measure(step_sides(case), turns, skipped)
            rows.append(dense.row_of("block", case, timed, missing, {STEP: STEP_TARGET}))
            print(f"wrote {report.write('block', rows, checks=checked)}", flush=True)


def _product_row(name: str, blocks: tuple, target: float | None, turns: int, skipped) -> dict[str, Any]:
    off = errors(blocks)
    print(f"{name}: errors {', '.join(f'{what} {error:.2e}' for what, error in off.items())}")
    timed, missing = measure(product_sides(blocks), turns, skipped)
    sides = {}
    for side, times in timed.items():
        rate = 2.0 * SIZE**3 / times.median
        part = None if PEER not in timed else timed[PEER].median / times.median
        own = target if side == OURS else None
        sides[side] = {**times.as_dict(), "tflops": rate / 1e12, "of_torch": part, "target": own}
        print(report.side_line(side, times, f"{rate / 1e12:.0f} TFLOP/s", own, part), flush=True)
        report.explain("block", name, side, own, part)
    return {"case": name, "m": SIZE, "n": SIZE, "k": SIZE, "errors": off, "sides": sides, "missing": missing}

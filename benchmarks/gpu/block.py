"""Scales for lines and squares of 128: fp8 products beside torch's, int8 products beside those, and the dense step of
the recipe fp8_block.

Errors are of float32 results against float64 on some rows, beside those of XLA's kernel for the same operands.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import dense, gemm, report
from benchmarks.gpu.sides import Side, jax_side, measure, torch_side
from scaledot.kernels.hopper.sizes import LINE

SIZE = 8192  # rows, columns and terms of a product
LINES, SQUARES = (1, LINE), (LINE, LINE)
STEPS = ("A", "B")
OURS, FP8, PEER, STEP = "scaledot", "scaledot fp8", "torch._scaled_mm", "scaledot fp8_block"
STEP_TARGET = 1.45  # of bfloat16
SMALL = (300, 712, 528)  # M, N, K of the comparison with XLA, multiples of nothing


class Product(NamedTuple):
    """A format, blocks of x (M, K) and w (N, K), our kernel and XLA's, whom it is held to, and at least what part."""

    format: str
    x: tuple[int, int]
    w: tuple[int, int]
    kernel: str
    reference: str
    peer: str
    target: float | None

    @property
    def allowed(self) -> float:
        """What float32 results may be off by: 8-bit floats are summed with few bits within 128 terms, integers exactly,
        and SIZE / 128 sums with as many roundings of float32."""
        return gemm.ALLOWED["promoted"] if self.peer == PEER else SIZE // LINE * 2.0**-24


def _fp8(w: tuple[int, int], target: float | None) -> Product:
    return Product("fp8_e4m3", LINES, w, "hopper_fp8", "xla_codes", PEER, target)


def _int8(w: tuple[int, int]) -> Product:
    return Product("int8", LINES, w, "hopper_int8", "xla_integer", FP8, 1.0)


PRODUCTS = {
    "1x128 and 128x128": _fp8(SQUARES, 1.1),
    "1x128 and 1x128": _fp8(LINES, None),
    "int8, 1x128 and 128x128": _int8(SQUARES),
    "int8, 1x128 and 1x128": _int8(LINES),
}


def operands(product: Product, m: int, n: int, k: int) -> tuple[sd.ScaledArray, sd.ScaledArray]:
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((m, k), (n, k)))]
    both = zip(arrays, (product.x, product.w), strict=True)
    x, w = (sd.quantize(a, product.format, axis=(0, 1), block=b, pad=True) for a, b in both)
    return x, w


def errors(product: Product) -> dict[str, float]:
    """Ours and that of XLA's kernel, on a small product and for ours on the timed one."""
    found = {}
    for kernel, what in ((product.kernel, OURS), (product.reference, "XLA")):
        found[f"{what}, K = {SMALL[2]}"] = gemm.error(None, *operands(product, *SMALL), kernel=kernel)
    found[f"{OURS}, K = {SIZE}"] = gemm.error(None, *operands(product, SIZE, SIZE, SIZE), kernel=product.kernel)
    if not max(error for name, error in found.items() if name.startswith(OURS)) <= product.allowed:
        raise AssertionError(f"{product} is off by {found}, over {product.allowed:.1e}")
    return found


def product_sides(product: Product) -> Iterator[Side]:
    def multiply(x, w, kernel=product.kernel):
        return gemm.product(x, w, kernel=kernel)

    yield jax_side(OURS, multiply, *operands(product, SIZE, SIZE, SIZE), ours=True)
    if product.peer == FP8:
        yield jax_side(FP8, gemm.product, *operands(_fp8(product.w, None), SIZE, SIZE, SIZE), ours=True)
    else:
        yield torch_side(PEER, lambda: _scaled_mm(square=product.w == SQUARES))


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
    for name, product in PRODUCTS.items():
        if not cases or name in cases:
            rows.append(_product_row(name, product, turns, skipped))
            print(f"wrote {report.write('block', rows, checks=checked)}", flush=True)
    for case in dense.CASES:
        if case.name in STEPS and (not cases or case.name in cases):
            print(f"{case.name}: {case.batch} x {case.sequence}, {case.inputs} -> {case.outputs}")
            timed, missing = measure(step_sides(case), turns, skipped)
            rows.append(dense.row_of("block", case, timed, missing, {STEP: STEP_TARGET}))
            print(f"wrote {report.write('block', rows, checks=checked)}", flush=True)


def _product_row(name: str, product: Product, turns: int, skipped) -> dict[str, Any]:
    off = errors(product)
    print(f"{name}: errors {', '.join(f'{what} {error:.2e}' for what, error in off.items())}")
    timed, missing = measure(product_sides(product), turns, skipped)
    sides, peer = {}, product.peer
    for side, times in timed.items():
        rate = 2.0 * SIZE**3 / times.median
        part = None if peer not in timed else timed[peer].median / times.median
        own = product.target if side == OURS else None
        sides[side] = {**times.as_dict(), "tflops": rate / 1e12, "of_peer": part, "target": own}
        print(report.side_line(side, times, f"{rate / 1e12:.0f} TFLOP/s", own, part), flush=True)
        report.explain("block", name, side, own, part)
    about = {"case": name, "m": SIZE, "n": SIZE, "k": SIZE, "peer": peer}
    return {**about, "errors": off, "sides": sides, "missing": missing}

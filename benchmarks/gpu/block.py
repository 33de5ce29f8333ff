"""Matmuls with scales per 1x128 and 128x128 block: fp8 compared with torch, int8 with fp8; and the dense step under
the recipe fp8_block.

Errors are those of float32 results relative to a float64 matmul of the dequantised operands, on some rows; those of
XLA's kernel for the same operands are recorded too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import dense, gemm, report
from benchmarks.gpu.implementations import Implementation, jax_implementation, measure, torch_implementation
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK

SIZE = 8192  # M, N and K
ROW_BLOCK, SQUARE_BLOCK = (1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK)
STEP_LAYERS = ("8192 -> 32768", "4096 -> 14336")
OURS, FP8, TORCH, STEP_IMPLEMENTATION = "scaledot", "scaledot fp8", "torch._scaled_mm", "scaledot fp8_block"
STEP_TARGET = 1.45  # speedup over bfloat16
SMALL = (300, 712, 528)  # M, N, K of the comparison with XLA; none is a multiple of a GEMM tile's size


class MatmulCase(NamedTuple):
    """Format, blocks of x (M, K) and w (N, K), scaledot's kernel, XLA's, and the minimum speedup over `baseline`."""

    format: str
    x: tuple[int, int]
    w: tuple[int, int]
    kernel: str
    reference: str
    baseline: str
    target: float | None

    @property
    def max_error(self) -> float:
        """The largest permitted relative error of float32 results.

        Tensor cores accumulate FP8 with reduced precision within 128 elements along K; int8 accumulation is exact, and
        SIZE / 128 partial accumulators add as many float32 roundings.
        """
        return gemm.MAX_ERROR[gemm.PROMOTED] if self.baseline == TORCH else SIZE // SCALE_BLOCK * 2.0**-24


def _fp8(w: tuple[int, int], target: float | None) -> MatmulCase:
    return MatmulCase("fp8_e4m3", ROW_BLOCK, w, "hopper_fp8", "xla_codes", TORCH, target)


def _int8(w: tuple[int, int]) -> MatmulCase:
    return MatmulCase("int8", ROW_BLOCK, w, "hopper_int8", "xla_integer", FP8, 1.0)


MATMULS = {
    "1x128 and 128x128": _fp8(SQUARE_BLOCK, 1.1),
    "1x128 and 1x128": _fp8(ROW_BLOCK, None),
    "int8, 1x128 and 128x128": _int8(SQUARE_BLOCK),
    "int8, 1x128 and 1x128": _int8(ROW_BLOCK),
}


def operands(case: MatmulCase, m: int, n: int, k: int) -> tuple[sd.ScaledArray, sd.ScaledArray]:
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((m, k), (n, k)))]
    arrays_and_blocks = zip(arrays, (case.x, case.w), strict=True)
    x, w = (sd.quantize(a, case.format, axis=(0, 1), block=b, pad=True) for a, b in arrays_and_blocks)
    return x, w


def errors(case: MatmulCase) -> dict[str, float]:
    """Relative errors of scaledot's kernel and XLA's on a small matmul, and of scaledot's on the timed one."""
    relative = {}
    for kernel, name in ((case.kernel, OURS), (case.reference, "XLA")):
        relative[f"{name}, K = {SMALL[2]}"] = gemm.error(None, *operands(case, *SMALL), kernel=kernel)
    relative[f"{OURS}, K = {SIZE}"] = gemm.error(None, *operands(case, SIZE, SIZE, SIZE), kernel=case.kernel)
    if not max(error for name, error in relative.items() if name.startswith(OURS)) <= case.max_error:
        raise AssertionError(f"{case}: relative errors {relative} exceed {case.max_error:.1e}")
    return relative


def matmul_implementations(case: MatmulCase) -> Iterator[Implementation]:
    def matmul(x, w, kernel=case.kernel):
        return gemm.matmul(x, w, kernel=kernel)

    yield jax_implementation(OURS, matmul, *operands(case, SIZE, SIZE, SIZE), ours=True)
    if case.baseline == FP8:
        yield jax_implementation(FP8, gemm.matmul, *operands(_fp8(case.w, None), SIZE, SIZE, SIZE), ours=True)
    else:
        yield torch_implementation(TORCH, lambda: _scaled_mm(square=case.w == SQUARE_BLOCK))


def _scaled_mm(square: bool):
    import torch  # pyright: ignore[reportMissingImports]

    num_blocks = SIZE // SCALE_BLOCK
    a, b = ((torch.randn(SIZE, SIZE, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(2))
    scale_a = torch.rand(num_blocks, SIZE, device="cuda").T
    scale_b = torch.rand(num_blocks, num_blocks if square else SIZE, device="cuda")
    scale_b = scale_b.T if square else scale_b
    return lambda: torch._scaled_mm(a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def step_implementations(case: dense.Case) -> Iterator[Implementation]:
    data = dense.data_of(case)
    yield jax_implementation(dense.BASE, dense.step_of(dense.plain_layer), *data)
    yield jax_implementation(STEP_IMPLEMENTATION, dense.step_of(dense.scaledot_layer("fp8_block")), *data, ours=True)


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    checks, rows = {"fp8_block": dense.check("fp8_block")}, []
    print(f"relative errors of gradients against XLA's: {checks}")
    for name, matmul in MATMULS.items():
        if not cases or name in cases:
            rows.append(_matmul_row(name, matmul, rounds, skipped))
            print(f"wrote {report.write('block', rows, checks=checks)}", flush=True)
    for case in dense.CASES:
        if case.name in STEP_LAYERS and (not cases or case.name in cases):
            print(f"{case.name}: {case.batch} x {case.sequence} tokens")
            timed, not_run = measure(step_implementations(case), rounds, skipped)
            rows.append(dense.row_of("block", case, timed, not_run, {STEP_IMPLEMENTATION: STEP_TARGET}))
            print(f"wrote {report.write('block', rows, checks=checks)}", flush=True)


def _matmul_row(name: str, case: MatmulCase, rounds: int, skipped) -> dict[str, Any]:
    relative = errors(case)
    print(f"{name}: relative errors {', '.join(f'{of} {error:.2e}' for of, error in relative.items())}")
    timed, not_run = measure(matmul_implementations(case), rounds, skipped)
    results, baseline = {}, case.baseline
    for implementation, times in timed.items():
        flops = 2.0 * SIZE**3 / times.median
        ratio = None if baseline not in timed else timed[baseline].median / times.median
        target = case.target if implementation == OURS else None
        results[implementation] = {**times.as_dict(), "tflops": flops / 1e12, "of_baseline": ratio, "target": target}
        print(report.result_line(implementation, times, f"{flops / 1e12:.0f} TFLOP/s", target, ratio), flush=True)
        report.print_remark("block", name, implementation, target, ratio)
    about = {"case": name, "m": SIZE, "n": SIZE, "k": SIZE, "baseline": baseline}
    return {**about, "errors": relative, "implementations": results, "not_run": not_run}

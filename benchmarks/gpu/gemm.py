"""FP8 matmuls with per-tensor scales, compared with torch and XLA, and the error of each accumulation mode.

Errors compare float32 results with float64 matmuls of the dequantised operands, so they show only accumulation; 64 rows
are checked. With fast accumulation, the tensor cores accumulate all of K (`use_fast_accum=True` in torch). "promoted":
partial accumulators are added in float32, every 128 elements of K in scaledot (`use_fast_accum=False` in torch).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import scaledot as sd
from benchmarks.gpu import report
from benchmarks.gpu.implementations import Implementation, jax_implementation, measure, torch_implementation

SIZES = {"8192": (8192, 8192, 8192), "16384": (8192, 8192, 16384)}  # M, N, K
BASELINE = "torch._scaled_mm, use_fast_accum=True"
TARGET = 0.99  # of the baseline's TFLOP/s
FAST, PROMOTED = "fast accumulation (default)", "promoted"
MODES = {FAST: None, PROMOTED: "highest"}  # `precision` of each accumulation mode
# The largest permitted relative error of float32 results for K = 8192.
MAX_ERROR = {FAST: 2.5e-3, PROMOTED: 1.3e-4}
CHECKED_ROWS = 64


def operands(m: int, n: int, k: int) -> tuple[sd.ScaledArray, sd.ScaledArray]:
    """x (M, K) and w (N, K), both with K last, as the fused cast writes them."""
    x, w = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(((m, k), (n, k))))
    return sd.quantize(x, "fp8_e4m3"), sd.quantize(w, "fp8_e4m3")


def matmul(x: sd.ScaledArray, w: sd.ScaledArray, precision=None, dtype=jnp.bfloat16, kernel="hopper_fp8"):
    return sd.matmul(x, w.T, precision=precision, preferred_element_type=dtype, kernel=kernel)


def error(precision: str | None, x: sd.ScaledArray, w: sd.ScaledArray, kernel: str = "hopper_fp8") -> float:
    """The relative error of the first rows against float64."""
    actual = jax.jit(lambda x, w: matmul(x, w, precision, jnp.float32, kernel))(x, w)[:CHECKED_ROWS]
    lhs, rhs = (np.asarray(sd.dequantize(q, jnp.float32), np.float64) for q in (x[:CHECKED_ROWS], w))
    exact = lhs @ rhs.T
    return float(np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact))


def implementations_of(m: int, n: int, k: int, x: sd.ScaledArray, w: sd.ScaledArray) -> Iterator[Implementation]:
    for mode, precision in MODES.items():
        yield jax_implementation(f"scaledot, {mode}", lambda x, w, p=precision: matmul(x, w, p), x, w, ours=True)
    for fast in (True, False):
        yield torch_implementation(
            f"torch._scaled_mm, use_fast_accum={fast}", lambda fast=fast: _scaled_mm(m, n, k, fast)
        )
    plain = [jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(((m, k), (k, n)))]
    yield jax_implementation("JAX bfloat16", jnp.matmul, *plain)
    yield torch_implementation("torch bfloat16", lambda: _torch_matmul(m, n, k))


def _scaled_mm(m: int, n: int, k: int, fast: bool):
    import torch  # pyright: ignore[reportMissingImports]

    a, b = (
        (torch.randn(*shape, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        for shape in ((m, k), (n, k))
    )
    one = torch.ones((), device="cuda")
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return lambda: torch._scaled_mm(a, b.T, **options)


def _torch_matmul(m: int, n: int, k: int):
    import torch  # pyright: ignore[reportMissingImports]

    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    return lambda: a @ b


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    rows = []
    for name in cases or SIZES:
        m, n, k = SIZES[name]
        x, w = operands(m, n, k)
        errors = {mode: error(precision, x, w) for mode, precision in MODES.items()}
        for mode, relative in errors.items():
            print(f"relative error of {mode} at K = {k}: {relative:.2e}")
            if k == 8192 and not relative <= MAX_ERROR[mode]:
                raise AssertionError(f"{mode}: relative error {relative:.2e} exceeds {MAX_ERROR[mode]:.1e}")
        timed, not_run = measure(implementations_of(m, n, k, x, w), rounds, skipped)
        results = {}
        for implementation, times in timed.items():
            flops = 2.0 * m * n * k / times.median
            ratio = None if BASELINE not in timed else timed[BASELINE].median / times.median
            target = TARGET if implementation == f"scaledot, {FAST}" and name == "8192" else None
            results[implementation] = {**times.as_dict(), "tflops": flops / 1e12, "of_torch": ratio, "target": target}
            print(report.result_line(implementation, times, f"{flops / 1e12:.0f} TFLOP/s", target, ratio), flush=True)
        rows.append(
            {"case": name, "m": m, "n": n, "k": k, "errors": errors, "implementations": results, "not_run": not_run}
        )
    print(f"wrote {report.write('gemm', rows)}")

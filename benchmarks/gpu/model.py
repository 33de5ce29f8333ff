"""Whole models: a Llama-like stack (`benchmarks.gpu.llama`) under recipes, beside bfloat16 and Flax's fp8.

Every row is a process of its own, so that its first step is a first step, and is written as soon as it is measured:
`--cases "4 blocks/fp8_current"` runs one. The first step is taken apart: tracing, lowering to StableHLO, compiling and
the first run. Ratios are to the bfloat16 row of the same stack, which must have been run on the same machine.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu import report

BASE = "bfloat16"
FLAX = "flax Fp8DirectDotGeneralOp"
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
STEPS = 4  # in a timed turn
TIMEOUT_S = 400


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack: `policy` names one of jax.checkpoint_policies for bfloat16 and one of scaledot's for recipes."""

    blocks: int = 4
    scanned: bool = False
    policy: tuple[str, str] | None = None
    head: bool = False  # whether the head is quantised, too
    programs: tuple[str, ...] = (BASE, "fp8_current")


CASES = {
    "4 blocks": Case(programs=(BASE, *RECIPES, FLAX)),
    "4 blocks, head too": Case(head=True, programs=("fp8_current", "fp8_block")),
    "16 blocks": Case(blocks=16, programs=(BASE, "fp8_current", "fp8_block")),
    "8 blocks, scanned": Case(blocks=8, scanned=True),
    "8 blocks, scanned, dots saved": Case(
        blocks=8, scanned=True, policy=("checkpoint_dots", "save_quantized_residuals_and_gemms")
    ),
    "8 blocks, scanned, residuals saved": Case(
        blocks=8, scanned=True, policy=("checkpoint_dots", "save_quantized_residuals"), programs=("fp8_current",)
    ),
    "8 blocks, scanned, nothing saved": Case(blocks=8, scanned=True, policy=("nothing_saveable", "nothing_saveable")),
}
# The stack whose bfloat16 row a case is compared with, where it has none of its own.
BASES = {
    "4 blocks, head too": "4 blocks",
    "8 blocks, scanned, residuals saved": "8 blocks, scanned, dots saved",
}
# At least these ratios; at most so many seconds beyond the first step of bfloat16.
TARGETS = {
    "4 blocks/fp8_current": (1.45, 8),
    "4 blocks/fp8_delayed": (1.47, 12),
    "4 blocks/fp8_block": (1.28, 10),
    "4 blocks/mxfp8": (1.02, 10),
    "4 blocks/nvfp4": (0.97, 15),
    "4 blocks, head too/fp8_current": (1.54, None),
    "16 blocks/fp8_current": (1.50, 8 + 12 * 0.3),
    "8 blocks, scanned/fp8_current": (1.48, None),
    "8 blocks, scanned, dots saved/fp8_current": (1.43, None),
    "8 blocks, scanned, nothing saved/fp8_current": (1.50, None),
}


def rows() -> list[str]:
    return [f"{name}/{program}" for name, case in CASES.items() for program in case.programs]


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    unknown = [case for case in cases if case not in rows()]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r}; rows are: {'; '.join(rows())}")
    for row in (row for row in cases or rows() if row not in skipped):
        print(f"measuring {row} ...", flush=True)
        found = _measured_apart(row, turns)
        path = report.write("model", [{"case": row, **found}])
        print(f"{line(row, found, base_of(row))}\nwrote {path}", flush=True)


def _measured_apart(row: str, turns: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.model", "--row", row, "--turns", str(turns)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{row} took longer than {TIMEOUT_S} s; rows before it are written") from None
    if done.returncode:
        raise SystemExit(f"{row} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def base_row(row: str) -> str:
    """The bfloat16 row that a row is compared with."""
    name, _ = row.split("/")
    return f"{BASES.get(name, name)}/{BASE}"


def base_of(row: str) -> dict[str, Any] | None:
    """The latest measurement of that row, if any."""
    suites = json.loads(report.device_file().read_text())
    return {case["case"]: case for case in suites["model"]["cases"]}.get(base_row(row))


def line(row: str, found: dict[str, Any], base: dict[str, Any] | None) -> str:
    first = found["first"]
    parts = " + ".join(f"{first[part]:.1f}" for part in ("trace", "lower", "compile", "run"))
    text = f"{row:<52} {1e3 * found['seconds']:7.1f} ms"
    if base is not None:
        beyond = sum(first.values()) - sum(base["first"].values())
        text += f"  {base['seconds'] / found['seconds']:.3f} x  first {sum(first.values()):5.1f} s ({beyond:+.1f})"
    return f"{text}  = {parts}  {found['peak_bytes'] / 1e9:5.1f} GB"


def measure(row: str, turns: int) -> dict[str, Any]:
    """One row, in this process."""
    import jax

    from benchmarks.gpu import llama

    name, program = row.split("/")
    init, step, data = llama.training(stack_of(CASES[name], program))
    start = time.perf_counter()
    state = jax.block_until_ready(init(jax.random.key(0)))
    init_s = time.perf_counter() - start
    clock, first = time.perf_counter(), {}
    traced = jax.jit(step, donate_argnums=0).trace(state, data, jax.random.key(2))
    first["trace"], clock = time.perf_counter() - clock, time.perf_counter()
    lowered = traced.lower()
    first["lower"], clock = time.perf_counter() - clock, time.perf_counter()
    compiled = lowered.compile()
    first["compile"], clock = time.perf_counter() - clock, time.perf_counter()
    state, loss = jax.block_until_ready(compiled(state, data, jax.random.key(2)))
    first["run"] = time.perf_counter() - clock
    losses, seconds = [float(loss)], []
    for _ in range(turns):
        clock = time.perf_counter()
        for _ in range(STEPS):
            state, loss = compiled(state, data, jax.random.key(2))
        losses.append(float(jax.block_until_ready(loss)))
        seconds.append((time.perf_counter() - clock) / STEPS)
    stats = jax.devices()[0].memory_stats() or {}
    kernels = (compiled.as_text() or "").count('custom_call_target="mosaic_gpu')
    return {
        "seconds": statistics.median(seconds),
        "first": first,
        "init_s": init_s,
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "kernels": kernels,
        "losses": losses,
    }


def stack_of(case: Case, program: str):
    import flax.linen as nn
    import jax

    import scaledot as sd
    from benchmarks.gpu import llama

    layer = None
    if program == FLAX:
        layer = nn.fp8_ops.Fp8DirectDotGeneralOp
    elif program != BASE:
        layer = sd.linen.make_dot_general_cls(program)
    policy = None
    if case.policy is not None:
        plain, ours = case.policy
        is_ours = layer is not None and hasattr(sd.checkpoint_policies, ours)
        policy = getattr(sd.checkpoint_policies, ours) if is_ours else getattr(jax.checkpoint_policies, plain)
    shape = llama.Shape(blocks=case.blocks, scanned=case.scanned, policy=policy)
    return llama.Stack(shape, layer, layer if case.head else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", required=True, choices=rows())
    parser.add_argument("--turns", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(measure(options.row, options.turns)))

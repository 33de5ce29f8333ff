"""Whole models: a Llama-like stack (`benchmarks.gpu.llama`) under recipes, beside bfloat16, Flax's fp8 and torchao's.

Every row is a process of its own, so that its first step is a first step, and is written as soon as it is measured:
`--cases "4 blocks/fp8_current"` runs one. The first step is taken apart: tracing, lowering to StableHLO, compiling and
the first run. Ratios are to the bfloat16 row of the same stack, in torch to torch's, which must have been run on the
same machine. A row of a peer that is not installed or fails is left out. `--tiny` runs rows with 2 blocks of width 128,
on any machine, and writes nothing.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import record
from benchmarks.gpu import report, sizes

BASE = "bfloat16"
FLAX = "flax Fp8DirectDotGeneralOp"
TORCHAO = "torchao float8 tensorwise"
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
PARTS = ("trace", "lower", "compile", "run")  # of a first step
STEPS = 4  # in a timed turn
TIMEOUT_S = 400


@dataclasses.dataclass(frozen=True)
class Case:
    """A stack: `policy` names one of jax.checkpoint_policies for bfloat16 and one of scaledot's for recipes.

    cached: the row is the second of two processes that share a persistent compilation cache.
    """

    blocks: int = 4
    scanned: bool = False
    policy: tuple[str, str] | None = None
    head: bool = False  # whether the head is quantised, too
    programs: tuple[str, ...] = (BASE, "fp8_current")
    library: str = "linen"  # or nnx, torch
    cached: bool = False


def _remat(ours: str, *programs: str, plain: str = "checkpoint_dots") -> Case:
    return Case(blocks=8, scanned=True, policy=(plain, ours), programs=programs)


CASES = {
    "4 blocks": Case(programs=(BASE, *RECIPES, FLAX)),
    "4 blocks, head too": Case(head=True, programs=("fp8_current", "fp8_block")),
    "4 blocks, NNX": Case(library="nnx", programs=(BASE, "fp8_current", "fp8_block")),
    "4 blocks, torch": Case(library="torch", programs=(BASE, TORCHAO)),
    "16 blocks": Case(blocks=16, programs=(BASE, "fp8_current", "fp8_block")),
    "16 blocks, second process": Case(blocks=16, programs=("fp8_current",), cached=True),
    "8 blocks, scanned": Case(blocks=8, scanned=True),
    "8 blocks, scanned, dots saved": _remat("save_quantized_residuals_and_gemms", BASE, "fp8_current"),
    "8 blocks, scanned, residuals saved": _remat("save_quantized_residuals", "fp8_current"),
    "8 blocks, scanned, results saved": _remat("checkpoint_dots_and_quantized_gemms", "fp8_current"),
    "8 blocks, scanned, unbatched results saved": _remat("dots_and_quantized_gemms_with_no_batch_dims", "fp8_current"),
    "8 blocks, scanned, nothing saved": _remat("nothing_saveable", BASE, "fp8_current", plain="nothing_saveable"),
}
# The stack whose bfloat16 row a case is compared with, where it has none of its own. Attention is cuDNN's, no dot with
# batch axes, so checkpoint_dots is what checkpoint_dots_with_no_batch_dims would be.
BASES = {
    "4 blocks, head too": "4 blocks",
    "16 blocks, second process": "16 blocks",
    "8 blocks, scanned, residuals saved": "8 blocks, scanned, dots saved",
    "8 blocks, scanned, results saved": "8 blocks, scanned, dots saved",
    "8 blocks, scanned, unbatched results saved": "8 blocks, scanned, dots saved",
}


def rows() -> list[str]:
    return [f"{name}/{program}" for name, case in CASES.items() for program in case.programs]


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str], tiny: bool = False) -> None:
    unknown = [case for case in cases if case not in rows()]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r}; rows are: {'; '.join(rows())}")
    for row in (row for row in cases or rows() if row not in skipped):
        missing = absent(row)
        if missing:
            print(f"{row} is left out: not installed: {', '.join(missing)}", flush=True)
            continue
        print(f"measuring {row} ...", flush=True)
        try:
            found = _measured_apart(row, turns, tiny)
        except RowError as error:
            if not is_peer(row):
                raise SystemExit(f"{error}\nrows before it are written") from None
            print(f"{row} is left out: {error}", flush=True)
            continue
        if tiny:
            print(line(row, found, None), flush=True)
        else:
            path = report.write("model", [{"case": row, **found}])
            print(f"{line(row, found, base_of(row))}\nwrote {path}", flush=True)


def absent(row: str) -> list[str]:
    """The packages that a row needs and that are not installed."""
    name, program = row.split("/")
    needed = ("torch",) if CASES[name].library == "torch" else ("flax", "optax")
    needed += ("torchao",) if program == TORCHAO else ()
    return [package for package in needed if importlib.util.find_spec(package) is None]


def is_peer(row: str) -> bool:
    name, program = row.split("/")
    return CASES[name].library == "torch" or program == FLAX


class RowError(Exception):
    """A row's process failed or took too long."""


def _measured_apart(row: str, turns: int, tiny: bool) -> dict[str, Any]:
    """`measure` in a process of its own: with a persistent cache, in the second of two."""
    command = [sys.executable, "-m", "benchmarks.gpu.model", "--row", row, "--turns"]
    last = ["--tiny"] if tiny else []
    if not CASES[row.split("/")[0]].cached:
        return _process([*command, str(turns), *last], {})
    with tempfile.TemporaryDirectory() as folder:
        # Programs of all sizes, so that a tiny one is kept too.
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        before = _process([*command, "1", *last], cache)
        return {**_process([*command, str(turns), *last], cache), "first_process": before["first"]}


def _process(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=record.RESULTS.parent.parent,
            env=os.environ | variables,
        )
    except subprocess.TimeoutExpired:
        raise RowError(f"it took longer than {TIMEOUT_S} s") from None
    if done.returncode:
        raise RowError(f"it failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def base_row(row: str) -> str:
    """The bfloat16 row that a row is compared with."""
    name, _ = row.split("/")
    return f"{BASES.get(name, name)}/{BASE}"


def base_of(row: str) -> dict[str, Any] | None:
    """The latest measurement of that row, if any."""
    return measured(json.loads(report.device_file().read_text())).get(base_row(row))


def measured(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of a device's file by name."""
    return {case["case"]: case for case in results.get("model", {"cases": []})["cases"]}


def policy_of(row: str) -> str | None:
    """The name of the checkpoint policy of a row's blocks."""
    name, program = row.split("/")
    policy = CASES[name].policy
    return None if policy is None else policy[program != BASE]


def activation_bytes(found: dict[str, Any]) -> float:
    """Peak memory less float32 parameters, two moments and gradients: of the state's three parts, one more."""
    return found["peak_bytes"] - found["state_bytes"] * 4 / 3


def first_step(found: dict[str, Any]) -> str:
    """Its seconds: the sum, and the parts where it was taken apart."""
    parts = [found["first"][part] for part in PARTS if part in found["first"]]
    total = f"{sum(found['first'].values()):.1f}"
    return f"{total} = {' + '.join(f'{part:.1f}' for part in parts)}" if parts else total


def line(row: str, found: dict[str, Any], base: dict[str, Any] | None) -> str:
    text = f"{row:<52} {1e3 * found['seconds']:7.1f} ms"
    if base is not None:
        beyond = sum(found["first"].values()) - sum(base["first"].values())
        text += f"  {base['seconds'] / found['seconds']:.3f} x  {beyond:+.1f} s"
    return f"{text}  first {first_step(found)} s  {found['peak_bytes'] / 1e9:5.1f} GB  loss {found['losses'][0]:.3f}"


def measure(row: str, turns: int, tiny: bool = False) -> dict[str, Any]:
    """One row, in this process."""
    name, program = row.split("/")
    case = CASES[name]
    lengths = (sizes.TINY_BATCH, sizes.TINY_TOKENS) if tiny else (sizes.BATCH, sizes.TOKENS)
    if case.library == "torch":
        from benchmarks.gpu import llama_torch

        return llama_torch.measure(_shape(case, program, tiny), *lengths, program == TORCHAO, turns, STEPS)
    return _measure_jax(*training(case, program, tiny, *lengths), turns)


def _measure_jax(init: Any, step: Any, data: Any, turns: int) -> dict[str, Any]:
    import jax

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


def _shape(case: Case, program: str, tiny: bool) -> sizes.Shape:
    found = sizes.Shape(blocks=case.blocks, scanned=case.scanned, policy=_policy(case, program))
    return dataclasses.replace(found, **sizes.TINY) if tiny else found


def _policy(case: Case, program: str) -> Any:
    if case.policy is None:
        return None
    import jax

    import scaledot as sd

    plain, ours = case.policy
    is_ours = program != BASE and hasattr(sd.checkpoint_policies, ours)
    return getattr(sd.checkpoint_policies, ours) if is_ours else getattr(jax.checkpoint_policies, plain)


def training(case: Case, program: str, tiny: bool, batch: int, tokens: int) -> tuple[Any, Any, Any]:
    """Initialiser, step and tokens of a row in JAX, as `llama.training`."""
    shape = _shape(case, program, tiny)
    if case.library == "nnx":
        from benchmarks.gpu import llama_nnx

        return llama_nnx.training(shape, None if program == BASE else program, batch, tokens)
    import flax.linen as nn

    import scaledot as sd
    from benchmarks.gpu import llama

    layer = None
    if program == FLAX:
        layer = nn.fp8_ops.Fp8DirectDotGeneralOp
    elif program != BASE:
        layer = sd.linen.make_dot_general_cls(program)
    return llama.training(llama.Stack(shape, layer, layer if case.head else None), batch, tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", required=True, choices=rows())
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.row, options.turns, options.tiny)))

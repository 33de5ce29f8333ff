"""Whole-model training: a Llama-like decoder (`benchmarks.gpu.llama`) under recipes, compared with bfloat16, Flax's fp8
and torchao's.

Each row runs in its own process, so that its first step is cold, and is written as soon as it is measured:
`--cases "4 blocks/fp8_current"` runs one. The first step is broken down into tracing, lowering to StableHLO,
compilation and execution. Speedups are over the bfloat16 row of the same model (for torch, torch's), which must have
been run on the same machine. Rows of other libraries that are not installed or fail are skipped. `--tiny` runs rows
with 2 blocks of width 128 on any machine and writes nothing.
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
from benchmarks.gpu import kernel_times, report, sizes

BASE = "bfloat16"
FLAX = "flax Fp8DirectDotGeneralOp"
TRANSFORM = "transform.quantized"
TORCHAO = "torchao float8 tensorwise"
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
PHASES = ("trace", "lower", "compile", "run")  # of a first step
STEPS = 4  # per timed round
TIMEOUT_S = 400


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the programs that train it.

    policy: the name of the jax.checkpoint policy of decoder blocks, from `jax.checkpoint_policies` or scaledot's.
    head: whether the LM head is quantised.
    cached: measures the second of two processes that share a persistent compilation cache.
    transformed: quantises the bfloat16 model by `transform.quantized` instead of the hooks of Dense.
    """

    blocks: int = 4
    scanned: bool = False
    policy: str | None = None
    head: bool = False
    programs: tuple[str, ...] = (BASE, "fp8_current")
    library: str = "linen"  # or nnx, torch
    cached: bool = False
    transformed: bool = False


def _remat(policy: str, *programs: str) -> Case:
    return Case(blocks=8, scanned=True, policy=policy, programs=programs)


# Names of cases are keys of the results.
CASES = {
    "4 blocks": Case(programs=(BASE, *RECIPES, FLAX)),
    "4 blocks, quantised LM head": Case(head=True, programs=("fp8_current", "fp8_block")),
    f"4 blocks, {TRANSFORM}": Case(transformed=True, programs=("fp8_current", "fp8_block")),
    "4 blocks, NNX": Case(library="nnx", programs=(BASE, "fp8_current", "fp8_block")),
    "4 blocks, torch": Case(library="torch", programs=(BASE, TORCHAO)),
    "16 blocks": Case(blocks=16, programs=(BASE, "fp8_current", "fp8_block")),
    "16 blocks, second process": Case(blocks=16, programs=("fp8_current",), cached=True),
    "8 blocks, scanned": Case(blocks=8, scanned=True),
} | {
    f"8 blocks, scanned, {case.policy}": case
    for case in (
        _remat("checkpoint_dots", BASE),
        _remat("save_quantized_residuals_and_gemms", "fp8_current"),
        _remat("save_quantized_residuals", "fp8_current"),
        _remat("checkpoint_dots_and_quantized_gemms", "fp8_current"),
        _remat("dots_and_quantized_gemms_with_no_batch_dims", "fp8_current"),
        _remat("nothing_saveable", BASE, "fp8_current"),
    )
}
# The case whose bfloat16 row is the baseline, for cases without one. Attention is a cuDNN call, not a dot with batch
# dims, so checkpoint_dots saves what checkpoint_dots_with_no_batch_dims would.
BASES = {
    "4 blocks, quantised LM head": "4 blocks",
    f"4 blocks, {TRANSFORM}": "4 blocks",
    "16 blocks, second process": "16 blocks",
    "8 blocks, scanned, save_quantized_residuals_and_gemms": "8 blocks, scanned, checkpoint_dots",
    "8 blocks, scanned, save_quantized_residuals": "8 blocks, scanned, checkpoint_dots",
    "8 blocks, scanned, checkpoint_dots_and_quantized_gemms": "8 blocks, scanned, checkpoint_dots",
    "8 blocks, scanned, dots_and_quantized_gemms_with_no_batch_dims": "8 blocks, scanned, checkpoint_dots",
}


def rows() -> list[str]:
    return [f"{name}/{program}" for name, case in CASES.items() for program in case.programs]


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str], tiny: bool = False) -> None:
    unknown = [case for case in cases if case not in rows()]
    if unknown:
        raise SystemExit(f"no row {unknown[0]!r}; rows are: {'; '.join(rows())}")
    for row in (row for row in cases or rows() if row not in skipped):
        missing = not_installed(row)
        if missing:
            print(f"{row} is skipped: not installed: {', '.join(missing)}", flush=True)
            continue
        print(f"measuring {row} ...", flush=True)
        try:
            result = _measure_in_process(row, rounds, tiny)
        except RowError as error:
            if not is_other_library(row):
                raise SystemExit(f"{error}\nprevious rows are written") from None
            print(f"{row} is skipped: {error}", flush=True)
            continue
        if tiny:
            print(line(row, result, None), flush=True)
        else:
            path = report.write("model", [{"case": row, **result}])
            print(f"{line(row, result, base_of(row))}\nwrote {path}", flush=True)


def not_installed(row: str) -> list[str]:
    """The packages that a row needs and that are not installed."""
    name, program = row.split("/")
    packages = ("torch",) if CASES[name].library == "torch" else ("flax", "optax")
    packages += ("torchao",) if program == TORCHAO else ()
    return [package for package in packages if importlib.util.find_spec(package) is None]


def is_other_library(row: str) -> bool:
    name, program = row.split("/")
    return CASES[name].library == "torch" or program == FLAX


class RowError(Exception):
    """A row's process failed or timed out."""


def _measure_in_process(row: str, rounds: int, tiny: bool) -> dict[str, Any]:
    """Runs `measure` in a new process; for cached rows, in the second of two with a persistent compilation cache."""
    command = [sys.executable, "-m", "benchmarks.gpu.model", "--row", row, "--rounds"]
    flags = ["--tiny"] if tiny else []
    if not CASES[row.split("/")[0]].cached:
        return _run_process([*command, str(rounds), *flags], {})
    with tempfile.TemporaryDirectory() as folder:
        # A minimum of 0 s, so that the programs of tiny models are cached too.
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        cold = _run_process([*command, "1", *flags], cache)
        return {**_run_process([*command, str(rounds), *flags], cache), "first_process": cold["first"]}


def _run_process(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    try:
        process = subprocess.run(
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
    if process.returncode:
        raise RowError(f"it failed:\n{process.stderr[-4000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def base_row(row: str) -> str:
    """The name of the bfloat16 row that is a row's baseline."""
    name, _ = row.split("/")
    return f"{BASES.get(name, name)}/{BASE}"


def base_of(row: str) -> dict[str, Any] | None:
    """The latest measurement of a row's baseline, if any."""
    return measured(report.read(report.device_file())).get(base_row(row))


def measured(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a device's results, by name."""
    return {case["case"]: case for case in results.get("model", {"cases": []})["cases"]}


def policy_of(row: str) -> str | None:
    """The name of the checkpoint policy of a row's decoder blocks."""
    return CASES[row.split("/")[0]].policy


def model_name(row: str) -> str:
    """The displayed name of a row's model: its case, with names of the API as code."""
    name = row.split("/")[0]
    code = policy_of(row) or TRANSFORM
    return name.replace(code, f"`{code}`")


def displayed_row(row: str) -> str:
    """The displayed name of a row: `model_name`, and the program."""
    return f"{model_name(row)}/{row.split('/')[1]}"


def activation_bytes(result: dict[str, Any]) -> float:
    """Peak memory less float32 parameters, two moments and gradients; the state is parameters and moments."""
    return result["peak_bytes"] - result["state_bytes"] * 4 / 3


def first_step(result: dict[str, Any]) -> str:
    """Seconds of the first step as text: the total, and its breakdown if it was measured."""
    seconds = [result["first"][phase] for phase in PHASES if phase in result["first"]]
    total = f"{sum(result['first'].values()):.1f}"
    return f"{total} = {' + '.join(f'{s:.1f}' for s in seconds)}" if seconds else total


def line(row: str, result: dict[str, Any], base: dict[str, Any] | None) -> str:
    text = f"{row:<52} {1e3 * result['seconds']:7.1f} ms"
    if base is not None:
        extra = sum(result["first"].values()) - sum(base["first"].values())
        text += f"  {base['seconds'] / result['seconds']:.3f} x  {extra:+.1f} s"
    return f"{text}  first {first_step(result)} s  {result['peak_bytes'] / 1e9:5.1f} GB  loss {result['losses'][0]:.3f}"


def measure(row: str, rounds: int, tiny: bool = False) -> dict[str, Any]:
    """Measures one row in this process."""
    name, program = row.split("/")
    case = CASES[name]
    batch_and_tokens = (sizes.TINY_BATCH, sizes.TINY_TOKENS) if tiny else (sizes.BATCH, sizes.TOKENS)
    if case.library == "torch":
        from benchmarks.gpu import llama_torch

        return llama_torch.measure(_shape(case, tiny), *batch_and_tokens, program == TORCHAO, rounds, STEPS)
    return _measure_jax(*training(case, program, tiny, *batch_and_tokens), rounds)


def _measure_jax(init: Any, step: Any, data: Any, rounds: int) -> dict[str, Any]:
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
    for _ in range(rounds):
        clock = time.perf_counter()
        for _ in range(STEPS):
            state, loss = compiled(state, data, jax.random.key(2))
        losses.append(float(jax.block_until_ready(loss)))
        seconds.append((time.perf_counter() - clock) / STEPS)
    gpu_ms = kernel_times.gpu_milliseconds(compiled, state, data, jax.random.key(2))
    stats = jax.devices()[0].memory_stats() or {}
    kernels = (compiled.as_text() or "").count('custom_call_target="mosaic_gpu')
    return {
        "seconds": statistics.median(seconds),
        "first": first,
        "init_s": init_s,
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "kernels": kernels,
        "gpu_ms": gpu_ms,
        "losses": losses,
    }


def _shape(case: Case, tiny: bool) -> sizes.Shape:
    shape = sizes.Shape(blocks=case.blocks, scanned=case.scanned, policy=_policy(case))
    return dataclasses.replace(shape, **sizes.TINY) if tiny else shape


def _policy(case: Case) -> Any:
    if case.policy is None:
        return None
    import jax

    import scaledot as sd

    module = sd.checkpoint_policies if hasattr(sd.checkpoint_policies, case.policy) else jax.checkpoint_policies
    return getattr(module, case.policy)


def training(case: Case, program: str, tiny: bool, batch: int, tokens: int) -> tuple[Any, Any, Any]:
    """Returns init, step and tokens of a JAX row, as `llama.training` does."""
    shape = _shape(case, tiny)
    if case.library == "nnx":
        from benchmarks.gpu import llama_nnx

        return llama_nnx.training(shape, None if program == BASE else program, batch, tokens)
    import flax.linen as nn

    import scaledot as sd
    from benchmarks.gpu import llama

    dot_general_cls = None
    if case.transformed:
        rules = {"*/head": None, "*": program}
        return llama.training(llama.Stack(shape), batch, tokens, lambda f: sd.transform.quantized(f, rules))
    if program == FLAX:
        dot_general_cls = nn.fp8_ops.Fp8DirectDotGeneralOp
    elif program != BASE:
        dot_general_cls = sd.linen.make_dot_general_cls(program)
    model = llama.Stack(shape, dot_general_cls, dot_general_cls if case.head else None)
    return llama.training(model, batch, tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", required=True, choices=rows())
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.row, options.rounds, options.tiny)))

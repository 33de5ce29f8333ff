"""Bias, stall and the tiny GPT: runs all three tests, prints their rows and writes them to results/."""

import argparse
import json
from collections.abc import Sequence

import jax
from tqdm import tqdm

from benchmarks import record
from benchmarks.convergence import bias, gpt, stall


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    jax.config.update("jax_default_matmul_precision", "highest")  # float32 matmuls in float32, not TF32, on a GPU
    environment = record.environment()
    environment["device"] = jax.devices()[0].device_kind
    name, tests = _name(options.steps, options.seeds, environment["device"], options.tests), options.tests
    journal = record.RESULTS / f"{name}-jax{environment['jax']}.unfinished.jsonl"
    print("bias: error of the mean of 1, 10, 100, 1000 draws; stall: final error; gpt: excess nats, gap to float32")
    kept = _kept(name, environment["jax"], options) if options.keep else {test: {} for test in TESTS}
    parts = {"bias": bias.steps(), "stall": stall.steps(), "gpt": gpt.progress_updates(options.steps)}
    result = {"suite": "convergence", "steps": options.steps, "seeds": options.seeds, "environment": environment}
    with tqdm(total=sum(parts[test] for test in tests), unit="part", leave=False) as progress:
        if "bias" in tests:
            result["bias"] = bias.run(progress, kept["bias"])
        if "stall" in tests:
            result["stall"] = stall.run(progress, kept["stall"])
        if "gpt" in tests:
            result["gpt"] = gpt.run(options.steps, options.seeds, journal, progress, kept["gpt"])
            result["relations"] = gpt.relations(result["gpt"])
    for relation in result.get("relations", []):
        print(f"{relation['what']}: {relation['value']:+.4f} {'met' if relation['met'] else 'MISSED'}")
    print(f"wrote {record.write(name, result)}")
    journal.unlink(missing_ok=True)  # there is none if no row was trained


def _kept(name: str, jax_version: str, options: argparse.Namespace) -> dict[str, dict[str, dict]]:
    """Returns the rows of each test in the results file of the same device, jax and sizes, by name."""
    path = record.RESULTS / f"{name}-jax{jax_version}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    if (result.get("steps"), result.get("seeds")) != (options.steps, options.seeds):
        raise SystemExit(f"--keep: {path.name} has no results of {options.steps} steps and {options.seeds} seeds")
    return {test: {row["name"]: row for row in result[test]} for test in options.tests}


TESTS = ("bias", "stall", "gpt")
STEPS, SEEDS = 600, 3


def _name(steps: int, seeds: int, device: str, tests: Sequence[str]) -> str:
    """The results file's name: by device, with the tests if not all run, and the sizes of a shorter run.

    A part or a shorter run must not replace a full one.
    """
    test_part = [] if set(tests) == set(TESTS) else sorted(tests)
    device_part = [] if device == "cpu" else [device.lower().replace(" ", "-")]
    size_part = [] if steps >= STEPS and seeds >= SEEDS else [f"{steps}x{seeds}"]
    return "-".join(["convergence", *test_part, *device_part, *size_part])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument(
        "--suite",
        choices=("three-tests", "code-gpt"),
        default="three-tests",
        help="--suite code-gpt --help shows the options of the other one",
    )
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=TESTS, help="(default: all)")
    parser.add_argument("--steps", type=_steps, default=STEPS, help="steps of the tiny GPT (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of the tiny GPT (default %(default)s)")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="measure only rows that the results file of this device and jax lacks; for new recipes",
    )
    return parser


def _steps(text: str) -> int:
    value = int(text)
    if value < gpt.CHUNK or value % gpt.CHUNK:
        raise argparse.ArgumentTypeError(f"must be a multiple of {gpt.CHUNK}, not {value}")
    return value

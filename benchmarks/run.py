"""The door: which suite, how large, how often.

A suite for CPUs is a module with a SIZE and `run(size, repeats) -> dict`, the record that is written to `results/`; one
for GPUs has cases instead, `run(cases, turns, skipped)`, and writes its part of the device's file; `targets` runs cases
of the others. A module is imported only when asked for, so that a suite for one machine does not need what another one
needs. A row that misses its target is a finding and not a failure; a wrong result raises before anything is timed.
"""

import argparse
import importlib

from benchmarks import record

CPU_SUITES = {name: f"benchmarks.{name}" for name in ("cpu", "contractions", "eager")}
GPU_SUITES = {
    name: f"benchmarks.gpu.{name}"
    for name in ("dense", "cast", "quantize", "gemm", "block", "grouped", "decode", "model", "targets")
}
SUITES = CPU_SUITES | GPU_SUITES
REPEATS = 15


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.tiny and options.suite != "model":
        parser.error(f"--tiny is of the suite model, not of {options.suite}")
    suite = importlib.import_module(SUITES[options.suite])
    if options.suite in GPU_SUITES:
        tiny = {"tiny": True} if options.tiny else {}
        suite.run(tuple(options.cases), options.repeats, frozenset(options.skip), **tiny)
        return
    size = options.size or suite.SIZE
    result = suite.run(size, options.repeats)
    # A quicker run never takes the place of the one that the docs quote.
    name = options.suite if size == suite.SIZE else f"{options.suite}-size{size}"
    print(f"wrote {record.write(name, result)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Time scaledot beside its peers.")
    parser.add_argument("--suite", required=True, choices=SUITES, help="what to measure")
    parser.add_argument("--size", type=_size, help="rows and columns of the matrices (default: the suite's)")
    parser.add_argument("--repeats", type=_count, default=REPEATS, help="timed calls of each (default %(default)s)")
    parser.add_argument("--cases", nargs="*", default=[], help="of a suite for GPUs (default: all)")
    parser.add_argument(
        "--skip", nargs="*", default=[], help="sides that a suite for GPUs leaves out; a case may precede: B/qwix"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="of the suite model: a dry run of tiny stacks, on any machine, not written"
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _size(text: str) -> int:
    value = _count(text)
    if value % 128:
        raise argparse.ArgumentTypeError(f"must be a multiple of 128, the largest block, not {value}")
    return value


if __name__ == "__main__":
    main()

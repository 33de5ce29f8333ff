"""Command line: `python -m benchmarks.run --suite NAME`.

A CPU suite is a module with SIZE and `run(size, repeats)`, which returns the record for `results/`. A GPU suite has
`run(cases, rounds, skipped)` and writes its cases to the device's file; `targets` runs the cases of other suites that
have a speed goal. A suite is imported only if it is selected, so that its dependencies are needed on its machine only.
A missed target is reported and does not fail; a wrong result raises before anything is timed.
"""

import argparse
import importlib

from benchmarks import record

CPU_SUITES = {name: f"benchmarks.{name}" for name in ("cpu", "contractions", "eager", "qlora", "checkpoints", "snr")}
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
        parser.error(f"--tiny is an option of the suite model, not of {options.suite}")
    suite = importlib.import_module(SUITES[options.suite])
    if options.suite in GPU_SUITES:
        tiny = {"tiny": True} if options.tiny else {}
        suite.run(tuple(options.cases), options.repeats, frozenset(options.skip), **tiny)
        return
    size = options.size or suite.SIZE
    result = suite.run(size, options.repeats)
    # A run with another size must not overwrite the results that the docs use.
    name = options.suite if size == suite.SIZE else f"{options.suite}-size{size}"
    print(f"wrote {record.write(name, result)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Benchmark scaledot and other libraries."
    )
    parser.add_argument("--suite", required=True, choices=SUITES, help="the suite to run")
    parser.add_argument("--size", type=_size, help="rows and columns of the matrices (default: the suite's)")
    parser.add_argument("--repeats", type=_count, default=REPEATS, help="timed rounds (default %(default)s)")
    parser.add_argument("--cases", nargs="*", default=[], help="cases of a GPU suite (default: all)")
    parser.add_argument(
        "--skip",
        nargs="*",
        default=[],
        help="implementations to skip: NAME in all cases; in the suite dense also CASE/NAME, such as "
        "'4096 -> 14336/qwix fp8'",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="suite model: dry run with tiny models on any machine; writes no results"
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

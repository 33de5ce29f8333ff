"""python -m tests.fuzzing TARGET --count N --seed S: reads N mutated inputs, and saves those that fail."""

import argparse
import sys
from pathlib import Path

from tests.fuzzing.checkpoints import GOLDEN
from tests.fuzzing.engine import Result, run
from tests.fuzzing.targets import TARGETS

BUILD = Path(__file__).resolve().parents[2] / "build" / "fuzzing"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--count", type=int, default=10_000, help="inputs per target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of checkpoints (default: tests/golden/hf)")
    options = parser.parse_args(arguments)
    targets = TARGETS if options.target == "all" else [options.target]
    failed = [_run(target, options) for target in targets]
    return int(any(failed))


def _run(target: str, options: argparse.Namespace) -> bool:
    def progress(result: Result) -> None:
        print(f"\r{target}: {result}", end="", file=sys.stderr, flush=True)

    result = run(target, options.count, options.seed, golden=options.golden, report=progress)
    print(f"\r{target}: {result}", flush=True)
    for reason, failure in result.failures.items():
        print(f"  {reason}\n    {failure.save(BUILD / target)}")
    return bool(result.failures)


if __name__ == "__main__":
    sys.exit(main())

"""python -m tests.mutations: applies every mutant in a scratch copy and reports which test kills it."""

import argparse
import dataclasses
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tests.mutations import mutants, suite
from tests.mutations.mutants import EXCLUDED, MOSAIC, Mutant
from tests.mutations.results import Results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/mutations/results.json"
RECORDS = ROOT / "build/mutations"
# Files that the outcome of tests depends on.
SOURCES = ("scaledot", "tests", "docs", "examples", "benchmarks", "README.md", "conftest.py", "pyproject.toml")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.mosaic and tuple(map(int, metadata.version("jax").split(".")[:3])) < (0, 11, 2):
        raise SystemExit(f"--mosaic needs jax 0.11.2; {EXCLUDED[MOSAIC]}, and this is {metadata.version('jax')}")
    all_mutants = mutants.named(ROOT) + mutants.random(ROOT, options.count, options.seed, options.mosaic)
    chosen = [m for m in all_mutants if not options.only or any(part in m.name for part in options.only)]
    for mutant in chosen:
        print(f"{mutant.name}\n    {mutant.file}:{mutant.line}  {mutant.change}")
    if options.list:
        return 0
    results = Results(options.results, _identity(options))
    with tempfile.TemporaryDirectory() as scratch:
        copy = suite.Copy(ROOT, Path(scratch))
        suite.check_imported_from(copy)
        for name in ("default", "all")[: 1 if options.suite == "default" else 2]:
            _judge_all(copy, name, all_mutants, chosen, results, options)
    return results.summary(chosen)


def _judge_all(copy: suite.Copy, name: str, all_mutants: list[Mutant], chosen: list[Mutant], results: Results, options):
    """Computes the verdicts of one suite; `all` runs only on survivors of the default suite."""
    judged = [m for m in chosen if name == "default" or not results.is_killed(m)]
    missing = [m for m in judged if results.verdict(m, name) is None]
    if not missing:
        return
    files = suite.collected(copy, name, options.tests)
    print(f"{name}: {sum(map(len, files.values()))} tests in {len(files)} files, first without a mutant", flush=True)
    key = _hash(json.dumps([results.identity, name, [dataclasses.astuple(m) for m in all_mutants]]).encode())
    records = suite.record(copy, files, all_mutants, RECORDS / f"{key}.json", options.jobs)
    for mutant in missing:
        verdict = suite.judge(copy, mutant, records, options.jobs)
        results.add(mutant, name, dataclasses.asdict(verdict))
        print(f"  {mutant.name}: {verdict.how} {verdict.test} ({verdict.seconds:.0f} s)", flush=True)
    results.discard_unreliable(copy, name, judged)


def _identity(options) -> dict:
    """Returns everything that verdicts depend on: the tree, the tests, and versions."""
    listed = subprocess.run(["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [n for n in listed.stdout.split("\0") if n and ROOT / n != RESULTS and (ROOT / n).is_file()]
    tree = _hash(b"".join(name.encode() + (ROOT / name).read_bytes() for name in names))
    versions = {
        name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "ml_dtypes", "pytest", "hypothesis")
    }
    return {"tree": tree, "tests": options.tests, "python": platform.python_version(), "versions": versions}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("tests", nargs="*", help="paths for pytest (default: those of pyproject.toml)")
    parser.add_argument("--suite", choices=("default", "all"), default="all", help="all: also tests of `pytest --all`")
    parser.add_argument("--only", nargs="+", help="only mutants whose name contains one of these strings")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--count", type=int, default=mutants.COUNT, help="random mutants (default %(default)s)")
    parser.add_argument("--seed", type=int, default=mutants.SEED, help="seed of random mutants (default %(default)s)")
    parser.add_argument("--mosaic", action="store_true", help="also mutate Mosaic GPU kernels; needs jax 0.11.2")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (default %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of verdicts (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

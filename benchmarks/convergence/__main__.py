"""`python -m benchmarks.convergence [--suite three-tests | code-gpt]`: runs a suite, with its own options."""

import argparse
import importlib
import sys

SUITES = {
    "three-tests": "benchmarks.convergence.three_tests",
    "code-gpt": "benchmarks.convergence.code_gpt.command",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", add_help=False)
    parser.add_argument("--suite", choices=SUITES, default="three-tests")
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    # Imported only if selected, so that the dependencies of the other suite are not needed.
    importlib.import_module(SUITES[options.suite]).main(rest)


if __name__ == "__main__":
    main()

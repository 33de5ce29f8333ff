"""Runs a program as `python -m` would, after this process was prepared for it."""

import runpy
import sys


def run_module(arguments: list[str], usage: str) -> None:
    """Runs the module arguments[0] as `__main__`, with the other arguments as its command line."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(f"usage: {usage}")
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)

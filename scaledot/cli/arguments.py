"""Arguments that several commands have, and parsers of argument values."""

import argparse


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def count(text: str) -> int:
    """Parses a positive integer.

    >>> count("128")
    128
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    """Parses a shape or block.

    >>> sizes("8192x4096")
    (8192, 4096)
    """
    found = text.split("x")
    if not all(size.isdecimal() and int(size) for size in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be sizes of at least 1, such as 8192x4096")
    return tuple(map(int, found))

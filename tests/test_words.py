"""Keeps phrases that only this project used out of code and docs; each has the field's term beside it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = "scaledot", "tests", "benchmarks", "examples", "docs", ".ci"
FILES = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "conftest.py", "pyproject.toml"
SUFFIXES = {".py", ".md", ".toml", ""}

# Pattern: replacement. Letters match in either case; a space matches any white space, line breaks and `#` included.
BANNED = {
    r"by chance": "stochastic rounding",
    r"(?:as|where) (?:it|they) lies?": "row-wise, or the layout's name",
    r"kept for the backward": "saved as residuals",
    r"remembered of": "the primal's aval",
    r"devices find": "sharded quantisation is bit-identical to single-device",
    r"to one rounding": "accumulate in float32 and round once",
    r"the other way round": "the inverse, or the reverse order",
    r"so many": "the number itself",
    r"multiprocessors?": "SM",
    r"largest magnitudes?": "amax",
    r"summed ax[ie]s": "contracting dim",
    r"kept ax[ie]s": "free dim",
    r"lines and squares": "1×128 and 128×128 blocks",
    r"lines of (?:32|64|128)": "1×128 blocks",
    r"partial sums pay": "per-block accumulation is only worth it",
    r"half ?way": "split in two",
    r"there and back": "forward and transpose",
    r"products of the values": "matmuls of dequantised values",
    r"where (?:it is|they are) meant": "the condition",
    r"of those that": "the condition",
    r"on their way": "in transfer",
    r"its own word": "metadata",
    r"other word of": "metadata",
}
SPELLINGS = {
    r"quantiz(?:ed|ing|es|ation)": "quantised, quantising, quantises, quantisation",
    r"dequantiz(?:ed|ing|es|ation)": "dequantised, …",
    r"(?:initial|normal|serial|optimi|synchron|material|parallel|special|real|general|summar|minim|maxim)iz(?:ed|ing|es|ation)": "-ised, …",
    r"behavior": "behaviour",
}

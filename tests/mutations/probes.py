"""Probes: statements put into a copy of the library that report when a mutated statement is about to be executed."""

import ast
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutations.mutants import Mutant

REACHED = "SCALEDOT_MUTANTS_REACHED"  # the environment variable with the file that probes write to
PACKAGE = "scaledot/__init__.py"

# Runs before any module of the package does. Standard library only: a test looks at what importing scaledot loads.
_REPORT = f'''import builtins, os

def _mutant_reached(mutant, seen=set()):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (mutant, test) not in seen:
        seen.add((mutant, test))
        with open(os.environ["{REACHED}"], "a") as file:
            file.write(f"{{mutant}} {{test}}\\n")

builtins._mutant_reached = _mutant_reached
'''


def with_probes(root: Path, mutants: Iterable[Mutant]) -> dict[str, str]:
    """The texts of all files that get probes; the probe of a mutant reports its index."""
    wanted: dict[str, dict[int, set[int]]] = {PACKAGE: {}}
    for index, mutant in enumerate(mutants):
        source = (root / mutant.file).read_text()
        for line in _changed(source, mutant.text):
            lines = wanted.setdefault(mutant.file, {})
            lines.setdefault(_statement(source, line), set()).add(index)
    texts = {file: _inserted((root / file).read_text(), lines) for file, lines in wanted.items()}
    return texts | {PACKAGE: _with_report(texts[PACKAGE])}


def reached(lines: Iterable[str], mutants: list[Mutant]) -> dict[str, list[str]]:
    """What probes wrote: for each mutant the tests that reached it, none if only the import of the file did."""
    found: dict[str, set[str]] = {}
    for line in lines:
        index, _, test = line.rstrip("\n").partition(" ")
        found.setdefault(mutants[int(index)].name, set()).update([test] if test else [])
    return {name: sorted(tests) for name, tests in found.items()}


def _changed(source: str, text: str) -> set[int]:
    """Lines of the source that a mutant changes; for an insertion, those beside it."""
    lines, found = source.splitlines(), set()
    for tag, start, end, *_ in difflib.SequenceMatcher(None, lines, text.splitlines(), autojunk=False).get_opcodes():
        if tag == "insert":
            found |= {max(start, 1), min(start + 1, len(lines))}
        elif tag != "equal":
            found |= set(range(start + 1, end + 1))
    return {line for line in found if lines[line - 1].strip()}


def _statement(source: str, line: int) -> int:
    """The first line of the innermost statement around a line that another statement can stand before.

    Being executed before that one is necessary for the line, if not always sufficient (an `elif`, a lambda).
    """
    starts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            text = source.splitlines()[start - 1].encode()
            is_first = not text[: node.col_offset].strip(b" @") and not text.lstrip().startswith(b"elif")
            if start <= line <= (node.end_lineno or start) and is_first:
                starts.append(start)
    return max(starts)


def _inserted(source: str, wanted: Mapping[int, set[int]]) -> str:
    lines = source.splitlines()
    for line in sorted(wanted, reverse=True):
        text = lines[line - 1]
        indent = text[: len(text) - len(text.lstrip())]
        lines[line - 1 : line - 1] = [f"{indent}_mutant_reached({index})" for index in sorted(wanted[line])]
    return "\n".join(lines) + "\n"


def _with_report(source: str) -> str:
    """The package with the report after its docstring."""
    docstring = ast.parse(source).body[0]
    lines = source.splitlines()
    return "\n".join([*lines[: docstring.end_lineno], _REPORT, *lines[docstring.end_lineno :]]) + "\n"

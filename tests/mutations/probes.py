"""Probes: statements, inserted into a copy of the library, that report before a mutated statement is executed."""

import ast
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutations.mutants import Mutant

REACHED = "SCALEDOT_MUTANTS_REACHED"  # the environment variable with the file that probes write to
PACKAGE = "scaledot/__init__.py"

# Runs before any module of the package. Standard library only: a test checks which modules importing scaledot loads.
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
    """Returns the text of every file with probes, by name; the probe of a mutant reports its index."""
    probes: dict[str, dict[int, set[int]]] = {PACKAGE: {}}
    for index, mutant in enumerate(mutants):
        source = (root / mutant.file).read_text()
        for line in _changed_lines(source, mutant.text):
            lines = probes.setdefault(mutant.file, {})
            lines.setdefault(_statement(source, line), set()).add(index)
    texts = {file: _with_lines((root / file).read_text(), lines) for file, lines in probes.items()}
    return texts | {PACKAGE: _with_report(texts[PACKAGE])}


def reached(lines: Iterable[str], mutants: list[Mutant]) -> dict[str, list[str]]:
    """Parses the output of probes: the tests that reached each mutant, an empty list if only an import did."""
    found: dict[str, set[str]] = {}
    for line in lines:
        index, _, test = line.rstrip("\n").partition(" ")
        found.setdefault(mutants[int(index)].name, set()).update([test] if test else [])
    return {name: sorted(tests) for name, tests in found.items()}


def _changed_lines(source: str, text: str) -> set[int]:
    """Returns the lines of the source that a mutant changes; for an insertion, the lines before and after it."""
    lines, found = source.splitlines(), set()
    for tag, start, end, *_ in difflib.SequenceMatcher(None, lines, text.splitlines(), autojunk=False).get_opcodes():
        if tag == "insert":
            found |= {max(start, 1), min(start + 1, len(lines))}
        elif tag != "equal":
            found |= set(range(start + 1, end + 1))
    return {line for line in found if lines[line - 1].strip()}


def _statement(source: str, line: int) -> int:
    """Returns the first line of the innermost statement around a line, before which a probe can be inserted.

    If the line is executed, the probe is, too; the converse does not always hold (an `elif`, a lambda).
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


def _with_lines(source: str, probes: Mapping[int, set[int]]) -> str:
    lines = source.splitlines()
    for line in sorted(probes, reverse=True):
        text = lines[line - 1]
        indent = text[: len(text) - len(text.lstrip())]
        lines[line - 1 : line - 1] = [f"{indent}_mutant_reached({index})" for index in sorted(probes[line])]
    return "\n".join(lines) + "\n"


def _with_report(source: str) -> str:
    """Returns the package's `__init__` with the reporting function after its docstring."""
    docstring = ast.parse(source).body[0]
    lines = source.splitlines()
    return "\n".join([*lines[: docstring.end_lineno], _REPORT, *lines[docstring.end_lineno :]]) + "\n"

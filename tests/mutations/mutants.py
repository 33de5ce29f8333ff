"""Mutants: named ones from patches, and random ones from the syntax trees of the library."""

import ast
import dataclasses
import hashlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATCHES = Path(__file__).parent / "patches"
PACKAGES = ("numerics", "ops", "kernels", "train")
COUNT, SEED = 30, 0

MOSAIC = "scaledot/kernels/hopper/"
# Code that is not mutated by default, by prefix of "file:function", and why: only a GPU executes it, or tests on a CPU
# do so with some versions of jax only. The Hopper package is excluded for all versions, so that mutants depend on the
# source and the seed only; --mosaic includes it.
EXCLUDED = {
    MOSAIC: "tests on a CPU run Mosaic GPU kernels, in Pallas' interpret mode, from jax 0.11.2 on only",
    "scaledot/kernels/block_scaled.py:device_reason": "reads the compute capability of a GPU",
    "scaledot/kernels/table.py:_mosaic_matmul": "runs a Mosaic matmul, or on a GPU machine its XLA replacement",
    "scaledot/kernels/table.py:_mosaic_cast": "runs a Mosaic cast, or on a GPU machine its XLA replacement",
    "scaledot/kernels/table.py:scalar_runner": "runs a Mosaic kernel, or on a GPU machine its XLA replacement",
    "scaledot/kernels/table.py:_differentiated": "differentiates a Mosaic kernel",
    "scaledot/kernels/table.py:_run_grouped": "runs a Mosaic kernel, or on a GPU machine its XLA replacement",
    "scaledot/kernels/table.py:_reference_cast": "runs on a GPU machine in the place of a Mosaic cast",
    "scaledot/kernels/table.py:group_row_multiple": "asks whether Mosaic kernels cast rows in groups",
}
# Equivalent mutants, by name and change, and why.
EQUIVALENT = {
    "scaledot/ops/einsum.py:_path#8 0 → 1": "only the shape of that array is used",
}

_SWAPPED_OPERATORS = (
    (ast.Add, ast.Sub),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
OPERATORS: dict[Any, Any] = {a: b for pair in _SWAPPED_OPERATORS for a, b in (pair, pair[::-1])} | {
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitXor: ast.BitOr,
}
_NOT_MUTATED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.pattern)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file: `text` is the whole mutated file, `line` the changed line of the original."""

    name: str
    file: str
    line: int
    change: str
    text: str = dataclasses.field(repr=False)
    is_named: bool = False


def named(root: Path) -> list[Mutant]:
    """Returns the mutants of `patches/`; raises if a patch no longer applies."""
    return [_patched(root, patch) for patch in sorted(PATCHES.glob("*.patch"))]


def _patched(root: Path, patch: Path) -> Mutant:
    description, _, diff = patch.read_text().partition("--- a/")
    file = diff.splitlines()[0]
    original = (root / file).read_text() if (root / file).exists() else ""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, file)
        copy.parent.mkdir(parents=True)
        copy.write_text(original)
        command = ["git", "apply", "--recount", "-C1", str(patch)]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        text = copy.read_text()
    if done.returncode or text == original:
        raise ValueError(
            f"{patch.name} no longer applies to {file}; introduce the same fault into the current code and save it as "
            f"`git diff -U1`. Output of git apply: {done.stderr.strip()}"
        )
    line = next(i for i, (a, b) in enumerate(zip(original.splitlines(), text.splitlines(), strict=False), 1) if a != b)
    return Mutant(patch.stem, file, line, " ".join(description.split()), text, is_named=True)


def random(root: Path, count: int = COUNT, seed: int = SEED, mosaic: bool = False) -> list[Mutant]:
    """Returns random mutants: per package in proportion to its mutation sites, and at most one per function.

    Sites are ranked by a hash of the seed, their function and their text, so that a change elsewhere in the library
    leaves most of the selection unchanged.
    """
    candidates = {package: list(_candidates(root, package, seed, mosaic)) for package in PACKAGES}
    total = sum(map(len, candidates.values()))
    quotas = {package: count * len(found) / total for package, found in candidates.items()}
    shares = {package: int(quota) for package, quota in quotas.items()}
    for package in sorted(PACKAGES, key=lambda p: shares[p] - quotas[p])[: count - sum(shares.values())]:
        shares[package] += 1
    return [mutant for package in PACKAGES for mutant in _first_of_functions(candidates[package], shares[package])]


def _first_of_functions(ranked: list[tuple[str, str, Mutant]], count: int) -> list[Mutant]:
    chosen: dict[str, Mutant] = {}
    for _, function, mutant in sorted(ranked, key=lambda entry: entry[0]):
        if len(chosen) < count:
            chosen.setdefault(function, mutant)
    return sorted(chosen.values(), key=lambda m: (m.file, m.line))


def _candidates(root: Path, package: str, seed: int, mosaic: bool) -> Iterator[tuple[str, str, Mutant]]:
    """Yields (rank, function, mutant) for every mutation site of a package."""
    for path in sorted((root / "scaledot" / package).rglob("*.py")):
        file, source = path.relative_to(root).as_posix(), path.read_text()
        counts: dict[str, int] = {}
        for function, node, mutated in _sites(ast.parse(source)):
            location = f"{file}:{function}"
            excluded = [p for p in EXCLUDED if location.startswith(p) and not (mosaic and p == MOSAIC)]
            if excluded:
                continue
            counts[location] = counts.get(location, 0) + 1
            name, change = f"{location}#{counts[location]}", f"{ast.unparse(node)} → {ast.unparse(mutated)}"
            if f"{name} {change}" in EQUIVALENT:
                continue
            rank = hashlib.sha256(f"{seed} {name} {change}".encode()).hexdigest()
            yield rank, location, Mutant(name, file, node.lineno, change, _replaced(source, node, mutated))


def _replaced(source: str, node: ast.expr, mutated: ast.expr) -> str:
    """Returns the source with one expression replaced; column offsets of syntax trees count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    assert node.end_lineno is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + f"({ast.unparse(mutated)})".encode() + after).decode()


def _sites(tree: ast.AST, function: str = "", in_function: bool = False) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yields (function, expression, mutated expression) for expressions in function bodies.

    Not mutated: module and class bodies, defaults and decorators (a fault there mostly breaks the import), annotations,
    strings, `raise` statements and assertions, and `strict=` of zip, which has no effect if lengths are equal.
    """
    for field, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, _NOT_MUTATED) or field == "annotation":
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                qualified = f"{function}.{child.name}".lstrip(".")
                yield from _sites(
                    ast.Module(child.body, []), qualified, in_function or isinstance(child, ast.FunctionDef)
                )
                continue
            if in_function and isinstance(child, ast.expr):
                yield from ((function, child, mutated) for mutated in _mutations(child))
            yield from _sites(child, function, in_function)


def _mutations(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 or 1.0)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.BinOp(op=op) if type(op) in OPERATORS and not any(map(_is_text, (node.left, node.right))):
            yield ast.BinOp(node.left, OPERATORS[type(op)](), node.right)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(OPERATORS[type(op)](), node.values)
        case ast.Compare(ops=[op, *rest]):
            yield ast.Compare(node.left, [OPERATORS[type(op)](), *rest], node.comparators)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))

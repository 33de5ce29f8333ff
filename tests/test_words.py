"""Keeps phrases that only this project used, and American spelling, out of code and docs."""

import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = "scaledot", "tests", "benchmarks", "examples", "docs", ".ci"
FILES = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "conftest.py", "pyproject.toml"
SUFFIXES = {".py", ".md", ".toml", ""}

# Pattern: what to write instead. A space matches line breaks and comment signs, too; case is ignored.
BANNED = {
    r"by chance": "with stochastic rounding",
    r"(?:as|where|how) (?:it|they) lies?": "row-wise, or the name of the layout or sharding",
    r"kept for the backward": "saved as residuals",
    r"remembered of": "the aval of the primal",
    r"devices find": "sharded quantisation is bit-identical to single-device",
    r"to one rounding": "accumulates in float32 and rounds once",
    r"the other way round": "the inverse, or in reverse order",
    r"so many": "the number",
    r"multiprocessors?": "SM",
    r"largest magnitudes?": "amax",
    r"summed ax[ie]s": "contracting dim",
    r"kept ax[ie]s": "free dim",
    r"lines and squares": "1×128 and 128×128 blocks",
    r"partial sums pay": "per-block accumulation is only worth it",
    r"there and back": "forward and transpose",
    r"products of the values": "matmuls of dequantised values",
    r"where (?:it is|they are) meant": "the condition",
    r"of those that": "the condition",
    r"on their way": "in transfer",
    r"(?:its|other) word of": "metadata of",
    r"every \d+ terms": "every 128 elements of K",
    r"(?:lines|squares) of \d+": "1×128 or 128×128 blocks",
    r"given factor": "delayed scaling, or the quantisation multiplier",
    r"gradient of kernels": "wgrad",
    r"(?:dots|nothing|residuals|results) saved": "the name of the jax.checkpoint policy",
}
AMERICAN = {
    r"(?:de)?quantiz(?:ed|es|ing|ation)": "quantised",
    r"(?:initial|normal|serial|optim|synchron|rematerial|material|parallel|special|maxim)iz(?:ed?|es|ing)": "-ise",
    r"(?:behavi|fav|neighb)ors?": "-our",
}


@functools.cache
def files() -> list[tuple[Path, str]]:
    """All files of code and prose except this one, and their text."""
    candidates = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + [ROOT / name for name in FILES]
    return [
        (path, path.read_text())
        for path in candidates
        if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__) and "__pycache__" not in path.parts
    ]


@functools.cache
def prose(path: Path) -> str:
    """Markdown without code, or the comments and docstrings of a module without names in backticks."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        is_prose = [(t.string, t.type == tokenize.COMMENT or t.string.startswith('"""')) for t in tokens]
        text = "\n".join(string for string, kept in is_prose if kept)
        text = "\n".join(
            line for line in text.splitlines() if not re.match(r'\s*(?:"""|#)?\s{4}|\s*(?:>>>|\.\.\.)', line)
        )
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text, flags=re.DOTALL)


def found(pattern: str, text: str) -> list[str]:
    expression = r"\b" + pattern.replace(" ", r"[\s#]+") + r"\b"
    return [match[0] for match in re.finditer(expression, text, re.IGNORECASE)]


@pytest.mark.parametrize("pattern", BANNED)
def test_the_words_of_the_field_are_used(pattern):
    places = [str(path.relative_to(ROOT)) for path, text in files() if found(pattern, text)]
    assert not places, f"write {BANNED[pattern]!r} instead of {pattern!r}"


@pytest.mark.parametrize("pattern", AMERICAN)
def test_spelling_is_british(pattern):
    texts = [path for path, _ in files() if path.suffix in (".py", ".md")]
    places = {str(path.relative_to(ROOT)): found(pattern, prose(path)) for path in texts}
    assert not {path: words for path, words in places.items() if words}, f"write {AMERICAN[pattern]!r}"


def test_banned_words_are_found_across_lines():
    assert found(r"so many", "there are so\n    # many of them") == ["so\n    # many"]
    assert not found(r"so many", "also many")

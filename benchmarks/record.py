"""The environment of a benchmark run, and its JSON file."""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path

import scaledot

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "qwix")


def environment() -> dict:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "scaledot": scaledot.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def source() -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of the library's Python files: one version has many states."""
    package = Path(scaledot.__file__).parent
    files = sorted(path for path in package.rglob("*.py"))
    contents = (f"{path.relative_to(package)}\n".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def write(name: str, record: dict) -> str:
    """Writes `results/<name>-jax<version>.json` atomically; returns its path relative to the repository's root."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-jax{record['environment']['jax']}.json"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(path)
    return path.relative_to(RESULTS.parent.parent).as_posix()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's model name on Linux, otherwise `platform.processor()`."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

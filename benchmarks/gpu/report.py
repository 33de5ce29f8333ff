"""Lines for people, and the file of a device that holds the latest run of each suite."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import jax

from benchmarks import record
from benchmarks.gpu.remarks import remark
from benchmarks.gpu.sides import Timed
from benchmarks.table import verdict

PACKAGES = ("flax", "torch", "torchao", "qwix")


def device_name() -> str:
    return jax.devices()[0].device_kind.lower().replace(" ", "-")


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    about = {"device": device.device_kind, "multiprocessors": getattr(device, "core_count", None)}
    return {**record.environment(), **about, **{name: record.version(name) for name in PACKAGES}}


def device_file() -> Path:
    return record.RESULTS / f"{device_name()}.json"


def write(suite: str, cases: list[dict[str, Any]], **about: Any) -> str:
    """Put cases of a suite into the device's file, whole or not at all; returns its path.

    Each case says when and with what it was run; those that were not run this time stay.
    """
    path = device_file()
    path.parent.mkdir(exist_ok=True)
    suites = json.loads(path.read_text()) if path.exists() else {}
    known = {case["case"]: case for case in suites.get(suite, {}).get("cases", [])}
    known |= {case["case"]: {**case, "environment": environment()} for case in cases}
    suites[suite] = {**about, "cases": list(known.values())}
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(suites, indent=1) + "\n")
    unfinished.replace(path)
    return path.relative_to(record.RESULTS.parent.parent).as_posix()


def side_line(name: str, timed: Timed, rate: str, target: float | None = None, reached: float | None = None) -> str:
    """One side of a case."""
    memory = "" if timed.memory_bytes is None else f"{timed.memory_bytes / 1e9:6.2f} GB"
    met = "" if target is None or reached is None else f"target {target:g} {verdict(reached >= target)}"
    return f"  {name:<44} {1e3 * timed.median:9.3f} ms  {rate:>14}  first {timed.first_s:6.1f} s {memory:>10}  {met}"


def explain(suite: str, case: str, side: str, target: float | None, reached: float | None) -> None:
    """Print what limits a row that missed its target."""
    words = remark(suite, case, side, target, reached)
    if words:
        print(textwrap.fill(words, 116, initial_indent="    ", subsequent_indent="    "))


def is_met(reached: float | None, target: float, at_most: bool) -> bool | None:
    """Whether a target, an upper or a lower bound, is met; None for one that was not measured."""
    if reached is None:
        return None
    return reached <= target if at_most else reached >= target

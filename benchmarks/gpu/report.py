"""Printed lines, and the JSON file of a device with the latest run of each case."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import jax

from benchmarks import record
from benchmarks.gpu.implementations import Timed
from benchmarks.gpu.remarks import remark
from benchmarks.table import verdict

PACKAGES = ("flax", "torch", "torchao", "qwix")
# A change of the kernels that makes earlier results differ from those of the current code.
AMAX_CHANGE = "XLA computed tensor amaxes and kernels were compiled in the background (2026-11-18)"
_AMAX_CHANGE_TIME = "2026-11-18T07:03"


def device_name() -> str:
    return jax.devices()[0].device_kind.lower().replace(" ", "-")


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    about = {"device": device.device_kind, "sm_count": getattr(device, "core_count", None)}
    return {**record.environment(), **about, **{name: record.version(name) for name in PACKAGES}}


def device_file() -> Path:
    return record.RESULTS / f"{device_name()}.json"


def read(path: Path) -> dict[str, Any]:
    """Returns the results of a device by suite."""
    return json.loads(path.read_text())


def is_before_amax_change(case: dict[str, Any]) -> bool:
    """Whether a case was measured before AMAX_CHANGE."""
    return case["environment"]["date"] < _AMAX_CHANGE_TIME


def write(suite: str, cases: list[dict[str, Any]], **about: Any) -> str:
    """Writes the cases of a suite to the device's file, atomically; returns its path.

    Each case records its date and versions; cases of the file that were not run again stay, as do other keys of a dict
    in `about`.
    """
    path = device_file()
    path.parent.mkdir(exist_ok=True)
    suites = read(path) if path.exists() else {}
    before = suites.get(suite, {})
    known = {case["case"]: case for case in before.get("cases", [])}
    known |= {case["case"]: {**case, "environment": environment()} for case in cases}
    about = {
        key: {**before.get(key, {}), **value} if isinstance(value, dict) else value for key, value in about.items()
    }
    suites[suite] = {**about, "cases": list(known.values())}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(suites, indent=1) + "\n")
    temporary.replace(path)
    return path.relative_to(record.RESULTS.parent.parent).as_posix()


def result_line(name: str, timed: Timed, rate: str, target: float | None = None, measured: float | None = None) -> str:
    """The printed line of one implementation of a case."""
    memory = "" if timed.memory_bytes is None else f"{timed.memory_bytes / 1e9:6.2f} GB"
    met = "" if target is None or measured is None else f"target {target:g} {verdict(measured >= target)}"
    return f"  {name:<44} {1e3 * timed.median:9.3f} ms  {rate:>14}  first {timed.first_s:6.1f} s {memory:>10}  {met}"


def print_remark(suite: str, case: str, implementation: str, target: float | None, measured: float | None) -> None:
    """Prints what limits an implementation that missed its target."""
    text = remark(suite, case, implementation, target, measured)
    if text:
        print(textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="    "))


def is_met(measured: float | None, target: float, at_most: bool) -> bool | None:
    """Whether a target is met, an upper bound if `at_most`, otherwise a lower bound; None if it was not measured."""
    if measured is None:
        return None
    return measured <= target if at_most else measured >= target

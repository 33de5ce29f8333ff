"""What is timed: programs that enqueue one step of work, how they are built, and the turns that they take.

Work on a GPU is asynchronous, so a turn is as many steps as fill a tenth of a second, enqueued one after the other and
waited for together. Turns of all sides alternate in an order that changes: clocks and temperature, which decide much,
are those of whoever ran before.
"""

import dataclasses
import gc
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

TURN_S = 0.12
WARM_UP = 2


class Running(NamedTuple):
    """A program that is ready: enqueue a step, wait for its result, and what the first one cost."""

    step: Callable[[], Any]
    wait: Callable[[Any], Any]
    first_s: float
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Side:
    """A program to time; `needs` are modules without which it is absent. Ours must run, a peer may fail."""

    name: str
    build: Callable[[], Running]
    needs: tuple[str, ...] = ()
    ours: bool = False

    @property
    def absent(self) -> str | None:
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


def jax_side(name: str, step: Callable[..., Any], *arguments: Any, needs: tuple[str, ...] = (), ours=False) -> Side:
    return Side(name, lambda: _jax_running(step, arguments), needs, ours)


def _jax_running(step: Callable[..., Any], arguments: tuple) -> Running:
    start = time.perf_counter()
    compiled = jax.jit(step).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    first = time.perf_counter() - start
    memory = compiled.memory_analysis()
    needed = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Running(lambda: compiled(*arguments), jax.block_until_ready, first, needed)


def torch_side(name: str, make: Callable[[], Callable[[], Any]], needs: tuple[str, ...] = ("torch",)) -> Side:
    """`make` prepares data and gives the step."""

    def build() -> Running:
        import torch  # pyright: ignore[reportMissingImports]  (a peer, not a dependency)

        step = make()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return Running(step, lambda _: torch.cuda.synchronize(), time.perf_counter() - start, None)

    return Side(name, build, needs)


class Timed(NamedTuple):
    """Seconds of a step, one for each turn; seconds of the first; bytes beside the arguments."""

    seconds: tuple[float, ...]
    first_s: float
    memory_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "median_ms": 1e3 * self.median,
            "min_ms": 1e3 * min(self.seconds),
            "max_ms": 1e3 * max(self.seconds),
            "first_step_s": self.first_s,
            "memory_gb": None if self.memory_bytes is None else self.memory_bytes / 1e9,
        }


def measure(sides: Iterable[Side], turns: int, skipped: frozenset[str]) -> tuple[dict[str, Timed], dict[str, str]]:
    """Times of the sides that ran, and why the others did not."""
    running, missing = {}, {}
    for side in sides:
        reason = "left out by request" if side.name in skipped else side.absent
        if reason is not None:
            missing[side.name] = reason
            continue
        print(f"  building {side.name} ...", flush=True)
        try:
            running[side.name] = side.build()
        except Exception as error:
            if side.ours:
                raise
            missing[side.name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"  {side.name} {missing[side.name]}", flush=True)
    gc.collect()
    steps = {name: _steps(program) for name, program in running.items()}
    taken: dict[str, list[float]] = {name: [] for name in running}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(list(running), len(running)):
            taken[name].append(_turn(running[name], steps[name]))
    timed = {
        name: Timed(tuple(taken[name]), program.first_s, program.memory_bytes) for name, program in running.items()
    }
    return timed, missing


def _steps(program: Running) -> int:
    """How many steps make a turn."""
    return max(2, round(TURN_S / _turn(program, WARM_UP)))


def _turn(program: Running, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        result = program.step()
    program.wait(result)
    return (time.perf_counter() - start) / steps

"""Timing of GPU implementations: how they are built and measured.

GPU work is asynchronous, so one measurement enqueues as many steps as take about 0.12 s and synchronises once, at the
end. Implementations are measured alternately, in an order that is shuffled in each round, because clock frequency and
temperature depend on what ran before.
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

ROUND_S = 0.12
WARM_UP = 2


class Program(NamedTuple):
    """A compiled program: `step` enqueues one step, `wait` blocks on its result, `first_s` is compile and first run."""

    step: Callable[[], Any]
    wait: Callable[[Any], Any]
    first_s: float
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation that is timed. It is skipped if a module of `needs` is not installed.

    An error while building an implementation of another library is recorded; one of scaledot's (`ours`) is raised.
    """

    name: str
    build: Callable[[], Program]
    needs: tuple[str, ...] = ()
    ours: bool = False

    @property
    def skip_reason(self) -> str | None:
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


def jax_implementation(
    name: str, step: Callable[..., Any], *arguments: Any, needs: tuple[str, ...] = (), ours=False
) -> Implementation:
    return Implementation(name, lambda: _jax_program(step, arguments), needs, ours)


def _jax_program(step: Callable[..., Any], arguments: tuple) -> Program:
    start = time.perf_counter()
    compiled = jax.jit(step).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    first = time.perf_counter() - start
    memory = compiled.memory_analysis()
    memory_bytes = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
    return Program(lambda: compiled(*arguments), jax.block_until_ready, first, memory_bytes)


def torch_implementation(
    name: str, make: Callable[[], Callable[[], Any]], needs: tuple[str, ...] = ("torch",)
) -> Implementation:
    """Returns an implementation whose step is returned by `make`, which also allocates its inputs."""

    def build() -> Program:
        import torch  # pyright: ignore[reportMissingImports]  (an optional library)

        step = make()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return Program(step, lambda _: torch.cuda.synchronize(), time.perf_counter() - start, None)

    return Implementation(name, build, needs)


class Timed(NamedTuple):
    """Seconds per step in each round, seconds of the first step with compilation, bytes of outputs and temporaries."""

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


def measure(
    implementations: Iterable[Implementation], rounds: int, skipped: frozenset[str]
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Returns the times of the implementations that ran, and the reasons why others did not."""
    programs, not_run = {}, {}
    for implementation in implementations:
        name = implementation.name
        reason = "left out by request" if name in skipped else implementation.skip_reason
        if reason is not None:
            not_run[name] = reason
            continue
        print(f"  building {name} ...", flush=True)
        try:
            programs[name] = implementation.build()
        except Exception as error:
            if implementation.ours:
                raise
            not_run[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"  {name} {not_run[name]}", flush=True)
    gc.collect()
    steps = {name: _steps_per_round(program) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(programs), len(programs)):
            seconds[name].append(_time_round(programs[name], steps[name]))
    timed = {
        name: Timed(tuple(seconds[name]), program.first_s, program.memory_bytes) for name, program in programs.items()
    }
    return timed, not_run


def _steps_per_round(program: Program) -> int:
    return max(2, round(ROUND_S / _time_round(program, WARM_UP)))


def _time_round(program: Program, steps: int) -> float:
    """Returns the seconds per step."""
    start = time.perf_counter()
    for _ in range(steps):
        result = program.step()
    program.wait(result)
    return (time.perf_counter() - start) / steps

"""Measure the tiles of matrix products on the GPU of this machine, and write its table.

Every candidate is first held to the default tiles' result, then all are timed in turns; the fastest median wins, and
the heuristic's own choice where nothing beats it by a hundredth.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.kernels.mosaic import support, tuning
from scaledot.kernels.mosaic.tuning import Shape

# Tokens, inputs and outputs of layers whose three products are measured.
LAYERS = ((16384, 8192, 32768), (8192, 4096, 14336), (4096, 2048, 2048))
TURNS, TURN_S = 5, 0.08
WORTH = 0.99  # of the heuristic's time, or the difference is noise


def shapes_of(layers: Iterable[tuple[int, int, int]]) -> list[Shape]:
    """The products of a layer forward, for the gradient of its input, and for that of its float32 kernel."""
    shapes: list[Shape] = []
    for tokens, inputs, outputs in layers:
        for itemsize in (1, 2):
            shapes += [
                Shape(tokens, outputs, inputs, itemsize, 2, False),
                Shape(tokens, inputs, outputs, itemsize, 2, False),
                Shape(inputs, outputs, tokens, itemsize, 4, False),
            ]
    return list(dict.fromkeys(shapes))


def tune(layers: Iterable[tuple[int, int, int]], path: Path) -> None:
    """Measure all products of the layers and write the device's table to a file, after each one.

    What the file has of other products stays.
    """
    reason = support.device_reason()
    if reason is not None:
        raise NotImplementedError(f"there is nothing to tune here: {reason}")
    shapes = shapes_of(layers)
    known = json.loads(path.read_text())["matmul"] if path.exists() else []
    rows = [row for row in known if Shape(**row["shape"]) not in shapes]
    for number, shape in enumerate(shapes, 1):
        config, gain = best(shape)
        print(f"[{number}/{len(shapes)}] {shape}: {config} ({gain:.1%} faster than by the count)", flush=True)
        rows.append({"shape": dataclasses.asdict(shape), "config": dataclasses.asdict(config)})
        device = jax.devices()[0].device_kind
        table = {"device": device, "jax": jax.__version__, "matmul": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {path}")


def best(shape: Shape) -> tuple[Any, float]:
    """The fastest config of a shape, and how much it gains over the heuristic's."""
    default = tuning.heuristic(shape)
    a, b = _operands(shape)
    programs = {config: _program(shape, config, a, b) for config in (default, *_variants(default))}
    expected = np.asarray(programs[default](a, b)[:64], np.float32)
    for config, program in programs.items():
        found = np.asarray(program(a, b)[:64], np.float32)
        # Tiles change the order of sums, not their terms: what is wrong is wrong by more than two steps of bfloat16.
        if not np.allclose(found, expected, rtol=2.0**-6, atol=2.0**-6 * np.abs(expected).max()):
            raise AssertionError(f"{config} gives another product of {shape} than {default}")
    taken: dict[Any, list[float]] = {config: [] for config in programs}
    for _ in range(TURNS):
        for config, program in programs.items():
            taken[config].append(_seconds(program, a, b))
    medians = {config: statistics.median(seconds) for config, seconds in taken.items()}
    fastest = min(medians, key=lambda config: medians[config])
    if medians[fastest] > WORTH * medians[default]:
        fastest = default
    return fastest, medians[default] / medians[fastest] - 1


def _variants(default: Any) -> list[Any]:
    changes = [{"pair": pair, "band": band} for pair in (None, "rows", "columns") for band in (4, 8)]
    return [config for change in changes if (config := dataclasses.replace(default, **change)) != default]


def _operands(shape: Shape) -> tuple[jax.Array, jax.Array]:
    dtype = jnp.float8_e4m3fn if shape.itemsize == 1 else jnp.bfloat16
    sizes = (shape.m, shape.k), (shape.n, shape.k)
    spread = 100.0 if shape.itemsize == 1 else 1.0  # codes fill their range, as power depends on the data
    a, b = (spread * jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i, size in enumerate(sizes))
    return jnp.clip(a, -448, 448).astype(dtype), jnp.clip(b, -448, 448).astype(dtype)


def _program(shape: Shape, config: Any, a: jax.Array, b: jax.Array) -> Any:
    from scaledot.kernels.mosaic.matmul import matmul

    def product(a, b):
        one = jnp.ones(1, jnp.float32)
        out = jnp.float32 if shape.out_itemsize == 4 else jnp.bfloat16
        how = {"out_dtype": out, "config": config, "promote": shape.promote, "programs": support.multiprocessors()}
        return matmul(a, b, one, one, None, **how)

    return jax.jit(product).lower(a, b).compile()


def _seconds(program: Any, a: jax.Array, b: jax.Array) -> float:
    """A step of a turn that fills some hundredths of a second."""
    start = time.perf_counter()
    jax.block_until_ready(program(a, b))
    steps = max(2, round(TURN_S / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(steps):
        result = program(a, b)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps

"""Measure the tiles of matrix products on the GPU of this machine, and write its table.

A product is run as its kernel runs it, with nothing but the tiles changed. Every candidate is first held to the default
tiles' result, then all are timed in turns; the fastest median wins, and the heuristic's own choice where nothing beats
it by a hundredth.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.formats import FORMATS
from scaledot.kernels.hopper import dot, grouped, support, tile_configs
from scaledot.kernels.hopper.sizes import LINE
from scaledot.kernels.hopper.tile_configs import Shape
from scaledot.kernels.layouts import VALUES
from scaledot.kernels.spec import Problem, operand_of
from scaledot.numerics import blocks
from scaledot.numerics.grouped import padded_capacity

Layer = tuple[int, int, int]  # tokens, inputs and outputs
LARGE, MEDIUM, SMALL = (16384, 8192, 32768), (8192, 4096, 14336), (4096, 2048, 2048)
SQUARE, EXPERTS = (8192, 8192, 8192), (16384, 4096, 14336)
GROUPS = 8
TURNS, TURN_S = 5, 0.08
WORTH = 0.99  # of the heuristic's time, or the difference is noise


class Products(NamedTuple):
    """The three products of layers: forward, for the gradient of the input, and for that of the float32 kernel.

    result: how the first two are summed. kernel: how the third is. layers: which are measured unless others are asked
    for. in_groups: whether tokens are in groups, each with a kernel.
    """

    element: str
    result: str
    kernel: str
    layers: tuple[Layer, ...]
    in_groups: bool = False


KINDS = {  # as recipes have them, and the square products of the benchmarks
    "dense": tuple(Products(of, "chained", "chained", (LARGE, MEDIUM, SMALL)) for of in ("float8", "bfloat16")),
    "precise": (Products("float8", "promoted", "promoted", (SQUARE,)),),
    "blocks": (
        Products("float8", "squares", "lines", (LARGE, MEDIUM, SQUARE)),
        Products("int8", "lines", "lines", (MEDIUM,)),
        Products("int8", "squares", "lines", (SQUARE,)),
    ),
    "integers": (Products("int8", "chained", "chained", (MEDIUM,)),),
    "groups": (
        Products("float8", "chained", "chained", (EXPERTS,), in_groups=True),
        Products("float8", "squares", "lines", (EXPERTS,), in_groups=True),
    ),
}


def shapes_of(kinds: Iterable[str], layers: Sequence[Layer] = (), groups: int = GROUPS) -> list[Shape]:
    """What the products of those kinds ask for, on their own layers or on those that are given."""
    return list(
        dict.fromkeys(
            shape
            for kind in kinds
            for products in KINDS[kind]
            for layer in layers or products.layers
            for shape in _shapes(products, layer, groups)
        )
    )


def _shapes(products: Products, layer: Layer, groups: int) -> list[Shape]:
    tokens, inputs, outputs = layer
    count, terms = (groups, padded_capacity(tokens, groups, LINE)) if products.in_groups else (0, tokens)
    return [
        Shape(tokens, outputs, inputs, products.element, 2, products.result, row_groups=count),
        Shape(tokens, inputs, outputs, products.element, 2, products.result, row_groups=count),
        Shape(inputs, outputs, terms, products.element, 4, products.kernel, sum_groups=count),
    ]


def tune(shapes: Sequence[Shape], path: Path, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure GEMMs, write the device's table to a file after each one, and return what was measured.

    What the file has of other GEMMs stays. say: called with a line after each one.
    """
    reason = support.device_reason()
    if reason is not None:
        raise NotImplementedError(f"there is nothing to tune here: {reason}")
    known = json.loads(path.read_text())["matmul"] if path.exists() else []
    rows = {Shape(**row["shape"]): row for row in known}
    measured = []
    for number, shape in enumerate(shapes, 1):
        config, gain = best(shape)
        say(f"[{number}/{len(shapes)}] {shape}: {config} ({gain:.1%} faster than by the count)")
        rows[shape] = {"shape": dataclasses.asdict(shape), "config": dataclasses.asdict(config)}
        measured.append(rows[shape] | {"gain": gain})
        device = jax.devices()[0].device_kind
        table = {"device": device, "jax": jax.__version__, "matmul": list(rows.values())}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    return measured


def best(shape: Shape) -> tuple[Any, float]:
    """The fastest config of a shape, and how much it gains over the heuristic's."""
    default = tile_configs.heuristic(shape)
    arguments = operands(shape)
    programs = {config: _program(shape, config, arguments) for config in (default, *variants(shape))}
    expected = programs[default](*arguments)
    for config, program in programs.items():
        if not _agree(program(*arguments), expected):
            raise AssertionError(f"{config} gives another product of {shape} than {default}")
    del expected
    taken: dict[Any, list[float]] = {config: [] for config in programs}
    for _ in range(TURNS):
        for config, program in programs.items():
            taken[config].append(_seconds(program, arguments))
    medians = {config: statistics.median(seconds) for config, seconds in taken.items()}
    fastest = min(medians, key=lambda config: medians[config])
    if medians[fastest] > WORTH * medians[default]:
        fastest = default
    return fastest, medians[default] / medians[fastest] - 1


@jax.jit
def _agree(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Tiles change the order of sums, not their terms: what is wrong is wrong by more than two steps of bfloat16."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.allclose(found, expected, rtol=2.0**-6, atol=2.0**-6 * jnp.abs(expected).max())


def variants(shape: Shape) -> list[Any]:
    """What is tried beside the heuristic's choice: tiles that registers and shared memory of Hopper have room for."""
    default = tile_configs.heuristic(shape)
    if shape.promotes:
        found = [dataclasses.replace(default, **change) for change in _promoted_changes(shape)]
    elif shape.row_groups:
        tiles = map(tile_configs.for_groups, tile_configs.candidates(promote=False))
        found = [dataclasses.replace(config, band=band) for config in tiles for band in (4, 8)]
    else:
        ways = [(pair, band) for pair in (None, "rows", "columns") for band in (4, 8)]
        found = [dataclasses.replace(default, pair=pair, band=band) for pair, band in ways]
    return [config for config in dict.fromkeys(found) if config != default]


def _promoted_changes(shape: Shape) -> list[dict[str, Any]]:
    """A path that is nearer to a square, and tiles of fewer rows; without groups of rows, a longer ring; and for lines
    without groups, which keep fewest numbers in registers, wide tiles in two parts."""
    changes: list[dict[str, Any]] = [{"band": 16}, {"groups": 2, "stages": 5}]
    if not shape.row_groups:
        changes.append({"stages": 5, "epilogue_columns": 16})
    if shape.sums == "lines" and not shape.row_groups and not shape.sum_groups:
        changes.append({"groups": 2, "columns": 256, "parts": 2})
    return changes


def operands(shape: Shape) -> tuple[Any, ...]:
    """Both sides, of which rows are (M, K) and columns (N, K), and the sizes of groups, where there are any."""
    rows, columns = _blocks(shape)
    matrices = (shape.row_groups,) if shape.row_groups else ()
    x = _codes(0, shape.element, (shape.m, shape.k), rows)
    w = _codes(1, shape.element, (*matrices, shape.n, shape.k), columns)
    return x, w, *_sizes(shape)


def _blocks(shape: Shape) -> tuple[blocks.Block, blocks.Block]:
    if shape.sums in ("lines", "squares"):
        return (1, LINE), (1 if shape.sums == "lines" else LINE, LINE)
    each = (1, 0) if shape.element == "int8" else (0, 0)
    return each, each


def _codes(seed: int, element: str, sizes: tuple[int, ...], block: blocks.Block) -> ScaledArray:
    """Codes that fill their range, as power depends on the data, with scales of about one."""
    format = {"float8": FORMATS["fp8_e4m3"], "int8": FORMATS["int8"], "bfloat16": VALUES}[element]
    codes, scales = jax.random.split(jax.random.key(seed))
    data = jax.random.normal(codes, sizes, jnp.bfloat16)
    if format is not VALUES:
        data = jnp.clip(data * (format.max / 4), -format.max, format.max)
    scale = jax.random.uniform(scales, blocks.grid(sizes, block), minval=0.5, maxval=1.5)
    dtype = np.dtype(jnp.bfloat16)
    how = {"format": format, "block": blocks.trim(block), "dtype": dtype}
    return ScaledArray(data.astype(format.code_dtype), scale, **how)


def _sizes(shape: Shape) -> tuple[jax.Array, ...]:
    """Of groups, uneven; those of a sum are whole steps of it, with the room that they may need."""
    count = shape.row_groups or shape.sum_groups
    if not count:
        return ()
    random = np.random.default_rng(0)
    rows = shape.m if shape.row_groups else shape.k - count * (LINE - 1)
    sizes = random.multinomial(rows, random.dirichlet(np.full(count, 2.0)))
    return (jnp.array(sizes if shape.row_groups else -(-sizes // LINE) * LINE, jnp.int32),)


def product(shape: Shape, x: ScaledArray, w: ScaledArray, sizes: jax.Array | None = None) -> jax.Array:
    """As the kernels for it are run."""
    columns = "gnk" if shape.row_groups else "nk"
    problem = Problem(
        "dot" if sizes is None else "ragged_dot",
        Contraction("mk", columns, "gmn" if shape.sum_groups else "mn"),
        operand_of(x, "mk"),
        operand_of(w, columns),
        preferred=np.dtype(jnp.float32 if shape.out_itemsize == 4 else jnp.bfloat16),
        precision="highest" if shape.sums == "promoted" else None,
        **_groups(shape),
    )
    if sizes is not None:
        return grouped.run(problem, x, w, sizes)
    return {"float8": dot.FLOAT8, "int8": dot.INT8, "bfloat16": dot.VALUES}[shape.element].run(problem, x, w)


def _groups(shape: Shape) -> dict[str, Any]:
    """What a problem says of them."""
    if shape.row_groups:
        return {"ragged": "m", "group": "g", "gathers": True}
    return {"ragged": "k", "group": "g", "group_multiple": LINE} if shape.sum_groups else {}


def _program(shape: Shape, config: Any, arguments: tuple[Any, ...]) -> Any:
    with tile_configs.trying(shape, config):
        return jax.jit(lambda *given: product(shape, *given)).lower(*arguments).compile()


def _seconds(program: Any, arguments: tuple[Any, ...]) -> float:
    """A step of a turn that fills some hundredths of a second."""
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    steps = max(2, round(TURN_S / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(steps):
        result = program(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps

"""Autotunes the `tiles.Config` of matmul kernels on the GPU of this machine, and writes the device's table.

A matmul is run through its entry of the kernel table, with only the config changed. The result of every candidate is
first compared with that of the heuristic's config. Then all are timed in turn; the config with the least median time is
chosen if it is at least 1% faster than the heuristic's.
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
from scaledot.kernels.hopper.scale_blocks import SCALE_BLOCK
from scaledot.kernels.hopper.swizzle_atom import K_STEP
from scaledot.kernels.hopper.tile_configs import GemmKey
from scaledot.kernels.layouts import DEQUANTIZED
from scaledot.kernels.spec import Problem, operand_of
from scaledot.numerics import blocks
from scaledot.numerics.grouped import padded_capacity

Layer = tuple[int, int, int]  # tokens, inputs and outputs
LARGE, MEDIUM, SMALL = (16384, 8192, 32768), (8192, 4096, 14336), (4096, 2048, 2048)  # layers of the benchmarks
SQUARE, EXPERTS = (8192, 8192, 8192), (16384, 4096, 14336)
GROUPS = 8
REPETITIONS, SECONDS_PER_REPETITION = 5, 0.08
MAX_RELATIVE_TIME = 0.99  # of a config that replaces the heuristic's; smaller gains are noise


class LayerMatmuls(NamedTuple):
    """The fwd, dgrad and wgrad matmuls of layers; fwd and dgrad have bfloat16 results, wgrad float32.

    accumulation, wgrad_accumulation: `GemmKey.accumulation` of fwd and dgrad, and of wgrad. layers: the layers that are
    tuned by default. is_grouped: whether tokens are in groups, each with its own weight.
    """

    element: str
    accumulation: str
    wgrad_accumulation: str
    layers: tuple[Layer, ...]
    is_grouped: bool = False


KINDS = {  # the matmuls of the recipes, and the square matmuls of the benchmarks
    "dense": (
        LayerMatmuls("float8", "unpromoted", "unpromoted", (LARGE, MEDIUM, SMALL)),
        LayerMatmuls("bfloat16", "unpromoted", "unpromoted", (LARGE, MEDIUM, SMALL)),
    ),
    "precise": (LayerMatmuls("float8", "promoted", "promoted", (SQUARE,)),),
    "blocks": (
        LayerMatmuls("float8", "blocks_128x128", "blocks_1x128", (LARGE, MEDIUM, SQUARE)),
        LayerMatmuls("int8", "blocks_1x128", "blocks_1x128", (MEDIUM,)),
        LayerMatmuls("int8", "blocks_128x128", "blocks_1x128", (SQUARE,)),
    ),
    "integers": (LayerMatmuls("int8", "unpromoted", "unpromoted", (MEDIUM,)),),
    "groups": (
        LayerMatmuls("float8", "unpromoted", "unpromoted", (EXPERTS,), is_grouped=True),
        LayerMatmuls("float8", "blocks_128x128", "blocks_1x128", (EXPERTS,), is_grouped=True),
    ),
}


def gemm_keys(kinds: Iterable[str], layers: Sequence[Layer] = (), groups: int = GROUPS) -> list[GemmKey]:
    """Returns the distinct matmuls of `KINDS`, for `layers` or, if there are none, each kind's default layers."""
    return list(
        dict.fromkeys(
            gemm
            for kind in kinds
            for matmuls in KINDS[kind]
            for layer in layers or matmuls.layers
            for gemm in _layer_gemms(matmuls, layer, groups)
        )
    )


def _layer_gemms(matmuls: LayerMatmuls, layer: Layer, groups: int) -> list[GemmKey]:
    """Returns the matmuls of fwd, dgrad and wgrad."""
    tokens, inputs, outputs = layer
    count, wgrad_k = (groups, padded_capacity(tokens, groups, K_STEP)) if matmuls.is_grouped else (0, tokens)
    return [
        GemmKey(tokens, outputs, inputs, matmuls.element, 2, matmuls.accumulation, row_groups=count),
        GemmKey(tokens, inputs, outputs, matmuls.element, 2, matmuls.accumulation, row_groups=count),
        GemmKey(inputs, outputs, wgrad_k, matmuls.element, 4, matmuls.wgrad_accumulation, k_groups=count),
    ]


def tune(gemms: Sequence[GemmKey], path: Path, log: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Tunes matmuls, writes the device's table to a file after each of them, and returns the new entries.

    Entries of the file for other matmuls are kept. log: called with a line after each matmul.
    """
    reason = support.mesh_reason()
    if reason is not None:
        raise NotImplementedError(f"cannot tune matmuls here: {reason}")
    existing = json.loads(path.read_text())["matmul"] if path.exists() else []
    entries = {GemmKey(**entry["gemm"]): entry for entry in existing}
    measured = []
    for number, gemm in enumerate(gemms, 1):
        config, gain = best(gemm)
        log(f"[{number}/{len(gemms)}] {gemm}: {config} ({gain:.1%} faster than the heuristic's)")
        entries[gemm] = {"gemm": dataclasses.asdict(gemm), "config": dataclasses.asdict(config)}
        measured.append(entries[gemm] | {"gain": gain})
        device = jax.devices()[0].device_kind
        table = {"device": device, "jax": jax.__version__, "matmul": list(entries.values())}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    return measured


def best(gemm: GemmKey) -> tuple[Any, float]:
    """Returns the fastest config of a matmul, and its speedup over the heuristic's config minus one."""
    heuristic = tile_configs.heuristic(gemm)
    arguments = operands(gemm)
    compiled = {config: _compile(gemm, config, arguments) for config in (heuristic, *variants(gemm))}
    expected = compiled[heuristic](*arguments)
    for config, matmul in compiled.items():
        if not _allclose(matmul(*arguments), expected):
            raise AssertionError(f"the result of {gemm} with {config} differs from that with {heuristic}")
    del expected
    times: dict[Any, list[float]] = {config: [] for config in compiled}
    for _ in range(REPETITIONS):
        for config, matmul in compiled.items():
            times[config].append(_seconds(matmul, arguments))
    medians = {config: statistics.median(seconds) for config, seconds in times.items()}
    fastest = min(medians, key=lambda config: medians[config])
    if medians[fastest] > MAX_RELATIVE_TIME * medians[heuristic]:
        fastest = heuristic
    return fastest, medians[heuristic] / medians[fastest] - 1


@jax.jit
def _allclose(result: jax.Array, expected: jax.Array) -> jax.Array:
    """Whether no result is wrong: rtol is 2^-6, and atol 2^-6 of the largest element."""
    result, expected = result.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.allclose(result, expected, rtol=2.0**-6, atol=2.0**-6 * jnp.abs(expected).max())


def variants(gemm: GemmKey) -> list[Any]:
    """Candidate configs besides the heuristic's, all of which fit Hopper's registers and SMEM."""
    heuristic = tile_configs.heuristic(gemm)
    if gemm.promotes:
        configs = [dataclasses.replace(heuristic, **changes) for changes in _promoted_changes(gemm)]
    elif gemm.row_groups:
        tiles = map(tile_configs.for_groups, tile_configs.candidates(promote=False))
        configs = [dataclasses.replace(config, grid_tile_width=width) for config in tiles for width in (4, 8)]
    else:
        configs = [
            dataclasses.replace(heuristic, cluster_along=dimension, grid_tile_width=width)
            for dimension in (None, "rows", "columns")
            for width in (4, 8)
        ]
    return [config for config in dict.fromkeys(configs) if config != heuristic]


def _promoted_changes(gemm: GemmKey) -> list[dict[str, Any]]:
    """Returns changes of the heuristic's config for promoted accumulators, by field."""
    changes: list[dict[str, Any]] = [
        {"grid_tile_width": 16},  # another order of output tiles, for L2
        {"consumer_warpgroups": 2, "stages": 5},  # CTA tiles of 128 rows: a stage is smaller, so that five fit SMEM
    ]
    if not gemm.row_groups:  # a deeper pipeline; with groups of rows, the edge staging buffer takes its SMEM
        changes.append({"stages": 5, "epilogue_columns": 16})
    if gemm.accumulation == "blocks_1x128" and not gemm.row_groups and not gemm.k_groups:
        # Tiles of 64 × 256, in halves, need the most registers. With 1×128 blocks, column scales are read from SMEM, so
        # it needs fewer registers than 128×128.
        changes.append({"consumer_warpgroups": 2, "wg_n": 256, "n_splits": 2})
    return changes


def operands(gemm: GemmKey) -> tuple[Any, ...]:
    """Random operands (M, K) and (N, K), or (groups, N, K) with groups of rows, and group sizes if there are groups."""
    lhs_block, rhs_block = _blocks(gemm)
    group_dim = (gemm.row_groups,) if gemm.row_groups else ()
    lhs = _random_array(0, gemm.element, (gemm.m, gemm.k), lhs_block)
    rhs = _random_array(1, gemm.element, (*group_dim, gemm.n, gemm.k), rhs_block)
    return lhs, rhs, *_group_sizes(gemm)


def _blocks(gemm: GemmKey) -> tuple[blocks.Block, blocks.Block]:
    if gemm.accumulation in ("blocks_1x128", "blocks_128x128"):
        return (1, SCALE_BLOCK), (1 if gemm.accumulation == "blocks_1x128" else SCALE_BLOCK, SCALE_BLOCK)
    block = (1, 0) if gemm.element == "int8" else (0, 0)
    return block, block


def _random_array(seed: int, element: str, sizes: tuple[int, ...], block: blocks.Block) -> ScaledArray:
    """Codes over the whole range of their format, because the GPU's power depends on the data, and scales near 1."""
    format = {"float8": FORMATS["fp8_e4m3"], "int8": FORMATS["int8"], "bfloat16": DEQUANTIZED}[element]
    data_key, scale_key = jax.random.split(jax.random.key(seed))
    data = jax.random.normal(data_key, sizes, jnp.bfloat16)
    if format is not DEQUANTIZED:
        data = jnp.clip(data * (format.max / 4), -format.max, format.max)
    scale = jax.random.uniform(scale_key, blocks.grid(sizes, block), minval=0.5, maxval=1.5)
    dtype = np.dtype(jnp.bfloat16)
    return ScaledArray(data.astype(format.code_dtype), scale, format=format, block=blocks.trim(block), dtype=dtype)


def _group_sizes(gemm: GemmKey) -> tuple[jax.Array, ...]:
    """Uneven group sizes; those along K are multiples of 128, whose sum may be less than the padded K."""
    count = gemm.row_groups or gemm.k_groups
    if not count:
        return ()
    random = np.random.default_rng(0)
    rows = gemm.m if gemm.row_groups else gemm.k - count * (K_STEP - 1)
    sizes = random.multinomial(rows, random.dirichlet(np.full(count, 2.0)))
    return (jnp.array(sizes if gemm.row_groups else -(-sizes // K_STEP) * K_STEP, jnp.int32),)


def run(gemm: GemmKey, lhs: ScaledArray, rhs: ScaledArray, group_sizes: jax.Array | None = None) -> jax.Array:
    """Computes a matmul through its entry of the kernel table; see `operands`."""
    rhs_labels = "gnk" if gemm.row_groups else "nk"
    problem = Problem(
        "dot" if group_sizes is None else "ragged_dot",
        Contraction("mk", rhs_labels, "gmn" if gemm.k_groups else "mn"),
        operand_of(lhs, "mk"),
        operand_of(rhs, rhs_labels),
        preferred=np.dtype(jnp.float32 if gemm.out_itemsize == 4 else jnp.bfloat16),
        precision="highest" if gemm.accumulation == "promoted" else None,
        **_group_fields(gemm),
    )
    if group_sizes is not None:
        return grouped.run(problem, lhs, rhs, group_sizes)
    kernel = {"float8": dot.FLOAT8, "int8": dot.INT8, "bfloat16": dot.BFLOAT16}[gemm.element]
    return kernel.run(problem, lhs, rhs)


def _group_fields(gemm: GemmKey) -> dict[str, Any]:
    """The fields of a Problem that describe groups."""
    if gemm.row_groups:
        return {"ragged_label": "m", "group_label": "g", "group_scales_to_rows": True}
    return {"ragged_label": "k", "group_label": "g", "group_multiple": K_STEP} if gemm.k_groups else {}


def _compile(gemm: GemmKey, config: Any, arguments: tuple[Any, ...]) -> Any:
    with tile_configs.config_override(gemm, config):
        return jax.jit(lambda *arrays: run(gemm, *arrays)).lower(*arguments).compile()


def _seconds(matmul: Any, arguments: tuple[Any, ...]) -> float:
    """The mean time of a call, over as many calls as take about SECONDS_PER_REPETITION."""
    start = time.perf_counter()
    jax.block_until_ready(matmul(*arguments))
    calls = max(2, round(SECONDS_PER_REPETITION / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        result = matmul(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls

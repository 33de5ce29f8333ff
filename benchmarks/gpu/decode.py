"""Few rows times packed weights, as in decoding: scaledot's kernel beside bfloat16, XLA and torch.

A step is a loop over tokens, each of which meets six layers of weights: more bytes than the cache holds, and more work
than the host needs to launch it. Errors are of float32 results against float64, beside those of XLA's kernel.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scaledot as sd
from benchmarks.gpu import report
from benchmarks.gpu.sides import Side, jax_side, measure, torch_side

LAYERS, TOKENS = 6, 8
SHAPES = {"4096 -> 14336": ((4096, 14336), (1, 16, 64)), "14336 -> 4096": ((14336, 4096), (1, 16))}
CASES = {f"{name}, batch {rows}": (*shape, rows) for name, (shape, batches) in SHAPES.items() for rows in batches}
INT4, NF4 = "scaledot int4 in groups of 128", "scaledot nf4"
WEIGHTS: dict[str, tuple[str, int | None, str]] = {  # format, block along the sum, XLA's kernel
    INT4: ("int4", 128, "xla_codes"),
    "scaledot int8": ("int8", None, "xla_codes"),
    "scaledot mxfp4": ("mxfp4", None, "xla_upcast"),
    "scaledot nvfp4": ("nvfp4", None, "xla_upcast"),
    NF4: ("nf4", None, "xla_dequantize"),
}
DEQUANTISED = {INT4: "XLA, int4 dequantised", NF4: "XLA, nf4 dequantised"}  # peers that multiply the same weights
OURS, BASE = "hopper_weight_only", "JAX bfloat16"
TARGETS = {1: 2.5, 16: 2.2}  # times the speed of bfloat16, by batch, for int4
SMALL = (1096, 712, 3)  # terms, columns and rows that suit no tile


def random_layers(terms: int, columns: int, count: int = LAYERS) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.random.normal(key, (terms, columns), jnp.bfloat16) for key in keys]


def random_rows(rows: int, terms: int) -> jax.Array:
    """x for each token."""
    return jax.random.normal(jax.random.key(1), (TOKENS, rows, terms), jnp.bfloat16)


def quantized(w: jax.Array, name: str) -> sd.ScaledArray:
    format, block, _ = WEIGHTS[name]
    return sd.quantize(w, format, axis=0, block=block, pad=True)


def product(x: jax.Array, w: sd.ScaledArray, kernel: str = OURS, dtype=jnp.bfloat16) -> jax.Array:
    return sd.matmul(x, w, preferred_element_type=dtype, kernel=kernel)


def errors(name: str, terms: int, columns: int, rows: int) -> dict[str, float]:
    """Relative ones of our kernel and of XLA's."""
    x, (w,) = random_rows(rows, terms)[0], random_layers(terms, columns, 1)
    w = quantized(w, name)
    exact = np.asarray(x, np.float64) @ np.asarray(sd.dequantize(w, jnp.float32), np.float64)
    found = {}
    for what, kernel in (("scaledot", OURS), ("XLA", WEIGHTS[name][2])):
        result = jax.jit(functools.partial(product, kernel=kernel, dtype=jnp.float32))(x, w)
        off = np.linalg.norm(np.asarray(result, np.float64) - exact) / np.linalg.norm(exact)
        found[f"{what}, {terms} terms"] = float(off)
    allowed = terms * 2.0**-24  # as many rounding errors of float32
    if not found[f"scaledot, {terms} terms"] <= allowed:
        raise AssertionError(f"{name} is {found} off, over {allowed:.1e}")
    return found


def step_of(layer: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Results of the last token; every token goes through all layers."""

    def step(tokens: jax.Array, weights: list) -> list[jax.Array]:
        def token(i, _):
            x = lax.dynamic_index_in_dim(tokens, i, keepdims=False)
            return [layer(x, w) for w in weights]

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(token, 0, None))
        return lax.fori_loop(0, TOKENS, token, zeros)

    return step


def sides_of(terms: int, columns: int, rows: int) -> Iterator[Side]:
    tokens, layers = random_rows(rows, terms), random_layers(terms, columns)
    yield jax_side(BASE, step_of(jnp.matmul), tokens, layers)
    for name in WEIGHTS:
        weights = [jax.jit(quantized, static_argnames="name")(w, name=name) for w in layers]
        yield jax_side(name, step_of(product), tokens, weights, ours=True)
        if name in DEQUANTISED:
            plain = step_of(lambda x, w: x @ sd.dequantize(w, jnp.bfloat16))
            yield jax_side(DEQUANTISED[name], plain, tokens, weights)
    yield torch_side("torch int4 in groups of 128", lambda: _torch_int4(terms, columns, rows))


def _torch_int4(terms: int, columns: int, rows: int):
    import torch  # pyright: ignore[reportMissingImports]

    device = {"device": "cuda"}
    codes = [torch.randint(0, 256, (columns, terms // 2), dtype=torch.uint8, **device) for _ in range(LAYERS)]
    packed = [torch._convert_weight_to_int4pack(layer, 8) for layer in codes]
    scales = torch.ones(terms // 128, columns, 2, dtype=torch.bfloat16, **device)
    x = torch.randn(rows, terms, dtype=torch.bfloat16, **device)

    def step():
        for _ in range(TOKENS):
            for layer in packed:
                torch._weight_int4pack_mm(x, layer, 128, scales)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def run(cases: tuple[str, ...], turns: int, skipped: frozenset[str]) -> None:
    rows = []
    for name in cases or CASES:
        terms, columns, batch = CASES[name]
        off = {side: errors(side, *SMALL) | errors(side, terms, columns, batch) for side in WEIGHTS}
        print(f"{name}: errors {off}", flush=True)
        timed, missing = measure(sides_of(terms, columns, batch), turns, skipped)
        sides = {}
        for side, times in timed.items():
            layer_s = times.median / (TOKENS * LAYERS)
            rate = _bytes(side, terms, columns) / layer_s
            ratio = None if BASE not in timed else timed[BASE].median / times.median
            target = TARGETS.get(batch) if side == INT4 else None
            about = {"layer_ms": 1e3 * layer_s, "gb_s": rate / 1e9, "of_bf16": ratio, "target": target}
            sides[side] = {**times.as_dict(), **about}
            print(report.side_line(side, times, f"{1e6 * layer_s:.1f} us, {rate / 1e9:.0f} GB/s", target, ratio))
            report.explain("decode", name, side, target, ratio)
        rows.append({"case": name, "errors": off, "sides": sides, "missing": missing})
        print(f"wrote {report.write('decode', rows)}", flush=True)


def _bytes(side: str, terms: int, columns: int) -> int:
    """Of one layer's weights and scales."""
    if side == BASE:
        return 2 * terms * columns
    like = jax.ShapeDtypeStruct((terms, columns), jnp.bfloat16)
    read = {peer: name for name, peer in DEQUANTISED.items()} | {name: name for name in WEIGHTS}
    return jax.eval_shape(lambda w: quantized(w, read.get(side, INT4)), like).nbytes

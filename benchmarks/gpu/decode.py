"""Weight-only quantised matmuls with few rows, as in decoding, compared with bfloat16, XLA and torch.

A step is a loop over 8 tokens, each of which is multiplied by six layers' weights: more bytes than the L2 cache holds,
and enough work to hide the host's launches. Errors are those of float32 results relative to a float64 matmul of the
dequantised weights; those of XLA's kernel are recorded too.
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
from benchmarks.gpu.implementations import Implementation, jax_implementation, measure, torch_implementation

LAYERS, TOKENS = 6, 8
SHAPES = {"4096 -> 14336": ((4096, 14336), (1, 16, 64)), "14336 -> 4096": ((14336, 4096), (1, 16))}
CASES = {f"{name}, batch {rows}": (*shape, rows) for name, (shape, batches) in SHAPES.items() for rows in batches}
INT4, NF4 = "scaledot int4 in groups of 128", "scaledot nf4"
WEIGHTS: dict[str, tuple[str, int | None, str]] = {  # format, block along K, XLA's kernel
    INT4: ("int4", 128, "xla_codes"),
    "scaledot int8": ("int8", None, "xla_codes"),
    "scaledot mxfp4": ("mxfp4", None, "xla_upcast"),
    "scaledot nvfp4": ("nvfp4", None, "xla_upcast"),
    NF4: ("nf4", None, "xla_dequantize"),
}
DEQUANTISED = {INT4: "XLA, int4 dequantised", NF4: "XLA, nf4 dequantised"}  # XLA's matmuls of the same weights
KERNEL, BASE = "hopper_weight_only", "JAX bfloat16"
TARGETS = {1: 2.5, 16: 2.2}  # speedup of int4 over bfloat16, by batch
SMALL = (1096, 712, 3)  # K, N, M; K and N are not multiples of a tile's size


def random_layers(k: int, n: int, count: int = LAYERS) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), count)
    return [jax.random.normal(key, (k, n), jnp.bfloat16) for key in keys]


def random_tokens(m: int, k: int) -> jax.Array:
    """x (M, K) of each token."""
    return jax.random.normal(jax.random.key(1), (TOKENS, m, k), jnp.bfloat16)


def quantized(w: jax.Array, name: str) -> sd.ScaledArray:
    format, block, _ = WEIGHTS[name]
    return sd.quantize(w, format, axis=0, block=block, pad=True)


def matmul(x: jax.Array, w: sd.ScaledArray, kernel: str = KERNEL, dtype=jnp.bfloat16) -> jax.Array:
    return sd.matmul(x, w, preferred_element_type=dtype, kernel=kernel)


def errors(name: str, k: int, n: int, m: int) -> dict[str, float]:
    """Relative errors of scaledot's kernel and of XLA's."""
    x, (w,) = random_tokens(m, k)[0], random_layers(k, n, 1)
    w = quantized(w, name)
    exact = np.asarray(x, np.float64) @ np.asarray(sd.dequantize(w, jnp.float32), np.float64)
    relative = {}
    for implementation, kernel in (("scaledot", KERNEL), ("XLA", WEIGHTS[name][2])):
        result = jax.jit(functools.partial(matmul, kernel=kernel, dtype=jnp.float32))(x, w)
        error = np.linalg.norm(np.asarray(result, np.float64) - exact) / np.linalg.norm(exact)
        relative[f"{implementation}, K = {k}"] = float(error)
    max_error = k * 2.0**-24  # one float32 rounding per element along K
    if not relative[f"scaledot, K = {k}"] <= max_error:
        raise AssertionError(f"{name}: relative errors {relative} exceed {max_error:.1e}")
    return relative


def step_of(layer: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Returns a step that multiplies every token by all layers' weights and returns the results of the last token."""

    def step(tokens: jax.Array, weights: list) -> list[jax.Array]:
        def token(i, _):
            x = lax.dynamic_index_in_dim(tokens, i, keepdims=False)
            return [layer(x, w) for w in weights]

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(token, 0, None))
        return lax.fori_loop(0, TOKENS, token, zeros)

    return step


def implementations_of(k: int, n: int, m: int) -> Iterator[Implementation]:
    tokens, layers = random_tokens(m, k), random_layers(k, n)
    yield jax_implementation(BASE, step_of(jnp.matmul), tokens, layers)
    for name in WEIGHTS:
        weights = [jax.jit(quantized, static_argnames="name")(w, name=name) for w in layers]
        yield jax_implementation(name, step_of(matmul), tokens, weights, ours=True)
        if name in DEQUANTISED:
            dequantizing = step_of(lambda x, w: x @ sd.dequantize(w, jnp.bfloat16))
            yield jax_implementation(DEQUANTISED[name], dequantizing, tokens, weights)
    yield torch_implementation("torch int4 in groups of 128", lambda: _torch_int4(k, n, m))


def _torch_int4(k: int, n: int, m: int):
    import torch  # pyright: ignore[reportMissingImports]

    device = {"device": "cuda"}
    codes = [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **device) for _ in range(LAYERS)]
    packed = [torch._convert_weight_to_int4pack(layer, 8) for layer in codes]
    scales = torch.ones(k // 128, n, 2, dtype=torch.bfloat16, **device)
    x = torch.randn(m, k, dtype=torch.bfloat16, **device)

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


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    rows = []
    for name in cases or CASES:
        k, n, batch = CASES[name]
        relative = {weights: errors(weights, *SMALL) | errors(weights, k, n, batch) for weights in WEIGHTS}
        print(f"{name}: relative errors {relative}", flush=True)
        timed, not_run = measure(implementations_of(k, n, batch), rounds, skipped)
        results = {}
        for implementation, times in timed.items():
            layer_s = times.median / (TOKENS * LAYERS)
            bandwidth = _weight_bytes(implementation, k, n) / layer_s
            ratio = None if BASE not in timed else timed[BASE].median / times.median
            target = TARGETS.get(batch) if implementation == INT4 else None
            about = {"layer_ms": 1e3 * layer_s, "gb_s": bandwidth / 1e9, "of_bf16": ratio, "target": target}
            results[implementation] = {**times.as_dict(), **about}
            rate = f"{1e6 * layer_s:.1f} us, {bandwidth / 1e9:.0f} GB/s"
            print(report.result_line(implementation, times, rate, target, ratio))
            report.print_remark("decode", name, implementation, target, ratio)
        rows.append({"case": name, "errors": relative, "implementations": results, "not_run": not_run})
        print(f"wrote {report.write('decode', rows)}", flush=True)


def _weight_bytes(implementation: str, k: int, n: int) -> int:
    """Bytes of one layer's codes and scales."""
    if implementation == BASE:
        return 2 * k * n
    w = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    weights = {xla: name for name, xla in DEQUANTISED.items()} | {name: name for name in WEIGHTS}
    return jax.eval_shape(lambda w: quantized(w, weights.get(implementation, INT4)), w).nbytes

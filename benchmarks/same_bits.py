"""Compares casts on an accelerator with the CPU's, bit for bit.

Every format, rounding, scale rule, library variant and orientation is run on both devices over inputs that cover all of
float32. Codes, scales and dequantised values must be bit-identical, and so must a quantise–dequantise round trip in one
jitted function, because XLA's GPU backend removes conversions to a narrow float and back. Calibrations that sum (`rms`,
`mse`) or interpolate are excluded: their order of addition depends on the backend.

    python -m benchmarks.same_bits
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

import scaledot as sd
from benchmarks import record
from scaledot import format_variants
from scaledot.formats import rules_of

KEY = np.array([7, 11], np.uint32)


@dataclasses.dataclass(frozen=True)
class Cast:
    """A quantisation function with its name and the dtype of its input."""

    name: str
    apply: Callable[[Any], Any]
    dtype: Any = np.float32


def casts() -> Iterator[Cast]:
    for name, format in sd.FORMATS.items():
        yield Cast(name, lambda x, f=format: sd.quantize(x, f))
        yield Cast(f"{name} axis 0", lambda x, f=format: sd.quantize(x, f, axis=0))
        yield Cast(f"{name} stochastic", lambda x, f=format: sd.quantize(x, f, rounding="stochastic", key=KEY))
        yield Cast(f"{name} rotated", lambda x, f=format: sd.quantize(x, f, rotation=sd.Hadamard()))
        for rule in rules_of(format):
            yield Cast(f"{name} {rule}", lambda x, f=format, r=rule: sd.quantize(x, f, rule=r))
    for library in ("torchao", "compressed_tensors", "deepgemm", "modelopt"):
        for name, format in vars(getattr(format_variants, library)).items():
            yield Cast(f"{library}.{name}", lambda x, f=format: sd.quantize(x, f))
            yield Cast(f"{library}.{name} bfloat16", lambda x, f=format: sd.quantize(x, f), ml_dtypes.bfloat16)
    yield from searched_and_corrected_casts()
    for bits in (8, 4):
        yield Cast(f"int{bits} minmax", lambda x, b=bits: sd.quantize(x, f"int{b}", calibration="minmax"))
    for name in ("fp8_e4m3", "mxfp8", "nvfp4"):
        sizes = np.array([100, 0, 57, 90])
        yield Cast(f"{name} grouped", lambda x, n=name, s=sizes: sd.quantize_grouped(x, s, n, axis=0))


def searched_and_corrected_casts() -> Iterator[Cast]:
    """Casts that compare errors of several block scales, or correct them by sums over rotated elements (MS-EDEN)."""
    searches = ("nvfp4", "four_over_six"), ("nvfp4", "scales"), ("nvint4", "scales"), ("if4", "scales")
    for name, search in searches:
        format = dataclasses.replace(sd.FORMATS[name], name=f"{name}_{search}", search=search)
        for axis in (0, 1):
            yield Cast(f"{format.name} axis {axis}", lambda x, f=format, a=axis: sd.quantize(x, f, axis=a))
    corrected = {"rounding": "ms_eden", "rotation": sd.Hadamard(128, mask=0), "key": KEY}
    for name in ("nvfp4", "nvint4", "if4"):
        for axis in (0, 1):
            yield Cast(f"{name} ms_eden axis {axis}", lambda x, n=name, a=axis: sd.quantize(x, n, axis=a, **corrected))


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (256, 512)
    pattern = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    narrow = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return {
        "normal": rng.standard_normal(shape).astype(np.float32),
        "heavy tails": rng.standard_t(2, shape).astype(np.float32) * np.float32(1e-4),
        "every exponent": pattern,
        "finite patterns": np.where(np.isfinite(pattern), pattern, np.float32(0)),
        "every bfloat16": np.concatenate([narrow, narrow]).reshape(shape).astype(np.float32),
        "near the smallest": (rng.standard_normal(shape) * 1e-37).astype(np.float32),
    }


def differences(cast: Cast, inputs: dict[str, np.ndarray], devices) -> list[dict]:
    """Returns what differs between the two devices; each function is compiled once and run on every input."""
    first_results: dict[str, dict[str, bytes]] = {}
    differing = []
    for device in devices:
        quantize, round_trip = jax.jit(cast.apply), jax.jit(lambda x: sd.dequantize(cast.apply(x)))
        for name, x in inputs.items():
            x = jax.device_put(x.astype(cast.dtype), device)
            results = {**_leaves(quantize(x)), "round trip": _canonical(round_trip(x))}
            expected = first_results.setdefault(name, results)
            differing += [
                {"cast": cast.name, "input": name, "array": array}
                for array in results
                if results[array] != expected[array]
            ]
    return differing


def _leaves(q: sd.ScaledArray) -> dict[str, bytes]:
    """The bytes of codes and scales, and of the values dequantised from them on the CPU."""
    leaves = {"codes": q.data, "scale": q.scale, "tensor scale": q.tensor_scale, "zero": q.zero}
    stored = {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items() if leaf is not None}
    return {**stored, "dequantised": _canonical(sd.dequantize(jax.device_put(q, jax.devices("cpu")[0])))}


def _canonical(x: jax.Array) -> bytes:
    """The bytes of an array with one bit pattern for NaN."""
    array = np.asarray(x.astype(jnp.float32))
    return np.where(np.isnan(array), np.float32(np.nan), array).tobytes()


def main() -> None:
    accelerator = jax.devices()[0]
    devices = (jax.devices("cpu")[0], accelerator)
    data, cases, differing = inputs(), list(casts()), []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(differences, cast, data, devices) for cast in cases]
        for job in tqdm(concurrent.futures.as_completed(jobs), total=len(jobs), unit="cast"):
            differing += job.result()
    for difference in differing:
        print("{cast} on {input}: {array} differ".format(**difference))
    print(f"{len(cases)} casts x {len(data)} inputs, cpu and {accelerator.device_kind}: {len(differing)} differences")
    kind = accelerator.device_kind.lower().replace(" ", "-")
    result = {"environment": record.environment(), "device": accelerator.device_kind, "inputs": list(data)}
    result |= {"casts": [cast.name for cast in cases], "differences": differing}
    print(f"wrote {record.write(f'same-bits-{kind}', result)}")


if __name__ == "__main__":
    main()

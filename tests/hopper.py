"""Runs Hopper kernels without a GPU, in JAX's interpreter, with race detection and few SMs."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scaledot as sd
from scaledot.kernels import table
from scaledot.kernels.hopper import support
from scaledot.kernels.spec import CastOutput

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < support.OLDEST_JAX,
    reason="Mosaic kernels and their interpreter need jax 0.11.2",
)


@contextlib.contextmanager
def interpreted(monkeypatch, sm_count: int = 2):
    """Enables the Hopper kernels, in interpret mode, as on a GPU with this number of SMs."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    races = plgpu.InterpretGPUParams(detect_races=True)
    with _enabled(monkeypatch, sm_count), plgpu.force_gpu_interpret_mode(races):
        yield


@contextlib.contextmanager
def lowered_for_hopper(monkeypatch):
    """Lowers the Hopper kernels as for an H200; the programs cannot be run."""
    with _enabled(monkeypatch, support.DEFAULT_SM_COUNT) as patched:
        patched.setattr(support, "device_reason", lambda: None)
        patched.setattr(support, "is_interpreted", lambda: False)
        yield


@contextlib.contextmanager
def _enabled(monkeypatch, sm_count: int):
    with monkeypatch.context() as patched:
        patched.setattr(support, "mesh_reason", lambda: None)
        patched.setattr(support, "sm_count", lambda: sm_count)
        for name in ("DOT", "RAGGED", "CASTS"):  # new tables: cached programs with other kernels are not reused
            first, *others = getattr(table, name)
            patched.setattr(table, name, (dataclasses.replace(first), *others))
        yield patched


def quantize(*arguments, **options) -> sd.ScaledArray:
    """Quantises an operand by XLA, because interpreted cast kernels are slow."""
    return sd.quantize(*arguments, kernel="xla_cast", **options)


def values(q: sd.ScaledArray) -> np.ndarray:
    return np.asarray(sd.dequantize(q, jnp.float32), np.float64)


def relative(found, expected) -> float:
    expected = np.asarray(expected, np.float64)
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def selected_row(explained: str) -> str:
    """Returns the line of the kernel that is chosen."""
    (row,) = (line.strip() for line in explained.splitlines() if "  selected: " in line)
    return row


def output_of(format: sd.Format, block, contracted: int, rotation, dtype) -> CastOutput:
    from benchmarks.gpu.cast import MatrixCast

    return MatrixCast(format, block, contracted, rotation=rotation).output(dtype, 0)

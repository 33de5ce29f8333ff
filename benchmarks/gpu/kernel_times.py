"""GPU time of a program by kind of kernel, from JAX's profiler."""

import pathlib
import tempfile
from typing import Any

STEPS = 2
# Kinds of kernels by the beginning of their names; XLA's fusions and everything else are OTHER.
KINDS = {
    "scaledot_matmul": "matmuls",
    "scaledot_cast": "casts",
    "scaledot_": "amaxes and scalars",
    "nvjet": "GEMMs of XLA",
    "gemm_fusion": "GEMMs of XLA",
    "cudnn": "attention",
    "void cudnn": "attention",
}
OTHER = "XLA fusions"


def gpu_milliseconds(step: Any, state: Any, *arguments: Any) -> dict[str, float]:
    """GPU milliseconds of one step(state, *arguments) -> (state, loss) by kind of kernel; empty without a GPU."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                state, loss = step(state, *arguments)
            jax.block_until_ready(loss)
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        times: dict[str, float] = {}
        for plane in profile.planes:
            streams = [line for line in plane.lines if "GPU" in plane.name and line.name.startswith("Stream")]
            for event in (event for line in streams for event in line.events):
                kind = kind_of(event.name)
                times[kind] = times.get(kind, 0.0) + event.duration_ns / 1e6 / STEPS
    return times


def kind_of(kernel: str) -> str:
    return next((kind for prefix, kind in KINDS.items() if kernel.startswith(prefix)), OTHER)

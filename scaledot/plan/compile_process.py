"""Compiles jobs in a child process, because JAX fixes the number of CPU devices when its backend starts.

The child reads jobs as JSON from stdin, reports progress on stderr, and writes the collectives of the compiled programs
as JSON to stdout. A ValueError in the child is raised again in the parent.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from scaledot.plan.hlo import Collective
from scaledot.plan.mesh import Mesh
from scaledot.plan.models import Model
from scaledot.plan.programs import CompiledModule, Job, compile_module
from scaledot.plan.setup import Setup


def compile_jobs(jobs: Sequence[Job]) -> list[CompiledModule]:
    """Compiles every job in one child process with as many CPU devices as the largest mesh."""
    done = subprocess.run(
        [sys.executable, "-m", "scaledot.plan.compile_process"],
        input=json.dumps([dataclasses.asdict(job) for job in jobs]),
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    if done.returncode:
        raise RuntimeError(f"the process that compiles ended with status {done.returncode}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise ValueError(reply["error"])
    return [
        CompiledModule(_collectives(forward), _collectives(backward), residual_bytes)
        for forward, backward, residual_bytes in reply["compiled"]
    ]


def _environment() -> dict[str, str]:
    """Returns this process's environment with JAX on CPU and without XLA's flag for the number of CPU devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def _collectives(rows: list[Any]) -> list[Collective]:
    return [Collective(kind, dtype, tuple(axes), *numbers) for kind, dtype, axes, *numbers in rows]


def _job(fields: dict[str, Any]) -> Job:
    setup = fields["setup"]
    axes = tuple((axis, size) for axis, size in setup["mesh"]["axes"])
    setup = Setup(**setup | {"model": Model(**setup["model"]), "mesh": Mesh(axes)})
    return Job(fields["module"], fields["recipe"], setup)


def _child_main() -> None:
    import jax

    jobs = [_job(fields) for fields in json.load(sys.stdin)]
    jax.config.update("jax_num_cpu_devices", max(job.setup.mesh.devices for job in jobs))
    compiled = []
    for number, job in enumerate(jobs, 1):
        setup = job.setup
        progress = (
            f"[{number}/{len(jobs)}] {job.module} of {setup.model.name}, {job.recipe}, for {setup.mesh.devices} devices"
        )
        print(f"{progress} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            compiled.append(compile_module(job))
        except ValueError as error:
            json.dump({"error": f"{job.recipe} on {setup.mesh}: {error}"}, sys.stdout)
            return
        print(f"{progress}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    json.dump({"compiled": compiled}, sys.stdout)


if __name__ == "__main__":
    _child_main()

"""Programs compiled in a process of its own: JAX's CPU devices are counted once, when it starts.

A child reads jobs as JSON from its input, says on its standard error what it does, and writes what it found to its
output.
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
from scaledot.plan.programs import Compiled, Job, compiled
from scaledot.plan.setup import Setup


def run(jobs: Sequence[Job]) -> list[Compiled]:
    """Every job's programs, compiled by a child with as many CPU devices as they need."""
    given = json.dumps([dataclasses.asdict(job) for job in jobs])
    done = subprocess.run(
        [sys.executable, "-m", "scaledot.plan.child"],
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    if done.returncode:
        raise RuntimeError(f"the process that compiles ended with status {done.returncode}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise ValueError(answer["refused"])
    return [Compiled(_collectives(row[0]), _collectives(row[1]), row[2]) for row in answer["compiled"]]


def _environment() -> dict[str, str]:
    """Ours, less another number of CPU devices."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", ""))
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def _collectives(rows: list[Any]) -> list[Collective]:
    return [Collective(kind, dtype, tuple(axes), *numbers) for kind, dtype, axes, *numbers in rows]


def _job(fields: dict[str, Any]) -> Job:
    setup = fields["setup"]
    axes = tuple((axis, size) for axis, size in setup["mesh"]["axes"])
    setup = Setup(**setup | {"model": Model(**setup["model"]), "mesh": Mesh(axes)})
    return Job(fields["part"], fields["recipe"], setup)


def _serve() -> None:
    import jax

    jobs = [_job(fields) for fields in json.load(sys.stdin)]
    jax.config.update("jax_num_cpu_devices", max(job.setup.mesh.devices for job in jobs))
    found = []
    for number, job in enumerate(jobs, 1):
        setup = job.setup
        what = (
            f"[{number}/{len(jobs)}] {job.part} of {setup.model.name}, {job.recipe}, for {setup.mesh.devices} devices"
        )
        print(f"{what} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            found.append(compiled(job))
        except ValueError as error:
            json.dump({"refused": f"{job.recipe} on {setup.mesh}: {error}"}, sys.stdout)
            return
        print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    json.dump({"compiled": found}, sys.stdout)


if __name__ == "__main__":
    _serve()

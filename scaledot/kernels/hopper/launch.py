"""Kernels that are lowered once: for all programs of a process, and for later processes by JAX's persistent cache.

JAX traces and lowers a Pallas kernel in Python, anew for every module that it builds: for each program, and for each
operation with a partitioning of its own. Here a kernel is exported
(`jax.export`) when it is first called, and modules get a copy of what was lowered. Where JAX's persistent compilation
cache is on (`jax_compilation_cache_dir`), exported kernels are stored there, too: the executables that JAX stores
save a second process the compilation of a program, but not tracing and lowering it.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import export
from jax.custom_batching import custom_vmap

from scaledot.kernels.hopper import support
from scaledot.programs import IS_FOR_TYPES

_CHECKS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
_LOWERED: dict[Hashable, export.Exported] = {}
_FOLDER = "scaledot_kernels"  # in the folder of JAX's cache
_DIGEST = hashlib.sha256().digest_size  # bytes in front of a stored kernel


def launch(key: Hashable, kernel: Callable[..., Any], *arrays: jax.Array) -> Any:
    """kernel(*arrays), lowered once for equal keys and types of arrays.

    kernel: what `plgpu.kernel` returned. key: everything that it depends on beside the types, with a repr that is the
    same in every process; None to lower it wherever it is called.
    """
    if key is None or support.is_interpreted() or IS_FOR_TYPES.get():
        return kernel(*arrays)
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    called = custom_vmap(_lowered((key, types), kernel).call)

    @called.def_vmap
    def _(axis_size: int, is_batched, *arrays):
        results = jax.vmap(kernel, in_axes=tuple(0 if batched else None for batched in is_batched))(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return called(*arrays)


def _lowered(problem: tuple[Hashable, tuple[jax.ShapeDtypeStruct, ...]], kernel: Callable[..., Any]) -> export.Exported:
    found = _LOWERED.get(problem)
    if found is None:
        found = _LOWERED[problem] = _stored(problem, kernel)
    return found


def _stored(problem, kernel: Callable[..., Any]) -> export.Exported:
    """From the folder of JAX's persistent cache, if there is one, or exported and left there."""
    folder = _folder()
    if folder is None:
        return _export(problem, kernel)
    file = folder / hashlib.sha256(f"{_versions()} {problem!r}".encode()).hexdigest()
    if file.exists():
        content = file.read_bytes()
        digest, stored = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(stored).digest() == digest:
            return export.deserialize(bytearray(stored))
        warnings.warn(f"{file} is damaged and is replaced", stacklevel=2)
    exported = _export(problem, kernel)
    stored = bytes(exported.serialize())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
        written.write(hashlib.sha256(stored).digest() + stored)
    os.replace(written.name, file)  # another process finds all of it or nothing
    return exported


def _folder() -> pathlib.Path | None:
    """Where kernels are stored between processes; None where JAX's cache is off or on another machine.

    None, too, without flatbuffers, an optional dependency of JAX that `jax.export` serialises with.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        return None
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    is_local = folder and config.jax_enable_compilation_cache and "://" not in folder
    return pathlib.Path(folder) / _FOLDER if is_local else None


@functools.cache
def _versions() -> str:
    """Of JAX, and of every file that a kernel may come from."""
    package = pathlib.Path(__file__).parents[2]
    sources = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        sources.update(file.read_bytes())
    libraries = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return " ".join((*libraries, f"scaledot {sources.hexdigest()}"))


def _export(problem, kernel: Callable[..., Any]) -> export.Exported:
    """In a thread of its own, in which no trace, mesh or setting of the caller's context is in force."""
    made: list[export.Exported] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(export.export(jax.jit(kernel), platforms=("cuda",), disabled_checks=_CHECKS)(*problem[1]))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]

"""Lowers each Mosaic kernel once per process, and stores it in JAX's persistent compilation cache.

JAX traces and lowers a Pallas kernel in Python again for every module that contains it: for each program, and for each
operation with its own partitioning. Here a kernel is exported (`jax.export`) when it is first called, and later modules
get a copy of the lowered kernel. If JAX's persistent compilation cache is on (`jax_compilation_cache_dir`), exported
kernels are stored there, too: the executables that JAX stores save another process the compilation of a program, but
not its tracing and lowering.
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
_FOLDER = "scaledot_kernels"  # in the directory of JAX's cache
_DIGEST_BYTES = hashlib.sha256().digest_size  # in front of a stored kernel


def launch(key: Hashable, kernel: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns kernel(*arrays), lowered once for equal keys and types of arrays.

    kernel: the result of `plgpu.kernel`. key: everything else that the kernel depends on, with a repr that is the same
    in every process; None lowers the kernel at every call.
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


def _lowered(
    signature: tuple[Hashable, tuple[jax.ShapeDtypeStruct, ...]], kernel: Callable[..., Any]
) -> export.Exported:
    exported = _LOWERED.get(signature)
    if exported is None:
        exported = _LOWERED[signature] = _load_or_export(signature, kernel)
    return exported


def _load_or_export(signature, kernel: Callable[..., Any]) -> export.Exported:
    """Loads a kernel from the directory of JAX's persistent cache, or exports it and stores it there."""
    folder = _folder()
    if folder is None:
        return _export(signature, kernel)
    file = folder / hashlib.sha256(f"{_versions()} {signature!r}".encode()).hexdigest()
    if file.exists():
        content = file.read_bytes()
        digest, stored = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(stored).digest() == digest:
            return export.deserialize(bytearray(stored))
        warnings.warn(f"{file} is damaged and is replaced", stacklevel=2)
    exported = _export(signature, kernel)
    stored = bytes(exported.serialize())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
        written.write(hashlib.sha256(stored).digest() + stored)
    os.replace(written.name, file)  # atomic: another process reads all of it or nothing
    return exported


def _folder() -> pathlib.Path | None:
    """Returns the directory of stored kernels, or None if JAX's cache is off or not on a local file system.

    Also None without flatbuffers, an optional dependency of JAX that `jax.export` needs for serialisation.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        return None
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    is_local = folder and config.jax_enable_compilation_cache and "://" not in folder
    return pathlib.Path(folder) / _FOLDER if is_local else None


@functools.cache
def _versions() -> str:
    """Returns the versions of JAX and a hash of all source files of this package, on which a lowered kernel depends."""
    package = pathlib.Path(__file__).parents[2]
    sources = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        sources.update(file.read_bytes())
    libraries = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return " ".join((*libraries, f"scaledot {sources.hexdigest()}"))


def _export(signature, kernel: Callable[..., Any]) -> export.Exported:
    """Exports a kernel in a new thread, which does not inherit the traces, mesh and config of the caller's context."""
    exported: list[export.Exported] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            exported.append(export.export(jax.jit(kernel), platforms=("cuda",), disabled_checks=_CHECKS)(*signature[1]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return exported[0]

"""Calls Mosaic kernels that are lowered once, for all programs of a process, or once for all processes.

JAX traces and lowers a Pallas kernel in Python for every module that contains it: for each program, and for each
operation that is partitioned on automatic mesh axes. Here a kernel is exported (`jax.export`) at its first call, and
every module gets a copy of the exported one. If JAX's persistent compilation cache is on (`jax_compilation_cache_dir`),
exported kernels are stored there as well: the executables that JAX stores save a later process the compilation of a
program, but not tracing and lowering.

Mosaic compiles a kernel when a program that contains it is compiled, and keeps it for other programs of the process.
An exported kernel is therefore compiled at once, in a background thread, while Python traces and lowers the rest of the
program.

Two cases are not covered. Under vmap the kernel itself is batched, traced and lowered again; and grouped matmuls, whose
parameters hold a traced array, are lowered at every call.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax import export
from jax.custom_batching import custom_vmap

from scaledot.kernels.hopper import support
from scaledot.programs import TRACES_TYPES_ONLY

_ALLOWED_CUSTOM_CALLS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
_EXPORTED: dict[Hashable, export.Exported] = {}
_FOLDER = "scaledot_kernels"  # in the directory of JAX's cache
_COMPILERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="scaledot_compiler")
_DIGEST_BYTES = hashlib.sha256().digest_size  # of the digest at the beginning of a file


def call_exported(key: Hashable, kernel: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns kernel(*arrays), with the kernel exported once for equal keys and types of arrays.

    kernel: the result of `plgpu.kernel`. key: everything that the kernel depends on except the types of arrays, with a
    repr that is the same in every process; None to lower the kernel at every call. Under vmap, the kernel is batched,
    traced and lowered again.
    """
    if key is None or support.is_interpreted() or TRACES_TYPES_ONLY.get():
        return kernel(*arrays)
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    call = custom_vmap(_exported((key, types), kernel).call)

    @call.def_vmap
    def _(axis_size: int, is_batched, *arrays):
        results = jax.vmap(kernel, in_axes=tuple(0 if batched else None for batched in is_batched))(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call(*arrays)


CacheKey = tuple[Hashable, tuple[jax.ShapeDtypeStruct, ...]]  # key and types of arrays, see `call_exported`


def _exported(cache_key: CacheKey, kernel: Callable[..., Any]) -> export.Exported:
    exported = _EXPORTED.get(cache_key)
    if exported is None:
        exported = _EXPORTED[cache_key] = _load_or_export(cache_key, kernel)
    return exported


def _load_or_export(cache_key: CacheKey, kernel: Callable[..., Any]) -> export.Exported:
    """Loads the exported kernel from JAX's cache directory, or exports it and writes it there."""
    folder = _folder()
    if folder is None:
        return _export(cache_key, kernel)
    file = folder / hashlib.sha256(f"{_versions()} {cache_key!r}".encode()).hexdigest()
    if file.exists():
        content = file.read_bytes()
        digest, stored = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(stored).digest() == digest:
            return export.deserialize(bytearray(stored))
        warnings.warn(f"{file} is damaged and is replaced", stacklevel=2)
    exported = _export(cache_key, kernel)
    stored = bytes(exported.serialize())
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as written:
        written.write(hashlib.sha256(stored).digest() + stored)
    os.replace(written.name, file)  # atomic: another process reads the whole file or none
    return exported


def _folder() -> pathlib.Path | None:
    """Returns the directory of exported kernels; None if JAX's cache is off or not in the local file system.

    Also None without flatbuffers, an optional dependency of JAX by which `jax.export` serialises.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        return None
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    is_local = folder and config.jax_enable_compilation_cache and "://" not in folder
    return pathlib.Path(folder) / _FOLDER if is_local else None


@functools.cache
def _versions() -> str:
    """Returns part of a file's cache key: the versions of jax and jaxlib, and a hash of all scaledot sources."""
    package = pathlib.Path(__file__).parents[2]
    sources = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        sources.update(file.read_bytes())
    libraries = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    return " ".join((*libraries, f"scaledot {sources.hexdigest()}"))


def _export(cache_key: CacheKey, kernel: Callable[..., Any]) -> export.Exported:
    """Exports a kernel in a new thread, in which no trace, mesh or setting of the caller's context is active.

    On a GPU, starts to compile it in the background. An error of the compiler is not lost: it is raised again when the
    program that contains the kernel is compiled.
    """
    results: list[export.Exported] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            exporter = export.export(jax.jit(kernel), platforms=("cuda",), disabled_checks=_ALLOWED_CUSTOM_CALLS)
            results.append(exporter(*cache_key[1]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    (exported,) = results
    if jax.devices()[0].platform == "gpu":
        _COMPILERS.submit(lambda: jax.jit(exported.call).lower(*cache_key[1]).compile())
    return exported

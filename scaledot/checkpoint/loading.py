"""`load`: reads a checkpoint into a tree of jax arrays and ScaledArrays."""

import contextlib
import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from scaledot.array import ScaledArray
from scaledot.checkpoint import forms
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.layouts.building import with_divided_scales
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.materialize import materialize
from scaledot.checkpoint.names import Location, NameMap
from scaledot.checkpoint.progress import Progress
from scaledot.checkpoint.source import open_source
from scaledot.parallel.sharding import shardings
from scaledot.path_patterns import PathPatterns

Include = str | Iterable[str] | Callable[[str], bool] | None
Rename = NameMap | Mapping[str, str] | Callable[[str], str] | None
ShardingFor = Sharding | Mapping[str, Sharding | None] | Callable[[str, tuple[int, ...]], Sharding | None] | None


def load(
    path: str | PathLike[str],
    *,
    dequantize: bool | Any = False,
    sharding: ShardingFor = None,
    rename: Rename = None,
    include: Include = None,
) -> dict[str, Any]:
    """Reads a checkpoint: a folder in Hugging Face's layout, a safetensors file or a GGUF file.

    Returns a dict of arrays by name. Quantised weights are ScaledArrays, with the codes and scales of the file and the
    values `codes x scale`, or one of `Permuted`, `Flat` and `Offset`. How they are stored is found from the
    configuration, or else from names and dtypes of tensors. Other tensors, such as the `input_scale` of static
    activation quantisation, are returned as they are.

    Args:
      dequantize: False returns quantised weights, True dequantises them to the dtype of the model, a float dtype to
        that dtype. Other tensors keep their dtypes.
      sharding: where arrays are placed: a Sharding for all of them, one for each pattern of names, or a function of
        name and shape. Scales are sharded with their blocks. Each process reads only the bytes of its shards.
      rename: the path of each array in the result, as a NameMap or its templates, or a function of the name. Paths with
        slashes give nested dicts.
      include: the tensors to load, by name in the file: patterns, or a function. Others are not read.
    """
    dequantize = _checked_dtype(dequantize)
    source = open_source(path)
    is_included, locate = predicate(include), _locator(rename)
    found = {name: entry for name, entry in entries(source).items() if is_included(name)}
    if not found and include is not None:
        raise ValueError(f"`include` {include!r} matches no tensor of {source.path}")
    jobs = [_Job(locate(name), entry, name) for name, entry in found.items()]
    with (
        _placement(sharding) as place,
        Progress(f"loading {source.path.name}", sum(j.nbytes for j in jobs)) as progress,
    ):
        return _nested(_run(jobs, place, dequantize, progress))


def _checked_dtype(dequantize: Any) -> Any:
    if dequantize is None or isinstance(dequantize, bool):
        return bool(dequantize)
    if not jnp.issubdtype(dequantize, jnp.floating) or jnp.finfo(dequantize).bits < 16:
        raise TypeError(f"`dequantize` must be True, False or a float dtype of at least 16 bits, not {dequantize!r}")
    return np.dtype(dequantize)


class _Job(NamedTuple):
    location: Location
    entry: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        shape = tuple(self.entry.shape)
        return (*shape[:-2], *shape[-2:][::-1]) if self.location.is_transposed else shape

    @property
    def nbytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.entry, is_leaf=_is_lazy))


def _run(jobs: list[_Job], place, dequantize, progress: Progress) -> Iterator[tuple[str, Any]]:
    """Yields paths and arrays; some threads read ahead."""

    def read(job: _Job) -> Any:
        return read_entry(job.entry, place(job.location.name, job.shape), dequantize, job.location.is_transposed)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="scaledot_load") as threads:
        for job, array in zip(jobs, threads.map(read, jobs), strict=True):
            progress.add(job.nbytes, job.name)
            yield job.location.name, array


def read_entry(entry: Any, sharding: Sharding | None = None, dequantize: Any = False, transpose: bool = False) -> Any:
    """Reads a tensor or a quantised weight of a checkpoint onto devices."""
    if dequantize is not False and isinstance(entry, ScaledArray):
        entry = with_divided_scales(entry)
    if transpose and sharding is not None:
        entry, transpose = transposed(entry), False
    leaves, tree = jax.tree.flatten(entry, is_leaf=_is_lazy)
    placed = _leaf_shardings(entry, sharding, len(leaves))
    weight = tree.unflatten([materialize(leaf, s) for leaf, s in zip(leaves, placed, strict=True)])
    if dequantize is not False and forms.is_weight(weight):
        weight = forms.dequantize(weight, None if dequantize is True else dequantize)
    return transposed(weight) if transpose else weight


def transposed(entry: Any) -> Any:
    """An array or weight with its last two axes exchanged; LazyArrays stay lazy."""
    if isinstance(entry, forms.Offset):
        return forms.Offset(entry.array.mT, entry.offset.mT)
    if isinstance(entry, forms.Permuted | forms.Flat):
        kind = type(entry).__name__
        raise ValueError(
            f"a {kind} weight of shape {entry.shape} cannot be transposed with its codes; pass `dequantize`, or a "
            "`rename` without .T for it"
        )
    if entry.ndim < 2:
        raise ValueError(
            f"a tensor of shape {tuple(entry.shape)} cannot be transposed; use a `rename` without .T for it"
        )
    return entry.mT


def _leaf_shardings(entry: Any, sharding: Sharding | None, count: int) -> list[Sharding | None]:
    """The sharding of each leaf: `sharding` for codes, that of their blocks for scales; other forms are replicated."""
    if sharding is None or isinstance(entry, LazyArray):
        return [sharding] * count
    if sharding.is_fully_replicated or not isinstance(sharding, NamedSharding):
        return [sharding] * count
    if isinstance(entry, ScaledArray):
        return jax.tree.leaves(shardings(entry, sharding.spec, mesh=sharding.mesh))
    return [NamedSharding(sharding.mesh, PartitionSpec())] * count


def _is_lazy(node: Any) -> bool:
    return isinstance(node, LazyArray)


def predicate(include: Include) -> Callable[[str], bool]:
    """Whether a name is included: patterns as in `fnmatch`, or a function; None includes every name."""
    if include is None:
        return lambda name: True
    if callable(include):
        return include
    patterns = [include] if isinstance(include, str) else list(include)
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _locator(rename: Rename) -> Callable[[str], Location]:
    if rename is None:
        return lambda name: Location(name, False)
    if isinstance(rename, Mapping):
        rename = NameMap(rename)
    if isinstance(rename, NameMap):
        return rename.to_path
    if not callable(rename):
        raise TypeError(f"`rename` must be a NameMap, a mapping of templates or a function, not {rename!r}")
    return lambda name: Location(rename(name), False)


@contextlib.contextmanager
def _placement(sharding: ShardingFor) -> Iterator[Callable[[str, tuple[int, ...]], Sharding | None]]:
    """Context with a function of path and shape; at its end, patterns that matched nothing are an error."""
    if isinstance(sharding, Mapping):
        patterns = PathPatterns(sharding, "sharding")
        patterns.matching = "tensor"
        yield lambda path, shape: _checked_sharding(path, patterns.value_for(path))
        patterns.check_all_matched()
    elif sharding is None or isinstance(sharding, Sharding):
        yield lambda path, shape: sharding
    elif callable(sharding):
        yield lambda path, shape: _checked_sharding(path, sharding(path, shape))
    else:
        raise TypeError(
            f"`sharding` must be a Sharding, a mapping of patterns to them, or a function, not {sharding!r}"
        )


def _checked_sharding(path: str, sharding: Any) -> Sharding | None:
    if sharding is not None and not isinstance(sharding, Sharding):
        raise TypeError(f"`sharding` has {sharding!r} for {path!r}; pass a Sharding, such as NamedSharding(mesh, spec)")
    return sharding


def _nested(flat: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dicts for paths with slashes."""
    tree: dict[str, Any] = {}
    for path, array in flat:
        *keys, last = path.split("/")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        if last in node:
            raise ValueError(f"`rename` maps two tensors to the path {path!r}")
        node[last] = array
    return tree

"""`load`: reads a checkpoint into a tree of jax arrays and ScaledArrays."""

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, NamedTuple

import jax
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
      dequantize: True for arrays in the dtype of the model instead of quantised weights, or a dtype.
      sharding: where arrays are placed: a Sharding for all of them, one for each pattern of names, or a function of
        name and shape. Scales are sharded with their blocks. Each process reads only the bytes of its shards.
      rename: the path of each array in the result, as a NameMap or its templates, or a function of the name. Paths with
        slashes give nested dicts.
      include: the tensors to load, by name in the file: patterns, or a function. Others are not read.
    """
    source = open_source(path)
    is_included, locate, place = predicate(include), _locator(rename), _placement(sharding)
    jobs = [_Job(locate(name), entry, name) for name, entry in entries(source).items() if is_included(name)]
    with Progress(f"loading {source.path.name}", sum(job.nbytes for job in jobs)) as progress:
        return _nested(_run(jobs, place, dequantize, progress))


class _Job(NamedTuple):
    location: Location
    entry: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        shape = tuple(self.entry.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.location.is_transposed else shape

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
    return lambda name: Location(rename(name), False)


def _placement(sharding: ShardingFor) -> Callable[[str, tuple[int, ...]], Sharding | None]:
    if isinstance(sharding, Mapping):
        patterns = PathPatterns(sharding, "sharding")
        return lambda path, shape: patterns.value_for(path)
    if sharding is None or isinstance(sharding, Sharding):
        return lambda path, shape: sharding
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

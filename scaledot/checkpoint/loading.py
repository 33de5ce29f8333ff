"""`load`: reads a checkpoint into a tree of jax arrays and ScaledArrays."""

import fnmatch
from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from scaledot.checkpoint import forms
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.materialize import materialize
from scaledot.checkpoint.source import open_source
from scaledot.parallel.sharding import shardings

Include = str | Iterable[str] | Callable[[str], bool] | None
ShardingFor = Sharding | Callable[[str, tuple[int, ...]], Sharding | None] | None


def load(
    path: str | PathLike[str],
    *,
    dequantize: Any = False,
    sharding: ShardingFor = None,
    rename: Callable[[str], Any] | None = None,
    include: Include = None,
) -> dict[str, Any]:
    """..."""
    source = open_source(path)
    is_included = _predicate(include)
    loaded = {}
    for name, entry in entries(source).items():
        if is_included(name):
            loaded[name] = read_entry(name, entry, sharding, dequantize)
    return loaded


def read_entry(name: str, entry: Any, sharding: ShardingFor = None, dequantize: Any = False) -> Any:
    """Reads a tensor or a quantised weight of a checkpoint onto devices."""
    placed = _leaf_shardings(name, entry, sharding)
    leaves, tree = jax.tree.flatten(entry, is_leaf=_is_lazy)
    weight = tree.unflatten([materialize(leaf, s) for leaf, s in zip(leaves, placed, strict=True)])
    if dequantize is False or not forms.is_weight(weight):
        return weight
    return forms.dequantize(weight, None if dequantize is True else dequantize)


def _leaf_shardings(name: str, entry: Any, sharding: ShardingFor) -> list[Sharding | None]:
    """The sharding of each leaf: `sharding` applies to codes, and scales are sharded with their blocks."""
    leaves = jax.tree.leaves(entry, is_leaf=_is_lazy)
    chosen = sharding(name, entry.shape) if callable(sharding) else sharding
    if chosen is None:
        return [None] * len(leaves)
    if not isinstance(entry, ScaledArray):
        return [chosen if leaf.shape == entry.shape else _replicated(chosen) for leaf in leaves]
    if isinstance(chosen, NamedSharding):
        return jax.tree.leaves(shardings(entry, chosen.spec, mesh=chosen.mesh))
    return [chosen if chosen.is_fully_replicated else chosen for _ in leaves]


def _is_lazy(node: Any) -> bool:
    return isinstance(node, LazyArray)


def _predicate(include: Include) -> Callable[[str], bool]:
    if include is None:
        return lambda name: True
    if callable(include):
        return include
    patterns = [include] if isinstance(include, str) else list(include)
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

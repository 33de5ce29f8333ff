"""`inspect` and `diff`: what checkpoints hold and how they differ, one tensor at a time."""

import math
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import forms
from scaledot.checkpoint.layouts import entries, find_layout
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source, open_source


class TensorRow(NamedTuple):
    """A tensor of a checkpoint: its format, or the dtype if it is not quantised; block; shape; bytes.

    nbytes: of packed codes, scales and other arrays; GGUF's K types store their scales in fewer bytes.
    snr_db: the signal-to-noise ratio against the tensor of the same name in a reference, in dB; None without one.
    """

    name: str
    format: str
    block: tuple[int, ...] | None
    shape: tuple[int, ...]
    nbytes: int
    snr_db: float | None = None


class Listing(NamedTuple):
    layout: str | None
    rows: list[TensorRow]


def inspect(path: str | PathLike[str], reference: str | PathLike[str] | None = None) -> Listing:
    """Lists a checkpoint. Only headers are read, unless there is a `reference`: the same model, not quantised."""
    source = open_source(path)
    found = entries(source)
    originals = {} if reference is None else entries(open_source(reference))
    rows = [row_of(name, entry, _snr(entry, originals.get(name))) for name, entry in found.items()]
    return Listing(find_layout(source), rows)


def row_of(name: str, entry: Any, snr_db: float | None = None) -> TensorRow:
    """The row of one entry, whose leaves may be LazyArrays."""
    if not forms.is_weight(entry):
        return TensorRow(name, entry.dtype.name, None, entry.shape, entry.size * entry.dtype.itemsize, snr_db)
    q = entry if isinstance(entry, ScaledArray) else entry.array
    kind = q.format.name if entry is q else f"{q.format.name} ({type(entry).__name__})"
    others = [leaf for leaf in leaves_of(entry) if all(leaf is not own for own in leaves_of(q))]
    nbytes = q.nbytes + sum(leaf.size * leaf.dtype.itemsize for leaf in others)
    return TensorRow(name, kind, q.block, tuple(entry.shape), nbytes, snr_db)


def leaves_of(entry: Any) -> list[LazyArray]:
    return jax.tree.leaves(entry, is_leaf=lambda node: isinstance(node, LazyArray))


def _snr(entry: Any, original: Any) -> float | None:
    """The SNR of a weight against the original; None if they cannot be compared."""
    is_float = forms.is_weight(entry) or jnp.issubdtype(entry.dtype, jnp.floating)
    if original is None or not is_float or tuple(original.shape) != tuple(entry.shape):
        return None
    return _snr_of(values_of(original), values_of(entry))


def values_of(entry: Any) -> jax.Array:
    """The values of an entry in float32."""
    from scaledot.checkpoint.loading import read_entry  # slow to import, and not needed without a reference

    return jnp.asarray(read_entry(entry, dequantize=jnp.float32)).astype(jnp.float32)


def _snr_of(original: jax.Array, other: jax.Array) -> float:
    signal, noise = (float(x) for x in _powers(original, other))
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@jax.jit
def _powers(original: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The energies of the signal and of the difference, relative to the largest element, so that neither overflows."""
    largest = jnp.maximum(jnp.max(jnp.abs(original), initial=0), np.float32(1e-30))
    return jnp.sum((original / largest) ** 2), jnp.sum(((original - other) / largest) ** 2)


class Difference(NamedTuple):
    """How a tensor differs: `kind` is "only in A", "only in B", "shape", "format" or "values"."""

    name: str
    kind: str
    detail: str


def diff(a: str | PathLike[str], b: str | PathLike[str]) -> list[Difference]:
    """The differences of two checkpoints, which may have different layouts; empty if all tensors are equal.

    Tensors of the same format are compared bit by bit, codes and scales; others by their dequantised values.
    """
    left, right = _entries(a), _entries(b)
    return [difference for name in {**left, **right} if (difference := _difference(name, left, right)) is not None]


def _entries(path: str | PathLike[str]) -> dict[str, Any]:
    source: Source = open_source(path)
    return entries(source)


def _difference(name: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Difference | None:
    if name not in right or name not in left:
        return Difference(name, "only in A" if name in left else "only in B", "")
    a, b = left[name], right[name]
    if tuple(a.shape) != tuple(b.shape):
        return Difference(name, "shape", f"{list(a.shape)} and {list(b.shape)}")
    kinds = row_of(name, a).format, row_of(name, b).format
    if _structure(a) == _structure(b):
        unequal = ", ".join(_unequal_leaves(a, b))
        return Difference(name, "values", unequal) if unequal else None
    x, y = values_of(a), values_of(b)
    if bool(jnp.array_equal(x, y, equal_nan=True)):
        return Difference(name, "format", f"{kinds[0]} and {kinds[1]}, equal values") if kinds[0] != kinds[1] else None
    detail = f"SNR {_snr_of(x, y):.1f} dB, largest difference {float(jnp.max(jnp.abs(x - y))):.3g}"
    return Difference(name, "values", f"{kinds[0]} and {kinds[1]}, {detail}" if kinds[0] != kinds[1] else detail)


def _structure(entry: Any) -> Any:
    """What two entries with comparable bits have in common: the pytree and the types of leaves."""
    leaves, tree = jax.tree.flatten(entry, is_leaf=lambda node: isinstance(node, LazyArray))
    return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _unequal_leaves(a: Any, b: Any) -> Iterator[str]:
    paths = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(a, is_leaf=lambda n: isinstance(n, LazyArray))]
    for keys, x, y in zip(paths, leaves_of(a), leaves_of(b), strict=True):
        left, right = (_bits(leaf.numpy()) for leaf in (x, y))
        count = int(np.any(left != right, axis=-1).sum()) if x.shape else int(np.any(left != right))
        if count:
            field = jax.tree_util.keystr(keys, simple=True, separator=".") or "elements"
            yield f"{count} of {x.size} {field}"


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes of each element, as a new last axis."""
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)

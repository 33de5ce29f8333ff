"""Saves trees that hold ScaledArrays with Orbax, whose TensorStore lacks some dtypes of codes.

    sd.orbax.save(path, params)
    params = sd.orbax.restore(path, target)     # shapes and shardings of `target`, such as jax.eval_shape(make_params)

Orbax saves a ScaledArray like any pytree, without its static fields. `save` adds these to the metadata of the
checkpoint, and `restore` compares them with the target's, because codes decoded with another format would be silently
wrong. Shards are written and read by the processes that hold them, and with a `checkpointer` saving is asynchronous.

TensorStore (0.1.86) has neither uint4, the dtype of `nf4` codes, nor uint2 nor float8_e4m3 (IEEE); arrays of these
dtypes are saved as integers with the same bits. Where Orbax is called by other code, such as a CheckpointManager,
convert with `to_saveable` and `from_saveable`. This module imports Orbax in `save` and `restore` only.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.serialization import static_differences, static_fields, to_json

_SAVED_AS = {
    np.dtype(jnp.uint4): np.dtype(jnp.int4),
    np.dtype(ml_dtypes.uint2): np.dtype(ml_dtypes.int2),
    np.dtype(ml_dtypes.float8_e4m3): np.dtype(np.uint8),
}
_METADATA = "scaledot"


def save(path: str | os.PathLike[str], tree: Any, *, checkpointer: Any = None) -> None:
    """Saves a pytree of arrays and ScaledArrays to a new folder `path`, which must not exist.

    checkpointer: an `orbax.checkpoint.StandardCheckpointer`, which writes in the background: the function returns when
    the arrays are copied to the host, and `checkpointer.wait_until_finished()` when they are saved. By default the
    function returns when they are.
    """
    static = {name: to_json(**static_fields(q)).decode() for name, q in _scaled_arrays(tree)}
    with _opened(checkpointer) as opened:
        opened.save(_absolute(path), jax.tree.map(_saveable, tree), custom_metadata={_METADATA: static})


def restore(path: str | os.PathLike[str], target: Any, *, checkpointer: Any = None) -> Any:
    """Restores what `save` saved to `path` into the structure, dtypes and shardings of `target`.

    target: a tree of arrays or ShapeDtypeStructs, such as the `jax.eval_shape` of the function that creates the
    parameters. A leaf without a sharding is restored to the default device. Shardings may differ from those that were
    saved. Raises ValueError if a static field of a ScaledArray, such as its format, differs from the saved one.
    """
    with _opened(checkpointer) as opened:
        metadata = opened.metadata(_absolute(path)).custom_metadata or {}
        _check_static(path, metadata.get(_METADATA, {}), target)
        restored = opened.restore(_absolute(path), jax.tree.map(lambda leaf: _saveable(_abstract(leaf)), target))
    return jax.tree.map(lambda leaf, like: _bitcast(leaf, getattr(like, "dtype", None)), restored, target)


def to_saveable(tree: Any) -> Any:
    """The tree with the codes of each ScaledArray in a dtype that Orbax saves; leaves may be ShapeDtypeStructs.

    >>> from scaledot.ops.quantize import quantize
    >>> to_saveable({"w": quantize(jnp.ones((2, 64)), "nf4")})["w"].data.dtype
    dtype(int4)
    """
    return jax.tree.map(lambda q: jax.tree.map(_saveable, q) if _is_scaled(q) else q, tree, is_leaf=_is_scaled)


def from_saveable(tree: Any) -> Any:
    """The inverse of `to_saveable`: the codes and zero points of each ScaledArray in the dtype of its format.

    >>> from scaledot.ops.quantize import quantize
    >>> from_saveable(to_saveable({"w": quantize(jnp.ones((2, 64)), "nf4")}))["w"].data.dtype
    dtype(uint4)
    """
    return jax.tree.map(lambda q: _with_code_dtypes(q) if _is_scaled(q) else q, tree, is_leaf=_is_scaled)


def _with_code_dtypes(q: ScaledArray) -> ScaledArray:
    dtype = q.format.code_dtype
    is_converted = q.zero is not None and q.zero.dtype == _SAVED_AS.get(dtype)
    return dataclasses.replace(
        q, data=_bitcast(q.data, dtype), zero=_bitcast(q.zero, dtype) if is_converted else q.zero
    )


def _is_scaled(node: Any) -> bool:
    return isinstance(node, ScaledArray)


def _saveable(leaf: Any) -> Any:
    return _bitcast(leaf, _SAVED_AS.get(getattr(leaf, "dtype", None)))


def _bitcast(leaf: Any, dtype: Any) -> Any:
    """The same bits in another dtype of the same width, for an array or a ShapeDtypeStruct; None: as they are."""
    if dtype is None or leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype)
    return jax.lax.bitcast_convert_type(leaf, dtype)


def _abstract(leaf: Any) -> Any:
    """The type of an array with its sharding; Orbax would restore a type without one as a NumPy array."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _scaled_arrays(tree: Any) -> Iterator[tuple[str, ScaledArray]]:
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_scaled):
        if _is_scaled(node):
            yield jax.tree_util.keystr(path), node


def _check_static(path: str | os.PathLike[str], saved: dict[str, str], target: Any) -> None:
    for name, q in _scaled_arrays(target):
        if name not in saved:
            raise ValueError(
                f"{path}: `target` has a ScaledArray at {name}, none was saved there by scaledot.orbax.save"
            )
        if differences := "; ".join(static_differences(saved[name].encode(), q)):
            raise ValueError(f"{path}: cannot restore {name} as {q!r}: {differences}")


@contextlib.contextmanager
def _opened(checkpointer: Any) -> Iterator[Any]:
    """The checkpointer of the caller, who closes it, or a new one, which finishes at the end."""
    if checkpointer is not None:
        yield checkpointer
        return
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as new:
        yield new


def _absolute(path: str | os.PathLike[str]) -> str:
    """Orbax needs absolute paths; addresses of object stores stay as they are."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)

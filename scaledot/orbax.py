"""Conversion of ScaledArrays for Orbax, whose TensorStore lacks one dtype of codes.

Orbax saves a ScaledArray like any pytree. TensorStore supports every dtype of codes and scales except uint4, the codes
of `nf4`, which are saved as int4 with the same bits:

    checkpointer.save(path, sd.orbax.to_saveable(params))
    params = sd.orbax.from_saveable(checkpointer.restore(path, jax.eval_shape(sd.orbax.to_saveable, params)))

Both functions leave all other leaves unchanged. This module does not import Orbax.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray

_SAVED_AS = {np.dtype(jnp.uint4): np.dtype(jnp.int4)}


def to_saveable(tree: Any) -> Any:
    """The tree with the codes of each ScaledArray in a dtype that Orbax saves; leaves may be ShapeDtypeStructs.

    >>> from scaledot.ops.quantize import quantize
    >>> to_saveable({"w": quantize(jnp.ones((2, 64)), "nf4")})["w"].data.dtype
    dtype(int4)
    """
    return _with_codes(tree, lambda q: _SAVED_AS.get(np.dtype(q.data.dtype), q.data.dtype))


def from_saveable(tree: Any) -> Any:
    """The inverse of `to_saveable`: the codes of each ScaledArray in the dtype of its format.

    >>> from scaledot.ops.quantize import quantize
    >>> from_saveable(to_saveable({"w": quantize(jnp.ones((2, 64)), "nf4")}))["w"].data.dtype
    dtype(uint4)
    """
    return _with_codes(tree, lambda q: q.format.code_dtype)


def _with_codes(tree: Any, dtype_for) -> Any:
    def convert(node):
        if not isinstance(node, ScaledArray):
            return node
        return dataclasses.replace(node, data=_bitcast(node.data, np.dtype(dtype_for(node))))

    return jax.tree.map(convert, tree, is_leaf=lambda node: isinstance(node, ScaledArray))


def _bitcast(codes: Any, dtype: np.dtype) -> Any:
    """The same bits in another dtype of the same width, for an array or a ShapeDtypeStruct."""
    if codes.dtype == dtype:
        return codes
    if isinstance(codes, jax.ShapeDtypeStruct):
        return codes.update(dtype=dtype)
    return jax.lax.bitcast_convert_type(codes, dtype)

"""dot_general, einsum, ragged_dot and conv_general_dilated on QArrays and plain arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.compat.qwix.array import MaybeQArray, QArray, as_scaled, validate_qarray
from scaledot.kernels.spec import promoted
from scaledot.ops import conv, dot, ragged
from scaledot.ops import einsum as sums


def _operand(x: MaybeQArray) -> jax.Array | ScaledArray:
    if not isinstance(x, QArray):
        return x
    validate_qarray(x)
    return as_scaled(x)


def get_accumulator_and_result_type(*args: MaybeQArray, preferred_element_type) -> tuple[Any, Any]:
    """What is summed in and what comes out: int32 sums for integers, results by the dtypes that are stood for."""
    codes = [np.dtype(x.qvalue.dtype if isinstance(x, QArray) else x.dtype) for x in args]
    result = preferred_element_type
    if result is None:
        first, *others = (_wide(np.dtype(x.dtype)) for x in args)
        result = first
        for other in others:
            result = promoted(result, other)
    integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in codes)
    return (np.dtype(np.int32) if integers else np.dtype(result)), np.dtype(result)


def _wide(dtype: np.dtype) -> np.dtype:
    if dtype.itemsize > 1:
        return dtype
    return np.dtype(np.int32) if jnp.issubdtype(dtype, jnp.integer) else np.dtype(jnp.bfloat16)


def dot_general(
    lhs: MaybeQArray, rhs: MaybeQArray, dimension_numbers, precision=None, preferred_element_type=None, **kwargs
) -> jax.Array:
    """`jax.lax.dot_general` with QArrays.

    >>> w = QArray(jnp.array([[2], [4]], jnp.int8), jnp.array([[0.5]]))
    >>> dot_general(jnp.array([[1.0, 1.0]]), w, (((1,), (0,)), ((), ())))
    Array([[3.]], dtype=float32)
    """
    return dot.dot_general(_operand(lhs), _operand(rhs), dimension_numbers, precision, preferred_element_type, **kwargs)


def einsum(subscripts: str, *operands: MaybeQArray, preferred_element_type=None, **kwargs) -> jax.Array:
    """`jnp.einsum` with QArrays."""
    arrays = (_operand(x) for x in operands)
    return sums.einsum(subscripts, *arrays, preferred_element_type=preferred_element_type, **kwargs)


def ragged_dot(
    lhs: MaybeQArray,
    rhs: MaybeQArray,
    group_sizes: jax.Array,
    precision=None,
    preferred_element_type=None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with QArrays."""
    _refuse_offset(group_offset)
    return ragged.ragged_dot(_operand(lhs), _operand(rhs), group_sizes, precision, preferred_element_type)


def ragged_dot_general(
    lhs: MaybeQArray,
    rhs: MaybeQArray,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision=None,
    preferred_element_type=None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` with QArrays."""
    _refuse_offset(group_offset)
    return ragged.ragged_dot_general(
        _operand(lhs), _operand(rhs), group_sizes, dimension_numbers, precision, preferred_element_type
    )


def _refuse_offset(group_offset: jax.Array | None) -> None:
    if group_offset is not None:
        raise NotImplementedError("`group_offset` is not implemented by jax.lax.ragged_dot either; slice the groups")


def conv_general_dilated(
    lhs: MaybeQArray,
    rhs: MaybeQArray,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` with QArrays."""
    return conv.conv_general_dilated(
        _operand(lhs),
        _operand(rhs),
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
        out_sharding=out_sharding,
    )

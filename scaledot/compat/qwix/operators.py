"""dot_general, einsum, ragged_dot and conv_general_dilated of QArrays and plain arrays.

As in Qwix, plain operands of 8 bits or fewer are not accumulated in their own dtype: integers accumulate in int32,
floats in `preferred_element_type` or else bfloat16. If the other operand is a QArray, a plain int8 or int4 array is
treated as codes with scale 1.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.compat.qwix.array import MaybeQArray, QArray, as_scaled, broadcast_to, validate_qarray
from scaledot.contraction import parse_einsum
from scaledot.kernels.spec import promoted
from scaledot.numerics.grouped import clipped_sizes
from scaledot.ops import conv, ragged
from scaledot.ops import dot as dot_ops
from scaledot.ops import einsum as einsum_ops
from scaledot.ops.operands import as_operand

_INTEGER_CODES = (np.dtype(jnp.int8), np.dtype(jnp.int4))
_NATIVE_FLOAT8 = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))


def get_accumulator_and_result_type(*args: MaybeQArray, preferred_element_type) -> tuple[Any, Any]:
    """Returns (accumulator dtype, result dtype).

    The accumulator is int32 if all codes are integers. The result dtype promotes the operands' (dequantised) dtypes,
    unless `preferred_element_type` is set.
    """
    code_dtypes = [np.dtype(x.qvalue.dtype if isinstance(x, QArray) else x.dtype) for x in args]
    result = preferred_element_type
    if result is None:
        result = functools.reduce(promoted, (_at_least_16_bits(np.dtype(x.dtype)) for x in args))
    integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in code_dtypes)
    return (np.dtype(np.int32) if integers else np.dtype(result)), np.dtype(result)


def _at_least_16_bits(dtype: np.dtype) -> np.dtype:
    if dtype.itemsize > 1:
        return dtype
    return np.dtype(np.int32) if jnp.issubdtype(dtype, jnp.integer) else np.dtype(jnp.bfloat16)


def _contract(op: Callable[..., jax.Array], operands: dict[str, Any], preferred_element_type) -> jax.Array:
    """Calls op(*operands, preferred_element_type=...) with Qwix's accumulator dtype and rounds to its result dtype."""
    arrays = [_checked(x, name) for name, x in operands.items()]
    accumulator, result = get_accumulator_and_result_type(*arrays, preferred_element_type=preferred_element_type)
    if any(isinstance(x, QArray) for x in arrays):
        return op(*map(_as_codes, arrays), preferred_element_type=result)
    common = _common_dtype([np.dtype(x.dtype) for x in arrays])
    if accumulator.itemsize < common.itemsize:
        accumulator = common  # jax.lax has no accumulator narrower than the operands
    return op(*(x.astype(common) for x in arrays), preferred_element_type=accumulator).astype(result)


def _checked(x: Any, name: str) -> MaybeQArray:
    if isinstance(x, QArray):
        validate_qarray(x)
        return x
    return as_operand(x, name)  # pyright: ignore[reportReturnType]


def _as_codes(x: MaybeQArray) -> jax.Array | ScaledArray:
    """Converts QArrays, and plain int8 and int4 arrays with scale 1, so that integer matmuls are exact in int32."""
    if isinstance(x, QArray):
        return as_scaled(x)
    return as_scaled(QArray(x, jnp.ones((1,) * x.ndim, jnp.bfloat16))) if x.dtype in _INTEGER_CODES else x


def _common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """Returns the dtype to which plain operands are converted, exactly: float8 if all are, else the promoted dtype.

    4-bit integers are widened because XLA's CPU backend has no matmul of them with an int32 result.
    """
    if len(set(dtypes)) == 1 and dtypes[0] in _NATIVE_FLOAT8:
        return dtypes[0]
    return functools.reduce(promoted, dtypes, dtypes[0])


def dot_general(
    lhs: MaybeQArray, rhs: MaybeQArray, dimension_numbers, precision=None, preferred_element_type=None, **kwargs
) -> jax.Array:
    """`jax.lax.dot_general` with QArrays.

    >>> w = QArray(jnp.array([[2], [4]], jnp.int8), jnp.array([[0.5]]))
    >>> dot_general(jnp.array([[1.0, 1.0]]), w, (((1,), (0,)), ((), ())))
    Array([[3.]], dtype=float32)
    """
    op = functools.partial(dot_ops.dot_general, dimension_numbers=dimension_numbers, precision=precision, **kwargs)
    return _contract(op, {"lhs": lhs, "rhs": rhs}, preferred_element_type)


def dot(a: MaybeQArray, b: MaybeQArray, precision=None, preferred_element_type=None, out_sharding=None) -> jax.Array:
    """`jnp.dot` with QArrays: contracts the last dim of a with the last but one of b, or its only one.

    >>> dot(jnp.array([1.0, 1.0]), QArray(jnp.array([2, 4], jnp.int8), jnp.array([0.5])))
    Array(3., dtype=float32)
    """
    contracting = ((a.ndim - 1,), (max(b.ndim - 2, 0),)) if a.ndim and b.ndim else ((), ())
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    return dot_general(a, b, (contracting, ((), ())), precision, preferred_element_type, **options)


def einsum(subscripts: str, *operands: MaybeQArray, preferred_element_type=None, **kwargs) -> jax.Array:
    """`jnp.einsum` with QArrays. If one size of a label divides another, entries are repeated, as in Qwix.

    >>> einsum("i,i->i", jnp.array([1.0, 2.0]), jnp.ones(4))
    Array([1., 1., 2., 2.], dtype=float32)
    """

    def op(*arrays: jax.Array | ScaledArray, preferred_element_type) -> jax.Array:
        plain = [x for x in arrays if not isinstance(x, ScaledArray)]
        if len(plain) == len(arrays) and _has_single_operand_reduction(subscripts, plain):
            arrays = tuple(x.astype(preferred_element_type) for x in plain)
        return einsum_ops.einsum(subscripts, *arrays, preferred_element_type=preferred_element_type, **kwargs)

    equal = _with_equal_sizes(subscripts, operands)
    return _contract(op, {f"operand {i}": x for i, x in enumerate(equal)}, preferred_element_type)


def _with_equal_sizes(subscripts: str, operands: Sequence[MaybeQArray]) -> list[MaybeQArray]:
    """Repeats entries of operands whose size of a label, other than 1, is a divisor of its largest size."""
    arrays = [x if isinstance(x, QArray) else jnp.asarray(x) for x in operands]
    inputs, _ = parse_einsum(subscripts, [x.ndim for x in arrays])
    sizes: dict[str, set[int]] = {}
    for labels, x in zip(inputs, arrays, strict=True):
        for label, size in zip(labels, x.shape, strict=True):
            sizes.setdefault(label, set()).add(size)
    largest = {label: max(found) for label, found in sizes.items() if len(found - {1}) > 1}

    def repeated(labels: str, x: MaybeQArray) -> MaybeQArray:
        shape = (size if size == 1 else largest.get(c, size) for c, size in zip(labels, x.shape, strict=True))
        return broadcast_to(x, tuple(shape))

    return list(map(repeated, inputs, arrays))


def _has_single_operand_reduction(subscripts: str, arrays: Sequence[jax.Array]) -> bool:
    """Whether jnp.einsum reduces an axis of one operand before any matmul, which it does in that operand's dtype."""
    inputs, out = parse_einsum(subscripts, [x.ndim for x in arrays])
    sizes = [dict(zip(labels, x.shape, strict=True)) for labels, x in zip(inputs, arrays, strict=True)]
    counts = collections.Counter(label_and_size for operand in sizes for label_and_size in operand.items())
    has_diagonal = any(len(operand) < len(labels) for operand, labels in zip(sizes, inputs, strict=True))
    return has_diagonal or any(label not in out and count == 1 for (label, _), count in counts.items())


def ragged_dot(
    lhs: MaybeQArray,
    rhs: MaybeQArray,
    group_sizes: jax.Array,
    precision=None,
    preferred_element_type=None,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with QArrays."""
    refuse_offset(group_offset)
    sizes = clipped_sizes(group_sizes, lhs.shape[0])
    op = functools.partial(ragged.ragged_dot, group_sizes=sizes, precision=precision)
    return _contract(op, {"lhs": lhs, "rhs": rhs}, preferred_element_type)


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
    refuse_offset(group_offset)
    (ragged_dim,) = dimension_numbers.lhs_ragged_dimensions
    op = functools.partial(
        ragged.ragged_dot_general,
        group_sizes=clipped_sizes(group_sizes, lhs.shape[ragged_dim]),
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
    )
    return _contract(op, {"lhs": lhs, "rhs": rhs}, preferred_element_type)


def refuse_offset(group_offset: jax.Array | None) -> None:
    if group_offset is not None:
        raise ValueError(
            "`group_offset` must be None, as in jax.lax.ragged_dot; slice lhs and rhs to the groups instead"
        )


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
    op = functools.partial(
        conv.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        out_sharding=out_sharding,
    )
    return _contract(op, {"lhs": lhs, "rhs": rhs}, preferred_element_type)

"""matmul and dot_general on scaled and plain operands."""

import functools

import jax

from scaledot.contraction import Contraction, for_matmul, from_dimension_numbers
from scaledot.ops.operands import Choice, as_operand, contract


def dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: Choice = None,
) -> jax.Array:
    """`jax.lax.dot_general` where either operand may be a ScaledArray.

    Sums are float32 or exact integers, scales are applied in float32, and the result is rounded once. The result's
    dtype is `preferred_element_type`, or the promotion of what the operands stand for. A plain operand can be
    differentiated; a ScaledArray is a constant.

    Args:
      lhs, rhs: ScaledArrays, jax or numpy arrays.
      dimension_numbers: ((lhs summed, rhs summed), (lhs batch, rhs batch)), paired in the order given.
      precision: of a float product, as in jax.lax; integer products are exact. CUDA's tensor cores sum 8-bit floats
        with fewer bits than float32 has; "highest" multiplies them as bfloat16, which is exact.
      kernel: the name of a kernel (`explain` lists them), or a function from the Problem to a name; None takes the
        first that supports the problem.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.array([[127.0, 64.0], [2.0, 0.0]]), "int8", block=(0, 0))
    >>> dot_general(jnp.array([[1.0, 1.0]]), w, (((1,), (0,)), ((), ())))
    Array([[129.,  64.]], dtype=float32)
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    contraction = from_dimension_numbers(dimension_numbers, lhs.ndim, rhs.ndim)
    return contract(
        contraction,
        lhs,
        rhs,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        kernel=kernel,
    )


def matmul(
    lhs,
    rhs,
    *,
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
    kernel: Choice = None,
) -> jax.Array:
    """`jnp.matmul` where either operand may be a ScaledArray; leading axes broadcast. Arguments as in `dot_general`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.eye(64), "mxfp8", axis=0)            # blocks down the columns: along the sum
    >>> matmul(jnp.ones((3, 64)), w).shape
    (3, 64)
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    contraction, lhs_index, rhs_index = _without_broadcast(lhs.shape, rhs.shape)
    lhs, rhs = (x if index is None else x[index] for x, index in ((lhs, lhs_index), (rhs, rhs_index)))
    return contract(
        contraction,
        lhs,
        rhs,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        kernel=kernel,
    )


Index = tuple[int | slice, ...] | None  # None keeps every axis


@functools.lru_cache(maxsize=4096)
def _without_broadcast(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> tuple[Contraction, Index, Index]:
    """matmul's contraction, and how to index operands so that batch axes of 1 that meet more elements are dropped."""
    contraction = for_matmul(lhs_shape, rhs_shape)
    left, right = dict(zip(contraction.lhs, lhs_shape, strict=True)), dict(zip(contraction.rhs, rhs_shape, strict=True))
    lhs_labels, lhs_index = _without(contraction.lhs, [c for c in contraction.batch if left[c] == 1 != right[c]])
    rhs_labels, rhs_index = _without(contraction.rhs, [c for c in contraction.batch if right[c] == 1 != left[c]])
    return Contraction(lhs_labels, rhs_labels, contraction.out), lhs_index, rhs_index


def _without(labels: str, dropped: list[str]) -> tuple[str, Index]:
    if not dropped:
        return labels, None
    index = tuple(0 if c in dropped else slice(None) for c in labels)
    return "".join(c for c in labels if c not in dropped), index

"""matmul and dot_general on scaled and plain operands."""

import functools

import jax

from scaledot.contraction import Contraction, for_matmul, from_dimension_numbers
from scaledot.ops.operands import KernelChoice, as_operand, contract


def dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jax.lax.dot_general` where either operand may be a ScaledArray.

    Accumulates in float32 (int32 for integer codes), applies scales in float32 and rounds once, to the output dtype:
    `preferred_element_type`, or the promoted `dtype` of both operands. A plain operand is differentiable; a ScaledArray
    is a constant.

    Args:
      lhs, rhs: ScaledArrays, jax or numpy arrays.
      dimension_numbers: ((lhs contracting dims, rhs contracting dims), (lhs batch dims, rhs batch dims)).
      precision: of a float matmul, as in jax.lax; integer matmuls are exact. The FP8 tensor cores of CUDA devices
        accumulate with fewer bits than float32; "highest" converts FP8 codes to bfloat16, which is exact,
        or, on Hopper, promotes accumulators to float32 every 128 elements of K.
      out_sharding: of the result, as in jax.lax.
      kernel: the name of a kernel (`explain` lists them), or a function from a `scaledot.kernels.spec.Problem` to a
        name; None is the first kernel that supports the problem.

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
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jnp.matmul` where either operand may be a ScaledArray; leading axes broadcast. Arguments as in `dot_general`.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> w = sd.quantize(jnp.eye(64), "mxfp8", axis=0)            # blocks along the contracting dim
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


Index = tuple[int | slice, ...] | None  # None: the array as it is


@functools.lru_cache(maxsize=4096)
def _without_broadcast(lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> tuple[Contraction, Index, Index]:
    """The contraction of matmul, and indices that drop the batch dims of size 1 of an operand that broadcast."""
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

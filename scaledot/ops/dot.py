"""matmul and dot_general on scaled and plain operands."""

import jax

from scaledot.contraction import Contraction, for_matmul, from_dimension_numbers
from scaledot.ops.operands import Array, Choice, as_operand, contract


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
    contraction = for_matmul(lhs.shape, rhs.shape)
    lhs, rhs, contraction = _without_broadcast(contraction, lhs, rhs)
    return contract(
        contraction,
        lhs,
        rhs,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        kernel=kernel,
    )


def _without_broadcast(contraction: Contraction, lhs: Array, rhs: Array) -> tuple[Array, Array, Contraction]:
    """Batch axes of 1 that meet more elements are dropped from their operand."""
    left, right = (dict(zip(of, x.shape, strict=True)) for of, x in ((contraction.lhs, lhs), (contraction.rhs, rhs)))
    lhs_gone = [c for c in contraction.batch if left[c] == 1 != right[c]]
    rhs_gone = [c for c in contraction.batch if right[c] == 1 != left[c]]
    lhs, lhs_labels = _without(lhs, contraction.lhs, lhs_gone)
    rhs, rhs_labels = _without(rhs, contraction.rhs, rhs_gone)
    return lhs, rhs, Contraction(lhs_labels, rhs_labels, contraction.out)


def _without(x: Array, labels: str, gone: list[str]) -> tuple[Array, str]:
    if not gone:
        return x, labels
    return x[tuple(0 if c in gone else slice(None) for c in labels)], "".join(c for c in labels if c not in gone)

"""Collective matmuls, which overlap communication with compute; to be called inside a shard_map.

For training pass `overlap` to the functions of `scaledot.train` instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.contraction import Contraction, for_matmul
from scaledot.kernels.spec import accumulation_dtype
from scaledot.ops.operands import as_operand, contract
from scaledot.parallel import overlap
from scaledot.parallel.divisibility import misfit
from scaledot.parallel.transfer_plan import NO_TRANSFERS, TransferPlan, Transfers
from scaledot.parallel.transfers import block_along


def all_gather_matmul(x, w, axis_name: str, *, preferred_element_type=None, precision=None, kernel=None) -> jax.Array:
    """all_gather(x) @ w for x (..., m, k), m sharded over a mesh axis, and w (k, n): (..., m * devices, n).

    To be called inside a shard_map. Operands may be ScaledArrays, which are transferred as codes and scales; a scale
    that covers all rows must be the same on every device (`amax_axes` of `quantize`). A plain operand is
    differentiable.

    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    >>> specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
    >>> f = jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh, **specs)
    >>> f(jnp.ones((4, 8)), jnp.ones((8, 2))).shape
    (4, 2)
    """
    contraction, lhs, rhs = _matrices(x, w)
    gathered = Transfers(gathered=((contraction.lhs_free[-1], (axis_name,)),))
    plan = TransferPlan(gathered, NO_TRANSFERS, (), (), ())
    return _overlapped(plan, contraction, lhs, rhs, preferred_element_type, precision=precision, kernel=kernel)


def matmul_reduce_scatter(
    x, w, axis_name: str, *, preferred_element_type=None, precision=None, kernel=None
) -> jax.Array:
    """Reduce-scatter of x (..., m, k) @ w (k, n), k sharded over a mesh axis: (..., m / devices, n) on each device.

    To be called inside a shard_map. Partial results are transferred and accumulated in float32 and rounded once, to
    the output dtype. Operands as in `all_gather_matmul`.
    """
    contraction, lhs, rhs = _matrices(x, w)
    rows = contraction.lhs_free[-1]
    _check_row_shards(lhs, lhs.ndim - 2, axis_name)
    plan = TransferPlan(NO_TRANSFERS, NO_TRANSFERS, (axis_name,), ((rows, (axis_name,)),), ())
    return _overlapped(plan, contraction, lhs, rhs, preferred_element_type, precision=precision, kernel=kernel)


def _matrices(x, w) -> tuple[Contraction, Any, Any]:
    x, w = as_operand(x, "x"), as_operand(w, "w")
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(f"`x` (..., m, k) and `w` (k, n) must be matrices, not of shapes {x.shape} and {w.shape}")
    return for_matmul(x.shape, w.shape), x, w


def _check_row_shards(x, axis: int, axis_name: str) -> None:
    """Raises unless every device gets the same number of rows, in whole blocks."""
    found = misfit(x.shape[axis], lax.axis_size(axis_name), block_along(x, axis))
    if found is not None:
        in_blocks = f" in blocks of {found.block}" if found.block > 1 else ""
        shards = f"shards for {found.devices} devices of {axis_name!r}{in_blocks}"
        raise ValueError(f"{found.size} rows of `x` cannot be cut into equal {shards}; {found.fitting_size} would fit")


def _overlapped(plan: TransferPlan, contraction: Contraction, lhs, rhs, preferred, **options) -> jax.Array:
    """The contraction along the plan's one mesh axis; `options` are those of `contract`."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype) if preferred is None else np.dtype(preferred)
    axes = plan.reduced_axes or plan.lhs.gathered[0][1]
    shard_dtype = accumulation_dtype(dtype) if overlap.accumulates_partials(plan, contraction, axes) else dtype

    def multiply(left, right, sizes) -> jax.Array:
        return contract(contraction, left, right, preferred_element_type=shard_dtype, **options)

    left, right = (
        overlap.RingOperand(labels, x, dict(zip(labels, x.shape, strict=True)))
        for labels, x in ((contraction.lhs, lhs), (contraction.rhs, rhs))
    )
    return overlap.contract_overlapped(plan, contraction, left, right, multiply, axes).astype(dtype)

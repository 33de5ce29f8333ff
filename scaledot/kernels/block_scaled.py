"""The block-scaled matmul of Blackwell's tensor cores, through XLA.

XLA compiles `jax.nn.scaled_matmul` to one cuDNN call if both operands are MXFP8 (8-bit floats with an E8M0 scale for 32
elements) or NVFP4 (E2M1 with an E4M3 scale for 16) in blocks along the contracting dim. Operands are passed as codes
(B, M, K) and (B, N, K) with scales (B, M, K / block) and (B, N, K / block). On other devices XLA emulates the call;
other kernels are chosen there.
"""

import math

import jax
import jax.numpy as jnp
from jax.nn import scaled_matmul as jax_scaled_matmul  # before callers replace it by scaledot's

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.operands import align_to
from scaledot.kernels.spec import Operand, Problem
from scaledot.numerics import blocks
from scaledot.parallel.types import vary_as

_BLOCK_SIZES = {  # by (element, scale) dtypes
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}


def layout_reason(problem: Problem) -> str | None:
    """Returns why the matmul cannot take these operands on any device, or None if it can."""
    dtypes = set()
    for name, operand in problem.named_operands:
        if operand.format is None:
            return f"{name} is {operand}; both operands must be quantised"
        expected = _BLOCK_SIZES.get((operand.format.element, operand.format.scale))
        if expected is None:
            return f"{name} is {operand.format.name}; XLA's block-scaled call takes MXFP8 and NVFP4"
        reason = _operand_reason(problem, name, operand, expected)
        if reason:
            return reason
        dtypes.add((operand.format.element, operand.format.scale))
    if len({scale for _, scale in dtypes}) > 1:
        return f"{problem.lhs.format} and {problem.rhs.format} have different scale dtypes"
    if {element for element, _ in dtypes} == {"float8_e5m2"}:
        return "XLA's block-scaled call takes at most one float8_e5m2 operand"
    return None


def mesh_reason() -> str | None:
    """Returns why the matmul cannot run under the current mesh, or None if it can."""
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return "jax.nn.scaled_matmul cannot be partitioned along explicit mesh axes"
    return None


def _operand_reason(problem: Problem, name: str, operand: Operand, expected: int) -> str | None:
    contracting = problem.contraction.contracting
    if problem.op != "dot" or len(contracting) != 1:
        return "it computes dots with one contracting dim"
    size, block = operand.size(contracting), operand.block_of(contracting)
    if block != expected or size % block:
        return f"{name} has blocks of {block} along {contracting!r} of {size}; it takes whole blocks of {expected}"
    if operand.rotated_label and operand.rotated_label in problem.contraction.out:
        return f"{name} is rotated along {operand.rotated_label!r}, which is a free dim"
    if any(c not in problem.contraction.out for c in operand.tensor_scale_varies_along):
        return f"the tensor scale of {name} varies along a contracting dim"
    return None


def device_reason() -> str | None:
    """Returns why the devices of this process have no block-scaled matmul, or None if they have."""
    backend = jax.default_backend()
    if backend != "gpu":
        return f"needs a Blackwell GPU; the default backend is {backend}"
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    major = capability.partition(".")[0]
    if not major.isdigit() or int(major) < 10:
        return f"needs compute capability 10; {device.device_kind} has {capability}"
    return None


def run(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes=None) -> jax.Array:
    """Computes a dot by `jax.nn.scaled_matmul`, and applies tensor scales to its float32 result."""
    contraction = problem.contraction
    batch, contracting = contraction.batch, contraction.contracting
    a, a_scale = _as_matrices(lhs, contraction.lhs, batch, contraction.lhs_free, contracting)
    b, b_scale = _as_matrices(rhs, contraction.rhs, batch, contraction.rhs_free, contracting)
    total = _scaled_matmul(a, b, a_scale, b_scale)
    total = vary_as(total, a, b, a_scale, b_scale)
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    total = total.reshape([sizes[c] for c in contraction.dot_general_out])
    total = total.transpose([contraction.dot_general_out.index(c) for c in contraction.out])
    left, right = (
        [align_to(scale, contraction.out) for scale in operands.tensor_scales(q, labels)]
        for q, labels in ((lhs, contraction.lhs), (rhs, contraction.rhs))
    )
    return operands.apply_scales(total, left, right).astype(problem.out_dtype)


@jax.custom_batching.custom_vmap
def _scaled_matmul(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    return jax_scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)


@_scaled_matmul.def_vmap
def _batched_scaled_matmul(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
    """Merges the mapped axis into the batch dim; before jax 0.11 jax's own rule needs all operands mapped."""
    mapped = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(operands, in_batched, strict=True)
    )
    total = _scaled_matmul(*(x.reshape(axis_size * x.shape[1], *x.shape[2:]) for x in mapped))
    return total.reshape(axis_size, total.shape[0] // axis_size, *total.shape[1:]), True


def _as_matrices(q: ScaledArray, labels: str, batch: str, free: str, contracting: str) -> tuple[jax.Array, jax.Array]:
    """Returns codes (B, rows, K) and scales (B, rows, K / block), from an operand with any number of free dims."""
    block = blocks.expand(q.block, q.ndim)
    per_row = tuple(1 if c == contracting else b for c, b in zip(labels, block, strict=True))
    shape = tuple(q.scale.shape[a] if c == contracting else q.shape[a] for a, c in enumerate(labels))
    scale = jnp.broadcast_to(blocks.repeat_scale(q.scale, shape, per_row), shape)
    return _flattened(q.data, labels, batch, free, contracting), _flattened(scale, labels, batch, free, contracting)


def _flattened(x: jax.Array, labels: str, batch: str, free: str, contracting: str) -> jax.Array:
    moved = x.transpose([labels.index(c) for c in batch + free + contracting])
    sizes = iter(moved.shape)
    shape = [math.prod(next(sizes) for _ in dims) for dims in (batch, free, contracting)]
    return moved.reshape(shape)

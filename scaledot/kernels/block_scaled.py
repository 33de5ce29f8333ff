"""The block-scaled product of Blackwell's tensor cores, through XLA.

`jax.nn.scaled_matmul` becomes one hardware call when both operands are MX (8-bit floats, E8M0 per 32) or NVFP4
(E2M1, E4M3 per 16) with blocks along the summed axis; on other devices XLA emulates it, and `xla_upcast` is taken.
"""

import math

import jax
import jax.numpy as jnp
from jax.nn import scaled_matmul as jax_scaled_matmul  # theirs, even where ours is put in its place later

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.operands import lay
from scaledot.kernels.spec import Operand, Problem
from scaledot.numerics import blocks
from scaledot.parallel.types import vary_as

_KINDS = {  # (element, scale): elements that share one
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}


def layout_reason(problem: Problem) -> str | None:
    """Why the hardware call cannot take these operands, whatever the device."""
    kinds = set()
    for name, operand in problem.named:
        if operand.format is None:
            return f"{name} is {operand}; both sides must be scaled"
        expected = _KINDS.get((operand.format.element, operand.format.scale))
        if expected is None:
            return f"{name} is {operand.format.name}; tensor cores take MXFP8 and NVFP4"
        reason = _operand_reason(problem, name, operand, expected)
        if reason:
            return reason
        kinds.add((operand.format.element, operand.format.scale))
    if len({scale for _, scale in kinds}) > 1:
        return f"{problem.lhs.format} and {problem.rhs.format} do not mix"
    if {element for element, _ in kinds} == {"float8_e5m2"}:
        return "one side must be float8_e4m3fn"
    return None


def mesh_reason() -> str | None:
    """Why the hardware call cannot be made under the mesh of the context."""
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return "jax.nn.scaled_matmul cannot be partitioned along explicit mesh axes"
    return None


def _operand_reason(problem: Problem, name: str, operand: Operand, expected: int) -> str | None:
    along = problem.contraction.contracting
    if problem.op != "dot" or len(along) != 1:
        return "the hardware call sums over one axis of a dot"
    size, block = operand.size(along), operand.block_of(along)
    if block != expected or size % block:
        return f"{name} has blocks of {block} along {along!r} of {size}; the hardware takes whole blocks of {expected}"
    if operand.rotated and operand.rotated in problem.contraction.out:
        return f"{name} is rotated along {operand.rotated!r}, which is kept"
    if any(c not in problem.contraction.out for c in operand.level_varies):
        return f"the tensor scale of {name} changes along the sum"
    return None


def device_reason() -> str | None:
    """Why the devices of this process do not have it."""
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
    contraction = problem.contraction
    batch, along = contraction.batch, contraction.contracting
    a, a_scale = _as_matrices(lhs, contraction.lhs, batch, contraction.lhs_free, along)
    b, b_scale = _as_matrices(rhs, contraction.rhs, batch, contraction.rhs_free, along)
    total = _scaled_matmul(a, b, a_scale, b_scale)
    total = vary_as(total, a, b, a_scale, b_scale)
    sizes = dict(zip(contraction.lhs + contraction.rhs, lhs.shape + rhs.shape, strict=True))
    total = total.reshape([sizes[c] for c in contraction.dot_general_out])
    total = total.transpose([contraction.dot_general_out.index(c) for c in contraction.out])
    left, right = (
        [lay(f, contraction.out) for f in operands.tensor_scales(q, of)]
        for q, of in ((lhs, contraction.lhs), (rhs, contraction.rhs))
    )
    return operands.scaled(total, left, right).astype(problem.out_dtype)


@jax.custom_batching.custom_vmap
def _scaled_matmul(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array) -> jax.Array:
    return jax_scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)


@_scaled_matmul.def_vmap
def _batched_scaled_matmul(axis_size: int, in_batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
    """A mapped axis joins the batch axis; jax's own rule wants all operands mapped before 0.11."""
    mapped = (
        x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, batched in zip(operands, in_batched, strict=True)
    )
    total = _scaled_matmul(*(x.reshape(axis_size * x.shape[1], *x.shape[2:]) for x in mapped))
    return total.reshape(axis_size, total.shape[0] // axis_size, *total.shape[1:]), True


def _as_matrices(q: ScaledArray, labels: str, batch: str, free: str, along: str) -> tuple[jax.Array, jax.Array]:
    """Codes (B, rows, K) and scales (B, rows, K / block)."""
    block = blocks.expand(q.block, q.ndim)
    per_row = tuple(1 if c == along else b for c, b in zip(labels, block, strict=True))
    shape = tuple(q.scale.shape[a] if c == along else q.shape[a] for a, c in enumerate(labels))
    scale = jnp.broadcast_to(blocks.repeat_scale(q.scale, shape, per_row), shape)
    return _flattened(q.data, labels, batch, free, along), _flattened(scale, labels, batch, free, along)


def _flattened(x: jax.Array, labels: str, batch: str, free: str, along: str) -> jax.Array:
    moved = x.transpose([labels.index(c) for c in batch + free + along])
    sizes = iter(moved.shape)
    shape = [math.prod(next(sizes) for _ in part) for part in (batch, free, along)]
    return moved.reshape(shape)

"""The block-scaled product of Blackwell's tensor cores, through XLA.

`jax.nn.scaled_matmul` becomes one hardware call when both operands are MX (8-bit floats, E8M0 per 32) or NVFP4
(E2M1, E4M3 per 16) with blocks along the summed axis; on other devices XLA would emulate it more slowly than
`xla_upcast` does.
"""

import math

import jax
import jax.numpy as jnp

from scaledot.array import ScaledArray
from scaledot.kernels import operands
from scaledot.kernels.manual import vary_as
from scaledot.kernels.operands import Factor, lay
from scaledot.kernels.spec import Operand, Problem
from scaledot.numerics import blocks

_KINDS = {  # (element, scale): elements that share one
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}


def layout_reason(problem: Problem) -> str | None:
    """Why the hardware call cannot take these operands, whatever the device."""
    kinds = set()
    for name, operand in zip(("lhs", "rhs"), problem.operands, strict=True):
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
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return "jax.nn.scaled_matmul cannot be partitioned along explicit mesh axes"
    return None


def _operand_reason(problem: Problem, name: str, operand: Operand, expected: int) -> str | None:
    along = problem.contraction.contracted
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
    capability = getattr(device, "compute_capability", "0")
    if float(capability) < 10:
        return f"needs compute capability 10; {device.device_kind} has {capability}"
    return None


def run(problem: Problem, lhs: ScaledArray, rhs: ScaledArray, group_sizes=None) -> jax.Array:
    contraction = problem.contraction
    order = {"lhs": contraction.lhs_free, "rhs": contraction.rhs_free}
    (a, a_scale), (b, b_scale) = (
        _as_matrices(q, o.labels, contraction.batch, order[name], contraction.contracted)
        for name, q, o in zip(order, (lhs, rhs), problem.operands, strict=True)
    )
    total = jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.float32)
    total = vary_as(total, a, b, a_scale, b_scale)
    sizes = {**dict(zip(contraction.lhs, lhs.shape, strict=True)), **dict(zip(contraction.rhs, rhs.shape, strict=True))}
    total = total.reshape([sizes[c] for c in contraction.natural])
    total = total.transpose([contraction.natural.index(c) for c in contraction.out])
    for q, operand in zip((lhs, rhs), problem.operands, strict=True):
        for factor in operands.level_factors(q, operand.labels):
            total = total * lay(factor, contraction.out)
    return total.astype(problem.out_dtype)


def _as_matrices(q: ScaledArray, labels: str, batch: str, free: str, along: str) -> tuple[jax.Array, jax.Array]:
    """Codes (B, rows, K) and scales (B, rows, K / block)."""
    block = blocks.expand(q.block, q.ndim)
    per_row = tuple(1 if c == along else b for c, b in zip(labels, block, strict=True))
    shape = tuple(q.scale.shape[a] if c == along else q.shape[a] for a, c in enumerate(labels))
    scale = jnp.broadcast_to(blocks.spread(q.scale, shape, per_row), shape)
    return tuple(_flattened(Factor(x, labels), batch, free, along) for x in (q.data, scale))  # type: ignore[return-value]


def _flattened(x: Factor, batch: str, free: str, along: str) -> jax.Array:
    moved = x.values.transpose([x.labels.index(c) for c in batch + free + along])
    sizes = iter(moved.shape)
    shape = [math.prod(next(sizes) for _ in part) for part in (batch, free, along)]
    return moved.reshape(shape)

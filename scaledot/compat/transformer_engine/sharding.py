"""Mesh axes by what they are for, and constraints by the names of logical axes.

`global_shard_guard` says which mesh axis is used for what. It is a convenience of this module and changes no result:
it only names axes. Meshes themselves are JAX's (`jax.set_mesh`).
"""

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scaledot.compat.transformer_engine.not_offered import refuse
from scaledot.parallel.sharding import constrain_what_divides

Names = Sequence[str | None] | None

BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"


@dataclasses.dataclass(frozen=True)
class MeshResource:
    """The mesh axis for each kind of parallelism: data, tensor, tensor and sequence, FSDP, pipeline, context, expert.

    >>> MeshResource(dp_resource="data", tp_resource="model").tp_resource
    'model'
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

    def __post_init__(self):
        if self.tp_resource is not None and self.tp_resource == self.tpsp_resource:
            raise ValueError(f"`tp_resource` and `tpsp_resource` are both {self.tp_resource!r}; use one of the two")


_NO_AXES = MeshResource()
_RESOURCE: contextvars.ContextVar[MeshResource] = contextvars.ContextVar("mesh_resource")


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource) -> Iterator[None]:
    """Inside, logical axes mean the mesh axes of this resource.

    >>> with global_shard_guard(MeshResource(dp_resource="data")):
    ...     global_mesh_resource().dp_resource
    'data'
    """
    if not isinstance(resource, MeshResource):
        raise TypeError(f"`resource` must be a MeshResource, not {resource!r}")
    _tensor_axis(resource)
    token = _RESOURCE.set(resource)
    try:
        yield
    finally:
        _RESOURCE.reset(token)


def global_mesh_resource() -> MeshResource:
    """The resource of the innermost guard; outside of all, one that names no axis.

    >>> global_mesh_resource()
    MeshResource(dp_resource=None, tp_resource=None, tpsp_resource=None, fsdp_resource=None, pp_resource=None,
                 cp_resource=None, ep_resource=None)
    """
    return _RESOURCE.get(_NO_AXES)


def with_sharding_constraint_by_logical_axes(x: Any, logical_axis_names: Names) -> Any:
    """x, an array or a tensor of `quantize`, laid out over the mesh as Flax's logical rules or the guard say.

    Nothing happens without names, without a mesh, or where no rule speaks of the names.

    >>> with_sharding_constraint_by_logical_axes(jax.numpy.ones((2, 4)), (BATCH_AXES, HIDDEN_TP_AXES)).shape
    (2, 4)
    """
    if hasattr(x, "apply_sharding_constraint_by_logical_axes"):
        return x.apply_sharding_constraint_by_logical_axes(logical_axis_names)
    return constrained(x, logical_axis_names)


def constrained(x: jax.Array, names: Names) -> jax.Array:
    """An array under the constraint of its logical axes, along those that the mesh axes divide."""
    if not names:
        return x
    if len(names) != x.ndim:
        raise ValueError(f"`logical_axis_names` {tuple(names)} must have one name for each axis of {x.shape}")
    return constrained_to(x, mesh_axes(names))


def constrained_to(x: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """An array laid out along mesh axes; a no-op where there is no mesh, inside a shard_map, or for axes of None."""
    return constrain_what_divides(x, PartitionSpec(*axes))


def _in_use(axis: str | None) -> str | None:
    """An axis, unless the mesh has only one device along it."""
    return None if axis is None or jax.sharding.get_abstract_mesh().shape.get(axis) == 1 else axis


def mesh_axes(names: Sequence[str | None]) -> list[Any]:
    """By Flax's rules where there are any, else by the guard; a Flax that was never imported has none."""
    linen = sys.modules.get("flax.linen")
    if linen is not None and linen.get_logical_axis_rules():
        return list(linen.logical_to_mesh_axes(names))
    rules = _rules(global_mesh_resource())
    return [rules.get(name) for name in names]


def batch_axis() -> str | None:
    """The mesh axis that batches lie along."""
    return _rules(global_mesh_resource())[BATCH_AXES]


def _tensor_axis(resource: MeshResource) -> str | None:
    """The axis of tensor parallelism, alone or with sequences; there can be one."""
    alone, with_sequences = _in_use(resource.tp_resource), _in_use(resource.tpsp_resource)
    if alone and with_sequences and not jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"`tp_resource` {alone!r} and `tpsp_resource` {with_sequences!r} are both set, and the mesh has several "
            "devices along either; set one, or make the other None"
        )
    return with_sequences or resource.tp_resource


def _rules(resource: MeshResource) -> dict[str | None, str | None]:
    tensor = _tensor_axis(resource)
    return {
        BATCH_AXES: _in_use(resource.fsdp_resource) or resource.dp_resource,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_TP_AXES: tensor,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
    }


__getattr__ = refuse(__name__)

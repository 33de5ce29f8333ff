"""Sharding constraints by logical axis names, and the mesh axis of each kind of parallelism.

`global_shard_guard` maps TransformerEngine's logical axis names (BATCH_AXES, HIDDEN_TP_AXES, ...) to mesh axes. It
affects shardings only, not results. The mesh itself is set by `jax.set_mesh`.
"""

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from scaledot.compat.transformer_engine.unsupported import module_getattr
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
    """The mesh axis of each kind of parallelism: data, tensor, tensor and sequence, FSDP, pipeline, context, expert.

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
    """Context manager that maps logical axis names to the mesh axes of `resource`.

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
    """Returns the MeshResource of the innermost `global_shard_guard`, or one without axes outside of any.

    >>> global_mesh_resource()
    MeshResource(dp_resource=None, tp_resource=None, tpsp_resource=None, fsdp_resource=None, pp_resource=None,
                 cp_resource=None, ep_resource=None)
    """
    return _RESOURCE.get(_NO_AXES)


def get_mesh_axis_size(axis: str | None, mesh: Any = None) -> int:
    """Returns the number of devices along a mesh axis, of the current mesh if `mesh` is None; 1 for an axis of None.

    >>> get_mesh_axis_size(None)
    1
    """
    if axis is None:
        return 1
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape
    if axis not in sizes:
        raise ValueError(f"`axis` {axis!r} is not one of the mesh axes {tuple(sizes)}")
    return sizes[axis]


def with_sharding_constraint_by_logical_axes(x: Any, logical_axis_names: Names) -> Any:
    """Constrains the sharding of x, an array or a quantised tensor, by Flax's logical axis rules or the guard.

    Returns x as it is if `logical_axis_names` is None, if there is no mesh, or if no rule maps the names.

    >>> with_sharding_constraint_by_logical_axes(jax.numpy.ones((2, 4)), (BATCH_AXES, HIDDEN_TP_AXES)).shape
    (2, 4)
    """
    if hasattr(x, "apply_sharding_constraint_by_logical_axes"):
        return x.apply_sharding_constraint_by_logical_axes(logical_axis_names)
    return constrain_by_names(x, logical_axis_names)


def constrain_by_names(x: jax.Array, names: Names) -> jax.Array:
    """Constrains an array by the names of its logical axes; dims that the mesh axis does not divide are left alone."""
    if not names:
        return x
    if len(names) != x.ndim:
        raise ValueError(f"`logical_axis_names` {tuple(names)} must have one name for each axis of {x.shape}")
    return constrain_to_axes(x, mesh_axes(names))


def constrain_to_axes(x: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """Constrains an array to one mesh axis (or None) per dim; a no-op without a mesh and inside a shard_map."""
    return constrain_what_divides(x, PartitionSpec(*axes))


def _unless_size_one(axis: str | None) -> str | None:
    """Returns the axis, or None if its mesh size is 1."""
    return None if axis is None or jax.sharding.get_abstract_mesh().shape.get(axis) == 1 else axis


def mesh_axes(names: Sequence[str | None]) -> list[Any]:
    """Maps logical axis names to mesh axes, by Flax's logical axis rules if any are set, else by the guard."""
    linen = sys.modules.get("flax.linen")  # if Flax was never imported, no rules can be set
    if linen is not None and linen.get_logical_axis_rules():
        return list(linen.logical_to_mesh_axes(names))
    rules = _rules(global_mesh_resource())
    return [rules.get(name) for name in names]


def batch_axis() -> str | None:
    """The mesh axis along which the batch dim is sharded."""
    return _rules(global_mesh_resource())[BATCH_AXES]


def _tensor_axis(resource: MeshResource) -> str | None:
    """The mesh axis of tensor parallelism, from `tpsp_resource` or `tp_resource`; raises if both are in use."""
    tp, tpsp = _unless_size_one(resource.tp_resource), _unless_size_one(resource.tpsp_resource)
    if tp and tpsp and not jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"`tp_resource` {tp!r} and `tpsp_resource` {tpsp!r} are both set, and the mesh has several devices along "
            "each; set only one of them"
        )
    return tpsp or resource.tp_resource


def _rules(resource: MeshResource) -> dict[str | None, str | None]:
    tensor = _tensor_axis(resource)
    return {
        BATCH_AXES: _unless_size_one(resource.fsdp_resource) or resource.dp_resource,
        SEQLEN_TP_AXES: resource.tpsp_resource,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_TP_AXES: tensor,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
    }


__getattr__ = module_getattr(__name__)

"""Kinds of training matmuls, and the records that pass between them and the custom_vjp.

A training step has three matmuls: fwd (x by w), dgrad (g by w) and wgrad (x by g), where g is the gradient of the
result. A tensor takes part in two of them, contracted along another axis in each.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from scaledot.hashing import hash_once
from scaledot.kernels.spec import CastArguments, accumulation_dtype
from scaledot.numerics.rounding import Key
from scaledot.ops.operands import Choice
from scaledot.parallel.types import Partitioning
from scaledot.recipes import Cast
from scaledot.train.options import Options


class Operands(NamedTuple):
    """The arrays of a call. groups: the sizes of ragged groups, None elsewhere."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    groups: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One of the three matmuls, "fwd", "dgrad" or "wgrad", and what is wanted of its result."""

    name: str
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    kernel: Choice = None

    @classmethod
    def of(cls, name: str, dtype, options: Options, out_sharding=None) -> "Matmul":
        return cls(name, dtype, options.precision, out_sharding, options.kernel)

    @property
    def wide(self) -> "Matmul":
        """The same with its result in the dtype of sums: before further terms are added and the one rounding."""
        return dataclasses.replace(self, dtype=accumulation_dtype(self.dtype))

    @property
    def on_shards(self) -> "Matmul":
        """The same inside a shard_map, where results have no sharding."""
        return dataclasses.replace(self, out_sharding=None)

    @property
    def keywords(self) -> dict[str, Any]:
        """As `jax.lax` and the verbs of `ops` take them."""
        wanted = {"precision": self.precision, "preferred_element_type": self.dtype}
        return wanted | {"out_sharding": self.out_sharding, "kernel": self.kernel}


@dataclasses.dataclass(frozen=True)
class CastRequest:
    """The casts of one tensor that some matmuls of a step take.

    laid: how each lies on the tensor, by matmul. keys: of those that round stochastically. residual: the matmul whose
    operand is saved for the backward pass. factor: that of delayed scaling. amax, sums: whether the largest magnitude,
    and sums over everything that shares a bias, are wanted, too. Of shards: amax_axes, the mesh axes over which scales
    are shared; and so that random numbers are those of one device, offset and row_length as in CastArguments and
    CastProblem, or uniforms, numbers in the place of keys.
    """

    tensor: str
    resolved: dict[str, Any]
    keys: dict[Any, Key | None]
    residual: str | None = None
    multiplier: jax.Array | None = None
    amax: bool = False
    sums: bool = False
    kernel: Choice = None
    uniforms: dict[Any, jax.Array | None] = dataclasses.field(default_factory=dict)
    amax_axes: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    offset: jax.Array | None = None
    row_length: int | None = None

    @property
    def distinct(self) -> list[Any]:
        """Casts that give different codes."""
        return list(dict.fromkeys(self.resolved.values()))

    def arguments(self, multiplier: jax.Array | None = None, group_sizes=None) -> CastArguments:
        """With the key of each distinct cast."""
        uniforms = tuple(self.uniforms.get(resolved) for resolved in self.distinct)
        keys = tuple(self.keys[resolved] for resolved in self.distinct)
        return CastArguments(keys, uniforms, multiplier, group_sizes=group_sizes, offset=self.offset)

    @property
    def is_stochastic(self) -> bool:
        return any(key is not None for key in self.keys.values())

    def on_shards(self, uniform: Callable[["ShardCast", Key], jax.Array | None]) -> "CastRequest":
        """The casts of a shard, which share scales with other devices and draw what one device would.

        `resolved` holds ShardCasts. uniform: the random numbers of a shard, from its cast and a key, or None where they
        follow from `offset`.
        """
        drawn = {on: None if (key := self.keys[on]) is None else uniform(on, key) for on in self.distinct}
        return dataclasses.replace(
            self,
            resolved={matmul: on.resolved for matmul, on in self.resolved.items()},
            keys={on.resolved: self.keys[on] for on in self.distinct},
            uniforms={on.resolved: numbers for on, numbers in drawn.items()},
            amax_axes={on.resolved: on.amax_axes for on in self.distinct},
        )

    def key_index(self, resolved) -> int | None:
        return self.distinct.index(resolved) if resolved.cast.rounding == "stochastic" else None


class ShardCast(NamedTuple):
    """A cast laid on a device's shard of a tensor. amax_axes: the mesh axes over which scales are shared."""

    tensor: str
    resolved: Any
    amax_axes: tuple[str, ...]


class CastOperands(NamedTuple):
    """A tensor as each matmul takes it, and what its casts saw on the way; None where they did not look."""

    operands: dict[str, Any]
    amax: jax.Array | None = None
    sums: jax.Array | None = None


class Kind(Protocol):
    """The interface that the custom_vjp needs of a kind of contraction: dot, ragged or conv, sharded or not.

    groups: the sizes of ragged groups, int32 (G,); None for other kinds.
    """

    @property
    def has_batch(self) -> bool:
        """Whether it is a batch of matmuls."""
        ...

    @property
    def partitioning(self) -> Partitioning | None:
        """How XLA partitions the program; None inside a shard_map."""
        ...

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> Hashable:
        """The cast laid on a tensor ("x", "w" or "g") of a matmul; equal ones give equal codes."""
        ...

    def cast(self, request: CastRequest, x: jax.Array, groups: jax.Array | None) -> CastOperands:
        """x quantised for several matmuls, in the layouts that `multiply` takes."""
        ...

    def plain(self, matmul: str, tensor: str, x: jax.Array, groups: jax.Array | None) -> Any:
        """An unquantised operand in the layout that `multiply` takes."""
        ...

    def unclipped_mask(self, resolved: Any, x: jax.Array, q: Any) -> jax.Array | None:
        """Where a cast did not clip; None if it never does."""
        ...

    def amax(self, tensor: str, x: jax.Array, groups: jax.Array | None) -> jax.Array:
        """The largest finite magnitude that takes part."""
        ...

    def multiply(self, matmul: Matmul, lhs: Any, rhs: Any, groups, bias: jax.Array | None = None) -> jax.Array:
        """The matmul of two operands, and for fwd plus a bias, rounded once."""
        ...

    def bias_gradient(self, g: jax.Array, groups: jax.Array | None) -> jax.Array:
        """Sums of g over everything that shares a bias, in float32, or float64 where g is."""
        ...


class LocalKind(Kind, Protocol):
    """The kind that multiplies one device's shards, with what its mesh form needs besides."""

    def logical(self, q: Any) -> Any:
        """An operand as an array or a ScaledArray in the order of its axes, which a kernel's layout may not have."""
        ...


class LocalRagged(Kind, Protocol):
    """The kind that multiplies the ragged groups of one device."""

    def add_bias(self, y: jax.Array, bias: jax.Array, groups: jax.Array) -> jax.Array:
        """y (rows, n) plus the row of bias (groups, n) that belongs to the group of each row."""
        ...


@hash_once
@dataclasses.dataclass(frozen=True)
class Step:
    """A training matmul before data: its kind, and the options of the call."""

    kind: Kind
    options: Options

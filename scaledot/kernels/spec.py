"""Contractions and casts before data: everything by which a kernel is chosen.

A Problem is a contraction (three label strings, as in einsum), what is known of each operand, and the result that is
wanted. A CastProblem is an array and the casts that are wanted of it. Both are frozen and hash, so that one is the
static argument of a jitted run and the key that tuning looks up.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.formats import Format
from scaledot.hashing import hash_once
from scaledot.numerics import blocks
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.hadamard import Hadamard
from scaledot.numerics.rounding import Key
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of


def accumulation_dtype(dtype) -> np.dtype:
    """What sums are kept in before they are rounded to dtype once: float32, or float64 for results of that."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# What jax.lax takes for the default precision of an operand.
_DEFAULT_PRECISION = (None, "default", "fastest", "bfloat16", lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def is_default_precision(precision: Any) -> bool:
    """Whether the argument `precision`, for both operands or a pair, leaves the precision of sums to the hardware.

    >>> is_default_precision("bfloat16"), is_default_precision(("default", "highest"))
    (True, False)
    """
    of_operands = precision if isinstance(precision, (tuple, list)) else (precision,)
    return all(each in _DEFAULT_PRECISION for each in of_operands)


@hash_once
@dataclasses.dataclass(frozen=True)
class Operand:
    """What is known of an operand before data; `format` is None for a plain array.

    block: one entry per axis. level_axes: how many leading axes the tensor scale has entries for.
    sharded: labels that are split over explicit mesh axes. partitioning: what its type says of how XLA partitions it.
    """

    labels: str
    shape: tuple[int, ...]
    dtype: np.dtype
    format: Format | None = None
    block: blocks.Block = ()
    zero: bool = False
    level_axes: int = 0
    rotation: Hadamard | None = None
    sharded: str = ""
    partitioning: Partitioning = ONE_DEVICE

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scale."""
        return blocks.grid(self.shape, self.block)

    @property
    def varies(self) -> str:
        """The labels along which the block scale is not one number."""
        if self.format is None:
            return ""
        return "".join(c for c, count in zip(self.labels, self.grid, strict=True) if count > 1)

    @property
    def level_varies(self) -> str:
        """The same for the tensor scale."""
        return "".join(c for c, size in zip(self.labels[: self.level_axes], self.shape, strict=False) if size > 1)

    @property
    def rotated(self) -> str:
        """The label that a rotation runs along."""
        return "" if self.rotation is None else self.labels[self.rotation.axis]

    def size(self, label: str) -> int:
        return self.shape[self.labels.index(label)]

    def block_of(self, label: str) -> int:
        """Elements along a label that share a scale; a plain operand has one block."""
        size = self.size(label)
        if self.format is None:
            return size
        b = self.block[self.labels.index(label)]
        return size if blocks.covers_axis(size, b) else b

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        if self.format is None:
            return f"{self.dtype}[{shape}]"
        return f"{self.format.name}[{shape}] in blocks of {blocks.trim(self.block)}"


def operand_of(x: ScaledArray | jax.Array, labels: str) -> Operand:
    if not isinstance(x, ScaledArray):
        sharded, partitioning = _sharded(x, labels), partitioning_of(x)
        return Operand(labels, tuple(x.shape), np.dtype(x.dtype), sharded=sharded, partitioning=partitioning)
    return Operand(
        labels,
        x.shape,
        np.dtype(x.dtype),
        x.format,
        blocks.expand(x.block, x.ndim),
        x.zero is not None,
        0 if x.tensor_scale is None else x.tensor_scale.ndim,
        x.rotation,
        _sharded(x.data, labels),
        partitioning_of(x.data),
    )


def _sharded(x: jax.Array, labels: str) -> str:
    return "".join(c for c, axes in zip(labels, jax.typeof(x).sharding.spec, strict=False) if axes is not None)


@hash_once
@dataclasses.dataclass(frozen=True)
class Problem:
    """One contraction of two operands, and the result that is wanted.

    op: "dot", "ragged_dot" or "conv". preferred: the caller's preferred_element_type.
    ragged, group: the label whose axis is cut into groups and the label that counts them.
    group_scales_to_rows: whether a scale per group can be expanded to one per row. group_multiple: what sizes of
    groups are multiples of.
    window: the remaining arguments of a convolution, as pairs.
    """

    op: str
    contraction: Contraction
    lhs: Operand
    rhs: Operand
    preferred: np.dtype | None = None
    precision: Any = None
    out_sharding: Any = None
    ragged: str = ""
    group: str = ""
    group_scales_to_rows: bool = False
    group_multiple: int = 1
    window: tuple[tuple[str, Any], ...] = ()

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return self.lhs, self.rhs

    @property
    def named(self) -> tuple[tuple[str, Operand], ...]:
        return ("lhs", self.lhs), ("rhs", self.rhs)

    @property
    def partitioning(self) -> Partitioning:
        """How XLA partitions it; automatic if each device can multiply shards of its operands."""
        found = self.lhs.partitioning.joined(self.rhs.partitioning)
        are_scaled = self.lhs.format is not None and self.rhs.format is not None
        can_shard = self.op == "dot" and are_scaled and not self.contraction.batch and self.out_sharding is None
        return found if can_shard or found == ONE_DEVICE else found._replace(is_automatic=False)

    @property
    def is_plain(self) -> bool:
        return self.lhs.format is None and self.rhs.format is None

    @functools.cached_property
    def out_dtype(self) -> np.dtype:
        if self.preferred is not None:
            return self.preferred
        return promoted(self.lhs.dtype, self.rhs.dtype)

    @property
    def reaches_out(self) -> str:
        """Labels along which a scale may vary and still be applied to the result."""
        return self.contraction.out + (self.group if self.group_scales_to_rows else "")

    @property
    def summed(self) -> str:
        """Labels that are summed over and may be cut into tiles."""
        return "".join(c for c in self.contraction.contracting if c != self.ragged)

    def __str__(self) -> str:
        c = self.contraction
        return f"{self.op} {c.lhs},{c.rhs}->{c.out}: {self.lhs} x {self.rhs} -> {self.out_dtype}"


def promoted(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype of a result of both, whatever promotion the caller's own arithmetic is held to."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(_promotable(a), _promotable(b)))


def _promotable(dtype: np.dtype) -> np.dtype:
    """What narrow numbers count as: floats of at most 8 bits and integers of fewer have no place in the lattice."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(jnp.bfloat16 if jnp.finfo(dtype).bits <= 8 else dtype)
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return np.dtype(np.int8 if narrow else dtype)


@hash_once
@dataclasses.dataclass(frozen=True)
class CastOutput:
    """One cast of an array, as its consumer takes it. Equal specs and keys give equal codes.

    key: for stochastic rounding, the index of its key (or uniform numbers) among the CastArguments; None rounds to
    nearest. contracted: the axis that the consuming matmul sums over; the result may then have any layout of
    `kernels.layouts`. None asks for an ordinary ScaledArray. is_residual: whether it is saved for the backward pass, as
    codes. Otherwise a contracted one may hold the values that the codes stand for.
    """

    spec: CastSpec
    key: int | None = None
    contracted: int | None = None
    is_residual: bool = False

    @property
    def is_stochastic(self) -> bool:
        return self.key is not None

    def __str__(self) -> str:
        rounding = " stochastically" if self.is_stochastic else ""
        rotation = "" if self.spec.rotation is None else f" after a rotation of {self.spec.rotation.size}"
        contracted = "" if self.contracted is None else f", contracted along axis {self.contracted}"
        return f"{self.spec.format.name} in blocks of {self.spec.block}{rounding}{rotation}{contracted}"


@hash_once
@dataclasses.dataclass(frozen=True)
class CastProblem:
    """One array and all casts that are wanted of it, for a kernel that may make them in one read.

    given: which CastArguments decide the scales or the rounding, by name. amax, column_sums: whether the largest finite
    magnitude, and sums over all axes but the last, are wanted beside the codes; a kernel may leave them to its caller.
    groups: rows come in so many groups, whose sizes are data, and each is cast as if it were alone; None elsewhere.
    group_multiple: each group of the results begins at a multiple of so many rows, with zeros between.
    row_length: of a shard (m, k), the length of rows in the whole matrix, by which stochastic rounding counts elements;
    None for k.
    """

    op: ClassVar[str] = "cast"
    shape: tuple[int, ...]
    views: tuple[CastOutput, ...]
    given: frozenset[str] = frozenset()
    amax: bool = False
    column_sums: bool = False
    groups: int | None = None
    group_multiple: int = 1
    row_length: int | None = None
    partitioning: Partitioning = ONE_DEVICE

    @property
    def dtype(self) -> np.dtype:
        return self.views[0].spec.input_dtype

    def __str__(self) -> str:
        groups = "" if self.groups is None else f" with rows in {self.groups} groups"
        return f"cast {self.dtype}[{','.join(map(str, self.shape))}]{groups} -> {' and '.join(map(str, self.views))}"


class CastArguments(NamedTuple):
    """The arrays of a cast beside the one that is cast; None where they are not given.

    keys: those that views name. uniforms: numbers in [0, 1) in the place of keys, each None or of the array's shape.
    offset: of a shard, the flat index of its first element in the whole matrix, uint32 ().
    """

    keys: tuple[Key | None, ...] = ()
    uniforms: tuple[jax.Array | None, ...] = ()
    multiplier: jax.Array | None = None
    scale: jax.Array | None = None
    tensor_scale: jax.Array | None = None
    zero: jax.Array | None = None
    group_sizes: jax.Array | None = None
    offset: jax.Array | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of those that decide scales or rounding: what CastProblem.given holds."""
        known = self.multiplier is None and self.scale is None and self.tensor_scale is None and self.zero is None
        if known and all(uniform is None for uniform in self.uniforms):
            return frozenset()
        found = {name for name in ("multiplier", "scale", "tensor_scale", "zero") if getattr(self, name) is not None}
        return frozenset(found | ({"uniform"} if any(u is not None for u in self.uniforms) else set()))

    def key(self, view: CastOutput) -> Key | None:
        return None if view.key is None or self.uniform(view) is not None else self.keys[view.key]

    def uniform(self, view: CastOutput) -> jax.Array | None:
        return None if view.key is None or not self.uniforms else self.uniforms[view.key]


class CastResult(NamedTuple):
    """For each view a ScaledArray or a layout of one; and what else was wanted, None where the kernel left it."""

    arrays: tuple[Any, ...]
    amax: jax.Array | None = None
    column_sums: jax.Array | None = None

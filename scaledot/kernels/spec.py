"""What a contraction asks for, before data.

A contraction is three label strings, one label per axis, as in einsum. Everything a kernel is chosen by is in
one frozen Problem: the labels, what is known of each operand, and the result that is wanted. Problems hash, so
one is the static argument of a jitted run and the key that tuning looks up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.formats import Format
from scaledot.kernels.mosaic import support
from scaledot.numerics import blocks
from scaledot.numerics.hadamard import Hadamard


def sum_dtype(dtype) -> np.dtype:
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


@dataclasses.dataclass(frozen=True)
class Operand:
    """What is known of an operand before data; `format` is None for a plain array.

    block: one entry per axis. level_axes: how many leading axes the tensor scale has entries for.
    sharded: labels that are split over explicit mesh axes. devices: those that its type says XLA partitions it over.
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
    devices: int = 1

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
        return size if blocks.whole(size, b) else b

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        if self.format is None:
            return f"{self.dtype}[{shape}]"
        return f"{self.format.name}[{shape}] in blocks of {blocks.trim(self.block)}"


def operand_of(x: ScaledArray | jax.Array, labels: str) -> Operand:
    if not isinstance(x, ScaledArray):
        sharded, devices = _sharded(x, labels), support.devices_of(x)
        return Operand(labels, tuple(x.shape), np.dtype(x.dtype), sharded=sharded, devices=devices)
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
        support.devices_of(x.data),
    )


def _sharded(x: jax.Array, labels: str) -> str:
    return "".join(c for c, axes in zip(labels, jax.typeof(x).sharding.spec, strict=False) if axes is not None)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One contraction of two operands, and the result that is wanted.

    op: "dot", "ragged_dot" or "conv". preferred: the caller's preferred_element_type.
    ragged, group: the label whose axis is cut into groups and the label that counts them.
    gathers: whether a scale per group can be turned into one per row. group_multiple: what sizes of groups are
    multiples of.
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
    gathers: bool = False
    group_multiple: int = 1
    window: tuple[tuple[str, Any], ...] = ()

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return self.lhs, self.rhs

    @property
    def named(self) -> tuple[tuple[str, Operand], ...]:
        return ("lhs", self.lhs), ("rhs", self.rhs)

    @property
    def devices(self) -> int:
        """Those that XLA partitions the operands over."""
        return max(operand.devices for operand in self.operands)

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
        return self.contraction.out + (self.group if self.gathers else "")

    @property
    def summed(self) -> str:
        """Labels that are summed over and may be cut into tiles."""
        return "".join(c for c in self.contraction.contracted if c != self.ragged)

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

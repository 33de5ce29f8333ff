"""Static descriptions of contractions and casts, from which a kernel is chosen.

A Problem describes a contraction (three label strings, as in einsum), its operands and its result. A CastProblem
describes an array and the quantised outputs to compute from it. Both are frozen and hashable: they are static arguments
of jitted functions and keys of caches.

For example, an (8, 256) bfloat16 array times an int8 (256, 16) weight with one scale for each 128 elements along K is

    Problem("dot", Contraction("mk", "kn", "mn"), lhs, rhs)
    lhs = Operand("mk", (8, 256), bfloat16)
    rhs = Operand("kn", (256, 16), float32, INT8, block=(128, 1))   # scale: (2, 16)
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
    """Returns the dtype to accumulate in before one rounding to `dtype`: float64 for float64, otherwise float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# The values of `precision` that jax.lax treats as the default precision of an operand.
_DEFAULT_PRECISION = (None, "default", "fastest", "bfloat16", lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def is_default_precision(precision: Any) -> bool:
    """Whether `precision`, one value or a pair for lhs and rhs, leaves the accumulation precision to the hardware.

    >>> is_default_precision("bfloat16"), is_default_precision(("default", "highest"))
    (True, False)
    """
    per_operand = precision if isinstance(precision, (tuple, list)) else (precision,)
    return all(each in _DEFAULT_PRECISION for each in per_operand)


@hash_once
@dataclasses.dataclass(frozen=True)
class Operand:
    """The static description of an operand; `format` is None for a plain array.

    labels: one letter per dim. dtype: of a plain array, or the dtype that a ScaledArray dequantises to.
    block: the block size along each dim, 0 for the whole dim. tensor_scale_axes: the number of dims of the tensor
    scale, which are the leading dims of the operand. sharded_labels: labels of dims that are sharded over explicit mesh
    axes. partitioning: how XLA partitions the operand, according to its type.
    """

    labels: str
    shape: tuple[int, ...]
    dtype: np.dtype
    format: Format | None = None
    block: blocks.Block = ()
    has_zero_point: bool = False
    tensor_scale_axes: int = 0
    rotation: Hadamard | None = None
    sharded_labels: str = ""
    partitioning: Partitioning = ONE_DEVICE

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the block scale: the number of blocks along each dim."""
        return blocks.grid(self.shape, self.block)

    @property
    def scale_varies_along(self) -> str:
        """Labels along which the block scale has more than one entry."""
        if self.format is None:
            return ""
        return "".join(
            c for c, count in zip(self.labels, self.grid, strict=True) if count not in (0, 1)
        )  # may be symbolic

    @property
    def tensor_scale_varies_along(self) -> str:
        """Labels along which the tensor scale has more than one entry."""
        labels = self.labels[: self.tensor_scale_axes]
        return "".join(c for c, size in zip(labels, self.shape, strict=False) if size not in (0, 1))

    @property
    def rotated_label(self) -> str:
        """The label of the Hadamard-rotated dim, or "" without a rotation."""
        return "" if self.rotation is None else self.labels[self.rotation.axis]

    def size(self, label: str) -> int:
        return self.shape[self.labels.index(label)]

    def block_of(self, label: str) -> int:
        """The number of elements along a label that share a scale: all of them for a plain operand."""
        size = self.size(label)
        if self.format is None:
            return size
        block = self.block[self.labels.index(label)]
        return size if blocks.covers_axis(size, block) else block

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        if self.format is None:
            return f"{self.dtype}[{shape}]"
        return f"{self.format.name}[{shape}] in blocks of {blocks.trim(self.block)}"


def operand_of(x: ScaledArray | jax.Array, labels: str) -> Operand:
    """Describes an array whose dims have these labels."""
    if not isinstance(x, ScaledArray):
        sharded, partitioning = _sharded_labels(x, labels), partitioning_of(x)
        return Operand(labels, tuple(x.shape), np.dtype(x.dtype), sharded_labels=sharded, partitioning=partitioning)
    return Operand(
        labels,
        x.shape,
        np.dtype(x.dtype),
        x.format,
        blocks.expand(x.block, x.ndim),
        x.zero is not None,
        0 if x.tensor_scale is None else x.tensor_scale.ndim,
        x.rotation,
        _sharded_labels(x.data, labels),
        partitioning_of(x.data),
    )


def _sharded_labels(x: jax.Array, labels: str) -> str:
    return "".join(c for c, axes in zip(labels, jax.typeof(x).sharding.spec, strict=False) if axes is not None)


@hash_once
@dataclasses.dataclass(frozen=True)
class Problem:
    """The static description of a contraction of two operands.

    op: "dot", "ragged_dot" or "conv". preferred: the caller's `preferred_element_type`.
    ragged_label: the label of the dim that is split into groups. group_label: the label of the group dim.
    group_scales_to_rows: whether the ragged dim is free, so that a scale per group can be gathered to one per row.
    group_multiple: a number that divides every group size.
    lax_arguments: the remaining arguments of `lax.conv_general_dilated`, as (name, value) pairs.
    """

    op: str
    contraction: Contraction
    lhs: Operand
    rhs: Operand
    preferred: np.dtype | None = None
    precision: Any = None
    out_sharding: Any = None
    ragged_label: str = ""
    group_label: str = ""
    group_scales_to_rows: bool = False
    group_multiple: int = 1
    lax_arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all dims of the operands; symbolic dims of jax.export are not ints."""
        return self.lhs.shape + self.rhs.shape

    @property
    def operands(self) -> tuple[Operand, Operand]:
        return self.lhs, self.rhs

    @property
    def named_operands(self) -> tuple[tuple[str, Operand], ...]:
        return ("lhs", self.lhs), ("rhs", self.rhs)

    @property
    def partitioning(self) -> Partitioning:
        """How XLA partitions the contraction; `is_automatic` only if a kernel can run on shards of the operands."""
        joined = self.lhs.partitioning.joined(self.rhs.partitioning)
        are_scaled = self.lhs.format is not None and self.rhs.format is not None
        can_shard = self.op == "dot" and are_scaled and not self.contraction.batch and self.out_sharding is None
        return joined if can_shard or joined == ONE_DEVICE else joined._replace(is_automatic=False)

    @property
    def is_plain(self) -> bool:
        """Whether neither operand is quantised."""
        return self.lhs.format is None and self.rhs.format is None

    @functools.cached_property
    def out_dtype(self) -> np.dtype:
        if self.preferred is not None:
            return self.preferred
        return promoted(self.lhs.dtype, self.rhs.dtype)

    @property
    def epilogue_labels(self) -> str:
        """Labels along which a scale can vary and still be applied to the result."""
        return self.contraction.out + (self.group_label if self.group_scales_to_rows else "")

    @property
    def tileable_labels(self) -> str:
        """Labels of contracting dims that can be split into tiles: all but the ragged one."""
        return "".join(c for c in self.contraction.contracting if c != self.ragged_label)

    def __str__(self) -> str:
        c = self.contraction
        return f"{self.op} {c.lhs},{c.rhs}->{c.out}: {self.lhs} x {self.rhs} -> {self.out_dtype}"


def promoted(a: np.dtype, b: np.dtype) -> np.dtype:
    """Returns the dtype that JAX promotes both to, also under `jax.numpy_dtype_promotion("strict")`."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(_promotable(a), _promotable(b)))


def _promotable(dtype: np.dtype) -> np.dtype:
    """Returns a wider dtype for those that JAX does not promote: floats of 8 bits or less, integers of less than 8."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(jnp.bfloat16 if jnp.finfo(dtype).bits <= 8 else dtype)
    narrow = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8
    return np.dtype(np.int8 if narrow else dtype)


@hash_once
@dataclasses.dataclass(frozen=True)
class CastOutput:
    """One quantised output of a cast. Outputs with equal specs, keys and signs have equal codes.

    key: with stochastic rounding, the index of the random key (or of the uniform numbers) in CastArguments; None rounds
    to nearest. contracted: the contracting dim of the matmul that reads the output. The kernel may then choose any of
    `kernels.layouts`, and bfloat16 dequantised values in place of codes; None requires a ScaledArray in the layout of
    the input. is_residual: whether the output is saved as a residual, so that it must be codes. signs: for a rotation
    that draws its signs, their index in CastArguments.
    """

    spec: CastSpec
    key: int | None = None
    contracted: int | None = None
    is_residual: bool = False
    signs: int | None = None

    @property
    def is_stochastic(self) -> bool:
        return self.key is not None

    @property
    def codes_key(self) -> tuple[CastSpec, int | None, int | None]:
        """What determines the codes; outputs with equal ones share them."""
        return self.spec, self.key, self.signs

    def __str__(self) -> str:
        rounding = " with stochastic rounding" if self.is_stochastic else ""
        rounding = " with MS-EDEN scales" if self.spec.eden else rounding
        rotation = "" if self.spec.rotation is None else f" after a Hadamard rotation of {self.spec.rotation.size}"
        contracted = "" if self.contracted is None else f", contracting dim {self.contracted}"
        return f"{self.spec.format.name} in blocks of {self.spec.block}{rounding}{rotation}{contracted}"


@hash_once
@dataclasses.dataclass(frozen=True)
class CastProblem:
    """The static description of an array and the outputs to compute from it, if possible in one pass over memory.

    passed_arguments: those of "multiplier", "scale", "tensor_scale", "zero" and "uniform" (random numbers) that the
    caller passes, so that the kernel does not compute them; "group_multiplier" is a multiplier for each group, "mean"
    an array that is subtracted first.
    amax: whether to return the largest finite magnitude, float32 (). column_sums: whether to return the sums over all
    dims but the last. A kernel may return None for both, and the caller computes them.
    groups: the number of groups that rows are split into, each cast as if it were an array of its own; None without
    groups. Group sizes are data. group_multiple: groups start at multiples of this many rows in the outputs, with zeros
    between them.
    row_length: if the array is a shard (m, k), the length of rows of the whole matrix, from which stochastic rounding
    computes the index of an element; None for k.
    """

    op: ClassVar[str] = "cast"
    shape: tuple[int, ...]
    outputs: tuple[CastOutput, ...]
    passed_arguments: frozenset[str] = frozenset()
    amax: bool = False
    column_sums: bool = False
    groups: int | None = None
    group_multiple: int = 1
    row_length: int | None = None
    partitioning: Partitioning = ONE_DEVICE

    @property
    def dtype(self) -> np.dtype:
        return self.outputs[0].spec.input_dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all dims; symbolic dims of jax.export are not ints."""
        return self.shape

    def __str__(self) -> str:
        groups = "" if self.groups is None else f" with rows in {self.groups} groups"
        mean = " (differences to a mean)" if "mean" in self.passed_arguments else ""
        x = f"{self.dtype}[{','.join(map(str, self.shape))}]{mean}{groups}"
        return f"cast {x} -> {' and '.join(map(str, self.outputs))}"


class CastArguments(NamedTuple):
    """The arrays that a cast reads in addition to x; None for those that are computed or not needed.

    keys: random keys, indexed by `CastOutput.key`. uniforms: random numbers in [0, 1) that replace keys; each is None
    or has the shape of x, padded for the rotation of the cast. multiplier, scale, tensor_scale, zero: as in
    `sd.quantize`. group_sizes: (groups,); the multiplier is then (1, 1) for all groups, or (groups, 1).
    offset: if x is a shard, the flat index of its first element in the whole matrix, uint32 ().
    signs: of rotations that draw them, indexed by `CastOutput.signs`; each is None or float32 (size of the rotation,).
    mean: float32, subtracted from x in float32 before the cast. Its shape broadcasts to that of x; with groups it is
    (groups, features), and the row of each group is subtracted from the rows of that group.
    """

    keys: tuple[Key | None, ...] = ()
    uniforms: tuple[jax.Array | None, ...] = ()
    multiplier: jax.Array | None = None
    scale: jax.Array | None = None
    tensor_scale: jax.Array | None = None
    zero: jax.Array | None = None
    group_sizes: jax.Array | None = None
    offset: jax.Array | None = None
    signs: tuple[jax.Array | None, ...] = ()
    mean: jax.Array | None = None

    @property
    def passed(self) -> frozenset[str]:
        """The `passed_arguments` of a CastProblem: names of passed scales, "mean", and "uniform" for random numbers."""
        no_scales = self.multiplier is None and self.scale is None and self.tensor_scale is None and self.zero is None
        if no_scales and self.mean is None and all(uniform is None for uniform in self.uniforms):
            return frozenset()
        passed = {name for name in ("scale", "tensor_scale", "zero", "mean") if getattr(self, name) is not None}
        if self.multiplier is not None:
            passed.add("multiplier" if self.group_sizes is None or self.multiplier.size == 1 else "group_multiplier")
        return frozenset(passed | ({"uniform"} if any(u is not None for u in self.uniforms) else set()))

    def key(self, output: CastOutput) -> Key | None:
        return None if output.key is None or self.uniform(output) is not None else self.keys[output.key]

    def signs_of(self, output: CastOutput) -> jax.Array | None:
        return None if output.signs is None else self.signs[output.signs]

    def uniform(self, output: CastOutput) -> jax.Array | None:
        return None if output.key is None or not self.uniforms else self.uniforms[output.key]


class CastResult(NamedTuple):
    """For each output, a ScaledArray or a layout of one; amax and column sums, or None if they were not computed."""

    arrays: tuple[Any, ...]
    amax: jax.Array | None = None
    column_sums: jax.Array | None = None

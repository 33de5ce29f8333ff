"""The interface between the custom_vjp of `vjp` and the operations it differentiates: dot, ragged dot, convolution.

A training step has three matmuls: fwd (x by w), dgrad (g by w) and wgrad (x by g), where g is the cotangent of the
result. Each of x, w and g is an operand of two of them, with a different contracting dim in each. A `TrainOp` resolves
a recipe's casts for the dims of its operands, casts the operands, and computes the three matmuls:

    on one device, or automatic mesh axes    dot.DotOp, conv.ConvOp       ragged.RaggedDotOp
    inside a shard_map                       dot_sharded.ShardedOp        ragged_sharded.ShardedRaggedDotOp

This module has the protocol and the records that the custom_vjp and its operations exchange, and no arithmetic.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from scaledot.hashing import hash_once
from scaledot.kernels.spec import CastArguments, accumulation_dtype
from scaledot.numerics.rounding import Key
from scaledot.ops.operands import KernelChoice
from scaledot.parallel.types import Partitioning
from scaledot.recipes import Cast
from scaledot.train.options import Options


class Operands(NamedTuple):
    """The arrays of a call. groups: the sizes of ragged groups, int32 (G,); None for other operations."""

    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    groups: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Matmul:
    """One of the three matmuls, "fwd", "dgrad" or "wgrad", with the dtype and sharding of its result."""

    name: str
    dtype: np.dtype
    precision: Any = None
    out_sharding: Any = None
    kernel: KernelChoice = None

    @classmethod
    def of(cls, name: str, dtype, options: Options, out_sharding=None) -> "Matmul":
        return cls(name, dtype, options.precision, out_sharding, options.kernel)

    @property
    def unrounded(self) -> "Matmul":
        """The same matmul with its result in the accumulation dtype, to which partial results or a bias are added."""
        return dataclasses.replace(self, dtype=accumulation_dtype(self.dtype))

    @property
    def without_out_sharding(self) -> "Matmul":
        """The same matmul for the inside of a shard_map."""
        return dataclasses.replace(self, out_sharding=None)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the matmuls of `scaledot.ops`."""
        return {
            "precision": self.precision,
            "preferred_element_type": self.dtype,
            "out_sharding": self.out_sharding,
            "kernel": self.kernel,
        }


@dataclasses.dataclass(frozen=True)
class CastRequest:
    """The casts of one tensor for one or two matmuls, computed in one pass where a kernel can.

    Attributes:
      resolved: for each matmul, its cast resolved for the dims of the tensor (a ResolvedCast, ResolvedRowCast or
        ShardCast); equal ones give equal codes.
      keys: for each resolved cast, the key of its stochastic rounding, or None.
      residual_gemm: the matmul whose operand is saved as a residual.
      multiplier: the quantisation multiplier of delayed scaling, () or (groups,).
      mean: of the tensor over its tokens, float32, if the casts subtract it; else None.
      amax, column_sums: whether to compute the amax of the tensor, and its sums over all dims but those of the bias.
      signs: for each resolved cast, the signs of its rotation if they are drawn in each step, else None.
      uniforms: random numbers in [0, 1) that replace `keys` for shards that `offset` and `row_length` cannot describe.
      amax_axes: for each resolved cast of a shard, the mesh axes over which its amax is reduced.
      offset, row_length: the position of a shard in the global array, as in CastArguments and CastProblem.
    """

    tensor: str
    resolved: dict[str, Any]
    keys: dict[Any, Key | None]
    residual_gemm: str | None = None
    multiplier: jax.Array | None = None
    amax: bool = False
    column_sums: bool = False
    kernel: KernelChoice = None
    signs: dict[Any, jax.Array | None] = dataclasses.field(default_factory=dict)
    uniforms: dict[Any, jax.Array | None] = dataclasses.field(default_factory=dict)
    amax_axes: dict[Any, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    offset: jax.Array | None = None
    row_length: int | None = None
    mean: jax.Array | None = None

    @property
    def distinct(self) -> list[Any]:
        """The resolved casts, each once."""
        return list(dict.fromkeys(self.resolved.values()))

    def arguments(self, multiplier: jax.Array | None = None, group_sizes=None) -> CastArguments:
        """The CastArguments: one key, or one array of random numbers, for each distinct cast."""
        uniforms = tuple(self.uniforms.get(resolved) for resolved in self.distinct)
        keys = tuple(self.keys[resolved] for resolved in self.distinct)
        signs = tuple(self.signs.get(resolved) for resolved in self.distinct)
        return CastArguments(
            keys, uniforms, multiplier, group_sizes=group_sizes, offset=self.offset, signs=signs, mean=self.mean
        )

    @property
    def is_stochastic(self) -> bool:
        return any(key is not None for key in self.keys.values())

    def on_shards(self, uniform: Callable[["ShardCast", Key], jax.Array | None]) -> "CastRequest":
        """Returns the request for a shard: each ShardCast is replaced by its `resolved` cast.

        The `amax_axes` of the ShardCasts become those of the request.
        uniform: the random numbers of a shard from its ShardCast and a key; None where `offset` determines them.
        """
        uniforms = {cast: None if (key := self.keys[cast]) is None else uniform(cast, key) for cast in self.distinct}
        return dataclasses.replace(
            self,
            resolved={matmul: cast.resolved for matmul, cast in self.resolved.items()},
            keys={cast.resolved: self.keys[cast] for cast in self.distinct},
            signs={cast.resolved: self.signs.get(cast) for cast in self.distinct},
            uniforms={cast.resolved: numbers for cast, numbers in uniforms.items()},
            amax_axes={cast.resolved: cast.amax_axes for cast in self.distinct},
        )

    def key_index(self, resolved) -> int | None:
        """The position of a cast's key in `arguments`; None if it rounds to nearest."""
        return None if resolved.cast.rounding == "nearest" else self.distinct.index(resolved)

    def signs_index(self, resolved) -> int | None:
        """The position of the signs of a cast's rotation in `arguments`; None if they are not drawn."""
        return None if self.signs.get(resolved) is None else self.distinct.index(resolved)

    @property
    def requantized(self) -> "CastRequest | None":
        """The request for the casts of the dequantised operand of fwd; None if there are none."""
        again = self._of({m: cast for m, cast in self.resolved.items() if _is_requantized(cast)})
        return None if again is None else dataclasses.replace(again, mean=None)  # fwd has subtracted it

    @property
    def direct(self) -> "CastRequest":
        """The request for the casts of the tensor itself."""
        direct = self._of({m: cast for m, cast in self.resolved.items() if not _is_requantized(cast)})
        assert direct is not None  # fwd is among them
        return direct

    def _of(self, resolved: dict[str, Any]) -> "CastRequest | None":
        if len(resolved) == len(self.resolved):
            return self
        return dataclasses.replace(self, resolved=resolved) if resolved else None


def _is_requantized(resolved: Any) -> bool:
    return (resolved.resolved if isinstance(resolved, ShardCast) else resolved).cast.requantized


class ShardCast(NamedTuple):
    """A resolved cast of one device's shard of a tensor. amax_axes: the mesh axes over which its amax is reduced."""

    tensor: str
    resolved: Any
    amax_axes: tuple[str, ...]


class CastOperands(NamedTuple):
    """The operand of each matmul, and the amax and column sums of the tensor if the cast kernel computed them."""

    operands: dict[str, Any]
    amax: jax.Array | None = None
    column_sums: jax.Array | None = None


class TokenMeans(NamedTuple):
    """The sums and means of x or g over all tokens, float32.

    Dims of tokens have size 1; of rows in groups, there is a row for each group, (groups, features).
    """

    sum: jax.Array
    mean: jax.Array


class MeanTerm(NamedTuple):
    """The operands of the term that means add to a matmul; see `scaledot.train.means`.

    lhs: the mean of x in fwd and wgrad, of g in dgrad. rhs: the unquantised w in fwd and dgrad, the sums of g in wgrad.
    """

    lhs: jax.Array
    rhs: jax.Array


class TrainOp(Protocol):
    """A contraction of x and w whose operands can be cast for, and multiplied in, each of fwd, dgrad and wgrad.

    matmul is "fwd", "dgrad" or "wgrad" (in `multiply`, the `Matmul` of that name); tensor is "x", "w" or "g"; groups
    has the sizes of ragged groups, int32 (G,), and is None for other operations.
    """

    @property
    def has_batch(self) -> bool:
        """Whether there are batch dims."""
        ...

    @property
    def sums_tokens(self) -> bool:
        """Whether the `column_sums` of a CastRequest for g are its sums over tokens, the leading dims."""
        ...

    @property
    def partitioning(self) -> Partitioning | None:
        """How XLA partitions the computation; None inside a shard_map."""
        ...

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> Hashable:
        """The cast with a block size for each dim of the tensor; equal results mean equal codes."""
        ...

    def cast(self, request: CastRequest, x: jax.Array, groups: jax.Array | None) -> CastOperands:
        """x quantised for each matmul of the request, in the layouts that `multiply` takes."""
        ...

    def unquantised_operand(self, matmul: str, tensor: str, x: jax.Array, groups: jax.Array | None) -> Any:
        """x unquantised, in the layout that `multiply` takes."""
        ...

    def unclipped_mask(self, resolved: Any, x: jax.Array, q: Any, groups: jax.Array | None) -> jax.Array | None:
        """A boolean array that is true where the cast did not clip x; None if it never clips."""
        ...

    def amax(self, tensor: str, x: jax.Array, groups: jax.Array | None) -> jax.Array:
        """The largest finite magnitude of x, without rows that belong to no group, or of each group, float32 (G,)."""
        ...

    def token_means(self, tensor: str, x: jax.Array, groups: jax.Array | None) -> TokenMeans:
        """The means of x or g over all tokens, for each batch index and feature, or for each group and feature."""
        ...

    def multiply(
        self,
        matmul: Matmul,
        lhs: Any,
        rhs: Any,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        """The matmul of two operands, plus a bias in fwd and the term of means, rounded once to `matmul.dtype`."""
        ...

    def bias_gradient(self, g: jax.Array, groups: jax.Array | None) -> jax.Array:
        """The sums of g over all dims but those of the bias, in float32, or float64 if g is float64."""
        ...


class LocalOp(TrainOp, Protocol):
    """The operation on one device's shards that a ShardedOp runs between its collectives."""

    def to_logical_layout(self, q: Any) -> Any:
        """An operand as an array or ScaledArray with its dims in logical order, whatever layout its kernel wrote."""
        ...


class LocalRaggedOp(TrainOp, Protocol):
    """The operation on one device's groups that a ShardedRaggedDotOp runs between its collectives."""

    def add_bias(self, y: jax.Array, bias: jax.Array, groups: jax.Array) -> jax.Array:
        """y (rows, n) plus, for each row, the row of bias (groups, n) of its group."""
        ...


@hash_once
@dataclasses.dataclass(frozen=True)
class StaticArgs:
    """The non-differentiable, hashable argument of the custom_vjp: the operation and the options of the call."""

    op: TrainOp
    options: Options

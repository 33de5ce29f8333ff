"""A weight with the codes that `cast_weights` made of it, which `dense`, `dot_general` and `einsum` multiply by.

Codes of a weight depend on its elements, on the recipe, and on which of its axes a matmul contracts. The last two are
static (`WeightSpec`) and are checked wherever codes are used. That the elements are still the same is not checked.

For w (4096, 1024) under `mxfp8` there are two operands of 1-byte codes: one with blocks of 32 along axis 0, which fwd
contracts, and one along axis 1, for dgrad. Under `fp8_block` the 128×128 blocks of both are the same, and so there is
one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.hashing import hash_once
from scaledot.ops.operands import float_operand
from scaledot.recipes import Recipe
from scaledot.train.flatten import flatten
from scaledot.train.residuals import as_bits, from_bits


@hash_once
@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """What the codes of one weight depend on besides its elements.

    shape, master_dtype: those of the weight. dtype: the one that it is converted to before the casts. contracted: the
    axes that fwd contracts. to_matrices: whether contracted axes, and free ones, were flattened to one each.
    """

    recipe: Recipe
    shape: tuple[int, ...]
    master_dtype: np.dtype
    dtype: np.dtype
    contracted: tuple[int, ...]
    to_matrices: bool

    @property
    def contraction(self) -> Contraction:
        """fwd, of an x (rows, contracted axes)."""
        count = len(self.contracted)
        numbers = (tuple(range(1, count + 1)), self.contracted), ((), ())
        return from_dimension_numbers(numbers, count + 1, len(self.shape))

    def check_use(self, recipe: Recipe, contraction: Contraction) -> None:
        """Raise unless a matmul under this recipe would cast w to the same codes."""
        if recipe != self.recipe:
            other = "another recipe of that name" if recipe.name == self.recipe.name else repr(recipe.name)
            raise ValueError(
                f"{self} was cast under {self.recipe.name!r} and is multiplied under {other}; give `cast_weights` and "
                "the matmul the same recipe"
            )
        if _flat_axes(contraction, self.to_matrices) != _flat_axes(self.contraction, self.to_matrices):
            contracted, batch = (_axes(contraction, labels) for labels in (contraction.contracted, contraction.batch))
            also = f", with batch axes {batch}," if batch else ""
            raise ValueError(
                f"{self} was cast to be contracted along axes {self.contracted} and is contracted along axes "
                f"{contracted}{also} here; give `cast_weights` the axes as `contracting` (it casts no batches), or "
                "leave the weight out with `select`"
            )

    def __str__(self) -> str:
        return f"a weight {described(self.shape, self.master_dtype)}"


def _axes(contraction: Contraction, labels: str) -> tuple[int, ...]:
    return tuple(contraction.rhs.index(c) for c in labels)


@functools.lru_cache(maxsize=1024)
def _flat_axes(contraction: Contraction, to_matrices: bool) -> tuple[Any, ...]:
    """For each axis of the flattened w: the axes of w that it consists of, and whether it is contracted or batch."""
    flat = flatten(contraction, to_matrices)
    kinds = ((c in flat.flat.contracted, c in flat.flat.batch) for c in flat.w.flat)
    return tuple((_axes(contraction, flat.w.members(c)), kind) for c, kind in zip(flat.w.flat, kinds, strict=True))


def described(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WeightCodes:
    """The quantised operands of one weight, or of a stack of them along leading axes.

    operands: each different one once, narrow floats as Bits. taken_by: (matmul, position in `operands`) of those that
    are quantised. ndim: of the first array in `operands`, without stacked axes.
    """

    operands: tuple[Any, ...]
    taken_by: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    ndim: int = dataclasses.field(metadata={"static": True})
    spec: WeightSpec = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, spec: WeightSpec, quantized: dict[str, Any]) -> "WeightCodes":
        """From the operand of each matmul; those that are one object are kept once."""
        different = {id(q): q for q in quantized.values()}
        positions = list(different)
        operands = tuple(map(as_bits, different.values()))
        taken_by = tuple((matmul, positions.index(id(q))) for matmul, q in quantized.items())
        return cls(operands, taken_by, jax.tree.leaves(operands)[0].ndim, spec)

    def bits(self, matmul: str) -> Any:
        """The operand of a matmul, with its codes as Bits; None if that matmul takes w unquantised."""
        position = dict(self.taken_by).get(matmul)
        return None if position is None else self.operands[position]

    def operand(self, matmul: str) -> Any:
        return from_bits(self.bits(matmul))

    @property
    def stack(self) -> tuple[int, ...]:
        """The sizes of stacked axes."""
        first = jax.tree.leaves(self.operands)[0]
        return tuple(first.shape[: first.ndim - self.ndim])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CastWeight:
    """A weight and its codes: stands for `master.astype(dtype)` as `w` of `train.dense`, `dot_general` and `einsum`.

    Those multiply by the codes; the gradient goes to the master weight. Nothing else takes it: `master` is the plain
    array. Of a stack of weights, each slice along axis 0 of all leaves, as `jax.lax.scan` and `nn.scan` make it, is
    a CastWeight.
    """

    master: Any  # the first leaf: nn.Module.param compares its shape with that of the initialiser
    codes: WeightCodes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.master.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is multiplied, and its gradient computed."""
        return self.codes.spec.dtype

    def astype(self, dtype) -> "CastWeight":
        """The CastWeight itself; raises if it was cast from another dtype."""
        if np.dtype(dtype) != self.dtype:
            raise ValueError(
                f"{self!r} was converted to {self.dtype} before it was cast, and is wanted in {np.dtype(dtype)} here; "
                f"give `cast_weights` the compute dtype: dtype={np.dtype(dtype).name!r}"
            )
        return self

    def __getitem__(self, index) -> "CastWeight":
        """The CastWeight itself for `...`, which is how NNX reads a Param."""
        if index is not ...:
            raise TypeError(f"{self!r} cannot be indexed: codes come in blocks; index `master`")
        return self

    def __array__(self, dtype=None, copy=None):
        raise TypeError(_no_array(self))

    @property
    def __jax_array__(self):
        """Raises TypeError as soon as JAX looks for the method: some of its paths would look and never call."""
        raise TypeError(_no_array(self))

    def __repr__(self) -> str:
        return f"CastWeight({described(self.shape, self.codes.spec.master_dtype)}, {self.codes.spec.recipe.name})"


def _no_array(w: CastWeight) -> str:
    name = repr(w.codes.spec.recipe.name)
    return (
        f"{w!r} was given to something that takes plain arrays; only train.dense, train.dot_general and train.einsum "
        "take it. A Flax layer needs a recipe and a `promote_dtype` that passes it on: linen.with_recipe(model, "
        f"{name}) and nnx.with_recipe(model, {name}) set both, and so does nn.Dense(..., dot_general_cls="
        f"linen.make_dot_general_cls({name}), promote_dtype=linen.promote_dtype), with `linen` and `nnx` of scaledot. "
        "Leave other weights out with `select` of cast_weights, or use `master`"
    )


def weight_operand(w: Any) -> tuple[jax.Array, WeightCodes | None]:
    """w as an array of floats, and the codes that were made of it."""
    if not isinstance(w, CastWeight):
        return float_operand(w, "w"), None
    spec, stack = w.codes.spec, w.codes.stack
    if w.shape != spec.shape:
        raise ValueError(f"`w` is a stack of {stack} weights of shape {spec.shape}; scan over it, or take one of them")
    return float_operand(w.master, "w").astype(spec.dtype), w.codes


def plain_weight(w: Any, verb: str) -> jax.Array:
    """w as an array of floats, for a verb that takes no codes."""
    if isinstance(w, CastWeight):
        raise TypeError(
            f"train.{verb} casts its own weights and takes no {w!r}; leave it out of cast_weights with "
            "select={its path: False, '*kernel': True}"
        )
    return float_operand(w, "w")


def promote_around(promote: Callable[[list[Any]], Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """What `promote` makes of arrays; a CastWeight stays itself, if it was cast from the dtype of the others."""
    promoted = promote([a.master if isinstance(a, CastWeight) else a for a in arrays])
    pairs = zip(arrays, promoted, strict=True)
    return [a.astype(plain.dtype) if isinstance(a, CastWeight) else plain for a, plain in pairs]

"""`CastWeight`: a master weight with its codes from `cast_weights`, as operand `w` of a training matmul.

The codes of a weight depend on its elements, on the recipe, and on its contracting dims. The last two are static
(`WeightSpec`) and are checked at every use. Codes that are older than the elements of the weight are not detected.

w (4096, 1024) under `mxfp8` has two operands of 1-byte codes: one with blocks of 32 along axis 0, the contracting dim
of fwd, and one with blocks along axis 1, for dgrad. Under `fp8_block` both matmuls share one operand with 128×128
blocks.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from scaledot.array import ScaledArray
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

    shape, master_dtype: those of the weight. dtype: that in which it is quantised. contracting: the contracting axes
    of fwd. to_matrices: whether contracting and free axes were flattened to one each (see `flatten`).
    """

    recipe: Recipe
    shape: tuple[int, ...]
    master_dtype: np.dtype
    dtype: np.dtype
    contracting: tuple[int, ...]
    to_matrices: bool

    @property
    def contraction(self) -> Contraction:
        """The contraction of fwd for an x of shape (rows, *contracting axes)."""
        count = len(self.contracting)
        numbers = (tuple(range(1, count + 1)), self.contracting), ((), ())
        return from_dimension_numbers(numbers, count + 1, len(self.shape))

    def check_use(self, recipe: Recipe, contraction: Contraction) -> None:
        """Raises ValueError unless this contraction under this recipe would cast w to the same codes."""
        if recipe != self.recipe:
            other = "another recipe of that name" if recipe.name == self.recipe.name else repr(recipe.name)
            raise ValueError(
                f"{self} was cast under {self.recipe.name!r} and is multiplied under {other}; pass the same recipe to "
                "`cast_weights` and the matmul"
            )
        if _flat_axes(contraction, self.to_matrices) != _flat_axes(self.contraction, self.to_matrices):
            contracting, batch = (_axes(contraction, labels) for labels in (contraction.contracting, contraction.batch))
            with_batch = f", with batch axes {batch}," if batch else ""
            raise ValueError(
                f"{self} was cast for contracting axes {self.contracting} and is contracted along axes "
                f"{contracting}{with_batch} here; pass the axes to `cast_weights` as `contracting` (batch axes are not "
                "supported), or leave the weight out with `select`"
            )

    def __str__(self) -> str:
        return f"a weight {described(self.shape, self.master_dtype)}"


def _axes(contraction: Contraction, labels: str) -> tuple[int, ...]:
    return tuple(contraction.rhs.index(c) for c in labels)


@functools.lru_cache(maxsize=1024)
def _flat_axes(contraction: Contraction, to_matrices: bool) -> tuple[Any, ...]:
    """For each dim of the flattened w: the axes of w it consists of, and whether it is a contracting or batch dim."""
    flat = flatten(contraction, to_matrices)
    return tuple(
        (_axes(contraction, flat.w.members(c)), (c in flat.flat.contracting, c in flat.flat.batch)) for c in flat.w.flat
    )


def described(shape: tuple[int, ...], dtype: Any) -> str:
    """An aval as text, such as "float32[64,32]"."""
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WeightCodes:
    """The quantised operands of one weight, or of a stack of weights along leading axes.

    operands: each distinct operand once, narrow floats as Bits. index_of: (matmul, index into `operands`) for each
    matmul whose w is quantised. ndim: that of the first array in `operands`, without stacked axes.
    """

    operands: tuple[Any, ...]
    index_of: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    ndim: int = dataclasses.field(metadata={"static": True})
    spec: WeightSpec = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, spec: WeightSpec, quantized: dict[str, Any]) -> "WeightCodes":
        """The codes from the operand of each matmul; one object that serves two matmuls is stored once."""
        distinct = {id(q): q for q in quantized.values()}
        ids = list(distinct)
        operands = tuple(map(as_bits, distinct.values()))
        index_of = tuple((matmul, ids.index(id(q))) for matmul, q in quantized.items())
        return cls(operands, index_of, jax.tree.leaves(operands)[0].ndim, spec)

    def bits(self, matmul: str) -> Any:
        """The operand of a matmul with codes as Bits; None if the recipe does not quantise w there."""
        index = dict(self.index_of).get(matmul)
        return None if index is None else self.operands[index]

    def operand(self, matmul: str) -> Any:
        return from_bits(self.bits(matmul))

    @property
    def stack(self) -> tuple[int, ...]:
        """The sizes of the leading axes of a stack of weights; () for one weight."""
        first = jax.tree.leaves(self.operands)[0]
        return tuple(first.shape[: first.ndim - self.ndim])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CastWeight:
    """A master weight and its codes; the argument `w` of `train.dense`, `train.dot_general` and `train.einsum`.

    These functions multiply by the codes and return the gradient for `master`; other functions take `master` itself. A
    stack of weights can be sliced along axis 0 of all leaves, as `jax.lax.scan` and `nn.scan` do; each slice is
    a CastWeight.
    """

    master: Any  # must be the first leaf: nn.Module.param compares its shape with that of the initializer
    codes: WeightCodes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.master.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which the weight was quantised, and in which its gradient is computed."""
        return self.codes.spec.dtype

    def astype(self, dtype) -> "CastWeight":
        """The CastWeight itself; raises ValueError if it was quantised in another dtype."""
        if np.dtype(dtype) != self.dtype:
            raise ValueError(
                f"{self!r} was quantised in {self.dtype}, but the layer computes in {np.dtype(dtype)}; pass "
                f"dtype={np.dtype(dtype).name!r} to `cast_weights`"
            )
        return self

    def __getitem__(self, index) -> "CastWeight":
        """The CastWeight itself for `[...]`, which is how NNX reads a Param."""
        if index is not ...:
            raise TypeError(f"{self!r} cannot be indexed, as an index could cut blocks of codes; index `master`")
        return self

    def __array__(self, dtype=None, copy=None):
        raise TypeError(_no_array(self))

    @property
    def __jax_array__(self):
        """Raises TypeError at attribute access, because some code paths of JAX look the method up and never call it."""
        raise TypeError(_no_array(self))

    def __repr__(self) -> str:
        return f"CastWeight({described(self.shape, self.codes.spec.master_dtype)}, {self.codes.spec.recipe.name})"


def _no_array(w: CastWeight) -> str:
    name = repr(w.codes.spec.recipe.name)
    return (
        f"{w!r} was passed to a function of plain arrays; only train.dense, train.dot_general and train.einsum take "
        "it. A Flax layer needs a recipe and a `promote_dtype` that accepts a CastWeight: linen.with_recipe(model, "
        f"{name}) and nnx.with_recipe(model, {name}) of scaledot set both, as does nn.Dense(..., dot_general_cls="
        f"linen.make_dot_general_cls({name}), promote_dtype=linen.promote_dtype). Leave other weights out with "
        "`select` of cast_weights, or use `master`"
    )


def weight_operand(w: Any) -> tuple[jax.Array, WeightCodes | None]:
    """w as an array of floats, and its codes if it is a CastWeight."""
    if not isinstance(w, CastWeight):
        return float_operand(w, "w"), None
    spec, stack = w.codes.spec, w.codes.stack
    if w.shape != spec.shape:
        raise ValueError(
            f"`w` is a stack of {stack} weights of shape {spec.shape}; scan over it, or slice one weight from it"
        )
    return float_operand(w.master, "w").astype(spec.dtype), w.codes


def plain_weight(w: Any, function: str) -> jax.Array:
    """w as an array of floats, for a function of `scaledot.train` that does not take a CastWeight."""
    if isinstance(w, CastWeight):
        raise TypeError(
            f"train.{function} casts its own weights and does not take {w!r}; leave it out of cast_weights with "
            "select={its path: False, '*kernel': True}"
        )
    return float_operand(w, "w")


def promote_around(promote: Callable[[list[Any]], Sequence[Any]], arrays: Sequence[Any]) -> list[Any]:
    """`promote(arrays)`, with each CastWeight and ScaledArray kept, of the promoted `dtype`.

    Raises ValueError for a CastWeight that was quantised in another dtype. A ScaledArray takes part in the promotion
    with its `dtype`.
    """
    promoted = promote([_stand_in(a) for a in arrays])
    pairs = zip(arrays, promoted, strict=True)
    return [a.astype(plain.dtype) if isinstance(a, (CastWeight, ScaledArray)) else plain for a, plain in pairs]


def _stand_in(x: Any) -> Any:
    """An array of the dtype of a weight for functions of plain arrays; other arguments are returned unchanged."""
    if isinstance(x, ScaledArray):
        return np.zeros((), x.dtype)
    return x.master if isinstance(x, CastWeight) else x

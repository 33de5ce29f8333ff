"""ScaledArray: codes and the scales that give them meaning, as one pytree.

There is one type for every format. `data` has the logical shape; `scale` has the same rank and one entry
per block; which elements form a block is stored in `block`, never guessed from shapes, so it survives vmap,
scan, stacking and transposition. The constructor checks nothing, because leaves may be tracers, shapes,
shardings or specs; the verb that needs an invariant checks it.

Shape verbs move codes and scales together and change no value. Where a verb would cut through a block it
raises and says which axis; dequantise, reshape and quantise again if that is what is meant.
"""

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import serialization, shape_ops
from scaledot.formats import Format
from scaledot.numerics import blocks
from scaledot.numerics.hadamard import Hadamard


@serialization.register
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledArray:
    """A low-precision array: value = decode(data) * scale (* tensor_scale), minus `zero` first where there is one.

    data: codes, in the logical shape.
    scale: one entry per block, in the format's own scale dtype.
    tensor_scale: float32, a scalar or one per leading index; None unless the format has two levels.
    zero: the zero point of asymmetric integer codes, shaped as the scale; None otherwise.
    format, block, dtype, rotation: static; `dtype` is what the array stands for, `rotation` what was applied
    before the cast and is undone by `dequantize`.
    """

    data: Any
    scale: Any
    tensor_scale: Any = None
    zero: Any = None
    _: dataclasses.KW_ONLY
    format: Format = dataclasses.field(metadata={"static": True})
    block: blocks.Block = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    rotation: Hadamard | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes packed to the format's bits, plus all scales."""
        packed = [(self.data, self.format.bits), (self.zero, self.format.bits)]
        whole = [
            (leaf, 8 * np.dtype(leaf.dtype).itemsize) for leaf in (self.scale, self.tensor_scale) if leaf is not None
        ]
        return sum(-(-math.prod(leaf.shape) * bits // 8) for leaf, bits in packed + whole if leaf is not None)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d ScaledArray")
        return self.shape[0]

    def astype(self, dtype) -> "ScaledArray":
        """The same codes, standing for an array of another float dtype."""
        dtype = np.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"`dtype` must be a float dtype, not {dtype}")
        return dataclasses.replace(self, dtype=dtype)

    @property
    def T(self) -> "ScaledArray":
        return self.transpose()

    @property
    def mT(self) -> "ScaledArray":
        if self.ndim < 2:
            raise ValueError(f"mT needs at least 2 axes; this array has shape {self.shape}")
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> "ScaledArray":
        axes = list(range(self.ndim))
        a, b = blocks.positive_axis(axis1, self.ndim), blocks.positive_axis(axis2, self.ndim)
        axes[a], axes[b] = axes[b], axes[a]
        return shape_ops.transpose(self, axes)

    def transpose(self, *axes) -> "ScaledArray":
        """Axes permuted as numpy does; without arguments, reversed."""
        return shape_ops.transpose(self, _one_tuple(axes) or tuple(range(self.ndim))[::-1])

    def reshape(self, *shape) -> "ScaledArray":
        """Another shape with the same scales, where blocks stay whole; otherwise an error that names the axes."""
        return shape_ops.reshape(self, _one_tuple(shape))

    def __getitem__(self, index) -> "ScaledArray":
        """Ints, slices, None, Ellipsis and integer arrays; a slice of a blocked axis must keep blocks whole."""
        return shape_ops.take(self, index if isinstance(index, tuple) else (index,))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        """Raises TypeError; without this method NumPy would index element by element into an array of objects."""
        raise TypeError(_no_conversion(self))

    @property
    def __jax_array__(self):
        """Raises TypeError as soon as JAX looks for the method: some of its paths would look and never call."""
        raise TypeError(_no_conversion(self))

    def __repr__(self) -> str:
        shape = ",".join(map(str, getattr(self.data, "shape", "?")))
        rotated = f", rotation={self.rotation.size}" if self.rotation else ""
        return (
            f"ScaledArray({self.format.name}[{shape}], block={self.block}, dtype={np.dtype(self.dtype).name}{rotated})"
        )


def _no_conversion(q: ScaledArray) -> str:
    return (
        f"{q!r} does not convert to an array implicitly; write scaledot.dequantize(q) for its values, "
        "scaledot.matmul(x, q) to multiply by it, or q.data for its codes"
    )


def _one_tuple(args: tuple) -> tuple[int, ...]:
    """(2, 3), ((2, 3),) and ([2, 3],) all mean (2, 3)."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, np.ndarray)) else args
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"axes and sizes must be integers, not {sizes}") from None

"""ScaledArray: codes and their scales, as one pytree, for every format.

`data` has the logical shape; `scale` has the same rank and one entry per block. The block shape is a static field and
never inferred from array shapes, so it survives vmap, scan, stacking and transposition. For example, mxfp8 codes of
shape (1024, 4096) with block (32,) have scales of shape (1024, 128). The constructor checks nothing, because leaves may
be tracers, ShapeDtypeStructs, shardings or PartitionSpecs; functions that depend on an invariant check it.

Transpose, reshape and indexing apply to codes and scales together and leave dequantised values unchanged. An operation
that would cut a block raises an error that names the axis; dequantise first in that case.
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
    """A low-precision array with dequantised values (decode(data) - zero) * scale * tensor_scale.

    data: codes, in the logical shape.
    scale: one entry per block, in the format's scale dtype.
    tensor_scale: float32, a scalar or one entry per index of the leading axes; None unless the format has two levels.
    zero: zero point of asymmetric integer codes, in the shape of `scale`; None otherwise.
    format: static, a Format.
    block: static, the block shape aligned to the trailing axes; 0 is a whole axis.
    dtype: static, the dtype that `dequantize` returns by default.
    rotation: static, the Hadamard transform that was applied before the cast and that `dequantize` inverts; or None.
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
        """Bytes of all leaves, with codes and zero points packed to the format's bits."""
        codes = [(self.data, self.format.bits), (self.zero, self.format.bits)]
        scales = [
            (leaf, 8 * np.dtype(leaf.dtype).itemsize) for leaf in (self.scale, self.tensor_scale) if leaf is not None
        ]
        return sum(-(-math.prod(leaf.shape) * bits // 8) for leaf, bits in codes + scales if leaf is not None)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d ScaledArray")
        return self.shape[0]

    def astype(self, dtype) -> "ScaledArray":
        """The same codes and scales with another float `dtype`, which `dequantize` returns."""
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
        """Permutes axes like numpy.ndarray.transpose; reverses them without arguments."""
        return shape_ops.transpose(self, _one_tuple(axes) or tuple(range(self.ndim))[::-1])

    def reshape(self, *shape) -> "ScaledArray":
        """Reshapes codes and scales; raises an error that names the axes if it would cut a block."""
        return shape_ops.reshape(self, _one_tuple(shape))

    def __getitem__(self, index) -> "ScaledArray":
        """Indexes by ints, slices, None, Ellipsis and integer arrays; slices must begin and end at block boundaries."""
        return shape_ops.take(self, index if isinstance(index, tuple) else (index,))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        """Raises TypeError; without this method NumPy would build an object array by indexing each element."""
        raise TypeError(_no_conversion(self))

    @property
    def __jax_array__(self):
        """Raises TypeError on attribute access, because some code paths of JAX test for it without calling it."""
        raise TypeError(_no_conversion(self))

    def __repr__(self) -> str:
        shape = ",".join(map(str, getattr(self.data, "shape", "?")))
        rotated = f", rotation={self.rotation.size}" if self.rotation else ""
        return (
            f"ScaledArray({self.format.name}[{shape}], block={self.block}, dtype={np.dtype(self.dtype).name}{rotated})"
        )


def _no_conversion(q: ScaledArray) -> str:
    return (
        f"{q!r} does not convert to an array implicitly; write scaledot.dequantize(q) for dequantised values, "
        "scaledot.matmul(x, q) for a matmul, or q.data for its codes. A Flax model takes quantised kernels through "
        "scaledot.linen.with_quantized_params(model), or after scaledot.nnx.quantize_params(model, rules)"
    )


def _one_tuple(args: tuple) -> tuple[int, ...]:
    """Returns (2, 3) for any of the argument lists (2, 3), ((2, 3),) and ([2, 3],)."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, np.ndarray)) else args
    try:
        return tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"axes and sizes must be integers, not {sizes}") from None

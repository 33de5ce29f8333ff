"""Scaling modes: how many elements share a scale, and of which kind.

A mode is a row of one table. Orientation is theirs: seen as a matrix that is cut in two at `flatten_axis`, "rowwise"
blocks run along the last axis (right of the cut) and "colwise" blocks along the last axis left of it. Colwise data are
stored transposed ("T") in every mode but MXFP8's.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from scaledot.formats import FORMATS, Format


class QuantizeLayout(enum.Enum):
    """Which orientations a tensor is quantised in.

    >>> QuantizeLayout.ROWWISE_COLWISE.has_colwise, QuantizeLayout.ROWWISE.has_colwise
    (True, False)
    """

    ROWWISE = "rowwise"
    COLWISE = "colwise"
    ROWWISE_COLWISE = "rowwise_colwise"

    @property
    def has_rowwise(self) -> bool:
        return self is not QuantizeLayout.COLWISE

    @property
    def has_colwise(self) -> bool:
        return self is not QuantizeLayout.ROWWISE

    @property
    def is_rowwise_only(self) -> bool:
        return self is QuantizeLayout.ROWWISE

    @property
    def is_colwise_only(self) -> bool:
        return self is QuantizeLayout.COLWISE

    @property
    def is_rowwise_colwise(self) -> bool:
        return self is QuantizeLayout.ROWWISE_COLWISE


class TensorUsage(enum.Enum):
    """Which side of a product a tensor is on; `_TRANS` when the product sums over its other axes than forward does.

    >>> ScalingMode.MXFP8_1D_SCALING.get_quantize_layout(TensorUsage.RHS)
    <QuantizeLayout.COLWISE: 'colwise'>
    """

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """What a mode means: formats by dtype of the codes, and the (kept, summed) tile of a block; None is the tensor."""

    formats: tuple[str, ...] = ()
    tile: tuple[int, int] | None = None
    delayed: bool = False
    colwise_layout: str = "T"


class DTypes(Set[np.dtype]):
    """A set of dtypes; a member may be asked for as a jnp or ml_dtypes scalar type, a numpy dtype or a name.

    In a plain set these differ, because equal dtypes and scalar types have different hashes.

    >>> jnp.float32 in DTypes(["float32"]), np.dtype("float32") in DTypes([jnp.float32])
    (True, True)
    >>> DTypes([jnp.float32]) == {jnp.float32}
    True
    """

    def __init__(self, dtypes: Iterable[Any]):
        self._dtypes = frozenset(map(np.dtype, dtypes))

    def __contains__(self, dtype: object) -> bool:
        try:
            return np.dtype(dtype) in self._dtypes  # pyright: ignore[reportArgumentType, reportCallIssue]
        except TypeError:
            return False  # no dtype, and so in no set of them

    def __iter__(self) -> Iterator[np.dtype]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

    def __le__(self, other: Set[Any]) -> bool:
        if not isinstance(other, Set):
            return NotImplemented
        return all(any(dtype == each for each in other) for dtype in self)

    def __repr__(self) -> str:
        return f"DTypes({sorted(dtype.name for dtype in self._dtypes)})"


_FP8 = ("fp8_e4m3", "fp8_e5m2")


class ScalingMode(enum.Enum):
    """How a tensor is scaled.

    The last two are ours: the blocks of 128 that Float8BlockScaling uses.

    >>> ScalingMode.MXFP8_1D_SCALING.get_scale_dtype()
    dtype(float8_e8m0fnu)
    >>> ScalingMode.NVFP4_1D_SCALING.is_colwise_transposed
    True
    """

    NO_SCALING = "no_scaling"
    DELAYED_TENSOR_SCALING = "delayed_tensor_scaling"
    CURRENT_TENSOR_SCALING = "current_tensor_scaling"
    MXFP8_1D_SCALING = "mxfp8_1d_scaling"
    NVFP4_1D_SCALING = "nvfp4_1d_scaling"
    NVFP4_2D_SCALING = "nvfp4_2d_scaling"
    FP8_1D_BLOCK_SCALING = "fp8_1d_block_scaling"
    FP8_2D_BLOCK_SCALING = "fp8_2d_block_scaling"

    @property
    def row(self) -> Row:
        return _TABLE[self]

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(FORMATS[name] for name in self.row.formats)

    def format_of(self, dtype: Any) -> Format:
        """The format whose codes have this dtype."""
        given = np.dtype(dtype).name
        for format in self.formats:
            if format.element == given:
                return format
        raise ValueError(
            f"{self.name} has codes of {' or '.join(f.element for f in self.formats) or 'no kind'}, not {given}"
        )

    def get_scale_dtype(self) -> np.dtype:
        scale = FORMATS[self.row.formats[0]].scale if self.row.formats else "float32"
        return np.dtype(jnp.dtype(scale))

    def get_data_layout(self) -> str:
        """Of rowwise and colwise data: "NN" or "NT"."""
        return "N" + self.row.colwise_layout

    def get_quantize_layout(self, usage: TensorUsage) -> QuantizeLayout:
        """The orientation in which a tensor takes part."""
        rowwise = self is ScalingMode.NO_SCALING or usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS)
        return QuantizeLayout.ROWWISE if rowwise else QuantizeLayout.COLWISE

    def get_compatible_q_dtypes(self) -> DTypes:
        """The dtypes of codes; without scaling, those of the arrays themselves.

        >>> jnp.float8_e5m2 in ScalingMode.MXFP8_1D_SCALING.get_compatible_q_dtypes()
        True
        """
        if self is ScalingMode.NO_SCALING:
            return DTypes((jnp.float16, jnp.bfloat16, jnp.float32))
        return DTypes(format.element for format in self.formats)

    def is_tensor_scaling(self) -> bool:
        return bool(self.row.formats) and self.row.tile is None

    def is_1d_block_scaling(self) -> bool:
        return self.row.tile is not None and self.row.tile[0] == 1

    @property
    def is_block_scaling(self) -> bool:
        return self.row.tile is not None

    @property
    def is_mxfp8_scaling(self) -> bool:
        return self is ScalingMode.MXFP8_1D_SCALING

    @property
    def is_nvfp4_scaling(self) -> bool:
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)

    @property
    def is_colwise_transposed(self) -> bool:
        return self.row.colwise_layout == "T" and self is not ScalingMode.NO_SCALING


_TABLE = {
    ScalingMode.NO_SCALING: Row(colwise_layout="N"),
    ScalingMode.DELAYED_TENSOR_SCALING: Row(_FP8, delayed=True),
    ScalingMode.CURRENT_TENSOR_SCALING: Row(_FP8),
    ScalingMode.MXFP8_1D_SCALING: Row(("mxfp8", "mxfp8_e5m2"), (1, 32), colwise_layout="N"),
    ScalingMode.NVFP4_1D_SCALING: Row(("nvfp4",), (1, 16)),
    ScalingMode.NVFP4_2D_SCALING: Row(("nvfp4",), (16, 16)),
    ScalingMode.FP8_1D_BLOCK_SCALING: Row(_FP8, (1, 128)),
    ScalingMode.FP8_2D_BLOCK_SCALING: Row(_FP8, (128, 128)),
}


def is_scaling_mode_supported(scaling_mode: ScalingMode, gpu_id: int | None = None) -> tuple[bool, str]:
    """Whether a mode works on a device, and why not: every mode works on every one.

    >>> is_scaling_mode_supported(ScalingMode.MXFP8_1D_SCALING)
    (True, '')
    """
    return True, ""

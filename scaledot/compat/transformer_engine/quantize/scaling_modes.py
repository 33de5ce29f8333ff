"""ScalingMode and QuantizeLayout: granularity and dtype of scales, and orientations of blocks.

A mode is an entry of one table. Orientations are TransformerEngine's: a tensor is flattened to a matrix at
`flatten_axis`; "rowwise" blocks run along the last dim, "colwise" blocks along the last dim before `flatten_axis`. For
MXFP8, a (64, 128) tensor has rowwise scales of shape (64, 4) and colwise scales of shape (2, 128). Colwise codes are
stored transposed ("T") in all modes except MXFP8's.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.scale_shapes import block_scale_shape
from scaledot.compat.transformer_engine.unsupported import module_getattr
from scaledot.formats import FORMATS, Format


class QuantizeLayout(enum.Enum):
    """The orientations in which a tensor is quantised.

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
    """The operand of a GEMM that a tensor is; `_TRANS` for the backward GEMM, which contracts its other dims.

    >>> ScalingMode.MXFP8_1D_SCALING.get_quantize_layout(TensorUsage.RHS)
    <QuantizeLayout.COLWISE: 'colwise'>
    """

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


@dataclasses.dataclass(frozen=True)
class ModeSpec:
    """Formats of a mode, one per code dtype, its block, and whether its scales are delayed.

    colwise_layout: "T" if colwise codes are stored transposed, otherwise "N".
    """

    formats: tuple[str, ...] = ()
    block: tuple[int, int] | None = None  # (free, contracting) elements per scale; None for one scale per tensor
    delayed: bool = False
    colwise_layout: str = "T"


class DTypes(Set[np.dtype]):
    """A set of dtypes whose `in` accepts jnp and ml_dtypes scalar types, numpy dtypes and names.

    A plain set would not: scalar types and the dtypes that they equal have different hashes.

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
            return False  # not a dtype

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
    """Granularity and dtype of a tensor's scales.

    The last two, 1×128 and 128×128 blocks for Float8BlockScaling, are not in TransformerEngine's JAX API.

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
    def spec(self) -> ModeSpec:
        return _SPECS[self]

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(FORMATS[name] for name in self.spec.formats)

    def format_of(self, dtype: Any) -> Format:
        """Returns the Format whose codes have this dtype."""
        name = np.dtype(dtype).name
        for format in self.formats:
            if format.element == name:
                return format
        supported = " or ".join(f.element for f in self.formats) or "no quantised dtype"
        raise ValueError(f"{self.name} supports codes of {supported}, not {name}")

    def get_scale_dtype(self) -> np.dtype:
        scale = FORMATS[self.spec.formats[0]].scale if self.spec.formats else "float32"
        return np.dtype(jnp.dtype(scale))

    def get_data_layout(self) -> str:
        """The layouts of rowwise and colwise codes: "NN" or "NT" (colwise codes are transposed)."""
        return "N" + self.spec.colwise_layout

    def get_scale_shape(
        self,
        data_shape: tuple[int, ...],
        data_layout: str = "N",
        is_colwise: bool = False,
        is_padded: bool = True,
        flatten_axis: int = -1,
        broadcast_2d_scale_shape_to_1d: bool = False,
    ) -> tuple[int, ...]:
        """Returns the shape of the scales of one orientation.

        Args:
          data_shape: the shape of the codes as stored, which are transposed in layout "T".
          is_padded: whether with the padding of TransformerEngine's GEMMs; the tensors of this package have none.
          flatten_axis: that of the tensor in layout "N".
          broadcast_2d_scale_shape_to_1d: whether scales of square blocks are repeated for each row, as the scales of
            NVFP4_2D_SCALING tensors are.

        >>> ScalingMode.NVFP4_2D_SCALING.get_scale_shape((64, 32), is_padded=False)
        (4, 2)
        """
        expected = self.get_data_layout()[int(is_colwise)]
        if self.is_block_scaling and data_layout != expected:
            raise ValueError(f"`data_layout` of these {self.name} codes must be {expected!r}, not {data_layout!r}")
        axis = flatten_axis % len(data_shape)
        if axis == 0:
            raise ValueError(f"`flatten_axis` {flatten_axis} leaves no dims before it in `data_shape` {data_shape}")
        if self.spec.block is None:
            return (1,) if self.is_tensor_scaling() else (0,)
        free, contracting = self.spec.block
        block = (1 if broadcast_2d_scale_shape_to_1d else free, contracting)
        transposed = data_layout == "T"
        axis = len(data_shape) - axis if transposed else axis
        return block_scale_shape(data_shape, axis, block, is_padded, is_colwise and not transposed)

    def get_scale_shape_2x(
        self,
        data_shape: tuple[int, ...],
        is_padded: bool = True,
        flatten_axis: int = -1,
        broadcast_2d_scale_shape_to_1d: bool = False,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of the rowwise and the colwise scales of a tensor; arguments as in `get_scale_shape`.

        >>> ScalingMode.MXFP8_1D_SCALING.get_scale_shape_2x((64, 128), is_padded=False)
        ((64, 4), (2, 128))
        """
        rowwise, colwise = self.get_data_layout()
        stored = data_shape[flatten_axis:] + data_shape[:flatten_axis] if colwise == "T" else data_shape
        options = (is_padded, flatten_axis, broadcast_2d_scale_shape_to_1d)
        return (
            self.get_scale_shape(data_shape, rowwise, False, *options),
            self.get_scale_shape(stored, colwise, True, *options),
        )

    def get_quantize_layout(self, usage: TensorUsage) -> QuantizeLayout:
        """The orientation that a GEMM reads."""
        rowwise = self is ScalingMode.NO_SCALING or usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS)
        return QuantizeLayout.ROWWISE if rowwise else QuantizeLayout.COLWISE

    def get_compatible_q_dtypes(self) -> DTypes:
        """The supported dtypes of codes; for NO_SCALING, of unquantised arrays.

        >>> jnp.float8_e5m2 in ScalingMode.MXFP8_1D_SCALING.get_compatible_q_dtypes()
        True
        """
        if self is ScalingMode.NO_SCALING:
            return DTypes((jnp.float16, jnp.bfloat16, jnp.float32))
        return DTypes(format.element for format in self.formats)

    def is_tensor_scaling(self) -> bool:
        return bool(self.spec.formats) and self.spec.block is None

    def is_1d_block_scaling(self) -> bool:
        return self.spec.block is not None and self.spec.block[0] == 1

    @property
    def is_block_scaling(self) -> bool:
        return self.spec.block is not None

    @property
    def is_mxfp8_scaling(self) -> bool:
        return self is ScalingMode.MXFP8_1D_SCALING

    @property
    def is_nvfp4_scaling(self) -> bool:
        return self in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING)

    @property
    def is_colwise_transposed(self) -> bool:
        return self.spec.colwise_layout == "T" and self is not ScalingMode.NO_SCALING


_SPECS = {
    ScalingMode.NO_SCALING: ModeSpec(colwise_layout="N"),
    ScalingMode.DELAYED_TENSOR_SCALING: ModeSpec(_FP8, delayed=True),
    ScalingMode.CURRENT_TENSOR_SCALING: ModeSpec(_FP8),
    ScalingMode.MXFP8_1D_SCALING: ModeSpec(("mxfp8", "mxfp8_e5m2"), (1, 32), colwise_layout="N"),
    ScalingMode.NVFP4_1D_SCALING: ModeSpec(("nvfp4",), (1, 16)),
    ScalingMode.NVFP4_2D_SCALING: ModeSpec(("nvfp4",), (16, 16)),
    ScalingMode.FP8_1D_BLOCK_SCALING: ModeSpec(_FP8, (1, 128)),
    ScalingMode.FP8_2D_BLOCK_SCALING: ModeSpec(_FP8, (128, 128)),
}


def is_scaling_mode_supported(scaling_mode: ScalingMode, gpu_id: int | None = None) -> tuple[bool, str]:
    """Returns (supported, reason if not); every mode is supported on every device.

    >>> is_scaling_mode_supported(ScalingMode.MXFP8_1D_SCALING)
    (True, '')
    """
    return True, ""


__all__ = ["QuantizeLayout", "ScalingMode", "TensorUsage"]
__getattr__ = module_getattr(__name__)

"""Configs of Qwix's quantised training, and the Recipe that a config describes."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from scaledot.compat.qwix.array import format_of, tile_size
from scaledot.compat.qwix.how import TileSize
from scaledot.compat.qwix.stochastic_rounding import NoiseFn
from scaledot.numerics import calibrate as statistics
from scaledot.recipes import Cast, Gemm, Recipe

_MX = ("mxfp8", "mxfp4")
_UNSUPPORTED = {
    "lhs_collect_quant_stat": "scales come from the array itself; use calibration methods such as 'fixed,8' or 'rms,6'",
    "rhs_collect_quant_stat": "scales come from the array itself; use calibration methods such as 'fixed,8' or 'rms,6'",
    "sparsity_rule": "apply the mask to the weight before the matmul",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QtConfig:
    """The fields that configs of matmuls and convolutions share."""

    lhs_qtype: Any = None
    rhs_qtype: Any = None
    lhs_calibration_method: str = "absmax"
    rhs_calibration_method: str = "absmax"
    lhs_collect_quant_stat: Callable[[Any], Any] | None = None
    rhs_collect_quant_stat: Callable[[Any], Any] | None = None
    lhs_disable_channelwise_axes: bool = False
    rhs_disable_channelwise_axes: bool = False
    dlhs_grad_qtype: Any = None
    drhs_grad_qtype: Any = None
    dlhs_grad_calibration_method: str = "absmax"
    drhs_grad_calibration_method: str = "absmax"
    dlhs_grad_disable_channelwise_axes: bool = False
    drhs_grad_disable_channelwise_axes: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotGeneralQtConfig(_QtConfig):
    """How `dot_general_qt` quantises its operands and gradients; fields are Qwix's, a qtype of None does not quantise.

    tile_size, dlhs_tile_size, drhs_tile_size: elements per scale along the last contracting dim; a float is
      1 / (number of tiles). For 2-D operands also {axis: elements}, with the axes of each operand.
    *_calibration_method: see HowToQuantize. *_disable_channelwise_axes: one scale per tensor (or per tile).
    *_stochastic_rounding_noise_fn: a NoiseFn of `stochastic_rounding`. Its key is used; noise is independent for each
      element. As in Qwix, it applies to integer qtypes only.
    disable_gradient_clipping: keep gradients of elements that the calibration clips.
    use_original_residuals: the backward pass uses full-precision operands, quantised to dlhs_residual_qtype (rhs) and
      drhs_residual_qtype (lhs) if these are set. Otherwise operands are quantised as in the forward pass, unless these
      have tiles.

    Not supported, and errors if set: lhs_collect_quant_stat and rhs_collect_quant_stat (static ranges), and
    sparsity_rule.
    """

    tile_size: TileSize = None
    dlhs_tile_size: TileSize = None
    dlhs_stochastic_rounding_noise_fn: NoiseFn | None = None
    drhs_tile_size: TileSize = None
    drhs_stochastic_rounding_noise_fn: NoiseFn | None = None
    disable_gradient_clipping: bool = False
    use_original_residuals: bool = False
    dlhs_residual_qtype: Any = None
    dlhs_residual_calibration_method: str = "absmax"
    dlhs_residual_disable_channelwise_axes: bool = False
    drhs_residual_qtype: Any = None
    drhs_residual_calibration_method: str = "absmax"
    drhs_residual_disable_channelwise_axes: bool = False
    sparsity_rule: Any = None


_NOISE = ("dlhs_stochastic_rounding_noise_fn", "drhs_stochastic_rounding_noise_fn")
jax.tree_util.register_dataclass(
    DotGeneralQtConfig,
    data_fields=list(_NOISE),
    meta_fields=[f.name for f in dataclasses.fields(DotGeneralQtConfig) if f.name not in _NOISE],
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDotQtConfig:
    """How `ragged_dot_qt` quantises its operands and gradients; a qtype of None does not quantise."""

    lhs_qtype: Any
    rhs_qtype: Any
    dlhs_grad_qtype: Any = None
    drhs_grad_qtype: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvGeneralQtConfig(_QtConfig):
    """How `conv_general_qt` quantises its operands and gradients; fields as in DotGeneralQtConfig."""


class DotDims(NamedTuple):
    """The contraction of a config: contracting axes of 2-D operands, and the sizes of the last dims m, k and n.

    m and n are the last free dims of lhs and rhs, k is the last contracting dim; None if unknown. The contracting axes
    are needed for tiles {axis: elements} only, and None if an operand is not 2-D.
    """

    lhs_contracting: int | None = 1
    rhs_contracting: int | None = 0
    m: int | None = None
    k: int | None = None
    n: int | None = None


MATMUL = DotDims()  # x (m, k) times w (k, n) of unknown sizes


class _Axes(NamedTuple):
    """The free and the contracting axis of a 2-D operand, None of others; and the size along which int tiles run."""

    free: int | None
    contracting: int | None
    size: int | None

    @classmethod
    def of(cls, contracting: int | None, size: int | None) -> "_Axes":
        return cls(None if contracting is None else 1 - contracting, contracting, size)


def keeps_codes(config: DotGeneralQtConfig, operand: str) -> bool:
    """Whether the backward pass multiplies by the forward codes of `operand`, "lhs" or "rhs"."""
    qtype = getattr(config, f"{operand}_qtype")
    return qtype is not None and not config.use_original_residuals and not config.tile_size and qtype not in _MX


def recipe_of(
    config: DotGeneralQtConfig, dims: DotDims = MATMUL, unit: Collection[str] = (), in_groups: bool = False
) -> Recipe:
    """Returns the Recipe that a config describes.

    unit: which of "lhs" and "rhs" are divided by their scales already, and only rounded by the recipe.
    in_groups: whether the matmul is a ragged dot.

    >>> print(recipe_of(DotGeneralQtConfig(lhs_qtype="int8", rhs_qtype="int8", dlhs_grad_qtype="float8_e5m2")))
    qwix
      fwd    x qwix.int8 1×all      w qwix.int8 1×all
      dgrad  g qwix.float8_e5m2 1×all      w qwix.int8 1×all
      wgrad straight through
    """
    for name, instead in _UNSUPPORTED.items():
        if getattr(config, name) is not None:
            raise ValueError(f"`{name}` of {type(config).__name__} is not supported: {instead}")
    lhs, rhs = dims.lhs_contracting, dims.rhs_contracting
    g = (None, None) if lhs is None or rhs is None else (1, 0)
    build = _Casts(config, unit, in_groups)
    fwd = Gemm(
        build.operand("lhs", config.tile_size, _Axes.of(lhs, dims.k)),
        build.operand("rhs", config.tile_size, _Axes.of(rhs, dims.k)),
    )
    dgrad = build.backward("dlhs", "rhs", _Axes.of(g[0], dims.n), _Axes.of(_other(rhs), dims.n))
    wgrad = build.backward("drhs", "lhs", _Axes.of(g[1], dims.m), _Axes.of(_other(lhs), dims.m))
    return Recipe("qwix", fwd, dgrad, None if wgrad is None else Gemm(wgrad.rhs, wgrad.lhs))


def _other(axis: int | None) -> int | None:
    return None if axis is None else 1 - axis


class _Casts(NamedTuple):
    """Builds the casts of a config."""

    config: DotGeneralQtConfig
    unit: Collection[str]
    in_groups: bool

    def operand(self, operand: str, tile: TileSize, axes: _Axes) -> Cast | None:
        """The cast of lhs or rhs with its forward qtype."""
        qtype, method, per_tensor = self._settings(operand)
        if operand in self.unit:
            # Rows in groups take no fixed range; the amax of each is the largest code, up to the rounding of its scale.
            method = "absmax" if self.in_groups and operand == "lhs" else f"fixed,{format_of(qtype).max}"
            return Cast(format_of(qtype), (0, 0), calibration=method)
        return _cast(qtype, method, tile, axes, not per_tensor)

    def backward(self, gradient: str, residual: str, g: _Axes, y: _Axes) -> Gemm | None:
        """The Gemm of `gradient`, "dlhs" or "drhs", from g and a residual; None for a straight-through gradient."""
        config, (qtype, method, per_tensor) = self.config, self._settings(f"{gradient}_grad")
        tile, noise = (getattr(config, f"{gradient}_{name}") for name in ("tile_size", "stochastic_rounding_noise_fn"))
        g_cast = _cast(qtype, method, tile, g, not per_tensor, noise)
        if keeps_codes(config, residual):
            is_straight_through = g_cast is None and residual not in self.unit
            return None if is_straight_through else Gemm(g_cast, self.operand(residual, None, y))
        qtype, method, per_tensor = self._settings(f"{gradient}_residual")
        return Gemm(g_cast, _cast(qtype, method, tile, y, not per_tensor))

    def _settings(self, prefix: str) -> tuple[Any, str, bool]:
        """Qtype, calibration method, and whether one scale is shared by all channels."""
        names = "qtype", "calibration_method", "disable_channelwise_axes"
        qtype, method, per_tensor = (getattr(self.config, f"{prefix}_{name}") for name in names)
        return qtype, method, per_tensor


def _cast(
    qtype, method: str, tile: TileSize, axes: _Axes, channelwise: bool, noise: NoiseFn | None = None
) -> Cast | None:
    """The Cast to a qtype; None for qtype None."""
    if qtype is None:
        return None
    format, method = format_of(qtype), _symmetric_as_amax(method)
    block = (1, 32) if qtype in _MX else _block(tile, axes, channelwise)
    is_fixed = method.startswith("fixed")
    rounding = "stochastic" if noise is not None and (format.is_integer or format.is_unsigned) else "nearest"
    return Cast(format, None if is_fixed else block, rounding, calibration=method)


def _symmetric_as_amax(method: str) -> str:
    """The calibration method in the form that a Cast takes: a symmetric range `fixed,-a,a` is `fixed,a`."""
    method = method.lower()
    parsed = statistics.parse(method)
    is_symmetric = parsed.method == "fixed" and len(parsed.values) == 2 and sum(parsed.values) == 0
    return f"fixed,{parsed.values[1]}" if is_symmetric else method


def _block(tile: TileSize, axes: _Axes, channelwise: bool) -> tuple[int, int]:
    """(free, contracting) elements that share a scale."""
    free, contracting = int(channelwise), 0
    if isinstance(tile, Mapping):
        if axes.free is None or axes.contracting is None or not all(isinstance(size, int) for size in tile.values()):
            raise ValueError(f"tiles {dict(tile)} need 2-D operands and whole numbers of elements; pass one number")
        return int(tile.get(axes.free, free)), int(tile.get(axes.contracting, contracting))
    if not tile:
        return free, contracting
    if isinstance(tile, float) and axes.size is None:
        raise ValueError(f"`tile_size` {tile} is a fraction of an axis of unknown size; pass the number of elements")
    return free, tile_size(axes.size or 0, tile)

"""How Qwix quantises an operand of a contraction: one scale per index of free and batch dims, optional tiles.

The functions return a HowToQuantize for one operand. Each is `get_how_to_quantize` of a module of Qwix's core.
"""

from collections.abc import Collection, Mapping

from jax import lax

from scaledot.compat.qwix.quantizers import HowToQuantize
from scaledot.contraction import parse_einsum

TileSize = int | float | Mapping[int, int | float] | None


def of_dot_general(
    *, dimension_numbers, ndims: tuple[int, int], for_lhs: bool, tile_size: TileSize = None, **fields
) -> HowToQuantize:
    """Returns how `dot_general` quantises lhs or rhs.

    tile_size: elements per scale along the last contracting dim, or {axis: elements} for the axes of the operand.

    >>> of_dot_general(dimension_numbers=(((1,), (0,)), ((), ())), ndims=(2, 2), for_lhs=False, qtype="int4")
    HowToQuantize(qtype='int4', channelwise_axes=(1,), tiled_axes={}, calibration_method='absmax', noise_fn=None)
    """
    operand = 0 if for_lhs else 1
    return of_operand(ndims[operand], tuple(dimension_numbers[0][operand]), tile_size, **fields)


def of_einsum(
    *, einsum_str: str, ndims: tuple[int, int], for_lhs: bool, tile_size: TileSize = None, **fields
) -> HowToQuantize:
    """Returns how `einsum` quantises lhs or rhs; contracting dims are those that the result does not have."""
    inputs, out = parse_einsum(einsum_str, list(ndims))
    labels = inputs[0 if for_lhs else 1]
    return of_operand(len(labels), tuple(i for i, c in enumerate(labels) if c not in out), tile_size, **fields)


def of_conv_general_dilated(*, dimension_numbers: lax.ConvDimensionNumbers, for_lhs: bool, **fields) -> HowToQuantize:
    """Returns how `conv_general_dilated` quantises lhs, with a scale per image, or rhs, per output feature."""
    spec = dimension_numbers.lhs_spec if for_lhs else dimension_numbers.rhs_spec
    return HowToQuantize(channelwise_axes=(spec[0],), **fields)


def of_operand(ndim: int, contracting: Collection[int], tile_size: TileSize, **fields) -> HowToQuantize:
    """Returns how an operand with the given contracting dims is quantised."""
    tiles = tile_size if isinstance(tile_size, Mapping) else {tuple(contracting)[-1]: tile_size} if tile_size else {}
    channelwise = tuple(axis for axis in range(ndim) if axis not in contracting and axis not in tiles)
    return HowToQuantize(channelwise_axes=channelwise, tiled_axes=dict(tiles), **fields)

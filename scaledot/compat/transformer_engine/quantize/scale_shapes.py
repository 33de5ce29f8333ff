"""The shapes of block scales in TransformerEngine's layouts, with and without the padding of its GEMMs."""

import math

_ALIGNMENT = (128, 4)  # (free, contracting) scales of a tile that Blackwell's block-scaled GEMMs load


def block_scale_shape(
    shape: tuple[int, ...], flatten_axis: int, block: tuple[int, int], is_padded: bool, is_colwise: bool
) -> tuple[int, ...]:
    """Returns the shape of the scales of codes of this shape, flattened to a matrix at `flatten_axis`.

    block: (free, contracting) elements per scale; a last block may be smaller.
    is_colwise: whether the dims before `flatten_axis` are the contracting ones.

    >>> block_scale_shape((64, 2, 32), 1, (1, 32), is_padded=False, is_colwise=False)
    (64, 2, 1)
    >>> block_scale_shape((64, 2, 32), 1, (1, 32), is_padded=True, is_colwise=False)
    (128, 4, 1)
    """
    alignment = _ALIGNMENT if is_padded else (1, 1)
    left, right = zip(block, alignment, strict=True)
    if is_colwise:
        left, right = right, left
    return (*_of_dims(shape[:flatten_axis], *left), *_of_dims(shape[flatten_axis:], *right))


def _of_dims(dims: tuple[int, ...], block: int, alignment: int) -> tuple[int, ...]:
    """Returns the number of blocks in each dim: blocks are along the last dim, the first one has the padding."""
    counts = (*dims[:-1], math.ceil(dims[-1] / block))
    padded, trailing = math.ceil(math.prod(counts) / alignment) * alignment, math.prod(counts[1:])
    if padded % trailing:
        raise ValueError(
            f"{math.prod(counts)} scales of `data_shape` dims {dims} are padded to {padded}, which their trailing dims "
            f"{counts[1:]} do not divide; pass is_padded=False"
        )
    return (padded // trailing, *counts[1:])

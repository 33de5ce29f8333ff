"""Transpose, reshape and indexing of a ScaledArray, applied to codes and scales together.

The functions take any dataclass with the fields of ScaledArray and return a `dataclasses.replace` of it, so that
`array` imports this module without an import cycle.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from scaledot.numerics import blocks


def transpose(q: Any, axes: Sequence[int]) -> Any:
    """Permutes the axes of codes, scales, block and rotation; `axes` may be negative."""
    order = tuple(blocks.positive_axis(a, q.ndim) for a in axes)
    if sorted(order) != list(range(q.ndim)):
        raise ValueError(f"`axes` {tuple(axes)} is not a permutation of the {q.ndim} axes of shape {q.shape}")
    block = blocks.expand(q.block, q.ndim)
    return dataclasses.replace(
        q,
        data=q.data.transpose(order),
        scale=q.scale.transpose(order),
        zero=None if q.zero is None else q.zero.transpose(order),
        tensor_scale=_transpose_leading(q.tensor_scale, order),
        block=blocks.trim([block[a] for a in order]),
        rotation=_move_rotation(q.rotation, q.ndim, {old: new for new, old in enumerate(order)}, q.ndim),
    )


def _transpose_leading(tensor_scale: Any, order: tuple[int, ...]) -> Any:
    if tensor_scale is None or not tensor_scale.ndim:
        return tensor_scale
    leading = order[: tensor_scale.ndim]
    if sorted(leading) != list(range(tensor_scale.ndim)):
        raise ValueError(
            f"cannot permute axes as {order}: `tensor_scale` has one entry per index of the leading "
            f"{tensor_scale.ndim} axes, which must stay in front"
        )
    return tensor_scale.transpose(leading)


def _move_rotation(rotation, old_ndim: int, new_axes: dict[int, int], new_ndim: int):
    if rotation is None:
        return None
    return dataclasses.replace(rotation, axis=new_axes[rotation.axis % old_ndim] - new_ndim)


def reshape(q: Any, shape: Sequence[int]) -> Any:
    """Reshapes codes and scales if every block stays a contiguous run of elements; raises if one would be cut."""
    shape = _resolve_shape(q.shape, tuple(shape))
    if shape == q.shape:
        return q
    _check_leading_unchanged(q, shape)
    if math.prod(shape) == 0:
        return _reshape_empty(q, shape)
    block_entries = [1] * len(shape)
    new_axis: dict[int, int] = {}  # of each axis that is not merged or split
    is_per_tensor = bool(q.block) and len(q.block) == q.ndim and not any(q.block)
    for old_axes, new_axes in _matching_groups(q.shape, shape):
        for axis, b in zip(new_axes, _reshaped_blocks(q, old_axes, [shape[a] for a in new_axes]), strict=True):
            block_entries[axis] = b
        if len(old_axes) == len(new_axes) == 1:
            new_axis[old_axes[0]] = new_axes[0]
    block = (0,) * len(shape) if is_per_tensor else blocks.trim(block_entries)
    if q.rotation is not None and q.rotation.axis % q.ndim not in new_axis:
        raise ValueError(
            f"cannot reshape {q.shape} to {shape}: axis {q.rotation.axis} is rotated and must not be merged or split"
        )
    grid = blocks.grid(shape, block)
    return dataclasses.replace(
        q,
        data=q.data.reshape(shape),
        scale=q.scale.reshape(grid),
        zero=None if q.zero is None else q.zero.reshape(grid),
        block=block,
        rotation=_move_rotation(q.rotation, q.ndim, new_axis, len(shape)),
    )


def _resolve_shape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    size = math.prod(old)
    if new.count(-1) == 1:
        rest = math.prod(d for d in new if d != -1)
        if rest and size % rest == 0:
            new = tuple(size // rest if d == -1 else d for d in new)
    if any(d < 0 for d in new) or math.prod(new) != size:
        raise ValueError(f"cannot reshape {old} of {size} elements to {new}")
    return new


def _check_leading_unchanged(q: Any, shape: tuple[int, ...]) -> None:
    leading = 0 if q.tensor_scale is None else q.tensor_scale.ndim
    if q.shape[:leading] != shape[:leading]:
        raise ValueError(
            f"cannot reshape {q.shape} to {shape}: `tensor_scale` has one entry per index of the leading "
            f"{leading} axes, which must stay {q.shape[:leading]}"
        )


def _reshape_empty(q: Any, shape: tuple[int, ...]) -> Any:
    """Reshapes an array without elements; its scales, if the new shape has any, are ones."""
    block = blocks.trim(q.block[max(len(q.block) - len(shape), 0) :])
    grid = blocks.grid(shape, block)
    return dataclasses.replace(
        q,
        data=q.data.reshape(shape),
        scale=jnp.ones(grid, q.scale.dtype),
        zero=None if q.zero is None else jnp.zeros(grid, q.zero.dtype),
        block=block,
        rotation=None,
    )


def _matching_groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest groups of consecutive old and new axes of equal size, without size-1 axes."""
    old_axes = [a for a, d in enumerate(old) if d != 1]
    new_axes = [a for a, d in enumerate(new) if d != 1]
    while old_axes:
        left, right = [old_axes.pop(0)], [new_axes.pop(0)]
        while (a := math.prod(old[i] for i in left)) != (b := math.prod(new[i] for i in right)):
            if a < b:
                left.append(old_axes.pop(0))
            else:
                right.append(new_axes.pop(0))
        yield left, right


def _reshaped_blocks(q: Any, old_axes: list[int], new_sizes: list[int]) -> list[int]:
    """The block entries of new axes, of `new_sizes`, that a group of old axes is reshaped to."""
    full_block = blocks.expand(q.block, q.ndim)
    sizes, old_blocks = [q.shape[a] for a in old_axes], [full_block[a] for a in old_axes]
    if sizes == new_sizes:
        return old_blocks
    run = _run_length(sizes, old_blocks)
    new_blocks = None if run is None else _blocks_of_run(run, new_sizes, whole_axis=0 if 0 in old_blocks else None)
    if new_blocks is None:
        raise ValueError(
            f"cannot reshape axes {[a - q.ndim for a in old_axes]} of {sizes} to {new_sizes}: "
            f"that would cut blocks of {old_blocks}; dequantize first"
        )
    return new_blocks


def _run_length(sizes: list[int], block: list[int]) -> int | None:
    """How many consecutive elements of the flattened axes share a scale; None if blocks are not contiguous."""
    run, is_contiguous = 1, True
    for size, b in zip(reversed(sizes), reversed(block), strict=True):
        if is_contiguous and blocks.covers_axis(size, b):
            run *= size
        elif is_contiguous and b >= 1 and size % b == 0:
            run, is_contiguous = run * b, False
        elif b != 1:
            return None
    return run


def _blocks_of_run(run: int, sizes: list[int], whole_axis: int | None) -> list[int] | None:
    """Block entries on axes of `sizes` whose blocks are contiguous runs of `run` elements; None if there are none.

    An axis that is covered by one block gets the entry `whole_axis`, or its size if that is None.
    """
    block: list[int] = []
    for size in reversed(sizes):
        if run % size == 0:
            block.append(size if whole_axis is None else whole_axis)
            run //= size
        elif size % run == 0:
            block.append(run)
            run = 1
        else:
            return None
    return block[::-1] if run == 1 else None


@dataclasses.dataclass
class _Entry:
    """One entry of an index: the axis and what it selects there; axis None inserts a new axis."""

    axis: int | None
    value: Any

    @property
    def is_array(self) -> bool:
        return hasattr(self.value, "ndim") and self.value.ndim > 0

    @property
    def is_slice_or_none(self) -> bool:
        return self.axis is None or isinstance(self.value, slice)


def take(q: Any, index: tuple) -> Any:
    """Basic and integer-array indexing with the semantics of numpy."""
    entries = _entries(q.shape, index)
    _check_rotated_axis(q, entries)
    full_block = blocks.expand(q.block, q.ndim)
    scale_index, array_block = _scale_index(q.shape, full_block, entries)
    block, new_axis = _resulting_axes(q, entries, full_block, array_block)
    return dataclasses.replace(
        q,
        data=q.data[tuple(e.value for e in entries)],
        scale=q.scale[scale_index],
        zero=None if q.zero is None else q.zero[scale_index],
        tensor_scale=_take_leading(q.tensor_scale, entries),
        block=blocks.trim(block),
        rotation=_move_rotation(q.rotation, q.ndim, new_axis, len(block)),
    )


def _entries(shape: tuple[int, ...], index: tuple) -> list[_Entry]:
    """The index as one entry per axis, with Ellipsis and missing trailing slices expanded."""
    index = tuple(np.asarray(i, None if i else np.int32) if isinstance(i, list) else i for i in index)
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    ellipses = sum(1 for i in index if i is Ellipsis)
    if ellipses > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: the array has {len(shape)} axes, but {used} were indexed")
    full_slices = [slice(None)] * (len(shape) - used)
    expanded: list[Any] = []
    for i in index if ellipses else (*index, Ellipsis):
        expanded += full_slices if i is Ellipsis else [i]
    axes = iter(range(len(shape)))
    return [_Entry(None, None) if i is None else _checked_entry(next(axes), i, shape) for i in expanded]


def _checked_entry(axis: int, value: Any, shape: tuple[int, ...]) -> _Entry:
    size = shape[axis]
    if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
        raise TypeError(f"axis {axis} is indexed by a boolean mask; use integer indices, e.g. of jnp.flatnonzero")
    if isinstance(value, slice):
        return _Entry(axis, value)
    if isinstance(value, (int, np.integer)):
        if not -size <= value < size:
            raise IndexError(f"index {value} is out of bounds for axis {axis} of {size}")
        return _Entry(axis, int(value) % size)
    if not (hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"axis {axis} is indexed by {type(value).__name__}; use ints, slices, None, ... or int arrays")
    value = jnp.asarray(value).astype(jnp.int32)
    return _Entry(axis, jnp.where(value < 0, value + size, value))


def _scale_index(shape: tuple[int, ...], full_block: blocks.Block, entries: list[_Entry]) -> tuple[tuple, int]:
    """The index into the scales of the codes that `entries` select, and the block entry of each broadcast axis.

    If every axis that an array indexes has a single scale, all selected elements share it: the block entry is 0 (the
    whole axis) and the scale has size 1 there. Otherwise each selected element has its own scale: the block entry is 1.
    """
    scale_entries = [_scale_entry(shape, full_block, e) for e in entries]
    array_axes = [e.axis for e in entries if e.is_array and e.axis is not None]
    if not array_axes or not all(blocks.covers_axis(shape[a], full_block[a]) for a in array_axes):
        return tuple(scale_entries), 1
    first = np.zeros((1,) * _broadcast_rank(entries), np.int32)
    return tuple(first if e.is_array else s for e, s in zip(entries, scale_entries, strict=True)), 0


def _scale_entry(shape: tuple[int, ...], full_block: blocks.Block, entry: _Entry) -> Any:
    """The index of the blocks that hold the elements which `entry` selects along its axis."""
    if entry.axis is None:
        return None
    size, b = shape[entry.axis], full_block[entry.axis]
    if b == 1:
        return entry.value
    if not isinstance(entry.value, slice):
        return entry.value * 0 if blocks.covers_axis(size, b) else entry.value // b
    start, stop, step = entry.value.indices(size)
    if blocks.covers_axis(size, b):
        return slice(None)
    if step != 1 or start % b or (stop % b and stop != size):
        raise ValueError(
            f"slice {start}:{stop}:{step} of axis {entry.axis - len(shape)} would cut blocks of {b}; "
            f"start and stop at multiples of {b}, or dequantize first"
        )
    return slice(start // b, -(-max(stop, start) // b))


def _resulting_axes(
    q: Any, entries: list[_Entry], full_block: blocks.Block, array_block: int
) -> tuple[list[int], dict[int, int]]:
    """The block entry of each axis of the result, and {axis of `q`: axis of the result} for sliced axes."""
    sources = _sources_of_axes(entries)
    if q.tensor_scale is not None and q.tensor_scale.ndim and not _are_adjacent(_advanced_positions(entries)):
        raise IndexError(
            "index arrays on both sides of a slice move their axes to the front, where `tensor_scale` has its own; "
            "index in two steps"
        )
    block = [array_block if e.is_array else _block_after(q.shape, full_block, e) for e in sources]
    return block, {e.axis: n for n, e in enumerate(sources) if e.axis is not None and e.is_slice_or_none}


def _sources_of_axes(entries: list[_Entry]) -> list[_Entry]:
    """The entry that produces each axis of the result: a slice, None, or an index array for each broadcast axis.

    As in numpy, the broadcast axes replace the advanced entries, or come first if these are not adjacent.
    """
    advanced = _advanced_positions(entries)
    start = advanced[0] if advanced and _are_adjacent(advanced) else 0
    before, after = ([e for e in part if e.is_slice_or_none] for part in (entries[:start], entries[start:]))
    index_array = [e for e in entries if e.is_array][:1]
    return before + index_array * _broadcast_rank(entries) + after


def _advanced_positions(entries: list[_Entry]) -> list[int]:
    """Positions of the advanced entries, which numpy broadcasts: index arrays, and ints if there is an index array."""
    if not any(e.is_array for e in entries):
        return []
    return [n for n, e in enumerate(entries) if not e.is_slice_or_none]


def _are_adjacent(positions: list[int]) -> bool:
    """Whether ascending positions have no gap."""
    return not positions or positions[-1] - positions[0] + 1 == len(positions)


def _broadcast_rank(entries: list[_Entry]) -> int:
    return len(np.broadcast_shapes(*(e.value.shape for e in entries if e.is_array)))


def _block_after(shape: tuple[int, ...], full_block: blocks.Block, entry: _Entry) -> int:
    """The block entry of the result's axis for a slice or None."""
    if entry.axis is None:
        return 1
    size, b = shape[entry.axis], full_block[entry.axis]
    is_shortened = len(range(*entry.value.indices(size))) != size
    if is_shortened and b > 1 and blocks.covers_axis(size, b):
        return 0  # one scale still covers the axis, which is now shorter than the block
    return b


def _check_rotated_axis(q: Any, entries: list[_Entry]) -> None:
    if q.rotation is None:
        return
    axis = q.rotation.axis % q.ndim
    value = next(e.value for e in entries if e.axis == axis)
    if isinstance(value, slice):
        start, stop, step = value.indices(q.shape[axis])
        if step == 1 and start % q.rotation.size == 0 and stop % q.rotation.size == 0:
            return
    raise IndexError(
        f"axis {q.rotation.axis} is rotated in groups of {q.rotation.size}; slice it at multiples of {q.rotation.size}"
    )


def _take_leading(tensor_scale: Any, entries: list[_Entry]) -> Any:
    """Applies the entries of the leading axes to `tensor_scale`, which has one element per index of these axes."""
    if tensor_scale is None or not tensor_scale.ndim:
        return tensor_scale
    index = []
    for entry in entries:
        if len(index) == tensor_scale.ndim:
            break
        if entry.axis is None or entry.is_array:
            raise IndexError(
                f"`tensor_scale` has the leading {tensor_scale.ndim} axes; index these by ints and slices only"
            )
        index.append(entry.value)
    return tensor_scale[tuple(index)]

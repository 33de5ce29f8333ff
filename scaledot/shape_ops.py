"""Shape verbs of a ScaledArray: transpose, reshape, index.

Each moves codes and scales together. They take any dataclass with the fields of ScaledArray and return a
`replace` of it, so `array` can import this room and not the other way round.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from scaledot.numerics import blocks


def transpose(q: Any, axes: Sequence[int]) -> Any:
    """`axes` may be negative; each must occur once."""
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
            f"{tensor_scale.ndim}, which must stay in front"
        )
    return tensor_scale.transpose(leading)


def _move_rotation(rotation, old_ndim: int, new_place: dict[int, int], new_ndim: int):
    if rotation is None:
        return None
    return dataclasses.replace(rotation, axis=new_place[rotation.axis % old_ndim] - new_ndim)


def reshape(q: Any, shape: Sequence[int]) -> Any:
    """Keep scales where every block stays a contiguous run of elements; raise where one would be cut."""
    shape = _resolve_shape(q.shape, tuple(shape))
    if shape == q.shape:
        return q
    _check_leading_kept(q, shape)
    if math.prod(shape) == 0:
        return _reshape_empty(q, shape)
    block = [1] * len(shape)
    places: dict[int, int] = {}
    everywhere = bool(q.block) and len(q.block) == q.ndim and not any(q.block)
    for old_axes, new_axes in _matching_groups(q.shape, shape):
        for axis, b in zip(new_axes, _reshaped_blocks(q, old_axes, [shape[a] for a in new_axes]), strict=True):
            block[axis] = b
        if len(old_axes) == len(new_axes) == 1:
            places[old_axes[0]] = new_axes[0]
    laid = (0,) * len(shape) if everywhere else blocks.trim(block)
    if q.rotation is not None and q.rotation.axis % q.ndim not in places:
        raise ValueError(f"cannot reshape {q.shape} to {shape}: axis {q.rotation.axis} carries a rotation")
    grid = blocks.grid(shape, laid)
    return dataclasses.replace(
        q,
        data=q.data.reshape(shape),
        scale=q.scale.reshape(grid),
        zero=None if q.zero is None else q.zero.reshape(grid),
        block=laid,
        rotation=_move_rotation(q.rotation, q.ndim, places, len(shape)),
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


def _check_leading_kept(q: Any, shape: tuple[int, ...]) -> None:
    leading = 0 if q.tensor_scale is None else q.tensor_scale.ndim
    if q.shape[:leading] != shape[:leading]:
        raise ValueError(
            f"cannot reshape {q.shape} to {shape}: `tensor_scale` has one entry per index of the leading "
            f"{leading}, which must stay {q.shape[:leading]}"
        )


def _reshape_empty(q: Any, shape: tuple[int, ...]) -> Any:
    """No element has a scale to keep, so the grid of the new shape is filled with ones."""
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
    """The smallest runs of axes, size-1 axes left out, whose sizes have equal products."""
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
    every = blocks.expand(q.block, q.ndim)
    sizes, old_blocks = [q.shape[a] for a in old_axes], [every[a] for a in old_axes]
    if sizes == new_sizes:
        return old_blocks
    run = _run_length(sizes, old_blocks)
    new_blocks = None if run is None else _blocks_of_run(run, new_sizes, whole=0 if 0 in old_blocks else None)
    if new_blocks is None:
        raise ValueError(
            f"cannot reshape axes {[a - q.ndim for a in old_axes]} of {sizes} to {new_sizes}: "
            f"blocks of {old_blocks} would not stay whole; dequantize first"
        )
    return new_blocks


def _run_length(sizes: list[int], block: list[int]) -> int | None:
    """How many consecutive elements of the flattened axes share a scale; None if that is not what they do."""
    run, inside = 1, True
    for size, b in zip(reversed(sizes), reversed(block), strict=True):
        if inside and blocks.whole(size, b):
            run *= size
        elif inside and b >= 1 and size % b == 0:
            run, inside = run * b, False
        elif b != 1:
            return None
    return run


def _blocks_of_run(run: int, sizes: list[int], whole: int | None) -> list[int] | None:
    """Blocks that make runs of that length on other axes."""
    block: list[int] = []
    for size in reversed(sizes):
        if run % size == 0:
            block.append(size if whole is None else whole)
            run //= size
        elif size % run == 0:
            block.append(run)
            run = 1
        else:
            return None
    return block[::-1] if run == 1 else None


@dataclasses.dataclass
class _Entry:
    """One part of an index: what it selects of which axis (None: it makes a new axis)."""

    axis: int | None
    value: Any

    @property
    def is_array(self) -> bool:
        return hasattr(self.value, "ndim") and self.value.ndim > 0

    @property
    def is_slice_or_none(self) -> bool:
        return self.axis is None or isinstance(self.value, slice)


def take(q: Any, index: tuple) -> Any:
    """Basic and integer-array indexing with numpy's meaning."""
    entries = _entries(q.shape, index)
    _check_rotation_kept(q, entries)
    every = blocks.expand(q.block, q.ndim)
    pick, array_block = _scale_index(q.shape, every, entries)
    block, places = _resulting_axes(q, entries, every, array_block)
    return dataclasses.replace(
        q,
        data=q.data[tuple(e.value for e in entries)],
        scale=q.scale[pick],
        zero=None if q.zero is None else q.zero[pick],
        tensor_scale=_take_leading(q.tensor_scale, entries),
        block=blocks.trim(block),
        rotation=_move_rotation(q.rotation, q.ndim, places, len(block)),
    )


def _entries(shape: tuple[int, ...], index: tuple) -> list[_Entry]:
    """The index with Ellipsis spelt out and every axis named."""
    index = tuple(np.asarray(i, None if i else np.int32) if isinstance(i, list) else i for i in index)
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    dots = sum(1 for i in index if i is Ellipsis)
    if dots > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: the array has {len(shape)} axes, but {used} were indexed")
    full = [slice(None)] * (len(shape) - used)
    spelt: list[Any] = []
    for i in index if dots else (*index, Ellipsis):
        spelt += full if i is Ellipsis else [i]
    axes = iter(range(len(shape)))
    return [_Entry(None, None) if i is None else _checked(next(axes), i, shape) for i in spelt]


def _checked(axis: int, value: Any, shape: tuple[int, ...]) -> _Entry:
    size = shape[axis]
    if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
        raise TypeError(f"axis {axis} is indexed by a boolean mask; use integer indices, such as jnp.flatnonzero gives")
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


def _scale_index(shape: tuple[int, ...], every: blocks.Block, entries: list[_Entry]) -> tuple[tuple, int]:
    """The index into the scales that selects what `entries` select of the codes, and the block of each broadcast axis.

    Where every axis that an array indexes has a single scale, all selected elements share it: the block is 0 (the whole
    axis) and the scale has size 1 there. Otherwise each selected element gets its own scale: the block is 1.
    """
    of_scale = [_scale_entry(shape, every, e) for e in entries]
    array_axes = [e.axis for e in entries if e.is_array and e.axis is not None]
    if not array_axes or not all(blocks.whole(shape[a], every[a]) for a in array_axes):
        return tuple(of_scale), 1
    first = np.zeros((1,) * _broadcast_rank(entries), np.int32)
    return tuple(first if e.is_array else s for e, s in zip(entries, of_scale, strict=True)), 0


def _scale_entry(shape: tuple[int, ...], every: blocks.Block, entry: _Entry) -> Any:
    """The same selection among blocks."""
    if entry.axis is None:
        return None
    size, b = shape[entry.axis], every[entry.axis]
    if b == 1:
        return entry.value
    if not isinstance(entry.value, slice):
        return entry.value * 0 if blocks.whole(size, b) else entry.value // b
    start, stop, step = entry.value.indices(size)
    if blocks.whole(size, b):
        return slice(None)
    if step != 1 or start % b or (stop % b and stop != size):
        raise ValueError(
            f"slice {start}:{stop}:{step} of axis {entry.axis - len(shape)} would cut blocks of {b}; "
            f"start and stop at multiples of {b}, or dequantize first"
        )
    return slice(start // b, -(-max(stop, start) // b))


def _resulting_axes(
    q: Any, entries: list[_Entry], every: blocks.Block, array_block: int
) -> tuple[list[int], dict[int, int]]:
    """The block of each axis of the result, and {axis of `q`: axis of the result} for the axes that are sliced."""
    sources = _sources_of_axes(entries)
    if q.tensor_scale is not None and q.tensor_scale.ndim and not _are_adjacent(_advanced_positions(entries)):
        raise IndexError("index arrays around a slice move axes to the front, where `tensor_scale` has its own")
    block = [array_block if e.is_array else _block_after(q.shape, every, e) for e in sources]
    return block, {e.axis: n for n, e in enumerate(sources) if e.axis is not None and e.is_slice_or_none}


def _sources_of_axes(entries: list[_Entry]) -> list[_Entry]:
    """The entry that each axis of the result comes from: a slice, None, or an index array for each broadcast axis.

    As in numpy, broadcast axes take the place of the advanced entries, or stand in front if these are not adjacent.
    """
    advanced = _advanced_positions(entries)
    start = advanced[0] if advanced and _are_adjacent(advanced) else 0
    before, after = ([e for e in part if e.is_slice_or_none] for part in (entries[:start], entries[start:]))
    an_array = [e for e in entries if e.is_array][:1]
    return before + an_array * _broadcast_rank(entries) + after


def _advanced_positions(entries: list[_Entry]) -> list[int]:
    """Positions of the entries that numpy broadcasts together: index arrays, and ints if there is an index array."""
    if not any(e.is_array for e in entries):
        return []
    return [n for n, e in enumerate(entries) if not e.is_slice_or_none]


def _are_adjacent(positions: list[int]) -> bool:
    """Whether ascending positions have no gap."""
    return not positions or positions[-1] - positions[0] + 1 == len(positions)


def _broadcast_rank(entries: list[_Entry]) -> int:
    return len(np.broadcast_shapes(*(e.value.shape for e in entries if e.is_array)))


def _block_after(shape: tuple[int, ...], every: blocks.Block, entry: _Entry) -> int:
    """The block of the axis of the result that a slice leaves or None inserts."""
    if entry.axis is None:
        return 1
    size, b = shape[entry.axis], every[entry.axis]
    cut = len(range(*entry.value.indices(size))) != size
    if cut and b > 1 and blocks.whole(size, b):
        return 0  # one scale still covers the axis, which is now shorter than the block
    return b


def _check_rotation_kept(q: Any, entries: list[_Entry]) -> None:
    if q.rotation is None:
        return
    axis = q.rotation.axis % q.ndim
    value = next(e.value for e in entries if e.axis == axis)
    if isinstance(value, slice):
        start, stop, step = value.indices(q.shape[axis])
        if step == 1 and start % q.rotation.size == 0 and stop % q.rotation.size == 0:
            return
    raise IndexError(f"axis {q.rotation.axis} is rotated in groups of {q.rotation.size}; slice it at multiples of that")


def _take_leading(tensor_scale: Any, entries: list[_Entry]) -> Any:
    """The tensor scales of the selected leading indices."""
    if tensor_scale is None or not tensor_scale.ndim:
        return tensor_scale
    picks = []
    for entry in entries:
        if len(picks) == tensor_scale.ndim:
            break
        if entry.axis is None or entry.is_array:
            raise IndexError(
                f"the leading {tensor_scale.ndim} axes carry `tensor_scale`; index them by ints and slices"
            )
        picks.append(entry.value)
    return tensor_scale[tuple(picks)]

"""`convert`: rewrites a checkpoint in another layout or format, one tensor at a time."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import format_variants
from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, forms, lazy
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.loading import Include, predicate, read_entry
from scaledot.checkpoint.saving import MAX_SHARD_BYTES, Entry, is_part, write_folder
from scaledot.checkpoint.source import Source, open_source
from scaledot.checkpoint.tensors import SIDE_TENSORS
from scaledot.checkpoint.writers.parts import with_packed_codes
from scaledot.formats import FORMATS, Format, find_format
from scaledot.numerics.blocks import Block
from scaledot.ops.quantize import quantize
from scaledot.programs import program

# Weights that quantised checkpoints leave in full precision: embeddings, output layer, norms and routers of experts.
DEFAULT_EXCLUDE = ("*embed*", "lm_head.*", "*norm*", "*router*", "*.gate.*", "*shared_expert_gate*")


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    layout: str = "scaledot",
    *,
    format: str | Format | None = None,
    block: Block | None = None,
    include: Include = "*.weight",
    exclude: Include = DEFAULT_EXCLUDE,
    activations: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the checkpoint `source` to the folder `target` in another layout.

    Files of tokenizers are copied. Memory is bounded by the largest tensor. An interrupted call, repeated with the same
    arguments, continues with the files that were not written yet.

    Args:
      layout: as in `save`.
      format: the format of matrices, a Format, a name such as "nvfp4" or "compressed_tensors.nvfp4" (the arithmetic of
        that library); or the name of a float dtype, to which the whole model is converted. None keeps the codes of the
        source.
      block: the block, instead of that of the format; blocks end at the last axis, that of the inputs.
      include, exclude: the matrices to quantise, also those that are quantised already: patterns of names, or
        functions. Other tensors are copied as they are.
      activations, max_shard_bytes: as in `save`.
    """
    if block is not None and format is None:
        raise ValueError("`block` needs a `format`; without one, the codes of the source are kept")
    opened, dtype = open_source(source), dtypes.named(format) if isinstance(format, str) else None
    found = _with_scales_for(layout, entries(opened))
    selected = {name for name in found if predicate(include)(name) and not predicate(exclude)(name)}
    if format is not None and not selected:
        raise ValueError(f"`include` {include!r} without `exclude` {exclude!r} selects no tensor of {opened.path}")
    plan = _plan(format, dtype, block, selected)
    config = opened.config if dtype is None else {**opened.config, "dtype": dtype.name, "torch_dtype": dtype.name}
    record = dataclasses.asdict(format) if isinstance(format, Format) else format
    key = json.dumps([_identity(opened), layout, record, block, sorted(selected), activations, max_shard_bytes])
    converted = {name: plan(name, entry) for name, entry in found.items()}
    write_folder(Path(target), converted, layout, config, activations, max_shard_bytes, resume_key=key)
    if opened.path.is_dir():
        _copy_others(opened.path, Path(target))


Plan = Callable[[str, Any], Entry]  # of a tensor or weight of the source, by name


def _plan(format: str | Format | None, dtype: np.dtype | None, block: Block | None, selected: Collection[str]) -> Plan:
    if format is None:
        return lambda name, entry: _kept(entry)
    if dtype is not None:
        return lambda name, entry: _dequantized(entry, dtype) if _is_of_model(name, entry) else _kept(entry)
    return functools.partial(_quantized, named_format(format), block, selected)


def _is_of_model(name: str, entry: Any) -> bool:
    """Whether a tensor has the dtype of the model: a weight, or floats that are no scale of activations."""
    is_side = name.endswith(tuple(f".{side}" for side in SIDE_TENSORS))
    return forms.is_weight(entry) or (jnp.issubdtype(entry.dtype, jnp.floating) and not is_side)


def _quantized(format: Format, block: Block | None, selected: Collection[str], name: str, entry: Any) -> Entry:
    is_weight = forms.is_weight(entry)
    if name not in selected or not (is_weight or (entry.ndim == 2 and jnp.issubdtype(entry.dtype, jnp.floating))):
        return _kept(entry)
    original = _dequantized(entry, forms.dtype_of(entry)) if forms.is_weight(entry) else _kept(entry)
    type = jax.eval_shape(functools.partial(quantize, format=format, block=block), original.type)
    return Entry(type, lambda: program(_quantize_packed, format, block)(original.compute()))


def _quantize_packed(format: Format, block: Block | None, x: jax.Array) -> ScaledArray:
    return with_packed_codes(quantize(x, format, block=block))


def _kept(entry: Any) -> Entry:
    return Entry(jax.tree.map(_type_of, entry, is_leaf=_is_lazy), lambda: read_entry(entry))


def _dequantized(entry: Any, dtype: np.dtype) -> Entry:
    return Entry(
        jax.ShapeDtypeStruct(entry.shape, dtype), lambda: jnp.asarray(read_entry(entry, dequantize=dtype)).astype(dtype)
    )


def _with_scales_for(layout: str, found: dict[str, Any]) -> dict[str, Any]:
    """The entries with static scales of NVFP4 activations as the layout stores them: as such, or as reciprocals."""
    if layout not in ("modelopt", "compressed-tensors"):
        return found
    theirs, ours = (".input_global_scale", ".input_scale")
    if layout == "compressed-tensors":
        theirs, ours = ours, theirs
    renamed = {}
    for name, entry in found.items():
        weight = found.get(f"{name.removesuffix(theirs)}.weight")
        if name.endswith(theirs) and isinstance(weight, ScaledArray) and weight.format.two_level:
            shape = () if layout == "modelopt" else (1,)
            renamed[name.removesuffix(theirs) + ours] = lazy.reciprocal(entry).reshape(shape)
        else:
            renamed[name] = entry
    return renamed


_OTHER_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of tokenizers and generation


def _copy_others(source: Path, target: Path) -> None:
    for file in source.iterdir():
        is_other = file.suffix in _OTHER_FILES and not is_part(file.name)
        if is_other and file.is_file() and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)


def named_format(format: str | Format) -> Format:
    """A Format by its name in FORMATS, or, with the name of a library before it, in `format_variants`.

    >>> named_format("compressed_tensors.nvfp4")
    Format('compressed_tensors.nvfp4')
    """
    if isinstance(format, str) and "." in format:
        library, _, name = format.partition(".")
        found = getattr(getattr(format_variants, library, None), name, None)
        if isinstance(found, Format):
            return found
        raise ValueError(
            f"`format` {format!r} is not in scaledot.format_variants; without a dot, there are {[*FORMATS]}"
        )
    return find_format(format)


def _type_of(array: LazyArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _is_lazy(node: Any) -> bool:
    return isinstance(node, LazyArray)


def _identity(source: Source) -> list[Any]:
    """What tells whether a source is the one of an interrupted call: its files, their sizes and times."""
    files = sorted({tensor.path for tensor in source.tensors.values()})
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]

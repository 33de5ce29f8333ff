"""`convert`: rewrites a checkpoint in another layout or format, one tensor at a time."""

import functools
import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot import format_variants
from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes, forms
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.loading import Include, predicate, read_entry
from scaledot.checkpoint.saving import MAX_SHARD_BYTES, Entry, write_folder
from scaledot.checkpoint.source import Source, open_source
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

    Memory is bounded by the largest tensor. An interrupted call, repeated with the same arguments, continues with the
    files that were not written yet.

    Args:
      layout: as in `save`.
      format: the format of matrices, a Format, a name such as "nvfp4" or "compressed_tensors.nvfp4" (the arithmetic of
        that library), or the name of a float dtype, which dequantises. None keeps the codes of the source.
      block: the block, instead of that of the format; blocks end at the last axis, that of the inputs.
      include, exclude: the matrices to quantise: patterns of names, or functions. Others are copied as they are, except
        weights that are quantised already.
      activations, max_shard_bytes: as in `save`.
    """
    opened = open_source(source)
    plan = _plan(format, block, lambda name: predicate(include)(name) and not predicate(exclude)(name))
    converted = {name: plan(name, entry) for name, entry in entries(opened).items()}
    config = dict(opened.config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {k: v for k, v in config["text_config"].items() if k != "quantization_config"}
    key = json.dumps([_identity(opened), layout, repr(format), block, activations, max_shard_bytes])
    write_folder(Path(target), converted, layout, config, activations, max_shard_bytes, resume_key=key)


Plan = Callable[[str, Any], Entry]  # of a tensor or weight of the source, by name


def _plan(format: str | Format | None, block: Block | None, is_selected: Callable[[str], bool]) -> Plan:
    if format is None:
        return lambda name, entry: _kept(entry)
    dtype = dtypes.named(format) if isinstance(format, str) else None
    if dtype is not None:
        return lambda name, entry: _dequantized(entry, dtype) if forms.is_weight(entry) else _kept(entry)
    return functools.partial(_quantized, named_format(format), block, is_selected)


def _quantized(format: Format, block: Block | None, is_selected: Callable[[str], bool], name: str, entry: Any) -> Entry:
    is_matrix = isinstance(entry, LazyArray) and entry.ndim == 2 and jnp.issubdtype(entry.dtype, jnp.floating)
    if not forms.is_weight(entry) and not (is_matrix and is_selected(name)):
        return _kept(entry)
    original = _dequantized(entry, forms.dtype_of(entry)) if forms.is_weight(entry) else _kept(entry)
    type = jax.eval_shape(functools.partial(quantize, format=format, block=block), original.type)
    return Entry(type, lambda: program(_quantize_packed, format, block)(original.compute()))


def _quantize_packed(format: Format, block: Block | None, x: jax.Array) -> ScaledArray:
    return with_packed_codes(quantize(x, format, block=block))


def _kept(entry: Any) -> Entry:
    return Entry(jax.tree.map(_type_of, entry, is_leaf=_is_lazy), lambda: read_entry(entry))


def _dequantized(entry: Any, dtype: np.dtype) -> Entry:
    return Entry(jax.ShapeDtypeStruct(entry.shape, dtype), lambda: read_entry(entry, dequantize=dtype))


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

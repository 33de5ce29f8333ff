"""The `quantization_config` of compressed-tensors: how the weights of each group are stored.

A Scheme is one entry of `config_groups`. `targets` and `ignore`, which name modules by class, name or regular
expression, are not used: dtypes and shapes of the tensors of a module tell its scheme (`compressed_tensors`), and the
regular expression of an untrusted file could take exponential time.

Content that changes the values of weights and is not implemented is refused by name: rotations (`transform_config`),
sparsity, and unknown formats, types and strategies.
"""

import dataclasses
import re
from typing import Any, NoReturn

from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.source import Source
from scaledot.numerics import blocks

FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the weights of a group are stored.

    bits: bits of a code; None if they are not declared.
    block: the elements that share a scale, in the trailing axes; None if it is not declared.
    """

    format: str
    bits: int | None = None
    is_symmetric: bool = True
    block: blocks.Block | None = None


# A file without a configuration may have any format.
UNDECLARED = tuple(Scheme(format) for format in FORMATS)


def schemes(source: Source) -> tuple[Scheme, ...]:
    """The different schemes of the groups that quantise weights."""
    config = source.quantization
    if not config:
        return UNDECLARED
    _refuse_transforms(source)
    groups = _object(source, "config_groups", config.get("config_groups"))
    found = [_scheme(source, f"config_groups.{name}", group) for name, group in groups.items()]
    return tuple(dict.fromkeys(scheme for scheme in found if scheme is not None))


def _refuse_transforms(source: Source) -> None:
    transforms = _object(source, "transform_config", source.quantization.get("transform_config"))
    if transforms.get("config_groups", transforms):
        _fail(source, "`transform_config` declares rotations of weights and activations, which are not supported")
    sparsity = _object(source, "sparsity_config", source.quantization.get("sparsity_config"))
    if sparsity.get("format", "dense") != "dense":
        _fail(
            source, f"`sparsity_config` declares the sparse format {quoted(sparsity['format'])}, which is not supported"
        )


def _scheme(source: Source, where: str, group: Any) -> Scheme | None:
    group = _object(source, where, group)
    arguments = _object(source, f"{where}.weights", group.get("weights"))
    if not arguments:  # a group of activations or key-value caches
        return None
    format = group.get("format") or source.quantization.get("format")
    if format not in FORMATS:
        _fail(
            source, f"`{where}` has the format {quoted(format)}, which is not supported; there are {', '.join(FORMATS)}"
        )
    kind, bits = arguments.get("type", "int"), arguments.get("num_bits", 8)
    if kind not in ("int", "float") or type(bits) is not int or not 2 <= bits <= 8:
        _fail(
            source,
            f"`{where}.weights` has codes of type {quoted(kind)} with {quoted(bits)} bits, which are not supported",
        )
    block = _block(source, f"{where}.weights", arguments)
    return Scheme(format, bits, bool(arguments.get("symmetric", True)), block)


def _block(source: Source, where: str, arguments: dict[str, Any]) -> blocks.Block:
    size = arguments.get("group_size")
    strategy = arguments.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in _STRATEGIES:
        known = ", ".join(_STRATEGIES)
        _fail(source, f"`{where}` has the strategy {quoted(strategy)}, which is not supported; there are {known}")
    if strategy == "tensor":
        return (0, 0)
    if strategy == "channel":
        return (0,)
    if strategy == "block":
        return _block_structure(source, where, arguments.get("block_structure"))
    if type(size) is not int or size < 1:
        _fail(
            source,
            f"`{where}` has the strategy {strategy!r}; `group_size` must be a positive integer, not {quoted(size)}",
        )
    return blocks.trim((size,))


def _block_structure(source: Source, where: str, value: Any) -> blocks.Block:
    """The block of [128, 128], or of "128x128" in older files."""
    sizes = value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", value):
        sizes = [int(size) for size in value.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        _fail(source, f"`{where}.block_structure` must be two positive integers, not {quoted(value)}")
    return blocks.trim(sizes)


def _object(source: Source, where: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        _fail(source, f"`{where}` must be an object, not {quoted(value)}")
    return value or {}


def _fail(source: Source, reason: str) -> NoReturn:
    raise CheckpointError(source.path / "config.json", reason)

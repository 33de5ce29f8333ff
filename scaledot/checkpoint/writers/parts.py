"""Parts of a weight: the tensors of a file that are extracted from a ScaledArray."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import dtypes
from scaledot.numerics import blocks, pack


class Part(NamedTuple):
    """One tensor of a file: name, dtype name and shape, and `extract(weight)`, which returns its bytes as an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extract: Callable[[Any], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtypes.bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Written:
    """How a layout stores weights: their parts by name, and what the configuration files say about them.

    quantization: the `quantization_config` of config.json; None for none.
    files: other JSON files by name. metadata: `__metadata__` of the safetensors files.
    """

    parts: Mapping[str, list[Part]]
    quantization: dict[str, Any] | None = None
    files: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Contents(NamedTuple):
    """What is saved: quantised weights by name, modules of matrices that are not quantised, and names of all arrays.

    activations: the argument of `save`.
    """

    weights: Mapping[str, Any]
    unquantized: list[str]
    names: Collection[str]
    activations: str | None

    def activations_of(self, weight: str, suffix: str = ".input_scale") -> str | None:
        """`activations` for one weight; by default "static" if it has a scale of its activations, X + `suffix`."""
        scale = f"{module_of(weight)}{suffix}"
        if self.activations == "static" and scale not in self.names:
            raise ValueError(f"activations='static' needs the scale {scale!r} for {weight!r}; it is not in the tree")
        return "static" if self.activations is None and scale in self.names else self.activations


def array_part(name: str, array: Any, extract: Callable[[Any], Any] = lambda array: array) -> Part:
    """A part with the dtype and shape of an array."""
    dtype = np.dtype(array.dtype)
    if dtype not in dtypes.NAMES:
        raise TypeError(f"{name!r} has dtype {dtype.name}, which safetensors files cannot hold")
    if dtypes.bits(dtypes.NAMES[dtype]) < 8:
        raise TypeError(f"{name!r} has dtype {dtype.name}; codes of less than a byte are saved in a ScaledArray only")
    return Part(name, dtypes.NAMES[dtype], tuple(array.shape), lambda value: np.asarray(extract(value)))


def packed_nibbles(name: str, shape: tuple[int, ...]) -> Part:
    """4-bit codes, two per byte along the last axis, the even one low.

    `extract` takes the codes, or the bytes that `with_packed_codes` computed.
    """
    *leading, last = shape
    return Part(name, "U8", (*leading, last // 2), lambda codes: np.asarray(_packed(jnp.asarray(codes))))


@jax.jit
def _packed(codes: jax.Array) -> jax.Array:
    return codes if codes.dtype == jnp.uint8 else pack.pack_nibbles(codes)


def with_packed_codes(q: ScaledArray) -> ScaledArray:
    """The weight with 4-bit codes as bytes, if its last axis is even, for parts with `packed_nibbles`.

    On CPUs, XLA writes an array of a 4-bit dtype ten times as slowly as the same codes in bytes.
    """
    is_packed = q.format.bits == 4 and q.data.dtype.name in PACKED_DTYPES and q.shape[-1] % 2 == 0
    return dataclasses.replace(q, data=pack.pack_nibbles(q.data)) if is_packed else q


PACKED_DTYPES = ("int4", "uint4", "float4_e2m1fn")


def packed_codes(name: str, q: ScaledArray) -> Part:
    """The 4-bit codes of a weight as `packed_nibbles`."""
    part = packed_nibbles(name, q.shape)
    return part._replace(extract=lambda q: part.extract(q.data))


def scale_part(name: str, q: ScaledArray, shape: tuple[int, ...] | None = None, dtype: str | None = None) -> Part:
    """The scales of a weight as stored, reshaped, or as bytes of E8M0 exponents if `dtype` is "U8"."""
    stored = dtypes.NAMES[np.dtype(q.scale.dtype)] if dtype is None else dtype
    target = tuple(q.scale.shape) if shape is None else shape

    def extract(q: ScaledArray) -> np.ndarray:
        scale = np.asarray(q.scale).reshape(target)
        return scale.view(np.uint8) if stored == "U8" else scale

    return Part(name, stored, target, extract)


def row_scale_part(name: str, q: ScaledArray, dtype: str | None = None) -> Part:
    """The scales of a weight, one row of them for each row of codes."""
    part = scale_part(name, with_rows_of_scales(q), dtype=dtype)
    return part._replace(extract=lambda q: part.extract(with_rows_of_scales(q)))


def with_rows_of_scales(q: Any) -> Any:
    """A matrix with blocks of several rows as one with blocks of one row, whose scales are repeated; values are equal.

    Leaves may be ShapeDtypeStructs.
    """
    rows, inputs = blocks.expand(q.block, 2)
    if rows == 1:
        return q
    repeated = jax.eval_shape if isinstance(q.scale, jax.ShapeDtypeStruct) else (lambda f, x: f(x))
    scale = repeated(lambda scale: jnp.repeat(scale, rows or q.shape[0], axis=0)[: q.shape[0]], q.scale)
    return dataclasses.replace(q, scale=scale, block=(inputs,))


def matrix_block(name: str, q: ScaledArray, layout: str) -> tuple[int, int]:
    """The block of a matrix, one entry per axis; raises ValueError for what no layout of this module stores."""
    if not name.endswith(".weight"):
        raise ValueError(f"{name!r} does not end in '.weight', as {layout} demands; pass `rename`")
    if q.ndim != 2:
        raise ValueError(f"{name!r} has {q.ndim} axes; {layout} stores matrices (outputs, inputs)")
    if q.rotation is not None:
        raise ValueError(f"{name!r} is rotated ({q.rotation}); {layout} has no rotations: requantise it without one")
    if q.tensor_scale is not None and math.prod(q.tensor_scale.shape) != 1:
        raise ValueError(f"{name!r} has {math.prod(q.tensor_scale.shape)} tensor scales; {layout} stores one")
    rows, inputs = blocks.expand(q.block, 2)
    return rows, inputs


def shared(kinds: Mapping[str, str], layout: str) -> str | None:
    """The kind that all weights have, None without weights; raises ValueError that names two that differ."""
    for name, kind in kinds.items():
        first = next(iter(kinds))
        if kind != kinds[first]:
            raise ValueError(
                f"{first!r} has {kinds[first]} and {name!r} has {kind}; {layout} stores one kind of weights"
            )
    return next(iter(kinds.values()), None)


def unsupported(name: str, q: ScaledArray, layout: str, supported: str) -> ValueError:
    return ValueError(
        f"{name!r} is {q.format.name} with block {q.block} and {np.dtype(q.scale.dtype).name} scales; {layout} stores "
        f"{supported}. Requantise it, or save with layout='scaledot', which stores every format"
    )


GLOBAL_SCALE = ".weight_global_scale"
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def module_of(name: str) -> str:
    return name.removesuffix(".weight")

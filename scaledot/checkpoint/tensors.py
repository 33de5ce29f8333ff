"""The tensors of a checkpoint as a layout takes them, so that none is forgotten.

A layout takes the tensors that make a quantised weight. What it leaves is either a tensor in full precision, which is
returned as it is, or an error that names it.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import numpy as np

from scaledot.checkpoint import dtypes
from scaledot.checkpoint.errors import CheckpointError
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.safetensors import StoredTensor
from scaledot.checkpoint.source import Source

# Tensors that are not weights, by the end of their names: statistics of activations and of key-value caches, and the
# scale that an activation is multiplied by before its matmul. They are returned, and never applied.
SIDE_TENSORS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "prob_output_scale",
    "pre_quant_scale",
)
# Dtypes of tensors that are not quantised: in a quantised checkpoint, where other integers are codes; and in others.
PLAIN_DTYPES = ("F16", "BF16", "F32", "F64", "BOOL", "I64", "C64")
UNQUANTIZED_DTYPES = (*PLAIN_DTYPES, "U8", "I8", "I16", "U16", "I32", "U32", "U64")


class Tensors:
    """The tensors of a source, each of which is taken once."""

    def __init__(self, source: Source):
        self.source = source
        self._stored: dict[str, Any] = dict(source.tensors)
        self._left = dict.fromkeys(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __iter__(self) -> Iterator[str]:
        """The names of tensors that are not taken yet; tensors may be taken meanwhile."""
        return iter(list(self._left))

    def info(self, name: str) -> StoredTensor:
        return self._stored[name]

    def ending(self, suffix: str) -> list[str]:
        """The names of tensors that are not taken yet and end in `suffix`, without it."""
        return [name.removesuffix(suffix) for name in self if name.endswith(suffix)]

    def take(
        self,
        name: str,
        *dtype_names: str,
        shape: tuple[int, ...] | None = None,
        view: tuple[int, ...] | None = None,
        required_by: str | None = None,
    ) -> LazyArray:
        """Takes a tensor and checks its dtype, one of `dtype_names` if there are any, and its shape.

        view: another shape of as many elements, in which the row-major tensor is returned.
        required_by: the tensor that needs this one, for the error if it is missing.
        """
        if name not in self._left:
            owner = name if required_by is None else required_by
            self.fail(owner, f"{name!r}, which belongs to it, is missing")
        stored = self.info(name)
        if dtype_names and stored.dtype not in dtype_names:
            self.fail(name, f"the dtype is {stored.dtype}; expected {' or '.join(dtype_names)}")
        if shape is not None and stored.shape != shape:
            self.fail(name, f"the shape is {list(stored.shape)}; expected {list(shape)}")
        if view is not None and math.prod(view) != math.prod(stored.shape):
            self.fail(name, f"the tensor has {math.prod(stored.shape)} elements; expected {math.prod(view)}")
        del self._left[name]
        return (stored if view is None else stored._replace(shape=view)).array(self.source.reader)

    def take_bytes(self, name: str, shape: tuple[int, ...], required_by: str | None = None) -> LazyArray:
        """Takes a tensor of any dtype and shape as its bytes, in row-major order, in `shape`."""
        self.take(name, required_by=required_by)
        stored = self.info(name)
        if stored.nbytes != math.prod(shape):
            self.fail(name, f"the tensor has {stored.nbytes} bytes; expected {math.prod(shape)}")
        return stored._replace(dtype="U8", shape=shape).array(self.source.reader)

    def fail(self, name: str, reason: str) -> NoReturn:
        stored = self._stored.get(name)
        raise CheckpointError(self.source.path if stored is None else stored.path, reason, tensor=name)

    def rest(
        self, layout: str, reserved: tuple[str, ...] = (), plain_dtypes: Collection[str] = PLAIN_DTYPES
    ) -> dict[str, LazyArray]:
        """Takes all other tensors: those of `plain_dtypes` and SIDE_TENSORS.

        reserved: ends of names that only belong to quantised weights; such a tensor without its weight is an error.
        """
        plain = {}
        for name in self:
            is_side = name.endswith(tuple(f".{side}" for side in SIDE_TENSORS))
            if not is_side and (name.endswith(reserved) or self.info(name).dtype not in plain_dtypes):
                self.fail(name, f"no weight uses this tensor of dtype {self.info(name).dtype} (layout: {layout})")
            plain[name] = self.take(name)
        return plain

    def model_dtype(self) -> np.dtype:
        """The dtype of the model's activations: `dtype` or `torch_dtype` of its configuration, else bfloat16."""
        config = self.source.config
        text_config = config.get("text_config")
        sections = (config, text_config if isinstance(text_config, dict) else {})
        found = (dtypes.named(section.get(key)) for section in sections for key in ("dtype", "torch_dtype"))
        return next((dtype for dtype in found if dtype is not None), dtypes.DTYPES["BF16"])

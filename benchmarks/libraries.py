"""The libraries that scaledot is compared with, through their public APIs.

Qwix has `qwix.quantize` and `qwix.dequantize`. `jax.nn` has no public quantisation function: `scaled_dot_general`
quantises its operands internally.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

JAX_NN = "jax.nn has no public quantisation function to time: scaled_dot_general quantises internally"


@dataclasses.dataclass(frozen=True)
class QwixCast:
    """Arguments of `qwix.quantize`: one scale per row and tile, per row if `tile` is None, or one if `per_tensor`."""

    qtype: str
    tile: int | None = None
    per_tensor: bool = False

    def quantizer(self, row_axis: int = 0) -> Callable[[Any], Any]:
        """Returns a function that quantises a matrix with scales per index of `row_axis`."""
        import qwix  # pyright: ignore[reportMissingImports]  (an optional library)

        rows = () if self.per_tensor else (row_axis,)
        tiles = {} if self.tile is None else {1 - row_axis: self.tile}
        return lambda x: qwix.quantize(x, self.qtype, channelwise_axes=rows, tiled_axes=tiles)

    @staticmethod
    def dequantizer() -> Callable[[Any], Any]:
        import qwix  # pyright: ignore[reportMissingImports]  (an optional library)

        return qwix.dequantize


def has_qwix() -> bool:
    return importlib.util.find_spec("qwix") is not None


def notes() -> list[str]:
    """Notes on libraries that are not timed."""
    not_installed = [] if has_qwix() else ["qwix is not installed: only scaledot is timed"]
    return [*not_installed, JAX_NN]

"""The libraries that scaledot is timed against, through their public names only.

Qwix has `qwix.quantize` and `qwix.dequantize`. `jax.nn` has none: `scaled_dot_general` quantises its operands
inside, and `get_scaled_dot_general_config` only describes how.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

JAX_NN = "jax.nn has no public quantiser to time: scaled_dot_general quantises inside"


@dataclasses.dataclass(frozen=True)
class QwixCast:
    """What `qwix.quantize` calls a case: a scale for every row unless `per_tensor`, cut into tiles where given."""

    qtype: str
    tile: int | None = None
    per_tensor: bool = False

    def quantizer(self, row_axis: int = 0) -> Callable[[Any], Any]:
        """The cast of a matrix whose scales belong to indices of `row_axis`."""
        import qwix  # pyright: ignore[reportMissingImports]  (a peer, not a dependency)

        rows = () if self.per_tensor else (row_axis,)
        tiles = {} if self.tile is None else {1 - row_axis: self.tile}
        return lambda x: qwix.quantize(x, self.qtype, channelwise_axes=rows, tiled_axes=tiles)

    @staticmethod
    def dequantizer() -> Callable[[Any], Any]:
        import qwix  # pyright: ignore[reportMissingImports]  (a peer, not a dependency)

        return qwix.dequantize


def has_qwix() -> bool:
    return importlib.util.find_spec("qwix") is not None


def notes() -> list[str]:
    """What a reader should know about peers that are not timed."""
    absent = [] if has_qwix() else ["qwix is not installed: no peer is timed"]
    return [*absent, JAX_NN]

"""The table of layouts that can be written.

A writer is a module with `plan(contents) -> Written`. It sees shapes and dtypes only: leaves of
ScaledArrays may be jax.ShapeDtypeStructs, so that a checkpoint can be planned before its tensors are computed. Each
`Part` of a weight extracts one tensor of the file from the computed weight.
"""

import importlib
from types import ModuleType

from scaledot.formats import row_of

WRITERS = {
    "scaledot": "native",
    "compressed-tensors": "compressed_tensors",
    "modelopt": "modelopt",
    "hf-fp8": "fine_grained_fp8",
}


def writer_of(layout: str) -> ModuleType:
    """The module that writes a layout; the error for an unknown name lists the nearest ones."""
    name = row_of("layout", layout, _Name, WRITERS, "the writable layouts")
    return importlib.import_module(f"scaledot.checkpoint.writers.{name}")


class _Name(str):
    """The type that `row_of` accepts besides a name; no value has it."""

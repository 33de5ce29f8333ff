"""The table of layouts: how quantised weights are stored as tensors.

A layout is a module with

* `matches(source)`: whether the configuration names this layout; without a configuration, whether tensors look like it;
* `weights(tensors)`: takes the tensors of quantised weights and returns these as ScaledArrays of LazyArrays, by name,
  and tensors of them that are returned as they are;
* `RESERVED`: ends of names of tensors that only belong to quantised weights;
* `PLAIN_DTYPES`, optionally: dtypes of tensors that are not quantised, instead of those in `tensors`.
"""

import importlib
from types import ModuleType
from typing import Any

from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import PLAIN_DTYPES, UNQUANTIZED_DTYPES, Tensors

LAYOUTS = {
    "gguf": "gguf_blocks",
    "scaledot": "native",
    "hf-fp8": "fine_grained_fp8",
    "compressed-tensors": "compressed_tensors",
    "modelopt": "modelopt",
    "gpt-oss": "gpt_oss",
    "bitsandbytes": "bitsandbytes",
    "gptq": "gptq",
    "awq": "awq",
    "torchao": "torchao",
}


def find_layout(source: Source) -> str | None:
    """The name of the first layout that matches, or None if no weight is quantised.

    Raises CheckpointError if the configuration names a quantisation method that is not in the table.
    """
    for name in LAYOUTS:
        if module_of(name).matches(source):
            return name
    method = source.quantization.get("quant_method")
    if method is not None:
        raise CheckpointError(
            source.path, f"the quantisation method {quoted(method)} is not supported; there are {', '.join(LAYOUTS)}"
        )
    return None


def module_of(layout: str) -> ModuleType:
    return importlib.import_module(f"scaledot.checkpoint.layouts.{LAYOUTS[layout]}")


def entries(source: Source) -> dict[str, Any]:
    """All tensors of a checkpoint by name, in the order of the files: LazyArrays, and weights with LazyArray leaves."""
    layout = find_layout(source)
    tensors = Tensors(source)
    if layout is None:
        return dict(tensors.rest("without quantisation", plain_dtypes=UNQUANTIZED_DTYPES))
    module = module_of(layout)
    found = module.weights(tensors)
    found |= tensors.rest(layout, module.RESERVED, getattr(module, "PLAIN_DTYPES", PLAIN_DTYPES))
    return found

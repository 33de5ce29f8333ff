"""Checkpoints: opens the quantised weights that others publish, and saves those that others serve.

    params = checkpoint.load("Llama-3.1-8B-NVFP4", rename=checkpoint.LLAMA)      # ScaledArrays and arrays
    checkpoint.save(params, "out", "compressed-tensors", config=config, rename=checkpoint.LLAMA)

Opening a checkpoint reads headers only. Every tensor is a `LazyArray`, which reads any slice of itself; a quantised
weight is a ScaledArray whose leaves are LazyArrays. `load` reads them onto devices.

| module | holds |
|---|---|
| `source`, `safetensors`, `gguf` | `open_source`: the tensors of a folder or file, their types and places |
| `json_text`, `errors` | JSON of untrusted files, within bounds; `CheckpointError` |
| `reader`, `lazy`, `unpacking` | slices of tensors, LazyArrays and what is derived from them, codes from packed bytes |
| `tensors`, `layouts/` | a table of layouts: which tensors make a quantised weight |
| `forms`, `subnormals` | weights that are more than a ScaledArray; exact dequantised values |
| `names` | maps between names in a file and paths of parameters |
| `materialize`, `loading` | `load` |
| `writers/`, `saving`, `atomic` | a table of layouts that can be written; `save`, which replaces a folder atomically |
| `conversion`, `listing` | `convert`, `inspect`, `diff` |
| `peft` | `save_adapters`, `load_adapters`: LoRA adapters in the layout of Hugging Face PEFT |
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scaledot.checkpoint.conversion import convert
    from scaledot.checkpoint.errors import CheckpointError
    from scaledot.checkpoint.forms import Flat, Offset, Permuted, dequantize
    from scaledot.checkpoint.listing import diff, inspect
    from scaledot.checkpoint.loading import load
    from scaledot.checkpoint.names import GPT_OSS, LLAMA, MIXTRAL, QWEN, NameMap
    from scaledot.checkpoint.peft import load_adapters, save_adapters
    from scaledot.checkpoint.saving import save

_MODULE_OF = {
    "CheckpointError": "errors",
    "Flat": "forms",
    "GPT_OSS": "names",
    "LLAMA": "names",
    "MIXTRAL": "names",
    "NameMap": "names",
    "Offset": "forms",
    "Permuted": "forms",
    "QWEN": "names",
    "convert": "conversion",
    "dequantize": "forms",
    "diff": "listing",
    "inspect": "listing",
    "load": "loading",
    "load_adapters": "peft",
    "save": "saving",
    "save_adapters": "peft",
}

__all__ = [
    "GPT_OSS",
    "LLAMA",
    "MIXTRAL",
    "QWEN",
    "CheckpointError",
    "Flat",
    "NameMap",
    "Offset",
    "Permuted",
    "convert",
    "dequantize",
    "diff",
    "inspect",
    "load",
    "load_adapters",
    "save",
    "save_adapters",
]


def __getattr__(name: str):
    """Imports a name on first use, so that `scaledot inspect` imports little."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

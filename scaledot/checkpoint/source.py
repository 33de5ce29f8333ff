"""Opens a checkpoint: lists its tensors and reads its configuration, without reading tensors.

A checkpoint is a folder of safetensors files with a `config.json`, one safetensors file, or one GGUF file. Names of
files that come from an index must be plain names, and must not lead out of the folder. Symbolic links may only lead to
the `blobs` of the same repository in the cache of the Hugging Face Hub, where all files of a snapshot are links.
"""

import dataclasses
import os
from os import PathLike
from pathlib import Path
from typing import Any

from scaledot.checkpoint import gguf, safetensors
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.gguf import GgufTensor
from scaledot.checkpoint.json_text import read_object
from scaledot.checkpoint.reader import Reader
from scaledot.checkpoint.safetensors import Header, StoredTensor

INDEX = "model.safetensors.index.json"
_MAX_NAME_BYTES = 255  # of file systems


@dataclasses.dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint by name, its configuration, and the reader that counts the bytes that are read.

    config: the content of `config.json`, or {}.
    quantization: `quantization_config` of it, or `quantization` of `hf_quant_config.json`, or {}.
    metadata: the `__metadata__` of safetensors files, or the key-value pairs of a GGUF file.
    """

    path: Path
    tensors: dict[str, StoredTensor] | dict[str, GgufTensor]
    config: dict[str, Any]
    quantization: dict[str, Any]
    metadata: dict[str, Any]
    reader: Reader

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def open_source(path: str | PathLike[str]) -> Source:
    """Opens a folder or a file."""
    path, reader = Path(path), Reader()
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_dir():
        return _open_folder(path, reader)
    if not path.is_file():
        raise CheckpointError(path, "expected a folder or a regular file")
    if path.suffix == ".gguf":
        reader.watch(path)
        header = gguf.read_header(path)
        return Source(path, header.tensors, {}, {}, header.metadata, reader)
    if path.suffix == ".safetensors":
        reader.watch(path)
        tensors, metadata = safetensors.read_header(path)
        return Source(path, tensors, {}, {}, dict(metadata), reader)
    raise CheckpointError(
        path, "expected a folder, a .safetensors file or a .gguf file; pickled files are never opened"
    )


def _open_folder(folder: Path, reader: Reader) -> Source:
    files = sorted(folder.glob("*.safetensors"))
    if os.path.lexists(folder / INDEX):  # a dangling link is an error, not a folder without an index
        tensors, metadata = _read_indexed(folder, read_object(inside(folder, INDEX)), reader)
    elif files:
        tensors, metadata = _read_all(folder, [file.name for file in files], reader)
    else:
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) == 1:
            return open_source(inside(folder, gguf_files[0].name))
        raise CheckpointError(folder, "the folder has neither safetensors files nor exactly one GGUF file")
    config = _optional(folder, "config.json")
    quantization = _quantization(folder, config)
    return Source(folder, tensors, config, quantization, dict(metadata), reader)


def _read_indexed(folder: Path, index: dict[str, Any], reader: Reader) -> Header:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise CheckpointError(folder / INDEX, "`weight_map` must be an object of file names")
    files = sorted(set(weight_map.values()))
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(folder / INDEX, f"{quoted(file)} is not the name of a safetensors file")
    header = _read_all(folder, files, reader)
    for name, file in weight_map.items():
        if name not in header.tensors or header.tensors[name].path.name != file:
            raise CheckpointError(folder / INDEX, f"{file} has no such tensor", tensor=name)
    for name, tensor in header.tensors.items():
        if name not in weight_map:
            raise CheckpointError(tensor.path, f"the tensor is not in `weight_map` of {INDEX}", tensor=name)
    return header


def _read_all(folder: Path, names: list[str], reader: Reader) -> Header:
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for name in names:
        path = inside(folder, name)
        reader.watch(path)
        header = safetensors.read_header(path)
        for tensor in header.tensors.values():
            if tensor.name in tensors:
                raise CheckpointError(tensor.path, f"also in {tensors[tensor.name].path.name}", tensor=tensor.name)
            tensors[tensor.name] = tensor
        metadata |= header.metadata
    return Header(tensors, metadata)


def inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder; raises CheckpointError if the name or a link leads out of it."""
    if (
        name in ("", ".", "..")
        or "/" in name
        or "\\" in name
        or "\0" in name
        or len(os.fsencode(name)) > _MAX_NAME_BYTES
    ):
        raise CheckpointError(folder, f"{quoted(name)} is not the name of a file in this folder")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(folder, f"the file {quoted(name)} is missing")
    target, parent = path.resolve(), folder.resolve()
    is_hub_blob = parent.parent.name == "snapshots" and target.parent == parent.parent.parent / "blobs"
    if target.parent != parent and not is_hub_blob:
        raise CheckpointError(folder, f"{quoted(name)} is a link out of the folder")
    return path


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_object(inside(folder, name)) if os.path.lexists(folder / name) else {}


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The quantisation section of the configuration; of a multimodal model it may be in `text_config`."""
    text_config = config.get("text_config")
    for section in (config, text_config if isinstance(text_config, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(section.get(key), dict):
                return section[key]
            if section.get(key) is not None:
                raise CheckpointError(folder / "config.json", f"`{key}` must be an object")
    modelopt = _optional(folder, "hf_quant_config.json").get("quantization")
    if modelopt is None:
        return {}
    if not isinstance(modelopt, dict):
        raise CheckpointError(folder / "hf_quant_config.json", "`quantization` must be an object")
    return {"quant_method": "modelopt", **modelopt}

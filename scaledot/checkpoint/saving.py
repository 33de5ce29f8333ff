"""`save`: writes a tree of arrays and ScaledArrays as a checkpoint that other libraries open."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from scaledot.checkpoint import forms, safetensors
from scaledot.checkpoint.atomic import replaced_folder, synchronize
from scaledot.checkpoint.loading import Rename, transposed
from scaledot.checkpoint.names import Location, NameMap
from scaledot.checkpoint.progress import Progress
from scaledot.checkpoint.source import INDEX
from scaledot.checkpoint.writers import writer_of
from scaledot.checkpoint.writers.parts import GLOBAL_SCALE, Contents, Part, Written, array_part, module_of

MAX_SHARD_BYTES = 5_000_000_000
_CONFIG_FILES = ("config.json", "hf_quant_config.json", INDEX)


class Entry(NamedTuple):
    """A tensor or weight to save: its type (leaves with a shape and a dtype), and a function that computes it."""

    type: Any
    compute: Callable[[], Any]


def save(
    tree: Mapping[str, Any],
    path: str | PathLike[str],
    layout: str = "scaledot",
    *,
    config: Mapping[str, Any] | None = None,
    rename: Rename = None,
    activations: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder of safetensors files with `config.json`, which replaces an existing folder atomically.

    An interrupted call leaves the old folder as it was. Of the old folder, `model*.safetensors`, their index and
    configurations are replaced; other files, such as those of a tokenizer, are kept.

    Args:
      tree: arrays, ScaledArrays and the forms that `load` returns, in a dict of names or nested dicts.
      layout: "compressed-tensors", "modelopt" and "hf-fp8" are served by vLLM and others and store some formats each;
        "scaledot" stores every format.
      config: the model's `config.json`, to which `quantization_config` is added.
      rename: the NameMap (or its templates) that `load` was called with, for the names in the file; weights are
        transposed back. Or a function of the path. By default, keys of nested dicts are joined with dots.
      activations: what the configuration says about activations: "dynamic", quantised at run time, or "static", by
        scales in the tree; by default "static" if all weights have such scales, else that only weights are quantised.
      max_shard_bytes: the size from which a further file is begun.
    """
    if not isinstance(tree, Mapping):
        raise TypeError(f"`tree` must be a dict of arrays, not {type(tree).__name__}")
    entries: dict[str, Entry] = {}
    for name, array in _flat(tree, _namer(rename)):
        if name in entries or name == "__metadata__":
            raise ValueError(f"two arrays would be saved as {name!r}" if name in entries else f"{name!r} is reserved")
        entries[name] = Entry(array, lambda array=array: array)
    write_folder(Path(path), entries, layout, config, activations, max_shard_bytes)


def write_folder(
    path: Path,
    entries: Mapping[str, Entry],
    layout: str,
    config: Mapping[str, Any] | None = None,
    activations: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume_key: str | None = None,
) -> None:
    """Writes entries one after the other, each computed when it is written.

    resume_key: describes what is written; files that a call with an equal key wrote before an interruption are kept.
    """
    if activations not in (None, "dynamic", "static"):
        raise ValueError(f"`activations` must be 'dynamic', 'static' or None, not {activations!r}")
    written = _planned(entries, layout, activations)
    shards = _shards(_parts_of_entries(entries, written), max_shard_bytes)
    files = {name: json.dumps(content, indent=2) for name, content in _json_files(config, written, shards).items()}
    with replaced_folder(path, is_part, resume=resume_key is not None) as folder:
        _begin(folder, resume_key, shards)
        with Progress(f"saving {path.name}", sum(shard.nbytes for shard in shards)) as progress:
            for shard in shards:
                if not (folder / shard.file).exists():
                    _write_shard(folder, shard, entries, written.metadata, progress)
        for name, content in files.items():
            _write_text(folder / name, content)
        (folder / _KEY_FILE).unlink(missing_ok=True)


def _planned(entries: Mapping[str, Entry], layout: str, activations: str | None) -> Written:
    weights = {name: entry.type for name, entry in entries.items() if forms.is_weight(entry.type)}
    matrices = [name for name, entry in entries.items() if name not in weights and len(entry.type.shape) == 2]
    unquantized = sorted(module_of(name) for name in matrices if name.endswith(".weight"))
    return writer_of(layout).plan(Contents(weights, unquantized, entries.keys(), activations))


class Shard(NamedTuple):
    """A file to write: its name, and the parts of each entry in it."""

    file: str
    parts: dict[str, list[Part]]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.parts.values() for part in parts)


def _parts_of_entries(entries: Mapping[str, Entry], written: Written) -> dict[str, list[Part]]:
    """The parts of each entry. X.weight includes `X.weight_global_scale`, which `load` returns beside some weights."""
    originals = {f"{module_of(name)}{GLOBAL_SCALE}" for name in written.parts} & entries.keys()
    parts = {name: written.parts.get(name) or [array_part(name, e.type)] for name, e in entries.items()}
    parts = {name: of_entry for name, of_entry in parts.items() if name not in originals}
    parts |= {
        name: [_with_original(part, entries[part.name]) if part.name in originals else part for part in of_weight]
        for name, of_weight in written.parts.items()
    }
    names = [part.name for of_entry in parts.values() for part in of_entry]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{duplicate!r} is the name of an array and of a part of a quantised weight; rename the array")
    return {name: parts[name] for name in entries if name in parts}


def _with_original(part: Part, original: Entry) -> Part:
    """The part with the bits of `original`, if that has the same reciprocal."""

    def extract(weight: Any) -> np.ndarray:
        computed, stored = part.extract(weight), np.asarray(original.compute(), np.float32).reshape(part.shape)
        return stored if np.array_equal(np.float32(1) / stored, np.float32(1) / computed) else computed

    return part._replace(extract=extract)


def _shards(parts: dict[str, list[Part]], max_shard_bytes: int) -> list[Shard]:
    groups: list[dict[str, list[Part]]] = [{}]
    size = 0
    for name, of_entry in parts.items():
        nbytes = sum(part.nbytes for part in of_entry)
        if groups[-1] and size + nbytes > max_shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = of_entry
        size += nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", groups[0])]
    return [Shard(f"model-{n:05}-of-{len(groups):05}.safetensors", group) for n, group in enumerate(groups, 1)]


def _json_files(config: Mapping[str, Any] | None, written: Written, shards: list[Shard]) -> dict[str, Any]:
    files: dict[str, Any] = dict(written.files)
    config = without_quantization(config or {})
    if written.quantization is not None:
        config["quantization_config"] = written.quantization
    if config:
        files["config.json"] = config
    if len(shards) > 1:
        weight_map = {part.name: s.file for s in shards for parts in s.parts.values() for part in parts}
        files[INDEX] = {"metadata": {"total_size": sum(s.nbytes for s in shards)}, "weight_map": weight_map}
    return files


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its sections about quantisation, also in that of a multimodal model's text part."""
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = without_quantization(kept["text_config"])
    return kept


_KEY_FILE = ".resume"


def _begin(folder: Path, resume_key: str | None, shards: list[Shard]) -> None:
    """Removes files of an interrupted call unless it had the same key and the same plan."""
    if resume_key is None:
        return
    plan = [(s.file, [(p.name, p.dtype, p.shape) for parts in s.parts.values() for p in parts]) for s in shards]
    key = hashlib.sha256(json.dumps([resume_key, plan]).encode()).hexdigest()
    file = folder / _KEY_FILE
    if not file.exists() or file.read_text() != key:
        for child in folder.iterdir():
            child.unlink()
        file.write_text(key)


def _write_shard(folder: Path, shard: Shard, entries: Mapping[str, Entry], metadata, progress: Progress) -> None:
    tensors = list(_pending(shard, entries, progress))
    own = {key: text for key, text in metadata.items() if ":" not in key or key.partition(":")[2] in shard.parts}
    unfinished = folder / f"{shard.file}.part"
    with unfinished.open("wb") as file:
        safetensors.write(file, tensors, {"format": "pt", **own})
    os.replace(unfinished, folder / shard.file)
    synchronize(folder)


def _pending(shard: Shard, entries: Mapping[str, Entry], progress: Progress) -> Iterator[safetensors.Pending]:
    for name, parts in shard.parts.items():
        value = _Shared(entries[name].compute, len(parts))
        for part in parts:
            yield safetensors.Pending(part.name, part.dtype, part.shape, _piece(part, value, progress))


def _piece(part: Part, value: "_Shared", progress: Progress) -> Iterator[np.ndarray]:
    yield part.extract(value.use())
    progress.add(part.nbytes, part.name)


class _Shared:
    """A value that is computed at its first use and released after its last."""

    def __init__(self, compute: Callable[[], Any], uses: int):
        self.compute, self.uses_left, self.value = compute, uses, None

    def use(self) -> Any:
        if self.value is None:
            self.value = self.compute()
        value, self.uses_left = self.value, self.uses_left - 1
        if not self.uses_left:
            self.value = None
        return value


def _write_text(path: Path, content: str) -> None:
    with path.open("w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def is_part(name: str) -> bool:
    """Whether a file belongs to a checkpoint of this module."""
    return name in _CONFIG_FILES or re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) is not None


def _flat(tree: Mapping[str, Any], locate: Callable[[str], Location], path: tuple[str, ...] = ()):
    """Yields names and arrays of nested dicts, transposed where the name map says so."""
    for key, node in tree.items():
        here = (*path, str(key))
        if isinstance(node, Mapping):
            yield from _flat(node, locate, here)
            continue
        name, is_transposed = locate("/".join(here))
        _check_saveable(name, node)
        yield name, transposed(node) if is_transposed else node


def _check_saveable(name: str, node: Any) -> None:
    if not forms.is_weight(node) and not (
        hasattr(node, "shape") and isinstance(getattr(node, "dtype", None), np.dtype)
    ):
        raise TypeError(
            f"{name!r} is of type {type(node).__name__}; trees to save hold arrays and ScaledArrays in dicts"
        )
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(node)):
        raise ValueError(f"{name!r} is sharded over other processes; save with Orbax, or gather it first")


def _namer(rename: Rename) -> Callable[[str], Location]:
    if rename is None:
        return lambda path: Location(path.replace("/", "."), False)
    if isinstance(rename, Mapping):
        rename = NameMap(rename)
    if isinstance(rename, NameMap):
        return rename.to_name
    return lambda path: Location(rename(path), False)

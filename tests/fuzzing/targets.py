"""The targets: for each reader, valid inputs, their mutation, and a function that reads an input as `load` does."""

import json
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax

from scaledot.checkpoint import forms
from scaledot.checkpoint.json_text import parse_object
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.reader import Reader
from scaledot.checkpoint.safetensors import read_header
from scaledot.checkpoint.source import INDEX, open_source
from tests.fuzzing import gguf_files
from tests.fuzzing.checkpoints import GOLDEN, MODEL, Checkpoint, Files, all_checkpoints, joined, split, words_of
from tests.fuzzing.mutation import mutated_bytes, mutated_json, mutated_text


class Target(NamedTuple):
    """inputs: returns the input of a generator of random numbers. read: reads the files of an input in a folder."""

    inputs: Callable[[Path], Callable[[Random], Files]]
    read: Callable[[Path, Files], None]


# Inputs. The argument `golden` is a folder of checkpoints.


@cache
def _checkpoints(golden: Path) -> tuple[list[Checkpoint], list[str]]:
    found = all_checkpoints(golden)
    return found, words_of(found)


def _texts(golden: Path) -> Callable[[Random], Files]:
    checkpoints, words = _checkpoints(golden)
    texts = [json.dumps(value).encode() for one in checkpoints for value in (*one.configs.values(), one.header)]
    texts += [b'{"a":[1,-2.5e3,true,null,"\\u00e9\\ud83d\\ude00"],"b":{"c":{}}}']
    return lambda random: {"text": mutated_text(random, random.choice(texts), texts, words)}


def _small_models(golden: Path) -> list[bytes]:
    """The safetensors files without most of the bytes of large tensors: sizes do not matter to the header's reader."""
    models = [one.files()[MODEL] for one in _checkpoints(golden)[0]]
    return [model for model in models if len(model) < 4096]


def _safetensors(golden: Path) -> Callable[[Random], Files]:
    words, models = _checkpoints(golden)[1], _small_models(golden)

    def one(random: Random) -> Files:
        content = random.choice(models)
        if random.random() < 0.5:
            return {MODEL: mutated_bytes(random, content, models)}
        header, data = split(content)
        text = json.dumps(mutated_json(random, header, words)).encode()
        return {
            MODEL: joined(text, data) if random.random() < 0.9 else mutated_bytes(random, joined(text, data), models)
        }

    return one


def _folders(golden: Path) -> Callable[[Random], Files]:
    """Folders of two shards with an index, one file of which is changed."""
    words, models = [*_checkpoints(golden)[1], "a.safetensors", "b.safetensors", "../x", "c.bin"], _small_models(golden)
    checkpoints = [one for one in _checkpoints(golden)[0] if len(one.files()[MODEL]) < 4096]
    folders = [_sharded(one) for one in checkpoints]
    texts = [content for folder in folders for name, content in folder.items() if name.endswith(".json")]

    def one(random: Random) -> Files:
        files = dict(random.choice(folders))
        name = random.choice((INDEX, INDEX, *files))
        if name.endswith(".json"):
            files[name] = mutated_text(random, files.get(name, b"{}"), texts, words)
        else:
            files[name] = mutated_bytes(random, files[name], models)
        if random.random() < 0.1:
            del files[random.choice(list(files))]
        return files

    return one


def _sharded(checkpoint: Checkpoint) -> Files:
    names = [name for name in checkpoint.header if name != "__metadata__"]
    files, weight_map = checkpoint.files(), {}
    del files[MODEL]
    for shard, some in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        metadata = {name: value for name, value in checkpoint.header.items() if name == "__metadata__"}
        part = Checkpoint({}, metadata | {name: checkpoint.header[name] for name in some}, checkpoint.data)
        files[shard] = part.files()[MODEL]
        weight_map |= dict.fromkeys(some, shard)
    return files | {INDEX: json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()}


def _gguf(golden: Path) -> Callable[[Random], Files]:
    valid = gguf_files.encoded(gguf_files.STRUCTURE)
    words = ["GGUF", "FUGG", "general.alignment", "token_embd.weight", "blk.0.scale", "é", ""]

    def one(random: Random) -> Files:
        if random.random() < 0.5:
            return {"model.gguf": mutated_bytes(random, valid, [valid])}
        return {"model.gguf": gguf_files.encoded(mutated_json(random, gguf_files.STRUCTURE, words))}

    return one


def _layouts(golden: Path) -> Callable[[Random], Files]:
    checkpoints, words = _checkpoints(golden)
    return lambda random: random.choice(checkpoints).mutated(random, words).files()


# Readers.


def _read_text(folder: Path, files: Files) -> None:
    parse_object(files["text"], folder / "text", "the text")


def _read_safetensors(folder: Path, files: Files) -> None:
    reader = Reader()
    for tensor in read_header(folder / MODEL).tensors.values():
        _read_leaf(tensor.array(reader))


def _read_folder(folder: Path, files: Files) -> None:
    for entry in entries(open_source(folder)).values():
        _read_entry(entry)


def _read_gguf(folder: Path, files: Files) -> None:
    for entry in entries(open_source(folder / "model.gguf")).values():
        _read_entry(entry)


def _read_entry(entry: Any) -> None:
    leaves, tree = jax.tree.flatten(entry, is_leaf=_is_lazy)
    for leaf in leaves:
        _read_leaf(leaf)
    if forms.is_weight(entry):
        shape = _dequantized_shape(tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        assert shape == tuple(entry.shape), f"{shape} is not {entry.shape}"


@lru_cache(maxsize=10_000)
def _dequantized_shape(tree: Any, types: tuple) -> tuple[int, ...]:
    """Traces `dequantize`, which checks that the leaves fit."""
    return jax.eval_shape(forms.dequantize, tree.unflatten(jax.ShapeDtypeStruct(*leaf) for leaf in types)).shape


def _read_leaf(leaf: LazyArray) -> None:
    """Reads the whole array and a slice of each axis, which must agree."""
    whole = leaf.numpy()
    assert whole.shape == tuple(leaf.shape), f"{whole.shape} is not {leaf.shape}"
    assert whole.dtype == leaf.dtype, f"{whole.dtype} is not {leaf.dtype}"
    index = tuple(slice(size // 3, size - size // 4) for size in leaf.shape)
    assert leaf.read(index).tobytes() == whole[index].tobytes(), "a slice differs from that of the whole array"


def _is_lazy(node: Any) -> bool:
    return isinstance(node, LazyArray)


TARGETS = {
    "json_text": Target(_texts, _read_text),
    "safetensors": Target(_safetensors, _read_safetensors),
    "folder": Target(_folders, _read_folder),
    "gguf": Target(_gguf, _read_gguf),
    "layouts": Target(_layouts, _read_folder),
}


def valid_inputs(golden: Path = GOLDEN) -> Sequence[Files]:
    """The files of all checkpoints before mutation."""
    return [files for one in _checkpoints(golden)[0] for files in (one.files(), _sharded(one))]

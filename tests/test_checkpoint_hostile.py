"""Damaged and hostile checkpoints: each raises CheckpointError that names the file, in bounded memory and time."""

import contextlib
import json
import os
import struct
import time
import tracemalloc

import numpy as np
import pytest

from scaledot.checkpoint import CheckpointError, layouts
from scaledot.checkpoint.json_text import parse_object
from scaledot.checkpoint.safetensors import read_header
from scaledot.checkpoint.source import INDEX, open_source

DATA = bytes(range(24))
PAIR = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [16, 24]},
}
# The most bytes of Python objects per byte of JSON: a list takes 72 and an entry of a list 8, in 3 bytes of text; a
# string takes 4 per character.
BYTES_PER_BYTE, SOME_BYTES, SECONDS = 40, 10_000_000, 2.0


def encoded(header, data=DATA, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(data=DATA, **changed) -> bytes:
    """A file with the tensor "w", uint8 of 24 elements, with fields of its record changed."""
    return encoded({"w": {"dtype": "U8", "shape": [24], "data_offsets": [0, 24]} | changed}, data)


@contextlib.contextmanager
def refused(*words, size=0):
    """Expects CheckpointError with all words, peak memory bounded by the size of the input, and little time."""
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError) as caught:
            yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < SECONDS
    assert peak < BYTES_PER_BYTE * size + SOME_BYTES
    assert len(str(caught.value)) < 2000
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, str(caught.value)


def refuse_file(folder, content: bytes, *words):
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with refused("model.safetensors", *words, size=len(content)):
        read_header(path)


def test_a_valid_file_opens_and_offsets_need_not_be_in_the_order_of_names(tmp_path):
    swapped = {"z": PAIR["a"], "a": PAIR["b"]}
    (tmp_path / "model.safetensors").write_bytes(encoded(swapped))
    source = open_source(tmp_path)
    read = {name: tensor.array(source.reader).numpy() for name, tensor in source.tensors.items()}
    assert read["z"].tobytes() + read["a"].tobytes() == DATA


@pytest.mark.parametrize("dtype", ["F32", "F4", "BOOL"])
def test_a_file_cut_at_any_byte_is_refused(tmp_path, dtype):
    shape = {"F32": [6], "F4": [48], "BOOL": [24]}[dtype]
    content = one(dtype=dtype, shape=shape)
    path = tmp_path / "model.safetensors"
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_source(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="the file at byte"):
        open_source(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 2**32, 1000], ids=str)
def test_a_header_length_past_the_end_is_refused(tmp_path, length):
    refuse_file(tmp_path, encoded(PAIR, length=length), str(length))


def test_a_header_that_claims_a_sparse_gigabyte_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**9))
    os.truncate(path, 2**31)
    with refused("model.safetensors", "1000000000"):
        read_header(path)


RECORDS = {
    "negative offset": ({"data_offsets": [-24, 0]}, "ascending"),
    "descending offsets": ({"data_offsets": [24, 0]}, "ascending"),
    "three offsets": ({"data_offsets": [0, 12, 24]}, "two"),
    "boolean offset": ({"data_offsets": [False, 24]}, "integers"),
    "float offset": ({"data_offsets": [0, 24.0]}, "integers"),
    "offsets as text": ({"data_offsets": "0,24"}, "integers"),
    "huge offset": ({"data_offsets": [0, 10**4000]}, "24 bytes"),
    "offset past the end": ({"shape": [25], "data_offsets": [0, 25]}, "the file at byte"),
    "gap at the start": ({"shape": [20], "data_offsets": [4, 24]}, "gap"),
    "gap at the end": ({"shape": [20], "data_offsets": [0, 20]}, "the file at byte"),
    "unknown dtype": ({"dtype": "F128"}, "unknown dtype 'F128'"),
    "dtype in lower case": ({"dtype": "u8"}, "unknown dtype"),
    "dtype as a list": ({"dtype": ["U8"]}, "unknown dtype"),
    "dtype as null": ({"dtype": None}, "unknown dtype None"),
    "dtype of megabytes": ({"dtype": "U" * 10**6}, "unknown dtype 'UUU"),
    "too few bytes": ({"shape": [25]}, "25 bytes"),
    "negative size": ({"shape": [-1]}, "at least 0"),
    "boolean size": ({"shape": [24, True]}, "integers"),
    "float size": ({"shape": [24.0]}, "integers"),
    "size as text": ({"shape": ["24"]}, "integers"),
    "shape as a number": ({"shape": 24}, "list"),
    "too many axes": ({"shape": [24] + [1] * 32}, "at most 32"),
    "product that overflows": ({"shape": [2**32, 2**32]}, "too large"),
    "product that overflows to 24": ({"shape": [2**61 + 3, 8]}, "too large"),
    "zero times a huge size": ({"shape": [0, 2**63], "data_offsets": [0, 0]}, "too large"),
    "half a byte": ({"dtype": "F4", "shape": [49]}, "24.5 bytes"),
    "additional field": ({"strides": [1]}, "expected an object"),
}


@pytest.mark.parametrize(("changed", "reason"), RECORDS.values(), ids=list(RECORDS))
def test_a_damaged_record_is_refused_by_the_name_of_its_tensor(tmp_path, changed, reason):
    named = () if reason == "the file at byte" else ("tensor 'w'",)
    refuse_file(tmp_path, one(**changed), reason, *named)


@pytest.mark.parametrize("record", [None, [], 1, {}, {"dtype": "U8", "shape": [24]}], ids=str)
def test_a_record_that_is_no_object_of_three_fields_is_refused(tmp_path, record):
    refuse_file(tmp_path, encoded({"w": record}), "tensor 'w'", "expected an object")


def test_overlapping_tensors_are_refused(tmp_path):
    header = {**PAIR, "b": PAIR["b"] | {"data_offsets": [8, 16]}}
    refuse_file(tmp_path, encoded(header, DATA[:16]), "tensor 'b'", "overlap")


@pytest.mark.parametrize("metadata", [[], "text", {"format": 1}, {"format": None}], ids=str)
def test_metadata_that_are_no_strings_are_refused(tmp_path, metadata):
    refuse_file(tmp_path, encoded({"__metadata__": metadata, **PAIR}), "__metadata__")


N = 50_000
TEXTS = {
    "not UTF-8": (b'{"\xff\xfe": 1}', "not UTF-8"),
    "overlong UTF-8": (b'{"\xc0\xaf": 1}', "not UTF-8"),
    "surrogate without its pair": (rb'{"\ud800": 1}', "surrogate"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "infinity": (b'{"a": -Infinity}', "Infinity"),
    "number past float64": (b'{"a": 1e999}', "1e999"),
    "integer of a million digits": (b'{"a": ' + b"9" * 10**6 + b"}", "not valid JSON"),
    "duplicate key": (b'{"a": 1, "b": 2, "a": 1}', "duplicate key 'a'"),
    "duplicate key among many": (
        b"{%s}" % b",".join(b'"%d":0' % min(i, N - 2) for i in range(N)),
        f"duplicate key '{N - 2}'",
    ),
    "list": (b"[]", "must be a JSON object"),
    "list of lists": (b"[" + b",".join([b"[]"] * N) + b"]", "must be a JSON object"),
    "string": (b'"%s"' % (b"a" * 10**6), "must be a JSON object"),
    "wide characters": (('"' + "\U0001f600" * N + '"').encode(), "must be a JSON object"),
    "nested lists": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    "nested objects": (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested"),
    "nested without an end": (b"[" * 10**6, "nested"),
    "nested below the limit of Python": (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "64 levels"),
    "more lists than are supported": (b"[" * 3_000_001, "3000001 lists"),
    "more items than are supported": (b"," * 10_000_001, "10000001 commas"),
    "empty": (b"", "not valid JSON"),
    "two values": (b"{}{}", "not valid JSON"),
}


@pytest.mark.parametrize(("text", "reason"), TEXTS.values(), ids=list(TEXTS))
def test_json_that_is_damaged_or_made_to_exhaust_memory_is_refused(text, reason):
    with refused("config.json", reason, size=len(text)):
        parse_object(text, "config.json", "the file")


def test_a_large_valid_header_takes_memory_in_proportion_to_its_size():
    text = json.dumps({f"w{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(10_000)})
    tracemalloc.start()
    parse_object(text.encode(), "model.safetensors", "the header")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BYTES_PER_BYTE * len(text)


def test_escaped_pairs_of_surrogates_are_characters():
    assert parse_object(rb'{"\ud83d\ude00": "\\ud800"}', "config.json", "the file") == {"\U0001f600": "\\ud800"}


@pytest.mark.parametrize("index", ["whole", "columns"])
def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path, index):
    path = tmp_path / "model.safetensors"
    path.write_bytes(one(shape=[4, 6]))
    source = open_source(path)
    os.truncate(path, path.stat().st_size - 1)
    array = source.tensors["w"].array(source.reader)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file was changed or replaced"):
        array.read((slice(0, 4), slice(0, 6) if index == "whole" else slice(0, 1)))


def test_bytes_of_booleans_other_than_0_and_1_are_true(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(one(dtype="BOOL"))
    source = open_source(path)
    read = source.tensors["w"].array(source.reader).numpy()
    assert read.view(np.uint8).tolist() == [0] + [1] * 23


# Folders: the index, the names of shards, and the configuration.


def folder_of(path, weight_map=None, config=None, **shards):
    path.mkdir(exist_ok=True)
    for name, content in shards.items():
        (path / f"{name}.safetensors").write_bytes(content)
    for name, value in (
        (INDEX, weight_map if weight_map is None else {"weight_map": weight_map}),
        ("config.json", config),
    ):
        if value is not None:
            (path / name).write_text(json.dumps(value))
    return path


NAMES = {
    "parent": "../outside.safetensors",
    "parent in the middle": "x/../../outside.safetensors",
    "absolute": "/etc/outside.safetensors",
    "backslashes": "..\\outside.safetensors",
    "subfolder": "sub/model.safetensors",
    "NUL": "model\0.safetensors",
    "too long": "a" * 300 + ".safetensors",
    "pickle": "pytorch_model.bin",
    "pickle of torch": "model.pt",
    "dot": ".",
    "empty": "",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_names_of_shards_that_are_no_safetensors_files_of_the_folder_are_refused(tmp_path, name):
    (tmp_path / "outside.safetensors").write_bytes(one())
    folder = folder_of(tmp_path / "model", {"w": name}, model=one())
    for pickled in ("pytorch_model.bin", "model.pt"):
        (folder / pickled).write_bytes(one())
    with refused(str(folder), repr(name)[:100]):
        open_source(folder)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickle_files_are_never_opened(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(one())
    path.chmod(0)
    with refused(path.name, "never opened"):
        open_source(path)
    with refused(str(tmp_path), "neither safetensors"):
        open_source(tmp_path)


def test_a_path_that_is_neither_a_folder_nor_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with refused("regular file"):
        open_source(tmp_path / "model.safetensors")
    with refused("'model.safetensors'"):
        open_source(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_source(tmp_path / "missing")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("target", ["outside", "missing", "itself"])
def test_links_out_of_the_folder_and_links_that_lead_nowhere_are_refused(tmp_path, name, target):
    folder = folder_of(tmp_path / "model", {"w": "model.safetensors"}, {}, model=one())
    path = folder / name
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes() if path.exists() else b"{}")
    path.unlink(missing_ok=True)
    path.symlink_to({"outside": "../outside", "missing": "nowhere", "itself": name}[target])
    with refused(str(folder), repr(name)):
        open_source(folder)


def test_links_inside_the_folder_and_to_blobs_of_the_hub_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "fedc").write_bytes(one())
    (snapshot / "model.safetensors").symlink_to("../../blobs/fedc")
    assert list(open_source(snapshot).tensors) == ["w"]
    (snapshot / "model.safetensors").rename(snapshot / "other")
    (snapshot / "model.safetensors").symlink_to("other")
    assert list(open_source(snapshot).tensors) == ["w"]
    (tmp_path / "models--y" / "blobs").mkdir(parents=True)
    (tmp_path / "models--y" / "blobs" / "fedc").write_bytes(one())
    (snapshot / "more.safetensors").symlink_to("../../../models--y/blobs/fedc")
    with refused("'more.safetensors'", "link out of the folder"):
        open_source(snapshot)


def test_shards_and_index_must_agree(tmp_path):
    other = one().replace(b'"w"', b'"v"')
    with refused(INDEX, "tensor 'u'", "s.safetensors"):
        open_source(folder_of(tmp_path / "no such tensor", {"w": "s.safetensors", "u": "s.safetensors"}, s=one()))
    with refused("t.safetensors", "tensor 'v'", INDEX):
        weight_map = {"w": "s.safetensors", "x": "t.safetensors"}
        two = {"v": PAIR["a"], "x": PAIR["b"]}
        open_source(folder_of(tmp_path / "not in the index", weight_map, s=one(), t=encoded(two)))
    with refused(INDEX, "tensor 'w'"):
        weight_map = {"w": "t.safetensors", "v": "s.safetensors"}
        open_source(folder_of(tmp_path / "swapped", weight_map, s=one(), t=other))
    for weight_map in ({"w": "s.safetensors", "v": "t.safetensors"}, None):
        with refused("t.safetensors", "s.safetensors", "tensor 'w'"):
            open_source(folder_of(tmp_path / "twice", weight_map, s=one(), t=one()))
    with refused("'t.safetensors'", "missing"):
        open_source(folder_of(tmp_path / "missing", {"w": "s.safetensors", "v": "t.safetensors"}, s=one()))


@pytest.mark.parametrize("index", [{}, [], {"weight_map": []}, {"weight_map": {"w": 1}}, {"weight_map": None}], ids=str)
def test_an_index_without_a_map_of_names_is_refused(tmp_path, index):
    folder = folder_of(tmp_path / "model", s=one())
    (folder / INDEX).write_text(json.dumps(index))
    with refused(INDEX):
        open_source(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json", "hf_quant_config.json"])
def test_a_json_file_cut_at_any_byte_is_refused(tmp_path, name):
    folder = folder_of(tmp_path / "model", {"w": "s.safetensors"}, s=one())
    content = json.dumps({"weight_map": {"w": "s.safetensors"}, "quantization": {"quant_algo": "FP8"}}).encode()
    (folder / name).write_bytes(content)
    open_source(folder)
    for end in range(len(content)):
        (folder / name).write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=name):
            open_source(folder)


@pytest.mark.parametrize(
    "config", [[], None, 1, "x", {"quantization_config": []}, {"quantization_config": "fp8"}], ids=str
)
def test_a_configuration_of_the_wrong_type_is_refused(tmp_path, config):
    folder = folder_of(tmp_path / "model", s=one())
    (folder / "config.json").write_text(json.dumps(config))
    with refused("config.json"):
        open_source(folder)


def test_a_quantisation_of_modelopt_of_the_wrong_type_is_refused(tmp_path):
    folder = folder_of(tmp_path / "model", s=one())
    (folder / "hf_quant_config.json").write_text('{"quantization": ["FP8"]}')
    with refused("hf_quant_config.json", "`quantization`"):
        open_source(folder)


@pytest.mark.parametrize("method", ["quip#", "spqr", 1, ["fp8"], {"fp8": 1}, "x" * 10**6], ids=lambda m: str(m)[:20])
def test_an_unknown_quantisation_method_is_refused_by_its_name(tmp_path, method):
    config = {"quantization_config": {"quant_method": method}}
    folder = folder_of(tmp_path / "model", config=config, s=one(dtype="F32", shape=[6]))
    with refused(str(folder), repr(method)[:100]):
        layouts.entries(open_source(folder))

"""Small GGUF files from lists of fields that can be mutated."""

import struct
from typing import Any

STRUCTURE: dict[str, Any] = {
    "magic": "GGUF",
    "version": 3,
    "tensor_count": 0,  # added to the true count
    "metadata_count": 0,
    "metadata": [
        ["general.architecture", 8, "llama"],
        ["general.alignment", 4, 32],
        ["general.file_type", 4, 7],
        ["llama.rope.freq_base", 6, 10000.0],
        ["tokenizer.ggml.tokens", 9, [8, ["a", "b", "é"]]],
        ["llama.lengths", 9, [5, [1, -2, 3]]],
        ["llama.flag", 7, True],
        ["llama.large", 10, 2**40],
        ["llama.double", 12, 0.5],
    ],
    "tensors": [  # name, dims with the fastest first, type, offset, bytes
        ["token_embd.weight", [32, 2], 1, 0, 128],
        ["output_norm.weight", [32], 0, 128, 128],
        ["blk.0.q8_0.weight", [32, 2], 8, 256, 68],
        ["blk.0.q4_0.weight", [64, 1], 2, 352, 36],
        ["blk.0.q4_1.weight", [32, 1], 3, 416, 20],
        ["blk.0.q5_0.weight", [32, 1], 6, 448, 22],
        ["blk.0.q4_k.weight", [256, 1], 12, 480, 144],
        ["blk.0.q6_k.weight", [256, 1], 14, 640, 210],
        ["blk.0.bf16.weight", [4, 4], 30, 864, 32],
        ["blk.0.mxfp4.weight", [32, 2], 39, 896, 34],
        ["blk.0.nvfp4.weight", [64, 1], 40, 960, 36],
    ],
}
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_SIZES = {"B": 1, "b": 1, "H": 2, "h": 2, "I": 4, "i": 4, "Q": 8, "q": 8}


def encoded(structure: Any) -> bytes:
    """The file of a structure; parts that are not of the type of their field are written as some bytes."""
    structure = structure if isinstance(structure, dict) else {}
    metadata = _list(structure.get("metadata"))
    tensors = _list(structure.get("tensors"))
    counts = _integer("Q", _number(structure.get("tensor_count")) + len(tensors))
    counts += _integer("Q", _number(structure.get("metadata_count")) + len(metadata))
    text = str(structure.get("magic")).encode("utf-8", "replace")[:4] + _integer("I", structure.get("version"))
    text += counts + b"".join(map(_pair, metadata)) + b"".join(map(_info, tensors))
    return text + bytes(-len(text) % 32) + _data(tensors)


def _pair(pair: Any) -> bytes:
    key, type_id, value = (*_list(pair), None, None, None)[:3]
    return _string(key) + _integer("I", type_id) + _value(type_id, value)


def _value(type_id: Any, value: Any) -> bytes:
    if type_id == 8:
        return _string(value)
    if type_id == 9:
        element, items = (*_list(value), None, None)[:2]
        items = _list(items)
        return _integer("I", element) + _integer("Q", len(items)) + b"".join(_value(element, one) for one in items)
    code = _FIXED.get(type_id, "I") if type(type_id) is int else "I"
    return struct.pack(f"<{code}", float(_number(value) % 2**60)) if code in "fd" else _integer(code, value)


def _info(info: Any) -> bytes:
    name, dims, type_id, offset = (*_list(info), None, None, None, None)[:4]
    dims = _list(dims)
    shape = _integer("I", len(dims)) + b"".join(_integer("Q", size) for size in dims)
    return _string(name) + shape + _integer("I", type_id) + _integer("Q", offset)


def _data(tensors: list[Any]) -> bytes:
    ends = [_number(info[3]) + _number(info[4]) for info in tensors if isinstance(info, list) and len(info) == 5]
    size = max([0, *(end for end in ends if end < 4096)])
    return (bytes(range(1, 252)) * (size // 251 + 1))[: -(-size // 32) * 32]


def _string(value: Any) -> bytes:
    text = str(value).encode("utf-8", "replace")
    return _integer("Q", len(text)) + text


def _integer(code: str, value: Any) -> bytes:
    return (_number(value) % 256 ** _SIZES[code]).to_bytes(_SIZES[code], "little")


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

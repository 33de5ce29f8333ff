"""Small checkpoints as values that can be mutated, and their files."""

import copy
import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from scaledot.checkpoint import dtypes
from tests.fuzzing.mutation import integer, mutated_json

Files = dict[str, bytes]  # an input: the content of each file
MODEL, CONFIG, MODELOPT = "model.safetensors", "config.json", "hf_quant_config.json"
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "hf"
_MAX_TENSOR_BYTES = 2**18


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint of one safetensors file.

    configs: the content of JSON files by name. header: of the safetensors file, without offsets. data: the bytes of
    the tensors, from which a tensor of another size takes its first ones.
    """

    configs: dict[str, Any]
    header: dict[str, Any]
    data: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        configs = {
            name: json.loads((folder / name).read_text()) for name in (CONFIG, MODELOPT) if (folder / name).exists()
        }
        header, content = split((folder / MODEL).read_bytes())
        spans = {name: record.pop("data_offsets") for name, record in header.items() if name != "__metadata__"}
        return cls(configs, header, {name: content[start:stop] for name, (start, stop) in spans.items()})

    def files(self) -> Files:
        return {MODEL: self._model(), **{name: json.dumps(value).encode() for name, value in self.configs.items()}}

    def _model(self) -> bytes:
        header, pieces, end = {}, [], 0
        for name, record in self.header.items():
            header[name] = record
            if name == "__metadata__":
                continue
            some = self.data.get(name, bytes(range(256)))
            size = _nbytes(record)
            piece = some if size is None else (some * (size // max(len(some), 1) + 1))[:size]
            if isinstance(record, dict):
                header[name] = record | {"data_offsets": [end, end + len(piece)]}
            pieces.append(piece)
            end += len(piece)
        return joined(json.dumps(header).encode(), b"".join(pieces))

    def mutated(self, random: Random, words: Sequence[str]) -> "Checkpoint":
        """A copy with a change of its configuration, or of names, dtypes and shapes of its tensors, or of both."""
        configs, header, data = self.configs, json.loads(json.dumps(self.header)), dict(self.data)
        kind = random.randrange(4)
        if kind != 0:
            configs = mutated_json(random, configs, words)
            configs = {name: value for name, value in configs.items() if name in (CONFIG, MODELOPT)}
        if kind != 1:
            for _ in range(random.choice((1, 1, 2))):
                _mutate_tensor(random, header, data, words)
        if kind == 3:
            header = mutated_json(random, header, words)
        return Checkpoint(configs, header, data)


def _nbytes(record: Any) -> int | None:
    """The bytes of a tensor, or None if its record is damaged or it is too large."""
    if not isinstance(record, dict):
        return None
    dtype, shape = record.get("dtype"), record.get("shape")
    if not isinstance(dtype, str) or dtype not in dtypes.DTYPES or not isinstance(shape, list):
        return None
    bits = dtypes.bits(dtype)
    for size in shape:
        if type(size) is not int or size < 0:
            return None
        bits *= size
    return bits // 8 if bits <= 8 * _MAX_TENSOR_BYTES else None


def _mutate_tensor(random: Random, header: dict[str, Any], data: dict[str, bytes], words: Sequence[str]) -> None:
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return
    name = random.choice(names)
    record = header[name]
    match random.randrange(6):
        case 0:
            record["dtype"] = random.choice(list(dtypes.DTYPES))
        case 1 if record["shape"]:
            axis = random.randrange(len(record["shape"]))
            record["shape"][axis] = abs(integer(random, record["shape"][axis])) % random.choice((4, 300, 2**40))
        case 1 | 2:
            shape = record["shape"]
            record["shape"] = random.choice((shape[::-1], shape[1:], shape[:-1], [1, *shape], [*shape, 1], [], [0]))
        case 3:
            del header[name]
        case 4:
            other = random.choice((random.choice(names), f"{name.rpartition('.')[0]}.{random.choice(words)}"))
            header[other], data[other] = copy.deepcopy(record), data.get(name, b"\0")
        case 5 if data.get(name):
            data[name] = random.choice((b"\0", b"\xff", random.randbytes(len(data[name])), data[name][::-1]))


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes of the tensors of a safetensors file."""
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return struct.pack("<Q", len(header)) + header + data


def _record(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape)}


def generated() -> Iterator[Checkpoint]:
    """Checkpoints of every dtype, and of weights in blocks with their scales."""
    counts = {"F6_E2M3": 4, "F6_E3M2": 4, "F4": 2}
    every = {f"layers.0.{name}": _record(name, 3, counts.get(name, 2)) for name in dtypes.DTYPES}
    plain = {name: record for name, record in every.items() if record["dtype"] in ("F32", "BF16", "I64", "BOOL")}
    yield Checkpoint(
        {CONFIG: {"model_type": "llama", "dtype": "bfloat16"}}, {"__metadata__": {"format": "pt"}, **plain}, {}
    )
    yield Checkpoint({}, every, {})
    weights = {
        "model.layers.0.q_proj.weight": _record("F8_E4M3", 6, 10),
        "model.layers.0.q_proj.weight_scale_inv": _record("F32", 2, 3),
        "model.layers.0.expert.weight": _record("I8", 4, 32),
        "model.layers.0.expert.scale": _record("F8_E8M0", 4, 2),
        "model.norm.weight": _record("BF16", 10),
    }
    section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
    yield Checkpoint({CONFIG: {"torch_dtype": "float32", "quantization_config": section}}, weights, {})


def all_checkpoints(folder: Path = GOLDEN) -> list[Checkpoint]:
    """Generated checkpoints, and those of the golden data."""
    return [*generated(), *(Checkpoint.read(path.parent) for path in sorted(folder.glob(f"*/{MODEL}")))]


def words_of(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Strings and keys of configurations, dtypes, and the ends of names of tensors."""
    words = set(dtypes.DTYPES)
    for checkpoint in checkpoints:
        pending: list[Any] = [checkpoint.configs]
        while pending:
            value = pending.pop()
            if isinstance(value, str):
                words.add(value)
            elif isinstance(value, dict):
                words.update(value)
                pending.extend(value.values())
            elif isinstance(value, list):
                pending.extend(value)
        words.update(name.rpartition(".")[2] for name in checkpoint.header)
    return sorted(words)

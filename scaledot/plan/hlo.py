"""Reads the collectives of a compiled program from its HLO text: kinds, dtypes, bytes, and mesh axes.

Replica groups are lists of device ids; this module maps them to the axes of the mesh. Asynchronous pairs such as
all-gather-start and all-gather-done count once, and the body of a while loop counts as often as its trip count says.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """Equal collectives of a program.

    dtype: of the arrays, joined by "+" if there are several.
    axes: the mesh axes of its replica groups, in the order of the mesh.
    bytes: on a device, of the larger of operand and result: the result of an all-gather, the operand of a
      reduce-scatter.
    count: how many there are.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1

    def sent_bytes(self, devices: int) -> float:
        """Returns the bytes that a device sends in all of them, with ring algorithms among `devices` devices."""
        if self.kind == "collective-permute":
            return float(self.bytes * self.count)
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * self.count * (devices - 1) / devices


def collectives(text: str, axes: Mapping[str, int]) -> list[Collective]:
    """Returns the collectives of compiled HLO on a mesh with those axes and sizes.

    Collectives among a single device are omitted.

    >>> line = "ENTRY %main (x: f32[4]) -> f32[8] {\\n  %g = f32[8] all-gather(%x), replica_groups={{0,1},{2,3}}\\n}"
    >>> collectives(line, {"dp": 2, "tp": 2})
    [Collective(kind='all-gather', dtype='f32', axes=('tp',), bytes=32, count=1)]
    """
    entry, computations = _computations(text)
    counts: dict[str, Counter[Collective]] = {}

    def count(name: str) -> Counter[Collective]:
        if name not in counts:
            total: Counter[Collective] = Counter()
            for line in computations[name]:
                one = _collective(line, axes)
                total += Counter() if one is None else Counter([one])
                for called in _called_computations(line):
                    total += _times_trip_count(count(called), line)
            counts[name] = total
        return counts[name]

    return [one._replace(count=number) for one, number in count(entry).items()]


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Returns the name of the entry computation, and the instructions of every computation."""
    entry, lines, found = "", [], {}
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            lines = found[header[2]] = []
            entry = header[2] if header[1] else entry
        elif " = " in line:
            lines.append(line)
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY")
    return entry, found


def _called_computations(line: str) -> Iterator[str]:
    for one, several in re.findall(r"\b(?:body|calls|to_apply|\w+_computations?)=(?:%?([\w.\-]+)|\{([^}]*)\})", line):
        yield from [one] if one else (name.strip().removeprefix("%") for name in several.split(","))


def _times_trip_count(called: Counter[Collective], line: str) -> Counter[Collective]:
    """Returns the collectives of a called computation, times the trip count if the instruction is a while loop."""
    if not called or " while(" not in line:
        return called
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    if trips is None:
        raise ValueError(f"a while loop with collectives has no known trip count: {line.strip()[:120]}")
    return Counter({one: count * int(trips[1]) for one, count in called.items()})


def _collective(line: str, axes: Mapping[str, int]) -> Collective | None:
    """Returns the collective of an instruction, or None if it is none or is among single devices."""
    match = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
    if match is None:
        return None
    kind = match[2]
    group_axes = _group_axes(line, kind, axes)
    if not group_axes:
        return None
    arrays = _results(kind, bool(match[3]), re.findall(r"([a-z]+\d*\w*)\[([\d,]*)\]", match[1]))
    size = sum(_bytes(dtype, shape) for dtype, shape in arrays)
    if kind == "reduce-scatter":
        size *= math.prod(axes[axis] for axis in group_axes)
    return Collective(kind, "+".join(dict.fromkeys(dtype for dtype, _ in arrays)), group_axes, size)


def _results(kind: str, is_start: bool, arrays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the results among the arrays of an instruction's type.

    The tuple of all-gather-start is (operands, results), that of collective-permute-start (operand, result, contexts).
    """
    if not is_start or kind == "all-reduce":
        return arrays
    if kind == "collective-permute":
        return arrays[1:2]
    return arrays[len(arrays) // 2 :]


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
    return -(-math.prod(int(size) for size in shape.split(",") if size) * bits // 8)


def _group_axes(line: str, kind: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a replica group, or of a source-target pair, differ."""
    is_permute = kind == "collective-permute"
    groups = _source_target_pairs(line) if is_permute else _replica_groups(line, math.prod(axes.values()))
    coordinates = np.unravel_index(groups, tuple(axes.values()))
    found = tuple(axis for axis, at in zip(axes, coordinates, strict=True) if (at != at[:, :1]).any())
    if not is_permute and groups.shape[1] != math.prod(axes[axis] for axis in found):
        raise ValueError(f"replica groups {groups.tolist()} do not span whole axes of the mesh {dict(axes)}")
    return found


def _source_target_pairs(line: str) -> np.ndarray:
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
    if pairs is None:
        raise ValueError(f"collective-permute without source_target_pairs: {line.strip()[:120]}")
    return np.array(_id_lists(pairs[1]))


def _replica_groups(line: str, devices: int) -> np.ndarray:
    """Returns device ids, (groups, devices per group), from any form in which XLA prints replica groups."""
    match = re.search(
        r"replica_groups=(mesh\[.*?\] ?\{.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\}|\{.*?\}\})", line
    )
    if match is None:
        raise ValueError(f"the replica groups of this collective cannot be read: {line.strip()[:200]}")
    text = match[1]
    if text == "{}":
        return np.arange(devices)[None]
    if text.startswith("mesh"):
        return _groups_of_mesh_axes(text)
    return _groups_of_iota(text) if text.startswith("[") else np.array(_id_lists(text))


def _groups_of_mesh_axes(text: str) -> np.ndarray:
    """Returns the groups of mesh['dp'=2,'tp'=4] {'tp'}: devices that differ in their index along tp only."""
    mesh, _, chosen = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    names = re.findall(r"'([^']+)'", chosen)
    if ":" in chosen:
        raise ValueError(f"replica groups along a part of a mesh axis are not supported: {text}")
    order = [*(name for name in sizes if name not in names), *names]
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    size = math.prod(sizes[name] for name in names)
    return ids.transpose([list(sizes).index(name) for name in order]).reshape(-1, size)


def _groups_of_iota(text: str) -> np.ndarray:
    """Returns the groups of [4,2]<=[2,2,2]T(0,2,1): iota(8) reshaped to (2, 2, 2), transposed, reshaped to (4, 2)."""
    shape, iota_shape, *order = ([int(n) for n in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)", text))
    return np.arange(math.prod(iota_shape)).reshape(iota_shape).transpose(*order).reshape(shape)


def _id_lists(text: str) -> list[list[int]]:
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]

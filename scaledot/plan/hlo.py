"""The collectives of a compiled program: what they move, how much, and along which axes of the mesh."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """Collectives of a program that are alike.

    dtype: several are joined by "+". axes: of the mesh, in its order. bytes: on a device, of the whole that is
    gathered, summed or passed on. count: how many.
    """

    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes: int
    count: int = 1

    def sent(self, devices: int) -> float:
        """Bytes that a device sends in all of them, where `devices` take part in each, as in a ring."""
        if self.kind == "collective-permute":
            return float(self.bytes * self.count)
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * self.count * (devices - 1) / devices


def collectives(text: str, axes: Mapping[str, int]) -> list[Collective]:
    """Those of compiled HLO on a mesh of those axes; what a loop repeats counts as often as it does.

    What a device has with itself alone, along axes of one device, is left out.

    >>> line = "ENTRY %main (x: f32[4]) -> f32[8] {\\n  %g = f32[8] all-gather(%x), replica_groups={{0,1},{2,3}}\\n}"
    >>> collectives(line, {"dp": 2, "tp": 2})
    [Collective(kind='all-gather', dtype='f32', axes=('tp',), bytes=32, count=1)]
    """
    entry, computations = _computations(text)
    found: dict[str, Counter[Collective]] = {}

    def counted(name: str) -> Counter[Collective]:
        if name not in found:
            total: Counter[Collective] = Counter()
            for line in computations[name]:
                one = _collective(line, axes)
                total += Counter() if one is None else Counter([one])
                for inner in _called(line):
                    total += _repeated(counted(inner), line)
            found[name] = total
        return found[name]

    return [one._replace(count=count) for one, count in counted(entry).items()]


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The entry's name, and the instructions of every computation."""
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


def _called(line: str) -> Iterator[str]:
    for one, several in re.findall(r"\b(?:body|calls|to_apply|\w+_computations?)=(?:%?([\w.\-]+)|\{([^}]*)\})", line):
        yield from [one] if one else (name.strip().removeprefix("%") for name in several.split(","))


def _repeated(inner: Counter[Collective], line: str) -> Counter[Collective]:
    """What a loop's body has, as often as it runs; other computations run once where they are called."""
    if not inner or " while(" not in line:
        return inner
    times = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    if times is None:
        raise ValueError(f"a loop with collectives runs for a number of times that is not known: {line.strip()[:120]}")
    return Counter({one: count * int(times[1]) for one, count in inner.items()})


def _collective(line: str, axes: Mapping[str, int]) -> Collective | None:
    made = re.search(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
    if made is None:
        return None
    kind = made[2]
    along = _axes(line, kind, axes)
    if not along:
        return None
    arrays = _moved(kind, bool(made[3]), re.findall(r"([a-z]+\d*\w*)\[([\d,]*)\]", made[1]))
    size = sum(_bytes(dtype, shape) for dtype, shape in arrays)
    if kind == "reduce-scatter":
        size *= math.prod(axes[axis] for axis in along)
    return Collective(kind, "+".join(dict.fromkeys(dtype for dtype, _ in arrays)), along, size)


def _moved(kind: str, starts: bool, arrays: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The results. What starts a gather or a permutation has operands in front, and the latter counters behind."""
    if not starts or kind == "all-reduce":
        return arrays
    if kind == "collective-permute":
        return arrays[1:2]
    return arrays[len(arrays) // 2 :]


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype))
    return -(-math.prod(int(size) for size in shape.split(",") if size) * bits // 8)


def _axes(line: str, kind: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which devices take part together."""
    pairs = kind == "collective-permute"
    groups = _pairs(line) if pairs else _groups(line, math.prod(axes.values()))
    places = np.unravel_index(groups, tuple(axes.values()))
    found = tuple(axis for axis, at in zip(axes, places, strict=True) if (at != at[:, :1]).any())
    if not pairs and groups.shape[1] != math.prod(axes[axis] for axis in found):
        raise ValueError(f"these devices are not those of whole axes of the mesh {dict(axes)}: {groups.tolist()}")
    return found


def _pairs(line: str) -> np.ndarray:
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", line)
    if pairs is None:
        raise ValueError(f"this permutation names no pairs: {line.strip()[:120]}")
    return np.array(_lists(pairs[1]))


def _groups(line: str, devices: int) -> np.ndarray:
    """(groups, devices of each), in any of the forms that XLA writes."""
    written = re.search(
        r"replica_groups=(mesh\[.*?\] ?\{.*?\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\}|\{.*?\}\})", line
    )
    if written is None:
        raise ValueError(f"the groups of this collective cannot be read: {line.strip()[:200]}")
    text = written[1]
    if text == "{}":
        return np.arange(devices)[None]
    if text.startswith("mesh"):
        return _of_axes(text)
    return _of_iota(text) if text.startswith("[") else np.array(_lists(text))


def _of_axes(text: str) -> np.ndarray:
    """mesh['dp'=2,'tp'=4] {'tp'}"""
    mesh, _, chosen = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    names = re.findall(r"'([^']+)'", chosen)
    if ":" in chosen:
        raise ValueError(f"these devices are those of a part of an axis: {text}")
    order = [*(name for name in sizes if name not in names), *names]
    places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    size = math.prod(sizes[name] for name in names)
    return places.transpose([list(sizes).index(name) for name in order]).reshape(-1, size)


def _of_iota(text: str) -> np.ndarray:
    """[4,2]<=[2,2,2]T(0,2,1): counted over the second sizes, transposed, in the shape of the first"""
    shape, over, *order = ([int(n) for n in part.split(",")] for part in re.findall(r"[\[(]([\d,]+)", text))
    return np.arange(math.prod(over)).reshape(over).transpose(*order).reshape(shape)


def _lists(text: str) -> list[list[int]]:
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]

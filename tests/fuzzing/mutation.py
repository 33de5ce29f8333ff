"""Mutations of inputs: of bytes, of numbers in text, and of parsed JSON."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

INTEGERS = (0, 1, 2, 7, 8, 15, 16, 31, 32, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
INTEGERS += (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
SCALARS = (None, True, False, 0.0, -1.5, 1e300, "", "a", "..", "/", "\0", "é", "0", "x" * 300)
CONTAINERS = ([], {}, [0], [[]], {"a": 0}, [None, None], [128, 128])


def integer(random: Random, near: int = 0) -> int:
    """An integer at a limit of a type, negative or not, or close to `near`."""
    chosen = random.choice(INTEGERS)
    return random.choice((chosen, -chosen, near + 1, near - 1, 2 * near, near // 2, -near, chosen + near))


# Bytes.


def mutated_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The bytes with one to four random changes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_BYTE_MUTATIONS)(random, data, random.choice(others))
    return data


def _span(random: Random, data: bytes) -> tuple[int, int]:
    start = random.randint(0, len(data))
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 8, 16, 64, 256)))


def _flip(random: Random, data: bytes, other: bytes) -> bytes:
    if not data:
        return b"\0"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _overwrite(random: Random, data: bytes, other: bytes) -> bytes:
    """A little-endian integer of 1, 2, 4 or 8 bytes, often at the start, where headers have their counts."""
    width = random.choice((1, 2, 4, 8))
    at = random.choice((0, 4, 8, 16, random.randint(0, len(data))))
    value = integer(random, int.from_bytes(data[at : at + width], "little"))
    return data[:at] + (value % 256**width).to_bytes(width, "little") + data[at + width :]


def _delete(random: Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(random, data)
    return data[:start] + data[stop:]


def _repeat(random: Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(random, data)
    return data[:stop] + data[start:stop] * random.choice((1, 2, 50)) + data[stop:]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    start, stop = _span(random, data)
    first, last = _span(random, other)
    return data[:start] + other[first:last] + data[stop:]


def _cut(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: random.randint(0, len(data))]


def _renumber(random: Random, data: bytes, other: bytes) -> bytes:
    """Replaces a decimal number of a text."""
    found = list(re.finditer(rb"\d+", data[:4096]))
    if not found:
        return data
    match = random.choice(found)
    number = int(match[0]) if len(match[0]) < 30 else 0
    return data[: match.start()] + str(integer(random, number)).encode() + data[match.end() :]


_BYTE_MUTATIONS = (_flip, _overwrite, _delete, _repeat, _splice, _cut, _renumber)


# Parsed JSON.


def mutated_json(random: Random, value: Any, words: Sequence[str]) -> Any:
    """A copy of a JSON value with one to three changes of parts of it.

    words: strings that mean something to the reader, such as names of dtypes, keys and methods.
    """
    value = json.loads(json.dumps(value))  # several times as fast as copy.deepcopy
    for _ in range(random.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return value
        container, key = random.choice(places)
        random.choice(_JSON_MUTATIONS)(random, container, key, words)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Pairs (container, key) of all parts of a value."""
    found, pending = [], [value]
    while pending:
        container = pending.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, child in items:
            found.append((container, key))
            if isinstance(child, dict | list):
                pending.append(child)
    return found


def _replace(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    old = container[key]
    if type(old) is int and random.random() < 0.7:
        container[key] = integer(random, old)
    elif isinstance(old, str) and random.random() < 0.7:
        container[key] = random.choice(words)
    else:
        container[key] = copy.deepcopy(random.choice(SCALARS + CONTAINERS))


def _remove(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    del container[key]


def _rename(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    """Moves a part to another key: one of `words`, a part of its own, or one with a word at its end."""
    if isinstance(container, list):
        container.reverse()
        return
    stem, _, last = key.rpartition(".")
    name = random.choice((random.choice(words), stem, last, f"{stem}.{random.choice(words)}", key + "x"))
    container[name] = container.pop(key)


def _duplicate(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    part = copy.deepcopy(container[key])
    if isinstance(container, list):
        container.insert(key, part)
    else:
        container[f"{key.rpartition('.')[0]}.{random.choice(words)}"] = part


def _swap(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    other = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
    container[key], container[other] = container[other], container[key]


def _wrap(random: Random, container: Any, key: Any, words: Sequence[str]) -> None:
    container[key] = random.choice((lambda v: [v], lambda v: {"a": v}, lambda v: [v, copy.deepcopy(v)], str))(
        container[key]
    )


_JSON_MUTATIONS: tuple[Callable[..., None], ...] = (_replace, _replace, _remove, _rename, _duplicate, _swap, _wrap)


def mutated_text(random: Random, text: bytes, others: Sequence[bytes], words: Sequence[str]) -> bytes:
    """A JSON text with changes of its parsed value or, in every second input, of its bytes."""
    if random.random() < 0.5:
        return mutated_bytes(random, text, others)
    return json.dumps(mutated_json(random, json.loads(text), words)).encode()

"""Does a sharding cut a block? Every part of the library asks `misfit`.

An axis of 4096 elements in blocks of 128 fits 32 devices, which hold a block each. On 64 devices a shard would be half
a block:

>>> misfit(4096, 32, 128)
>>> found = misfit(4096, 64, 128)
>>> found.shard, found.fewer_devices, found.fitting_size
(64, 32, 8192)
"""

import math
from typing import NamedTuple


class Misfit(NamedTuple):
    """An axis of `size` elements in blocks of `block` that so many devices cannot share in whole blocks."""

    size: int
    devices: int
    block: int

    @property
    def shard(self) -> int:
        """Elements of the axis on each device."""
        return self.size // self.devices

    @property
    def fewer_devices(self) -> int:
        """The largest number of devices, up to those asked for, that can share the axis in whole blocks."""
        counts = range(self.devices, 1, -1)
        return next((count for count in counts if misfit(self.size, count, self.block) is None), 1)

    @property
    def fitting_size(self) -> int:
        """The shortest axis, not shorter than this one, that the devices can share in whole blocks."""
        unit = self.devices * self.block
        return -(-self.size // unit) * unit

    @property
    def fitting_sizes(self) -> list[int]:
        """The nearest sizes that the devices can share in whole blocks: one below, if there is any, and one above."""
        unit = self.devices * self.block
        return sorted({self.size // unit * unit, self.fitting_size} - {0})

    @property
    def fitting_multiple(self) -> int:
        """How many times as long the axis must be for its shards to be whole blocks."""
        unit = self.devices * self.block
        return unit // math.gcd(self.size, unit)


def misfit(size: int, devices: int, block: int = 1) -> Misfit | None:
    """Why an axis cannot be sharded so that every device holds whole blocks; None if it can.

    On one device nothing is cut: the last block of an axis may be short.
    """
    return None if devices == 1 or not size % (devices * block) else Misfit(size, devices, block)

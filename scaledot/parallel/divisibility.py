"""Whether a sharding cuts blocks: `misfit`, which every such check of the library uses.

An axis of 4096 elements in blocks of 128 can be sharded over 32 devices, one block each. Over 64 devices a shard would
be half a block:

>>> misfit(4096, 32, 128)
>>> found = misfit(4096, 64, 128)
>>> found.shard, found.fewer_devices, found.fitting_size
(64, 32, 8192)
"""

import math
from typing import NamedTuple


class Misfit(NamedTuple):
    """An axis of `size` elements in blocks of `block` that cannot be sharded over `devices` in whole blocks."""

    size: int
    devices: int
    block: int

    @property
    def shard(self) -> int:
        """Elements of the axis on each device."""
        return self.size // self.devices

    @property
    def fewer_devices(self) -> int:
        """The largest number of devices, at most `devices`, over which the axis can be sharded in whole blocks."""
        counts = range(self.devices, 1, -1)
        return next((count for count in counts if misfit(self.size, count, self.block) is None), 1)

    @property
    def fitting_size(self) -> int:
        """The smallest size, at least `size`, that can be sharded over `devices` in whole blocks."""
        unit = self.devices * self.block
        return -(-self.size // unit) * unit

    @property
    def fitting_sizes(self) -> list[int]:
        """The nearest sizes that can be sharded over `devices` in whole blocks: one below, if any, and one above."""
        unit = self.devices * self.block
        return sorted({self.size // unit * unit, self.fitting_size} - {0})

    @property
    def fitting_multiple(self) -> int:
        """The smallest n for which an axis of n * `size` elements can be sharded over `devices` in whole blocks."""
        unit = self.devices * self.block
        return unit // math.gcd(self.size, unit)


def misfit(size: int, devices: int, block: int = 1) -> Misfit | None:
    """The Misfit of an axis that cannot be sharded over `devices` in whole blocks; None if it can.

    One device always fits: the last block of an unsharded axis may be short.
    """
    return None if devices == 1 or not size % (devices * block) else Misfit(size, devices, block)

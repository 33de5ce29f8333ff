"""What devices reach: a table in `devices/` for each kind, in which every figure says where it is from.

A rate is the peak that the maker states times the fraction of it that was measured, or is assumed. The tables name
products as `products.kind_of` does.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaledot.formats import row_of


@dataclasses.dataclass(frozen=True)
class Product:
    """Operations per second, and the fraction of the memory's rate at which operands are cast, each byte once."""

    peak_tflops: float
    reached: float
    casts_reached: float
    source: str

    @property
    def flops(self) -> float:
        return 1e12 * self.peak_tflops * self.reached


@dataclasses.dataclass(frozen=True)
class Rate:
    """Bytes per second."""

    gb_s: float
    reached: float
    source: str

    @property
    def bytes_s(self) -> float:
        return 1e9 * self.gb_s * self.reached


@dataclasses.dataclass(frozen=True)
class Memory(Rate):
    gb: float

    @property
    def bytes(self) -> float:
        return 1e9 * self.gb


@dataclasses.dataclass(frozen=True)
class Link(Rate):
    """What a device sends in a second, and what a collective takes that moves next to nothing.

    devices: that are linked so; 0 for all.
    """

    latency_us: float
    devices: int = 0

    def seconds(self, sent: float, collectives: int) -> float:
        return sent / self.bytes_s + 1e-6 * self.latency_us * collectives


@dataclasses.dataclass(frozen=True)
class Rates:
    name: str
    device: str
    products: Mapping[str, Product]
    memory: Memory
    nvlink: Link
    network: Link

    def link(self, span: int) -> str:
        """The name of what connects a group that is spread over `span` neighbouring devices."""
        return "nvlink" if span <= self.nvlink.devices else "network"


def find_rates(name: str) -> Rates:
    return row_of("device", name, Rates, RATES, "the table of rates")


def _read(path: Path) -> Rates:
    fields: dict[str, Any] = json.loads(path.read_text())
    return Rates(
        path.stem,
        fields["device"],
        {name: Product(**row) for name, row in fields["products"].items()},
        Memory(**fields["memory"]),
        Link(**fields["nvlink"]),
        Link(**fields["network"]),
    )


RATES: Mapping[str, Rates] = {
    path.stem: _read(path) for path in sorted(Path(__file__).with_name("devices").glob("*.json"))
}

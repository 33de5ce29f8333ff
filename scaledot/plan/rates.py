"""Achieved rates of devices: one JSON table per device type in `devices/`, with a source for every figure.

A rate is the peak of the data sheet times the fraction of it that was measured, or is assumed, to be achieved. Rows of
`matmuls` are named by `gemm_kinds.gemm_kind`.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaledot.formats import row_of


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """Rate of one kind of matmul, and of the casts of its operands.

    achieved: fraction of `peak_tflops`.
    casts_achieved: fraction of the memory bandwidth at which operands are cast, counting each byte once.
    """

    peak_tflops: float
    achieved: float
    casts_achieved: float
    source: str

    @property
    def flops(self) -> float:
        """Achieved FLOP/s."""
        return 1e12 * self.peak_tflops * self.achieved


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Peak bandwidth in GB/s and the fraction of it that is achieved."""

    gb_s: float
    achieved: float
    source: str

    @property
    def bytes_s(self) -> float:
        """Achieved bytes per second."""
        return 1e9 * self.gb_s * self.achieved


@dataclasses.dataclass(frozen=True)
class Memory(Bandwidth):
    """Bandwidth and capacity of a device's memory."""

    gb: float

    @property
    def bytes(self) -> float:
        return 1e9 * self.gb


@dataclasses.dataclass(frozen=True)
class Link(Bandwidth):
    """Bandwidth per device and direction of NVLink or the network.

    latency_us: time of a collective that transfers almost nothing.
    devices: in one domain of the link; 0 if it connects all devices.
    """

    latency_us: float
    devices: int = 0

    def seconds(self, sent_bytes: float, collectives: int) -> float:
        return sent_bytes / self.bytes_s + 1e-6 * self.latency_us * collectives


@dataclasses.dataclass(frozen=True)
class Rates:
    """Achieved rates of one device type. name: on the command line; device: its full name."""

    name: str
    device: str
    matmuls: Mapping[str, MatmulRate]
    memory: Memory
    nvlink: Link
    network: Link

    def link(self, span: int) -> str:
        """Returns the name of the link that connects a replica group within `span` consecutive devices."""
        return "nvlink" if span <= self.nvlink.devices else "network"


def find_rates(name: str) -> Rates:
    return row_of("device", name, Rates, RATES, "the table of rates")


def _read(path: Path) -> Rates:
    fields: dict[str, Any] = json.loads(path.read_text())
    return Rates(
        path.stem,
        fields["device"],
        {name: MatmulRate(**row) for name, row in fields["matmuls"].items()},
        Memory(**fields["memory"]),
        Link(**fields["nvlink"]),
        Link(**fields["network"]),
    )


RATES: Mapping[str, Rates] = {
    path.stem: _read(path) for path in sorted(Path(__file__).with_name("devices").glob("*.json"))
}

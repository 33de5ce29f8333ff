"""Meshes of data (dp), fully sharded data (fsdp) and tensor parallelism (tp): read, chosen, made smaller.

Axes lie as they are written, so that devices along the last one are neighbours. Weights are split over fsdp and tp,
tokens over dp and fsdp, and over tp too between the products where sequences are parallel.
"""

import dataclasses
import math

from scaledot.plan.models import Model
from scaledot.plan.rates import Rates

AXES = ("dp", "fsdp", "tp")
BATCH = ("dp", "fsdp")  # the axes that sequences are split over
MOST_COMPILED = 2048  # devices that XLA compiles for in some seconds
STATE_BYTES = 16  # of a parameter: float32 weight, gradient and two moments of Adam
NARROWEST = 2048  # features of the model's width for each tensor-parallel device


@dataclasses.dataclass(frozen=True)
class Mesh:
    axes: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def devices(self) -> int:
        return self.along(self.sizes)

    def along(self, axes) -> int:
        """Devices along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def span(self, axes) -> int:
        """How many neighbouring devices hold a group along some axes."""
        names = list(self.sizes)
        return self.along(names[min(map(names.index, axes), default=len(names)) :])

    @property
    def is_compilable(self) -> bool:
        """Whether `compiled` finds a mesh that XLA compiles for."""
        return self.devices <= MOST_COMPILED or self._with_short_dp().devices <= MOST_COMPILED

    def _with_short_dp(self) -> "Mesh":
        return Mesh(tuple((axis, min(size, 2) if axis == "dp" else size) for axis, size in self.axes))

    def compiled(self) -> "Mesh":
        """This mesh, or one with two devices along dp, which only repeats, where that would be too many."""
        if self.devices <= MOST_COMPILED:
            return self
        if not self.is_compilable:
            raise ValueError(
                f"the mesh {self} has {self.along(('fsdp', 'tp'))} devices along fsdp and tp; at most "
                f"{MOST_COMPILED // 2} can be compiled for, put the rest along dp"
            )
        return self._with_short_dp()

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes)


def parse(text: str) -> Mesh:
    """
    >>> parse("dp=4,tp=2")
    Mesh(axes=(('fsdp', 1), ('dp', 4), ('tp', 2)))
    """
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = (part.strip() for part in entry.partition("="))
        if axis not in AXES:
            raise ValueError(f"`mesh` {text!r} has an axis {axis!r}; its axes are {', '.join(AXES)}")
        if axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"`mesh` {text!r} must name each axis once with a number of devices, as in dp=4,fsdp=8,tp=8"
            )
        sizes[axis] = int(size)
    left = {axis: 1 for axis in AXES if axis not in sizes}
    return Mesh(tuple((left | sizes).items()))


def choose(model: Model, devices: int, rates: Rates) -> tuple[Mesh, str]:
    """A sensible mesh, and why: products that stay wide, weights that leave half of the memory, copies of that."""
    domain, memory = rates.nvlink.devices, rates.memory.gb
    wide = [n for n in _powers(domain) if not devices % n and not model.kv_heads % n and model.width // n >= NARROWEST]
    tp = max(wide, default=1)
    rest, state = devices // tp, STATE_BYTES * model.matrices / tp / 1e9
    splits = [n for n in _powers(rest) if not rest % n and not model.width % n]
    filling = max(n for n in splits if n * tp <= domain)
    enough = [n for n in splits if state / n <= memory / 2 and n >= filling]
    fsdp = min(enough, default=max(splits))
    narrow = (
        f"the most of NVLink's {domain} devices that leaves each {NARROWEST} of the width {model.width} and divides "
    )
    reasons = (
        f"tp={tp}: {narrow}{model.kv_heads} kv_heads and {devices} devices"
        if tp > 1
        else f"tp=1: no more divides and leaves {NARROWEST} each",
        f"fsdp={fsdp}: weights, gradients and optimizer take {state / fsdp:.1f} GB of a device's {memory:g}, "
        f"{'at most half, and NVLink is full' if enough else 'and nothing divides further'}",
        f"dp={rest // fsdp}: the rest",
    )
    return Mesh((("dp", rest // fsdp), ("fsdp", fsdp), ("tp", tp))), "; ".join(reasons)


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]

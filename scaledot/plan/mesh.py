"""Meshes of data (dp), fully sharded data (fsdp) and tensor parallelism (tp): parsing, choosing, shrinking to compile.

Device ids are row-major over the axes as they are written, so devices along the last axis have consecutive ids and are
the first to share an NVLink domain. Weights are sharded over fsdp and tp, tokens over dp and fsdp; with sequence
parallelism, activations between the matmuls are also sharded over tp.
"""

import dataclasses
import math
from collections.abc import Iterable

from scaledot.plan.models import Model
from scaledot.plan.rates import Rates

AXES = ("dp", "fsdp", "tp")
BATCH_AXES = ("dp", "fsdp")  # sequences are sharded over these
MAX_COMPILED_DEVICES = 2048  # XLA compiles a decoder block for that many in a few seconds
STATE_BYTES = 16  # per parameter: float32 weight, gradient and two moments of Adam
MIN_WIDTH_PER_DEVICE = 2048  # of the model's width, with tensor parallelism; smaller matmuls are inefficient


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Names and sizes of mesh axes, the slowest-varying axis first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def devices(self) -> int:
        return self.size_along(self.sizes)

    def size_along(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along some axes, the product of their sizes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def span(self, axes: Iterable[str]) -> int:
        """Returns how many consecutive device ids contain a replica group along some axes."""
        names = list(self.sizes)
        return self.size_along(names[min(map(names.index, axes), default=len(names)) :])

    @property
    def is_compilable(self) -> bool:
        """Whether XLA can compile for this mesh, or for the same mesh with dp=2."""
        return self.devices <= MAX_COMPILED_DEVICES or self._with_dp_of_two().devices <= MAX_COMPILED_DEVICES

    def _with_dp_of_two(self) -> "Mesh":
        return Mesh(tuple((axis, min(size, 2) if axis == "dp" else size) for axis, size in self.axes))

    def compilation_mesh(self) -> "Mesh":
        """Returns the mesh to compile for: this one, or with dp=2 if it has more than MAX_COMPILED_DEVICES devices.

        Devices along dp run identical programs, whose only collectives along dp are all-reduces.
        """
        if self.devices <= MAX_COMPILED_DEVICES:
            return self
        if not self.is_compilable:
            raise ValueError(
                f"the mesh {self} has {self.size_along(('fsdp', 'tp'))} devices along fsdp and tp; at most "
                f"{MAX_COMPILED_DEVICES // 2} can be compiled for, put the rest along dp"
            )
        return self._with_dp_of_two()

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.axes)


def parse_mesh(text: str) -> Mesh:
    """Returns the mesh of a text such as dp=4,fsdp=8,tp=8; axes that it does not name have size 1.

    >>> parse_mesh("dp=4,tp=2")
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
    unnamed = {axis: 1 for axis in AXES if axis not in sizes}
    return Mesh(tuple((unnamed | sizes).items()))


def choose_mesh(model: Model, devices: int, rates: Rates) -> tuple[Mesh, str]:
    """Returns a mesh with that number of devices, and the reasons for its sizes.

    tp is as large as an NVLink domain, kv_heads and MIN_WIDTH_PER_DEVICE allow; fsdp fills the NVLink domain as far as
    possible, and is larger if weights, gradients and optimizer state would take more than half of the memory; dp is the
    rest.
    """
    domain, memory = rates.nvlink.devices, rates.memory.gb
    tp_sizes = [
        n
        for n in _powers_of_two(domain)
        if not devices % n and not model.kv_heads % n and model.width // n >= MIN_WIDTH_PER_DEVICE
    ]
    tp = max(tp_sizes, default=1)
    rest, state_gb = devices // tp, STATE_BYTES * model.matrix_parameters / tp / 1e9
    fsdp_sizes = [n for n in _powers_of_two(rest) if not rest % n and not model.width % n]
    fills_domain = max(n for n in fsdp_sizes if n * tp <= domain)
    fits_half = [n for n in fsdp_sizes if state_gb / n <= memory / 2 and n >= fills_domain]
    fsdp = min(fits_half, default=max(fsdp_sizes))
    divides = f"divides both the width {model.width} and {rest} devices"
    if not fits_half:
        fsdp_reason = f"more than half, and no larger power of two {divides}"
    elif fsdp == fills_domain:
        fsdp_reason = f"at most half; the largest power of two that {divides} with fsdp × tp within an NVLink domain"
    else:
        fsdp_reason = f"at most half; the smallest power of two that {divides} for which this holds"
    reasons = (
        f"tp={tp}: no larger power of two within an NVLink domain of {domain} devices divides both {model.kv_heads} "
        f"kv_heads and {devices} devices and leaves each device at least {MIN_WIDTH_PER_DEVICE} of the width "
        f"{model.width}",
        f"fsdp={fsdp}: weights, gradients and optimizer state take {state_gb / fsdp:.1f} of {memory:g} GB per device, "
        + fsdp_reason,
        f"dp={rest // fsdp}: the rest",
    )
    return Mesh((("dp", rest // fsdp), ("fsdp", fsdp), ("tp", tp))), "; ".join(reasons)


def _powers_of_two(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]

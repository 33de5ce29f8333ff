"""Estimates the time and memory of a training step on one device, from compiled collectives and the rates of a device.

A step is forward and backward of all decoder blocks and the output head, and an Adam update of float32 weights.
Matmuls, attention and casts run one after another on a device. Collectives run on links, which at best overlap with
compute and with each other: NVLink and the network are separate links. The time of a step is between `full_overlap`
and `no_overlap` of its `Cost`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scaledot.plan.gemm_kinds import BASELINE, cast_bytes, gemm_kind
from scaledot.plan.hlo import Collective
from scaledot.plan.models import Linear
from scaledot.plan.programs import CompiledModule
from scaledot.plan.rates import Rates
from scaledot.plan.setup import Setup
from scaledot.recipes import Recipe
from scaledot.recipes.casts import GEMM_OPERANDS

# Bytes of memory traffic per parameter in an Adam update: float32 weight, gradient and two moments are read, and all
# but the gradient are written.
UPDATE_BYTES = 28
# FLOPs of attention's backward pass over those of its forward pass: five matmuls instead of two.
BACKWARD_ATTENTION = 2.5


def transfers_operands(kind: str, dtype: str) -> bool:
    """Returns whether a collective transfers matmul operands, not float32 partial results.

    Operands are all-gathered, or passed around a ring by collective-permutes.
    """
    return kind == "all-gather" or (kind == "collective-permute" and dtype != "f32")


class Traffic(NamedTuple):
    """Collectives of one kind and dtype along the same mesh axes: number, bytes sent and time per device and step."""

    axes: tuple[str, ...]
    link: str
    kind: str
    dtype: str
    collectives: int
    sent_bytes: float
    seconds: float


class Cost(NamedTuple):
    """Cost of a step on one device: seconds per kind of compute, collectives, and bytes of memory by what they hold."""

    compute_seconds: dict[str, float]
    traffic: list[Traffic]
    memory: dict[str, float]

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def compute(self) -> float:
        """Seconds of compute, without communication."""
        return sum(self.compute_seconds.values())

    @property
    def sent_bytes(self) -> float:
        return sum(row.sent_bytes for row in self.traffic)

    @property
    def gathered_bytes(self) -> float:
        """Bytes sent to gather operands, which depend on the recipe; reductions are float32 under all recipes."""
        return sum(row.sent_bytes for row in self.traffic if transfers_operands(row.kind, row.dtype))

    def seconds_on(self, link: str) -> float:
        """Seconds of collectives on "nvlink" or "network"."""
        return sum(row.seconds for row in self.traffic if row.link == link)

    @property
    def no_overlap(self) -> float:
        """Seconds of a step if collectives and compute run one after another."""
        return self.compute + sum(row.seconds for row in self.traffic)

    @property
    def full_overlap(self) -> tuple[float, str]:
        """Seconds of a step if compute, NVLink and network overlap completely, and which of the three takes longest."""
        seconds = {"compute": self.compute, **{link: self.seconds_on(link) for link in ("nvlink", "network")}}
        bottleneck = max(seconds, key=lambda name: seconds[name])
        return seconds[bottleneck], bottleneck


def cost(setup: Setup, rates: Rates, recipe: Recipe, block: CompiledModule, head: CompiledModule) -> Cost:
    """Returns the cost of a step whose decoder blocks use `recipe`; the output head is bfloat16."""
    collectives = [(collective, setup.model.layers) for collective in (*block.forward, *block.backward)]
    collectives += [(collective, 1) for collective in (*head.forward, *head.backward)]
    return Cost(
        _compute_seconds(setup, rates, recipe), _traffic(setup, rates, collectives), memory(setup, recipe, block, head)
    )


def _compute_seconds(setup: Setup, rates: Rates, recipe: Recipe) -> dict[str, float]:
    model = setup.model
    matmuls = sum(_matmul_seconds(setup, rates, recipe, linear) for linear in model.linears)
    block_bytes = sum(cast_bytes(recipe, setup.local_elements(linear)) for linear in model.linears)
    casts = block_bytes / (1e9 * rates.memory.gb_s * rates.matmuls[gemm_kind(recipe, "fwd")].casts_achieved)
    head_casts = cast_bytes(BASELINE, setup.local_elements(model.head)) / rates.memory.bytes_s
    return {
        "matmuls": model.layers * matmuls + _matmul_seconds(setup, rates, BASELINE, model.head),
        "attention": model.layers * _attention_flops(setup) / rates.matmuls["attention"].flops,
        "casts": model.layers * casts + head_casts,
        "optimizer update": UPDATE_BYTES * _local_parameters(setup) / rates.memory.bytes_s,
    }


def _matmul_seconds(setup: Setup, rates: Rates, recipe: Recipe, linear: Linear) -> float:
    """Returns the seconds of fwd, dgrad and wgrad of one linear layer on a device."""
    return sum(setup.matmul_flops(linear) / rates.matmuls[gemm_kind(recipe, gemm)].flops for gemm in GEMM_OPERANDS)


def _attention_flops(setup: Setup) -> float:
    """Returns the FLOPs of one block's causal attention on a device, forward and backward, without the masked half."""
    forward = 2 * setup.tokens * setup.sequence * setup.model.attention_width / setup.mesh.sizes["tp"]
    return forward * (1 + BACKWARD_ATTENTION)


def _local_parameters(setup: Setup) -> float:
    """Returns the parameters on a device: matrices are sharded over fsdp and tp, scales of norms are replicated."""
    model = setup.model
    return model.matrix_parameters / setup.mesh.size_along(("fsdp", "tp")) + model.parameters - model.matrix_parameters


def _traffic(setup: Setup, rates: Rates, collectives: Iterable[tuple[Collective, int]]) -> list[Traffic]:
    """Returns the traffic of a step, grouped by axes, kind and dtype.

    collectives: each with the number of times that its program runs per step.
    """
    grouped: dict[tuple[tuple[str, ...], str, str], list[tuple[float, int]]] = {}
    for collective, times in collectives:
        _check_extrapolates(setup, collective)
        sent = times * collective.sent_bytes(setup.mesh.size_along(collective.axes))
        key = (collective.axes, collective.kind, collective.dtype)
        grouped.setdefault(key, []).append((sent, times * collective.count))
    traffic = []
    for (axes, kind, dtype), rows in sorted(grouped.items()):
        link = rates.link(setup.mesh.span(axes))
        sent, count = sum(sent for sent, _ in rows), sum(count for _, count in rows)
        traffic.append(Traffic(axes, link, kind, dtype, count, sent, getattr(rates, link).seconds(sent, count)))
    return traffic


def _check_extrapolates(setup: Setup, collective: Collective) -> None:
    """Raises if a collective other than all-reduce runs along an axis that was shortened for compilation."""
    compiled_sizes = setup.compilation_setup.mesh.sizes
    shortened = [axis for axis in collective.axes if compiled_sizes[axis] != setup.mesh.sizes[axis]]
    if shortened and collective.kind != "all-reduce":
        axis = shortened[0]
        raise ValueError(
            f"{collective.kind} along {axis} was compiled for {compiled_sizes[axis]} devices; its bytes for "
            f"{setup.mesh.sizes[axis]} do not follow from that, only those of an all-reduce do"
        )


def memory(setup: Setup, recipe: Recipe, block: CompiledModule, head: CompiledModule) -> dict[str, float]:
    """Returns the bytes of memory on a device in a step, by what they hold."""
    model, parameters = setup.model, _local_parameters(setup)
    gathered = max(
        sum(one.bytes * one.count for one in collectives if one.kind == "all-gather" and "fsdp" in one.axes)
        for collectives in (block.forward, block.backward)
    )
    logits = 2 * setup.tokens * model.vocabulary / setup.mesh.sizes["tp"]
    block_residuals = block.residual_bytes + _attention_residual_bytes(setup, recipe)
    return {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer state": 8 * parameters,
        "residuals": model.layers * block_residuals + head.residual_bytes + logits,
        "gathered weights of one layer": gathered,
    }


def _attention_residual_bytes(setup: Setup, recipe: Recipe) -> float:
    """Returns the bytes that one block's attention saves on a device, without queries, keys and values.

    They are the float32 log-sum-exp of each head, and the bfloat16 result unless the next matmul saves it uncast.
    """
    model = setup.model
    casts_x = any(tensor == "x" for _, tensor, _ in recipe.casts())
    bytes_per_token = 4 * model.heads + (2 * model.attention_width if casts_x else 0)
    return setup.tokens * bytes_per_token / setup.mesh.sizes["tp"]

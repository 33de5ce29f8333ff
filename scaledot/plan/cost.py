"""Times and memory of a step on a device, from what was compiled and what devices reach.

A step is the layers and the head, forward and backward, and an update by Adam with float32 weights. Products, attention
and casts take turns on a device; collectives have links of their own, which at best hide behind those, and behind each
other where one is NVLink and the other the network.
"""

from collections.abc import Iterable
from typing import NamedTuple

from scaledot.plan.gemm_kinds import BASELINE, cast_bytes, kind_of
from scaledot.plan.hlo import Collective
from scaledot.plan.models import Linear
from scaledot.plan.programs import Compiled
from scaledot.plan.rates import Rates
from scaledot.plan.setup import Setup
from scaledot.recipes import GEMM_OPERANDS, Recipe

UPDATE_BYTES = 28  # of a parameter: four float32 numbers are read, three written
BACKWARD_ATTENTION = 2.5  # of forward's work: five products for two


def of_operands(kind: str, dtype: str) -> bool:
    """Whether a collective puts operands together, at once or by passing parts on; others add up sums in float32."""
    return kind == "all-gather" or (kind == "collective-permute" and dtype != "f32")


class Traffic(NamedTuple):
    """What a device sends in a step by collectives of one kind along some axes."""

    axes: tuple[str, ...]
    link: str
    kind: str
    dtype: str
    collectives: int
    sent: float
    seconds: float


class Cost(NamedTuple):
    """Of a step on a device: seconds of each kind of work, collectives, and bytes of memory."""

    work: dict[str, float]
    traffic: list[Traffic]
    memory: dict[str, float]

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def computing(self) -> float:
        return sum(self.work.values())

    @property
    def sent(self) -> float:
        return sum(row.sent for row in self.traffic)

    @property
    def gathered(self) -> float:
        """Of what is sent, that which recipes change."""
        return sum(row.sent for row in self.traffic if of_operands(row.kind, row.dtype))

    @property
    def moving(self) -> float:
        return sum(row.seconds for row in self.traffic)

    def seconds_on(self, link: str) -> float:
        return sum(row.seconds for row in self.traffic if row.link == link)

    @property
    def in_turns(self) -> float:
        """Nothing overlaps."""
        return self.computing + self.moving

    @property
    def at_once(self) -> tuple[float, str]:
        """Everything overlaps that can, and what is left is the longest."""
        longest = {"computing": self.computing, **{link: self.seconds_on(link) for link in ("nvlink", "network")}}
        name = max(longest, key=lambda of: longest[of])
        return longest[name], name


def cost(setup: Setup, rates: Rates, recipe: Recipe, layer: Compiled, head: Compiled) -> Cost:
    """Of a recipe in the layers; the head is bfloat16."""
    layers = setup.model.layers
    every = [(one, layers) for one in (*layer.forward, *layer.backward)]
    every += [(one, 1) for one in (*head.forward, *head.backward)]
    return Cost(_work(setup, rates, recipe), _traffic(setup, rates, every), memory(setup, recipe, layer, head))


def _work(setup: Setup, rates: Rates, recipe: Recipe) -> dict[str, float]:
    model = setup.model
    products = sum(_product_seconds(setup, rates, recipe, linear) for linear in model.linears)
    cast = sum(cast_bytes(recipe, setup.parts(linear)) for linear in model.linears)
    casts = cast / (1e9 * rates.memory.gb_s * rates.products[kind_of(recipe, "fwd")].casts_reached)
    of_head = cast_bytes(BASELINE, setup.parts(model.head)) / rates.memory.bytes_s
    return {
        "products": model.layers * products + _product_seconds(setup, rates, BASELINE, model.head),
        "attention": model.layers * _attention_flops(setup) / rates.products["attention"].flops,
        "casts": model.layers * casts + of_head,
        "update": UPDATE_BYTES * _parameters(setup) / rates.memory.bytes_s,
    }


def _product_seconds(setup: Setup, rates: Rates, recipe: Recipe, linear: Linear) -> float:
    return sum(setup.flops(linear) / rates.products[kind_of(recipe, product)].flops for product in GEMM_OPERANDS)


def _attention_flops(setup: Setup) -> float:
    """Of a layer on a device, both ways: scores and their values, half of them masked."""
    forward = 2 * setup.tokens * setup.sequence * setup.model.attention / setup.mesh.sizes["tp"]
    return forward * (1 + BACKWARD_ATTENTION)


def _parameters(setup: Setup) -> float:
    """On a device; norms are whole on all."""
    model = setup.model
    return model.matrices / setup.mesh.along(("fsdp", "tp")) + model.parameters - model.matrices


def _traffic(setup: Setup, rates: Rates, every: Iterable[tuple[Collective, int]]) -> list[Traffic]:
    """Collectives that are alike together, each so many times in a step."""
    alike: dict[tuple[tuple[str, ...], str, str], list[tuple[float, int]]] = {}
    for one, times in every:
        _check_repeats(setup, one)
        sent = times * one.sent(setup.mesh.along(one.axes))
        alike.setdefault((one.axes, one.kind, one.dtype), []).append((sent, times * one.count))
    found = []
    for (axes, kind, dtype), rows in sorted(alike.items()):
        link = rates.link(setup.mesh.span(axes))
        sent, count = sum(sent for sent, _ in rows), sum(count for _, count in rows)
        found.append(Traffic(axes, link, kind, dtype, count, sent, getattr(rates, link).seconds(sent, count)))
    return found


def _check_repeats(setup: Setup, one: Collective) -> None:
    """Raise where what was compiled for fewer devices along an axis says nothing of more."""
    compiled = setup.compiled.mesh.sizes
    shorter = [axis for axis in one.axes if compiled[axis] != setup.mesh.sizes[axis]]
    if shorter and one.kind != "all-reduce":
        raise ValueError(f"{one.kind} along {shorter[0]} is not the same for another number of devices")


def memory(setup: Setup, recipe: Recipe, layer: Compiled, head: Compiled) -> dict[str, float]:
    """Bytes on a device in a step, by what they hold."""
    model, parameters = setup.model, _parameters(setup)
    gathered = max(
        sum(one.bytes * one.count for one in each if one.kind == "all-gather" and "fsdp" in one.axes)
        for each in (layer.forward, layer.backward)
    )
    logits = 2 * setup.tokens * model.vocabulary / setup.mesh.sizes["tp"]
    return {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "kept for backward": model.layers * (layer.kept + _kept_by_attention(setup, recipe)) + head.kept + logits,
        "a layer's weights, gathered": gathered,
    }


def _kept_by_attention(setup: Setup, recipe: Recipe) -> float:
    """Beside queries, keys and values: float32 logarithms of sums, and its result, unless the product keeps it too."""
    model = setup.model
    numbers = 4 * model.heads + (2 * model.attention if any(of == "x" for _, of, _ in recipe.casts()) else 0)
    return setup.tokens * numbers / setup.mesh.sizes["tp"]

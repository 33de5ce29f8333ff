"""Which meshes have room for a training step: memory in closed form, so that only what is proposed need be compiled.

The estimate counts what `cost.memory` counts, with residuals and gathered weights from the sizes of the model instead
of compiled programs; tests hold it to those within a hundredth.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from scaledot.plan.cost import memory
from scaledot.plan.gemm_kinds import BASELINE, bits_of
from scaledot.plan.hlo import Collective
from scaledot.plan.mesh import MOST_COMPILED, Mesh
from scaledot.plan.models import Linear
from scaledot.plan.programs import Compiled
from scaledot.plan.rates import Rates
from scaledot.plan.setup import Setup
from scaledot.recipes import Cast, Recipe


def nearest(setup: Setup, recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    """Setups of as many devices on which every recipe is estimated to fit, those nearest to the mesh of `setup` first.

    Nearest is tp within NVLink, then the ratio of tp to that of `setup`, then the ratio of fsdp.
    """
    fitting = _fitting(setup, _meshes(setup.mesh.devices), recipes, rates)
    return sorted(fitting, key=lambda found: _distance(found.mesh, setup.mesh, rates))


def fewest(setup: Setup, recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    """Setups without data parallelism on which every recipe is estimated to fit, those of fewest devices first."""
    model = setup.model
    sizes = [(fsdp, tp) for tp in _divisors(model.kv_heads) for fsdp in _divisors(model.width)]
    meshes = (_mesh(1, fsdp, tp) for fsdp, tp in sizes if fsdp * tp <= MOST_COMPILED)
    fitting = _fitting(setup, meshes, recipes, rates)
    return sorted(fitting, key=lambda found: (found.mesh.devices, *_distance(found.mesh, setup.mesh, rates)))


def estimate(setup: Setup, recipe: Recipe) -> float:
    """Bytes of memory on a device in a step."""
    return sum(memory(setup, recipe, layer(setup, recipe), head(setup)).values())


def _fitting(setup: Setup, meshes: Iterable[Mesh], recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    found = (setup.on(mesh) for mesh in meshes if mesh.is_compilable)
    return [one for one in found if all(_has_room(one, recipe, rates) for recipe in recipes)]


def _has_room(setup: Setup, recipe: Recipe, rates: Rates) -> bool:
    return setup.reason(recipe) is None and estimate(setup, recipe) <= rates.memory.bytes


def _distance(mesh: Mesh, wanted: Mesh, rates: Rates) -> tuple[bool, float, float]:
    fsdp, tp = (abs(math.log(mesh.sizes[axis] / wanted.sizes[axis])) for axis in ("fsdp", "tp"))
    return mesh.sizes["tp"] > rates.nvlink.devices, tp, fsdp


def _meshes(devices: int) -> Iterator[Mesh]:
    for tp in _divisors(devices):
        for fsdp in _divisors(devices // tp):
            yield _mesh(devices // tp // fsdp, fsdp, tp)


def _mesh(dp: int, fsdp: int, tp: int) -> Mesh:
    return Mesh((("dp", dp), ("fsdp", fsdp), ("tp", tp)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]


def layer(setup: Setup, recipe: Recipe) -> Compiled:
    """What `programs.compiled` finds of a layer, in closed form.

    Beside operands, it saves the inputs of two norms, of attention and of the activation.
    """
    qkv, _, up, _ = setup.model.linears
    split = setup.tokens * (qkv.outputs + up.outputs) / setup.mesh.sizes["tp"]
    return _estimated(setup, recipe, setup.model.linears, 2 * _stream(setup) + split)


def head(setup: Setup) -> Compiled:
    """What `programs.compiled` finds of the head, in closed form."""
    return _estimated(setup, BASELINE, (setup.model.head,), _stream(setup))


def _stream(setup: Setup) -> float:
    """Elements of the residual stream on a device."""
    split = setup.mesh.sizes["tp"] if setup.sequence_parallel else 1
    return setup.tokens * setup.model.width / split


def _estimated(setup: Setup, recipe: Recipe, linears: Sequence[Linear], plain: float) -> Compiled:
    """Residuals, of which `plain` elements are bfloat16, and the weights that both passes gather."""
    backward = recipe.dgrad or recipe.fwd  # straight-through gradients take the operands of fwd
    x, w = _bits((recipe.wgrad or recipe.fwd).lhs), _bits(backward.rhs)
    parts = [setup.parts(linear) for linear in linears]
    saved = 2 * plain + sum(part["x"] * x + part["w"] * w for part in parts) / 8
    return Compiled(_gathered(setup, linears, _bits(recipe.fwd.rhs)), _gathered(setup, linears, w), round(saved))


def _gathered(setup: Setup, linears: Sequence[Linear], bits: float) -> list[Collective]:
    if setup.mesh.sizes["fsdp"] == 1:
        return []
    elements = sum(linear.parameters for linear in linears) / setup.mesh.sizes["tp"]
    return [Collective("all-gather", "u8", ("fsdp",), round(elements * bits / 8))]


def _bits(cast: Cast | None) -> float:
    return 16 if cast is None else bits_of(cast)

"""Finds meshes on which a training step fits the memory of a device, without compiling.

The estimate has the terms of `cost.memory`; residuals and gathered weights are computed from the sizes of the model
instead of read from compiled programs. Tests compare both: they agree within 1%. Only the meshes that are proposed are
then compiled.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from scaledot.plan.cost import memory
from scaledot.plan.gemm_kinds import BASELINE, bits_per_element
from scaledot.plan.hlo import Collective
from scaledot.plan.mesh import MAX_COMPILED_DEVICES, Mesh
from scaledot.plan.models import Linear
from scaledot.plan.programs import CompiledModule
from scaledot.plan.rates import Rates
from scaledot.plan.setup import Setup
from scaledot.recipes import Cast, Recipe


def nearest_fitting(setup: Setup, recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    """Returns setups with the same number of devices that fit under every recipe, nearest to the mesh of `setup` first.

    They are ordered by whether tp stays within an NVLink domain, then by the ratio of tp to that of `setup`, then by
    the ratio of fsdp.
    """
    fitting = _fitting(setup, _meshes(setup.mesh.devices), recipes, rates)
    return sorted(fitting, key=lambda found: _distance(found.mesh, setup.mesh, rates))


def fewest_devices(setup: Setup, recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    """Returns setups without data parallelism that fit under every recipe, those with the fewest devices first."""
    model = setup.model
    sizes = [(fsdp, tp) for tp in _divisors(model.kv_heads) for fsdp in _divisors(model.width)]
    meshes = (_mesh(1, fsdp, tp) for fsdp, tp in sizes if fsdp * tp <= MAX_COMPILED_DEVICES)
    fitting = _fitting(setup, meshes, recipes, rates)
    return sorted(fitting, key=lambda found: (found.mesh.devices, *_distance(found.mesh, setup.mesh, rates)))


def estimate_memory(setup: Setup, recipe: Recipe) -> float:
    """Returns the bytes of memory on a device in a step."""
    return sum(memory(setup, recipe, estimate_block(setup, recipe), estimate_head(setup)).values())


def _fitting(setup: Setup, meshes: Iterable[Mesh], recipes: Sequence[Recipe], rates: Rates) -> list[Setup]:
    candidates = (setup.with_mesh(mesh) for mesh in meshes if mesh.is_compilable)
    return [one for one in candidates if all(_fits(one, recipe, rates) for recipe in recipes)]


def _fits(setup: Setup, recipe: Recipe, rates: Rates) -> bool:
    return setup.unsupported_reason(recipe) is None and estimate_memory(setup, recipe) <= rates.memory.bytes


def _distance(mesh: Mesh, reference: Mesh, rates: Rates) -> tuple[bool, float, float]:
    fsdp, tp = (abs(math.log(mesh.sizes[axis] / reference.sizes[axis])) for axis in ("fsdp", "tp"))
    return mesh.sizes["tp"] > rates.nvlink.devices, tp, fsdp


def _meshes(devices: int) -> Iterator[Mesh]:
    """Yields every mesh with that number of devices."""
    for tp in _divisors(devices):
        for fsdp in _divisors(devices // tp):
            yield _mesh(devices // tp // fsdp, fsdp, tp)


def _mesh(dp: int, fsdp: int, tp: int) -> Mesh:
    return Mesh((("dp", dp), ("fsdp", fsdp), ("tp", tp)))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if not number % n]


def estimate_block(setup: Setup, recipe: Recipe) -> CompiledModule:
    """Returns residuals and gathered weights of a decoder block in closed form, as `programs.compile_module` would.

    Residuals that are not matmul operands are the bfloat16 inputs of two norms, of attention and of the activation.
    """
    qkv, _, up, _ = setup.model.linears
    sharded_over_tp = setup.tokens * (qkv.outputs + up.outputs) / setup.mesh.sizes["tp"]
    bfloat16_elements = 2 * _residual_stream_elements(setup) + sharded_over_tp
    return _estimate_module(setup, recipe, setup.model.linears, bfloat16_elements)


def estimate_head(setup: Setup) -> CompiledModule:
    """Returns residuals and gathered weights of the output head in closed form, as `programs.compile_module` would."""
    return _estimate_module(setup, BASELINE, (setup.model.head,), _residual_stream_elements(setup))


def _residual_stream_elements(setup: Setup) -> float:
    """Returns the elements of the residual stream on a device."""
    shards = setup.mesh.sizes["tp"] if setup.sequence_parallel else 1
    return setup.tokens * setup.model.width / shards


def _estimate_module(
    setup: Setup, recipe: Recipe, linears: Sequence[Linear], bfloat16_elements: float
) -> CompiledModule:
    """Returns the weights that forward and backward gather, and the residuals.

    bfloat16_elements: residuals on a device that are not operands of matmuls.
    """
    dgrad = recipe.dgrad or recipe.fwd  # straight-through gradients use the operands of fwd
    x_bits, w_bits = _bits((recipe.wgrad or recipe.fwd).lhs), _bits(dgrad.rhs)
    elements = [setup.local_elements(linear) for linear in linears]
    residual_bytes = 2 * bfloat16_elements + sum(local["x"] * x_bits + local["w"] * w_bits for local in elements) / 8
    return CompiledModule(
        _gathered_weights(setup, linears, _bits(recipe.fwd.rhs)),
        _gathered_weights(setup, linears, w_bits),
        round(residual_bytes),
    )


def _gathered_weights(setup: Setup, linears: Sequence[Linear], bits: float) -> list[Collective]:
    if setup.mesh.sizes["fsdp"] == 1:
        return []
    elements = sum(linear.parameters for linear in linears) / setup.mesh.sizes["tp"]
    return [Collective("all-gather", "u8", ("fsdp",), round(elements * bits / 8))]


def _bits(cast: Cast | None) -> float:
    return 16 if cast is None else bits_per_element(cast)

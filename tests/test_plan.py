"""`scaledot.plan`: collectives read from compiled HLO, and the arithmetic of costs, memory and meshes.

Bytes of collectives are compared with closed formulas on meshes of eight CPU devices, costs with numbers computed by
hand.
"""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import record, scaling
from scaledot.cli import main
from scaledot.plan import fit, programs, report
from scaledot.plan.cost import cost, transfers_operands
from scaledot.plan.gemm_kinds import (
    BASELINE,
    RECIPES_AND_BASELINE,
    block_size_along,
    cast_bytes,
    find_recipe,
    gemm_kind,
)
from scaledot.plan.hlo import Collective, collectives
from scaledot.plan.mesh import choose_mesh, parse_mesh
from scaledot.plan.models import MODELS, Model, find_model
from scaledot.plan.programs import CompiledModule, Job
from scaledot.plan.rates import RATES, find_rates
from scaledot.plan.setup import Setup
from scaledot.recipes.casts import GEMM_OPERANDS

pytestmark = pytest.mark.optimized  # collectives depend on XLA's optimization passes

AXES = {"dp": 2, "fsdp": 2, "tp": 2}
TINY = dataclasses.replace(MODELS["gpt-tiny"], name="tiny", sequence=256)


def setup_of(mesh: str, **options) -> Setup:
    return Setup(TINY, parse_mesh(mesh), 1, TINY.sequence, **options)


@functools.cache
def compiled(mesh: str, recipe: str = "bf16", module: str = "block", **options) -> CompiledModule:
    return programs.compile_module(Job(module, recipe, setup_of(mesh, **options)))


def compiled_text(run, in_specs, out_specs, *shapes) -> str:
    """Returns the HLO of a shard_map of `run` over float32 arrays, compiled for eight devices."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*arguments).compile().as_text()


EVERY_AXES = [("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp"), ("dp", "fsdp", "tp")]


@pytest.mark.parametrize("axes", EVERY_AXES, ids="·".join)
def test_collectives_are_read_with_their_axes_and_bytes(axes):
    all_axes, devices = P(("dp", "fsdp", "tp")), math.prod(AXES[axis] for axis in axes)
    runs = {
        "all-gather": lambda x: lax.all_gather(x, axes, tiled=True),
        "all-reduce": lambda x: lax.psum(x, axes),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
    }
    found = [collectives(compiled_text(run, all_axes, all_axes, (512, 16)), AXES) for run in runs.values()]
    shard = 512 // 8 * 16 * 4
    assert found == [
        [Collective("all-gather", "f32", axes, shard * devices)],
        [Collective("all-reduce", "f32", axes, shard)],
        [Collective("reduce-scatter", "f32", axes, shard)],
    ]


@pytest.mark.parametrize("axis", AXES)
def test_collective_permutes_are_read_with_their_axis(axis):
    all_axes = P(("dp", "fsdp", "tp"))
    text = compiled_text(lambda x: lax.ppermute(x, axis, [(0, 1), (1, 0)]), all_axes, all_axes, (512, 16))
    assert collectives(text, AXES) == [Collective("collective-permute", "f32", (axis,), 512 // 8 * 16 * 4)]


def test_collectives_in_a_loop_count_once_per_trip():
    all_axes = P(("dp", "fsdp", "tp"))

    def ring(x):
        return lax.fori_loop(0, 7, lambda _, x: jnp.sin(lax.ppermute(x, "tp", [(0, 1), (1, 0)])), x)

    (found,) = collectives(compiled_text(ring, all_axes, all_axes, (512, 16)), AXES)
    assert (found.kind, found.axes, found.count) == ("collective-permute", ("tp",), 7)

    def unknown_trip_count(x):
        return lax.while_loop(lambda x: x[0, 0] > 0, lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]), x)

    with pytest.raises(ValueError, match="a while loop with collectives has no known trip count"):
        collectives(compiled_text(unknown_trip_count, all_axes, all_axes, (512, 16)), AXES)


REPLICA_GROUPS = {  # along fsdp on 2 × 2 × 2 devices, in every form that versions of XLA print
    "lists": "{{0,2},{1,3},{4,6},{5,7}}",
    "iota": "[4,2]<=[2,2,2]T(0,2,1)",
    "axes": "mesh['dp'=2,'fsdp'=2,'tp'=2] {'fsdp'}",
}


@pytest.mark.parametrize("groups", REPLICA_GROUPS.values(), ids=REPLICA_GROUPS)
def test_replica_groups_are_read_in_every_form(groups):
    """Pairs of -start and -done instructions, which XLA emits for GPUs, count once."""
    lines = [
        f"%a = (u8[8,4]{{1,0}}, u8[16,4]{{1,0}}) all-gather-start(%x), channel_id=1, replica_groups={groups}, dims",
        "%b = u8[16,4]{1,0} all-gather-done(%a)",
        f"%c = (bf16[8]{{0}}, /*index=1*/f32[3]{{0}}) all-reduce(%x, %y), replica_groups={groups}, to_apply=%add",
        "%d = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,2},{2,0}}",
        "%e = f4e2m1fn[6]{0} all-to-all(%x), replica_groups={}, dimensions={0}",
    ]
    text = "\n".join(["%add (x: f32[]) -> f32[] {", "}", "ENTRY %main (x: u8[8,4]) -> u8[16,4] {", *lines, "}"])
    assert collectives(text, AXES) == [
        Collective("all-gather", "u8", ("fsdp",), 64),
        Collective("all-reduce", "bf16+f32", ("fsdp",), 28),
        Collective("collective-permute", "f32", ("fsdp",), 24),
        Collective("all-to-all", "f4e2m1fn", ("dp", "fsdp", "tp"), 3),
    ]


def test_replica_groups_that_are_not_whole_axes_raise():
    line = "ENTRY %main (x: f32[4]) -> f32[8] {\n  %g = f32[8] all-gather(%x), replica_groups={{0,1,2},{3,4,5}}\n}"
    with pytest.raises(ValueError, match="do not span whole axes of the mesh"):
        collectives(line, AXES)
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("nothing", AXES)


def test_sent_bytes_are_those_of_ring_algorithms():
    assert Collective("all-gather", "u8", ("tp",), 800).sent_bytes(8) == 700
    assert Collective("reduce-scatter", "f32", ("tp",), 800).sent_bytes(8) == 700
    assert Collective("all-reduce", "f32", ("tp",), 800, count=3).sent_bytes(8) == 3 * 1400
    assert Collective("collective-permute", "u8", ("tp",), 100, count=7).sent_bytes(8) == 700


def totals(found: list[Collective], least: int = 1024) -> dict[tuple[str, tuple[str, ...]], int]:
    """Returns the bytes per kind and axes, without collectives of fewer than `least` bytes, such as those of amax."""
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for one in found:
        if one.bytes >= least:
            sums[one.kind, one.axes] = sums.get((one.kind, one.axes), 0) + one.bytes * one.count
    return sums


def closed_form(setup: Setup, element_bytes: int) -> tuple[dict, dict]:
    """Returns the bytes of a decoder block's collectives, forward and backward.

    Weights are all-gathered over fsdp in both passes; their float32 gradients are reduce-scattered over fsdp and
    all-reduced over dp. Without sequence parallelism, results of row-parallel matmuls (forward) and input gradients of
    column-parallel ones (backward) are all-reduced over tp. With it, these are reduce-scattered, inputs of
    column-parallel matmuls are all-gathered, and gathered again for wgrad.
    """
    sizes = setup.mesh.sizes
    dp, fsdp, tp = sizes["dp"], sizes["fsdp"], sizes["tp"]
    weights = sum(linear.parameters for linear in setup.model.linears) // tp
    tokens = setup.tokens * setup.model.width
    forward, backward = {}, {}
    if fsdp > 1:
        forward["all-gather", ("fsdp",)] = backward["all-gather", ("fsdp",)] = weights * element_bytes
        backward["reduce-scatter", ("fsdp",)] = 4 * weights
    if dp > 1:
        backward["all-reduce", ("dp",)] = 4 * weights // fsdp
    if tp > 1 and not setup.sequence_parallel:
        forward["all-reduce", ("tp",)] = backward["all-reduce", ("tp",)] = 2 * 4 * tokens
    if tp > 1 and setup.sequence_parallel:
        forward["all-gather", ("tp",)] = 2 * tokens * element_bytes
        forward["reduce-scatter", ("tp",)] = backward["reduce-scatter", ("tp",)] = 2 * 4 * tokens
        backward["all-gather", ("tp",)] = 2 * 2 * tokens * element_bytes
    return forward, backward


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,tp=2", "fsdp=8", "dp=2,tp=4", "tp=8", "dp=8"])
def test_bytes_of_a_block_equal_closed_forms(mesh):
    found = compiled(mesh)
    assert (totals(found.forward), totals(found.backward)) == closed_form(setup_of(mesh), 2)


def test_bytes_with_sequence_parallelism_equal_closed_forms():
    found = compiled("fsdp=2,tp=4", sequence_parallel=True)
    forward, backward = closed_form(setup_of("fsdp=2,tp=4", sequence_parallel=True), 2)
    assert (totals(found.forward), totals(found.backward)) == (forward, backward)


def test_operands_are_gathered_as_fp8_codes():
    mesh = "dp=2,fsdp=2,tp=2"
    found = compiled(mesh, "fp8_current")
    assert (totals(found.forward), totals(found.backward)) == closed_form(setup_of(mesh), 1)


def fsdp_gathered(found: list[Collective]) -> int:
    return sum(one.bytes * one.count for one in found if one.kind == "all-gather" and one.axes == ("fsdp",))


@pytest.mark.parametrize(("recipe", "most"), [("fp8_current", 0.52), ("fp8_block", 0.52), ("nvfp4", 0.3)])
def test_weights_are_gathered_in_fewer_bytes(recipe, most):
    """The head has one matmul and compiles faster than a decoder block, which has four."""
    job = Job("head", recipe, setup_of("dp=2,fsdp=2,tp=2"))
    gathered = fsdp_gathered(programs.compile_collectives(programs.trace_module(job).lower_forward(), job))
    assert 0 < gathered <= most * fsdp_gathered(compiled("dp=2,fsdp=2,tp=2", module="head").forward)


def test_bytes_of_the_head_equal_closed_forms():
    found = compiled("dp=2,fsdp=2,tp=2", module="head")
    matrix, tokens = TINY.width * TINY.vocabulary // 2, TINY.sequence * TINY.width
    assert totals(found.forward) == {("all-gather", ("fsdp",)): 2 * matrix}
    assert totals(found.backward) == {
        ("all-gather", ("fsdp",)): 2 * matrix,
        ("reduce-scatter", ("fsdp",)): 4 * matrix,
        ("all-reduce", ("dp",)): 4 * matrix // 2,
        ("all-reduce", ("tp",)): 4 * tokens,
    }


def test_a_mesh_compiled_with_dp_of_two_has_the_costs_of_the_full_mesh(monkeypatch):
    small, rates = compiled("dp=2"), find_rates("h200")
    setup = setup_of("dp=8")
    exact = cost(setup, rates, BASELINE, compiled("dp=8"), compiled("dp=8", module="head"))
    monkeypatch.setattr("scaledot.plan.mesh.MAX_COMPILED_DEVICES", 4)
    assert setup.compilation_setup.mesh == parse_mesh("dp=2")
    assert cost(setup, rates, BASELINE, small, compiled("dp=2", module="head")) == exact
    gathered = CompiledModule([Collective("all-gather", "u8", ("dp",), 8)], [], 0)
    with pytest.raises(ValueError, match="all-gather along dp was compiled for 2 devices"):
        cost(setup, rates, BASELINE, gathered, small)


@pytest.mark.parametrize(
    ("recipe", "residual_bits"), [("bf16", 16), ("fp8_current", 8), ("mxfp8", 8.25), ("nvfp4", 4.5)]
)
def test_residuals_equal_closed_forms(recipe, residual_bits):
    """Inputs of norms, attention and activation are saved in bfloat16, x and w of every matmul as codes and scales."""
    setup = setup_of("dp=2,fsdp=2,tp=2")
    residual_bytes = programs.trace_module(Job("block", recipe, setup)).residual_bytes
    features = [2 * TINY.width, (TINY.linears[0].outputs + TINY.linears[2].outputs) / 2]
    bfloat16_bytes = 2 * setup.tokens * sum(features)
    operands = sum(setup.local_elements(linear)["x"] + setup.local_elements(linear)["w"] for linear in TINY.linears)
    scales = 4 * 2 * 4 if recipe in ("fp8_current", "nvfp4") else 0  # float32 scales of tensors
    if recipe == "nvfp4":  # w has one scale per 16 × 16 block
        operands -= sum(setup.local_elements(linear)["w"] for linear in TINY.linears) * (0.5 - 8 / 256) / residual_bits
    assert residual_bytes == bfloat16_bytes + operands * residual_bits / 8 + scales


@pytest.mark.parametrize(
    ("mesh", "recipe", "options"),
    [
        ("dp=2,fsdp=2,tp=2", "bf16", {}),
        ("dp=2,fsdp=2,tp=2", "fp8_current", {}),
        ("fsdp=2,tp=4", "bf16", {"sequence_parallel": True}),
        ("tp=8", "bf16", {}),
    ],
)
def test_estimated_memory_is_within_1_percent_of_compiled(mesh, recipe, options):
    setup = setup_of(mesh, **options)
    exact = cost(
        setup,
        find_rates("h200"),
        find_recipe(recipe),
        compiled(mesh, recipe, **options),
        compiled(mesh, module="head", **options),
    )
    assert fit.estimate_memory(setup, find_recipe(recipe)) == pytest.approx(exact.memory_bytes, rel=0.01)


@pytest.mark.parametrize(
    "recipe", ["fp8_block", "mxfp8", "nvfp4", "int8", "w8a16_qat", "w4a16_qat", "int8_qat", "fp8_delayed"]
)
def test_estimated_residuals_are_within_5_percent_of_traced(recipe):
    setup = setup_of("dp=2,fsdp=2,tp=2")
    saved = programs.trace_module(Job("block", recipe, setup)).residual_bytes
    assert fit.estimate_block(setup, find_recipe(recipe)).residual_bytes == pytest.approx(saved, rel=0.05)


def test_nearest_fitting_meshes_are_ordered_by_tp_then_fsdp():
    setup, rates = Setup(MODELS["gpt-tiny"], parse_mesh("dp=6,tp=4"), 1, 1024), find_rates("h200")
    found = [one.mesh.sizes for one in fit.nearest_fitting(setup, [BASELINE], rates)]
    assert {math.prod(sizes.values()) for sizes in found} == {24}
    assert found[0] == {"dp": 6, "fsdp": 1, "tp": 4}
    assert [(sizes["fsdp"], sizes["tp"]) for sizes in found[:6]] == [(1, 4), (2, 4), (1, 2), (1, 8), (2, 2), (4, 2)]
    assert fit.fewest_devices(setup, [BASELINE], rates)[0].mesh == parse_mesh("dp=1,fsdp=1,tp=1")


SMALL = Model("small", 3, 64, 128, 4, 2, 16, 100, 10, tied=True)


def test_costs_equal_those_computed_by_hand():
    """With tp=2, each matmul has 2 · tokens · inputs · outputs / 2 FLOPs on a device; fsdp · tp = 4 fits NVLink."""
    setup, rates = Setup(SMALL, parse_mesh("dp=8,fsdp=2,tp=2"), 2, 10), find_rates("h200")
    block = CompiledModule(
        [Collective("all-gather", "u16", ("fsdp",), 1000)], [Collective("all-reduce", "f32", ("dp",), 80)], 50
    )
    head = CompiledModule([], [Collective("all-reduce", "f32", ("tp",), 600)], 70)
    found = cost(setup, rates, BASELINE, block, head)
    matrices = 64 * (64 + 64), 64 * 64, 64 * 256, 128 * 64
    flops = 3 * (3 * 2 * 20 * sum(matrices) / 2) + 3 * 2 * 20 * 64 * 100 / 2
    local = (3 * sum(matrices) + 6400) / 4 + 7 * 64
    attention = 3 * 3.5 * 2 * 20 * 10 * 64 / 2
    assert found.compute_seconds == pytest.approx(
        {
            "matmuls": flops / (989e12 * 0.687),
            "attention": attention / (989e12 * 0.6),
            "casts": (3 * sum(matrices) / 4 + 6400 / 4) * 6 / (4800e9 * 0.885),
            "optimizer update": 28 * local / (4800e9 * 0.885),
        }
    )
    rows = {row.axes: (row.link, row.collectives, row.sent_bytes, row.seconds) for row in found.traffic}
    assert rows == {
        ("fsdp",): ("nvlink", 3, 1500, pytest.approx(1500 / 360e9 + 30e-6)),
        ("dp",): ("network", 3, 3 * 140, pytest.approx(420 / 40e9 + 120e-6)),
        ("tp",): ("nvlink", 1, 600, pytest.approx(600 / 360e9 + 10e-6)),
    }
    assert found.memory == pytest.approx(
        {
            "weights": 4 * local,
            "gradients": 4 * local,
            "optimizer state": 8 * local,
            "residuals": 3 * (50 + 20 * 4 * 4 / 2) + 70 + 2 * 20 * 100 / 2,
            "gathered weights of one layer": 1000,
        }
    )
    communication = sum(row.seconds for row in found.traffic)
    assert found.no_overlap == pytest.approx(sum(found.compute_seconds.values()) + communication)
    assert found.full_overlap == (found.seconds_on("network"), "network")


def test_casts_read_a_tensor_once_and_write_codes_for_each_matmul():
    elements = {"x": 1000, "w": 100, "g": 10}
    assert cast_bytes(BASELINE, elements) == 100 * (4 + 2)
    assert cast_bytes(find_recipe("fp8_current"), elements) == 1000 * (2 + 2) + 100 * (4 + 2) + 10 * (2 + 2)
    assert cast_bytes(find_recipe("w8a16_qat"), elements) == 100 * (4 + 1)
    mxfp8 = 1010 * (2 + 2 * 33 / 32) + 100 * (4 + 2 * 33 / 32)
    assert cast_bytes(find_recipe("mxfp8"), elements) == pytest.approx(mxfp8)


def test_every_kind_of_matmul_has_a_rate_on_every_device():
    kinds = {recipe: gemm_kind(find_recipe(recipe), "fwd") for recipe in RECIPES_AND_BASELINE}
    assert {
        recipe: kinds[recipe] for recipe in ("bf16", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4_four_over_six")
    } == {
        "bf16": "bf16",
        "fp8_delayed": "fp8",
        "fp8_block": "fp8_block",
        "mxfp8": "mxfp8",
        "nvfp4_four_over_six": "nvfp4",
    }
    assert (kinds["int8"], kinds["int8_block"]) == ("int8", "int8_block")
    assert gemm_kind(find_recipe("int8_qat"), "wgrad") == kinds["w4a16_qat"] == "bf16"
    for rates in RATES.values():
        assert {
            gemm_kind(recipe, product) for recipe in RECIPES_AND_BASELINE.values() for product in GEMM_OPERANDS
        } <= set(rates.matmuls)
        rows = [*rates.matmuls.values(), rates.memory, rates.nvlink, rates.network]
        assert all(row.source and 0 < row.achieved <= 1 for row in rows)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_parameter_counts_equal_the_published_ones(name, parameters):
    assert MODELS[name].parameters == parameters


def test_a_model_can_be_read_from_a_file(tmp_path):
    fields = dataclasses.asdict(TINY)
    del fields["name"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(fields))
    assert find_model(str(path)) == dataclasses.replace(TINY, name="mine")
    for change, words in (({"widht": 4}, "has an unknown field 'widht'"), ({"width": 0}, "`width` of a model must be")):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=words):
            find_model(str(path))


FILLS_DOMAIN = "at most half; the largest power of two that divides both the width "


@pytest.mark.parametrize(
    ("model", "devices", "mesh", "fsdp_reason"),
    [
        ("gpt-tiny", 4, "dp=1,fsdp=4,tp=1", FILLS_DOMAIN),
        ("gpt-tiny", 8, "dp=1,fsdp=8,tp=1", FILLS_DOMAIN),
        ("llama3-8b", 64, "dp=8,fsdp=4,tp=2", FILLS_DOMAIN),
        ("llama3-405b", 10240, "dp=80,fsdp=16,tp=8", "at most half; the smallest power of two that divides both the "),
        ("llama3-70b", 6, "dp=3,fsdp=1,tp=2", "more than half, and no larger power of two divides both the "),
    ],
)
def test_a_mesh_is_chosen_for_a_number_of_devices(model, devices, mesh, fsdp_reason):
    found, why = choose_mesh(MODELS[model], devices, find_rates("h200"))
    assert found == parse_mesh(mesh)
    assert all(f"{axis}={size}:" in why for axis, size in found.axes)
    assert f" GB per device, {fsdp_reason}" in why


def test_consecutive_devices_are_along_the_last_axis():
    mesh = parse_mesh("dp=4,fsdp=8,tp=4")
    spans = {axes: mesh.span(axes) for axes in (("tp",), ("fsdp",), ("dp",), ("fsdp", "tp"), ())}
    assert spans == {("tp",): 4, ("fsdp",): 32, ("dp",): 128, ("fsdp", "tp"): 32, (): 1}
    assert find_rates("gb200").link(32) == "nvlink"
    assert find_rates("h200").link(32) == "network"


ERRORS = {
    "--model llama3-8 --devices 8": "`model` 'llama3-8' is not in the table of models; did you mean 'llama3-8b'",
    "--model mine.json --devices 8": "`model` file 'mine.json' does not exist",
    "--model gpt-tiny --devices 8 --device h20": "`device` 'h20' is not in the table of rates; did you mean 'h200'",
    "--model gpt-tiny --devices 8 --recipes fp8_blok": "`recipe` 'fp8_blok' is not in RECIPES; did you mean",
    "--model gpt-tiny": "pass `--devices`, `--mesh`, or both",
    "--model gpt-tiny --devices 8 --mesh tp=4": "the mesh tp=4 has 4 devices, not the 8 of `--devices`",
    "--model gpt-tiny --mesh ddp=4": "has an axis 'ddp'; its axes are dp, fsdp, tp",
    "--model gpt-tiny --mesh tp=4,tp=2": "must name each axis once with a number of devices",
    "--model gpt-tiny --mesh tp=many": "must name each axis once with a number of devices",
    "--model gpt-tiny --mesh tp=16": "tp=16 does not divide the model's kv_heads, 8; tp=4 or tp=8 would",
    "--model gpt-tiny --mesh fsdp=3": "fsdp=3 does not divide the model's width, 1024; fsdp=2 or fsdp=4 would",
    "--model gpt-tiny --mesh fsdp=16": "fsdp=16 leaves each device 64 of the model's width, 1024, which is not "
    "a multiple of fp8_block's blocks of 128; fsdp=4 or fsdp=8 would work",
    "--model gpt-tiny --mesh fsdp=8 --sequence 200": "1 × 200 tokens per tp group are not a multiple of fp8_block's "
    "blocks of 128 tokens; sequences of 128 or 256 would be",
    "--model gpt-tiny --mesh tp=8 --sequence 512 --sequence-parallel": "tp=8 leaves each device 64 of the model's",
    "--model llama3-405b --mesh fsdp=4096 --recipes bf16": "at most 1024 can be compiled for, put the rest along dp",
}


@pytest.mark.parametrize("words", ERRORS)
def test_invalid_plans_exit_with_2_and_name_what_would_work(words, capsys):
    assert main(["plan", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("scaledot: error: ")
    assert ERRORS[words] in printed.err
    assert not printed.out


def test_block_sizes_along_tokens_inputs_and_outputs():
    assert [block_size_along(find_recipe("fp8_block"), axis) for axis in "tio"] == [128, 128, 128]
    assert [block_size_along(find_recipe("w4a16_qat"), axis) for axis in "tio"] == [1, 128, 1]
    assert [block_size_along(find_recipe("nvfp4"), axis) for axis in "tio"] == [16, 16, 16]
    assert [block_size_along(BASELINE, axis) for axis in "tio"] == [1, 1, 1]


def test_the_command_prints_a_plan_and_writes_it(tmp_path):
    path = tmp_path / "plan.json"
    command = ["plan", "--devices", "8", "--model", "gpt-tiny", "--recipes", "fp8_current", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "scaledot", *command], capture_output=True, text=True, timeout=120, check=True
    )
    written = json.loads(path.read_text())
    assert written["mesh"] == written["compiled_mesh"] == {"dp": 1, "fsdp": 8, "tp": 1}
    found = {name: _sent(of, "all-gather", ["fsdp"]) for name, of in written["recipes"].items()}
    layers = 2 * 7 / 8 * MODELS["gpt-tiny"].layers * sum(linear.parameters for linear in MODELS["gpt-tiny"].linears)
    head = 2 * 7 / 8 * MODELS["gpt-tiny"].head.parameters
    assert found == {"bf16": 2 * layers + 2 * head, "fp8_current": layers + 2 * head}
    assert "[3/3] block of gpt-tiny, fp8_current, for 8 devices: " in done.stderr
    for words in ("gpt-tiny, 29,365,248 parameters, on 8 × NVIDIA H200: dp=1,fsdp=8,tp=1", "comparison with bf16"):
        assert words in done.stdout
    assert f"{written['recipes']['fp8_current']['step_ms']['no_overlap']:.2f} ms, full overlap" in done.stdout


def _sent(recipe, kind: str, axes: list[str]) -> float:
    return sum(row["sent_bytes"] for row in recipe["traffic"] if (row["kind"], row["axes"]) == (kind, axes))


def test_collectives_of_operands_are_distinguished_from_reductions():
    rows = [("all-gather", "f32"), ("collective-permute", "u8"), ("collective-permute", "f32"), ("all-reduce", "f32")]
    assert [transfers_operands(*row) for row in rows] == [True, True, False, False]


def test_the_text_of_a_plan_that_does_not_fit_says_so():
    setup, rates = Setup(MODELS["llama3-405b"], parse_mesh("dp=8"), 1, 8192), find_rates("h100")
    empty = CompiledModule([], [], 0)
    plan = report.Plan(setup, rates, "", {"bf16": cost(setup, rates, BASELINE, empty, empty)})
    assert "of 80: does not fit" in report.text(plan)


def test_the_text_names_the_mesh_that_was_compiled(monkeypatch):
    monkeypatch.setattr("scaledot.plan.mesh.MAX_COMPILED_DEVICES", 4)
    setup, rates = setup_of("dp=8,tp=2"), find_rates("h200")
    empty = CompiledModule([], [], 0)
    plan = report.Plan(setup, rates, "", {"bf16": cost(setup, rates, BASELINE, empty, empty)})
    assert "compiled for fsdp=1,dp=2,tp=2: devices along dp run identical programs" in report.text(plan)


def test_the_page_is_generated_from_the_results_file():
    assert scaling.PAGE.read_text() == scaling.text(json.loads((record.RESULTS / scaling.RESULTS_FILE).read_text()))

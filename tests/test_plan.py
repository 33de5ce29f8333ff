"""The plan of a step: what it reads from compiled programs is what they move, and its arithmetic is that of a sheet."""

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
from scaledot.plan.cost import cost, of_operands
from scaledot.plan.gemm_kinds import BASELINE, KNOWN, block_along, cast_bytes, find_recipe, kind_of
from scaledot.plan.hlo import Collective, collectives
from scaledot.plan.mesh import choose, parse
from scaledot.plan.models import MODELS, Model, find_model
from scaledot.plan.programs import Compiled, Job
from scaledot.plan.rates import RATES, find_rates
from scaledot.plan.setup import Setup
from scaledot.recipes import GEMM_OPERANDS

pytestmark = pytest.mark.optimized  # collectives of compiled programs are what is tested here

AXES = {"dp": 2, "fsdp": 2, "tp": 2}
TINY = dataclasses.replace(MODELS["gpt-tiny"], name="tiny", sequence=256)


def setup_of(mesh: str, **how) -> Setup:
    return Setup(TINY, parse(mesh), 1, TINY.sequence, **how)


@functools.cache
def compiled(mesh: str, recipe: str = "bf16", part: str = "layer", **how) -> Compiled:
    return programs.compiled(Job(part, recipe, setup_of(mesh, **how)))


def text_of(run, in_specs, out_specs, *shapes, **how) -> str:
    """Compiled for eight devices, with what each of them runs on its part."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*given).compile().as_text()


EVERY_AXES = [("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp"), ("dp", "fsdp", "tp")]


@pytest.mark.parametrize("axes", EVERY_AXES, ids="·".join)
def test_collectives_are_found_with_their_axes_and_bytes(axes):
    whole, devices = P(("dp", "fsdp", "tp")), math.prod(AXES[axis] for axis in axes)
    moves = {
        "all-gather": lambda x: lax.all_gather(x, axes, tiled=True),
        "all-reduce": lambda x: lax.psum(x, axes),
        "reduce-scatter": lambda x: lax.psum_scatter(x, axes, tiled=True),
    }
    found = [collectives(text_of(move, whole, whole, (512, 16)), AXES) for move in moves.values()]
    part = 512 // 8 * 16 * 4
    assert found == [
        [Collective("all-gather", "f32", axes, part * devices)],
        [Collective("all-reduce", "f32", axes, part)],
        [Collective("reduce-scatter", "f32", axes, part)],
    ]


@pytest.mark.parametrize("axis", AXES)
def test_permutations_are_found_with_their_axis(axis):
    whole = P(("dp", "fsdp", "tp"))
    text = text_of(lambda x: lax.ppermute(x, axis, [(0, 1), (1, 0)]), whole, whole, (512, 16))
    assert collectives(text, AXES) == [Collective("collective-permute", "f32", (axis,), 512 // 8 * 16 * 4)]


def test_what_a_loop_moves_counts_as_often_as_it_runs():
    whole = P(("dp", "fsdp", "tp"))

    def ring(x):
        return lax.fori_loop(0, 7, lambda _, x: jnp.sin(lax.ppermute(x, "tp", [(0, 1), (1, 0)])), x)

    (found,) = collectives(text_of(ring, whole, whole, (512, 16)), AXES)
    assert (found.kind, found.axes, found.count) == ("collective-permute", ("tp",), 7)

    def unknown(x):
        return lax.while_loop(lambda x: x[0, 0] > 0, lambda x: lax.ppermute(x, "tp", [(0, 1), (1, 0)]), x)

    with pytest.raises(ValueError, match="a loop with collectives runs for a number of times that is not known"):
        collectives(text_of(unknown, whole, whole, (512, 16)), AXES)


GROUPS = {  # of fsdp on 2 × 2 × 2 devices, in every form that versions of XLA write
    "lists": "{{0,2},{1,3},{4,6},{5,7}}",
    "iota": "[4,2]<=[2,2,2]T(0,2,1)",
    "axes": "mesh['dp'=2,'fsdp'=2,'tp'=2] {'fsdp'}",
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_groups_are_read_in_every_form(groups):
    """And pairs of a start and an end, as GPUs have them, count once."""
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


def test_what_is_not_of_whole_axes_is_an_error():
    line = "ENTRY %main (x: f32[4]) -> f32[8] {\n  %g = f32[8] all-gather(%x), replica_groups={{0,1,2},{3,4,5}}\n}"
    with pytest.raises(ValueError, match="not those of whole axes of the mesh"):
        collectives(line, AXES)
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("nothing", AXES)


def test_bytes_that_are_sent():
    assert Collective("all-gather", "u8", ("tp",), 800).sent(8) == 700
    assert Collective("reduce-scatter", "f32", ("tp",), 800).sent(8) == 700
    assert Collective("all-reduce", "f32", ("tp",), 800, count=3).sent(8) == 3 * 1400
    assert Collective("collective-permute", "u8", ("tp",), 100, count=7).sent(8) == 700


def totals(found: list[Collective], least: int = 1024) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes of each kind along each axes, less those of a few numbers."""
    sums: dict[tuple[str, tuple[str, ...]], int] = {}
    for one in found:
        if one.bytes >= least:
            sums[one.kind, one.axes] = sums.get((one.kind, one.axes), 0) + one.bytes * one.count
    return sums


def expected(setup: Setup, code_bytes: int) -> tuple[dict, dict]:
    """By hand: weights are gathered in both passes, their float32 gradients scattered over fsdp and added over dp;
    tokens are added over tp after products by rows, forward and for the gradient, or gathered and scattered in parts,
    and gathered once more for the gradient of the weights."""
    sizes = setup.mesh.sizes
    dp, fsdp, tp = sizes["dp"], sizes["fsdp"], sizes["tp"]
    weights = sum(linear.parameters for linear in setup.model.linears) // tp
    tokens = setup.tokens * setup.model.width
    forward, backward = {}, {}
    if fsdp > 1:
        forward["all-gather", ("fsdp",)] = backward["all-gather", ("fsdp",)] = weights * code_bytes
        backward["reduce-scatter", ("fsdp",)] = 4 * weights
    if dp > 1:
        backward["all-reduce", ("dp",)] = 4 * weights // fsdp
    if tp > 1 and not setup.sequence_parallel:
        forward["all-reduce", ("tp",)] = backward["all-reduce", ("tp",)] = 2 * 4 * tokens
    if tp > 1 and setup.sequence_parallel:
        forward["all-gather", ("tp",)] = 2 * tokens * code_bytes
        forward["reduce-scatter", ("tp",)] = backward["reduce-scatter", ("tp",)] = 2 * 4 * tokens
        backward["all-gather", ("tp",)] = 2 * 2 * tokens * code_bytes
    return forward, backward


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,tp=2", "fsdp=8", "dp=2,tp=4", "tp=8", "dp=8"])
def test_a_layer_moves_what_closed_forms_say(mesh):
    found = compiled(mesh)
    assert (totals(found.forward), totals(found.backward)) == expected(setup_of(mesh), 2)


def test_parallel_sequences_move_what_closed_forms_say():
    found = compiled("fsdp=2,tp=4", sequence_parallel=True)
    forward, backward = expected(setup_of("fsdp=2,tp=4", sequence_parallel=True), 2)
    assert (totals(found.forward), totals(found.backward)) == (forward, backward)


def test_codes_move_in_the_place_of_numbers():
    mesh = "dp=2,fsdp=2,tp=2"
    found = compiled(mesh, "fp8_current")
    assert (totals(found.forward), totals(found.backward)) == expected(setup_of(mesh), 1)


def fsdp_gathered(found: list[Collective]) -> int:
    return sum(one.bytes * one.count for one in found if one.kind == "all-gather" and one.axes == ("fsdp",))


@pytest.mark.parametrize(("recipe", "most"), [("fp8_current", 0.52), ("fp8_block", 0.52), ("nvfp4", 0.3)])
def test_weights_are_gathered_in_fewer_bytes(recipe, most):
    """Of one product, which compiles sooner than four."""
    job = Job("head", recipe, setup_of("dp=2,fsdp=2,tp=2"))
    moved = fsdp_gathered(programs.collectives(programs.traced(job).forward(), job))
    assert 0 < moved <= most * fsdp_gathered(compiled("dp=2,fsdp=2,tp=2", part="head").forward)


def test_the_head_moves_its_matrix_and_sums_gradients_of_tokens():
    found = compiled("dp=2,fsdp=2,tp=2", part="head")
    matrix, tokens = TINY.width * TINY.vocabulary // 2, TINY.sequence * TINY.width
    assert totals(found.forward) == {("all-gather", ("fsdp",)): 2 * matrix}
    assert totals(found.backward) == {
        ("all-gather", ("fsdp",)): 2 * matrix,
        ("reduce-scatter", ("fsdp",)): 4 * matrix,
        ("all-reduce", ("dp",)): 4 * matrix // 2,
        ("all-reduce", ("tp",)): 4 * tokens,
    }


def test_more_devices_along_dp_change_only_how_often_sums_are_passed_on(monkeypatch):
    """What is compiled for two of them and counted for eight is what is compiled for eight."""
    small, rates = compiled("dp=2"), find_rates("h200")
    setup = setup_of("dp=8")
    exact = cost(setup, rates, BASELINE, compiled("dp=8"), compiled("dp=8", part="head"))
    monkeypatch.setattr("scaledot.plan.mesh.MOST_COMPILED", 4)
    assert setup.compiled.mesh == parse("dp=2")
    assert cost(setup, rates, BASELINE, small, compiled("dp=2", part="head")) == exact
    gathered = Compiled([Collective("all-gather", "u8", ("dp",), 8)], [], 0)
    with pytest.raises(ValueError, match="all-gather along dp is not the same for another number of devices"):
        cost(setup, rates, BASELINE, gathered, small)


@pytest.mark.parametrize(("recipe", "kept_bits"), [("bf16", 16), ("fp8_current", 8), ("mxfp8", 8.25), ("nvfp4", 4.5)])
def test_what_is_kept_is_what_products_keep(recipe, kept_bits):
    """Inputs of norms, attention and activation in bfloat16, and x and w of every product as the recipe has them."""
    setup = setup_of("dp=2,fsdp=2,tp=2")
    kept = programs.traced(Job("layer", recipe, setup)).kept
    features = [2 * TINY.width, (TINY.linears[0].outputs + TINY.linears[2].outputs) / 2]
    plain = 2 * setup.tokens * sum(features)
    operands = sum(setup.parts(linear)["x"] + setup.parts(linear)["w"] for linear in TINY.linears)
    scales = 4 * 2 * 4 if recipe in ("fp8_current", "nvfp4") else 0  # of tensors
    if recipe == "nvfp4":  # a scale for 16 × 16 weights
        operands -= sum(setup.parts(linear)["w"] for linear in TINY.linears) * (0.5 - 8 / 256) / kept_bits
    assert kept == plain + operands * kept_bits / 8 + scales


@pytest.mark.parametrize(
    ("mesh", "recipe", "how"),
    [
        ("dp=2,fsdp=2,tp=2", "bf16", {}),
        ("dp=2,fsdp=2,tp=2", "fp8_current", {}),
        ("fsdp=2,tp=4", "bf16", {"sequence_parallel": True}),
        ("tp=8", "bf16", {}),
    ],
)
def test_memory_is_estimated_without_compiling(mesh, recipe, how):
    setup = setup_of(mesh, **how)
    exact = cost(
        setup,
        find_rates("h200"),
        find_recipe(recipe),
        compiled(mesh, recipe, **how),
        compiled(mesh, part="head", **how),
    )
    assert fit.estimate(setup, find_recipe(recipe)) == pytest.approx(exact.memory_bytes, rel=0.01)


@pytest.mark.parametrize(
    "recipe", ["fp8_block", "mxfp8", "nvfp4", "int8", "w8a16_qat", "w4a16_qat", "int8_qat", "fp8_delayed"]
)
def test_residuals_are_estimated_without_tracing(recipe):
    setup = setup_of("dp=2,fsdp=2,tp=2")
    saved = programs.traced(Job("layer", recipe, setup)).kept
    assert fit.layer(setup, find_recipe(recipe)).kept == pytest.approx(saved, rel=0.05)


def test_every_mesh_of_a_number_of_devices_is_tried():
    """The nearest keep tp, and of those the first keeps fsdp."""
    setup, rates = Setup(MODELS["gpt-tiny"], parse("dp=6,tp=4"), 1, 1024), find_rates("h200")
    found = [one.mesh.sizes for one in fit.nearest(setup, [BASELINE], rates)]
    assert {math.prod(sizes.values()) for sizes in found} == {24}
    assert found[0] == {"dp": 6, "fsdp": 1, "tp": 4}
    assert [(sizes["fsdp"], sizes["tp"]) for sizes in found[:6]] == [(1, 4), (2, 4), (1, 2), (1, 8), (2, 2), (4, 2)]
    assert fit.fewest(setup, [BASELINE], rates)[0].mesh == parse("dp=1,fsdp=1,tp=1")


SHEET = Model("sheet", 3, 64, 128, 4, 2, 16, 100, 10, tied=True)


def test_costs_are_those_of_a_sheet():
    """Two devices of fsdp and two of tp, within NVLink; one product of a layer is 2 · tokens · inputs · outputs / 2."""
    setup, rates = Setup(SHEET, parse("dp=8,fsdp=2,tp=2"), 2, 10), find_rates("h200")
    layer = Compiled(
        [Collective("all-gather", "u16", ("fsdp",), 1000)], [Collective("all-reduce", "f32", ("dp",), 80)], 50
    )
    head = Compiled([], [Collective("all-reduce", "f32", ("tp",), 600)], 70)
    found = cost(setup, rates, BASELINE, layer, head)
    matrices = 64 * (64 + 64), 64 * 64, 64 * 256, 128 * 64
    flops = 3 * (3 * 2 * 20 * sum(matrices) / 2) + 3 * 2 * 20 * 64 * 100 / 2
    local = (3 * sum(matrices) + 6400) / 4 + 7 * 64
    attention = 3 * 3.5 * 2 * 20 * 10 * 64 / 2
    assert found.work == pytest.approx(
        {
            "products": flops / (989e12 * 0.687),
            "attention": attention / (989e12 * 0.6),
            "casts": (3 * sum(matrices) / 4 + 6400 / 4) * 6 / (4800e9 * 0.885),
            "update": 28 * local / (4800e9 * 0.885),
        }
    )
    rows = {row.axes: (row.link, row.collectives, row.sent, row.seconds) for row in found.traffic}
    assert rows == {
        ("fsdp",): ("nvlink", 3, 1500, pytest.approx(1500 / 360e9 + 30e-6)),
        ("dp",): ("network", 3, 3 * 140, pytest.approx(420 / 40e9 + 120e-6)),
        ("tp",): ("nvlink", 1, 600, pytest.approx(600 / 360e9 + 10e-6)),
    }
    assert found.memory == pytest.approx(
        {
            "weights": 4 * local,
            "gradients": 4 * local,
            "optimizer": 8 * local,
            "kept for backward": 3 * (50 + 20 * 4 * 4 / 2) + 70 + 2 * 20 * 100 / 2,
            "a layer's weights, gathered": 1000,
        }
    )
    moving = sum(row.seconds for row in found.traffic)
    assert found.in_turns == pytest.approx(sum(found.work.values()) + moving)
    assert found.at_once == (found.seconds_on("network"), "network")


def test_casts_read_a_tensor_once_and_write_codes_for_each_product():
    parts = {"x": 1000, "w": 100, "g": 10}
    assert cast_bytes(BASELINE, parts) == 100 * (4 + 2)
    assert cast_bytes(find_recipe("fp8_current"), parts) == 1000 * (2 + 2) + 100 * (4 + 2) + 10 * (2 + 2)
    assert cast_bytes(find_recipe("w8a16_qat"), parts) == 100 * (4 + 1)
    mxfp8 = 1010 * (2 + 2 * 33 / 32) + 100 * (4 + 2 * 33 / 32)
    assert cast_bytes(find_recipe("mxfp8"), parts) == pytest.approx(mxfp8)


def test_products_have_rates_on_every_device():
    kinds = {recipe: kind_of(find_recipe(recipe), "fwd") for recipe in KNOWN}
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
    assert kind_of(find_recipe("int8_qat"), "wgrad") == kinds["w4a16_qat"] == "bf16"
    for rates in RATES.values():
        assert {kind_of(recipe, product) for recipe in KNOWN.values() for product in GEMM_OPERANDS} <= set(
            rates.products
        )
        rows = [*rates.products.values(), rates.memory, rates.nvlink, rates.network]
        assert all(row.source and 0 < row.reached <= 1 for row in rows)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_parameters_are_those_that_are_published(name, parameters):
    assert MODELS[name].parameters == parameters


def test_a_model_may_be_a_file(tmp_path):
    fields = dataclasses.asdict(TINY)
    del fields["name"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(fields))
    assert find_model(str(path)) == dataclasses.replace(TINY, name="mine")
    for change, words in (({"widht": 4}, "has no field 'widht'"), ({"width": 0}, "`width` of a model must be")):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=words):
            find_model(str(path))


@pytest.mark.parametrize(
    ("model", "devices", "mesh"),
    [
        ("gpt-tiny", 8, "dp=1,fsdp=8,tp=1"),
        ("llama3-8b", 64, "dp=8,fsdp=4,tp=2"),
        ("llama3-405b", 10240, "dp=80,fsdp=16,tp=8"),
        ("llama3-70b", 6, "dp=3,fsdp=1,tp=2"),
    ],
)
def test_a_mesh_is_chosen_for_a_number_of_devices(model, devices, mesh):
    found, why = choose(MODELS[model], devices, find_rates("h200"))
    assert found == parse(mesh)
    assert all(f"{axis}={size}:" in why for axis, size in found.axes)


def test_neighbours_lie_along_the_last_axis():
    mesh = parse("dp=4,fsdp=8,tp=4")
    spans = {axes: mesh.span(axes) for axes in (("tp",), ("fsdp",), ("dp",), ("fsdp", "tp"), ())}
    assert spans == {("tp",): 4, ("fsdp",): 32, ("dp",): 128, ("fsdp", "tp"): 32, (): 1}
    assert find_rates("gb200").link(32) == "nvlink"
    assert find_rates("h200").link(32) == "network"


REFUSED = {
    "--model llama3-8 --devices 8": "`model` 'llama3-8' is not in the table of models; did you mean 'llama3-8b'",
    "--model mine.json --devices 8": "`model` 'mine.json' is not there",
    "--model gpt-tiny --devices 8 --device h20": "`device` 'h20' is not in the table of rates; did you mean 'h200'",
    "--model gpt-tiny --devices 8 --recipes fp8_blok": "`recipe` 'fp8_blok' is not in RECIPES; did you mean",
    "--model gpt-tiny": "give `--devices`, `--mesh`, or both",
    "--model gpt-tiny --devices 8 --mesh tp=4": "the mesh tp=4 has 4 devices, not the 8 of `--devices`",
    "--model gpt-tiny --mesh ddp=4": "has an axis 'ddp'; its axes are dp, fsdp, tp",
    "--model gpt-tiny --mesh tp=4,tp=2": "must name each axis once with a number of devices",
    "--model gpt-tiny --mesh tp=many": "must name each axis once with a number of devices",
    "--model gpt-tiny --mesh tp=16": "tp=16 does not divide the model's kv_heads, 8; tp=4 or tp=8 would",
    "--model gpt-tiny --mesh fsdp=3": "fsdp=3 does not divide the model's width, 1024; fsdp=2 or fsdp=4 would",
    "--model gpt-tiny --mesh fsdp=16": "fsdp=16 leaves a device 64 of the model's width, 1024, which cuts blocks of "
    "128 of fp8_block; fsdp=4 or fsdp=8 would not",
    "--model gpt-tiny --mesh fsdp=8 --sequence 200": "1 × 200 tokens of a device cut blocks of 128 of fp8_block; "
    "sequences of 128 or 256 would not",
    "--model gpt-tiny --mesh tp=8 --sequence 512 --sequence-parallel": "tp=8 leaves a device 64 of the model's seq",
    "--model llama3-405b --mesh fsdp=4096 --recipes bf16": "at most 1024 can be compiled for, put the rest along dp",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_planned_is_said(words, capsys):
    assert main(["plan", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("scaledot: error: ")
    assert REFUSED[words] in said.err
    assert not said.out


def test_blocks_are_those_of_the_axes_that_casts_cut():
    assert [block_along(find_recipe("fp8_block"), axis) for axis in "tio"] == [128, 128, 128]
    assert [block_along(find_recipe("w4a16_qat"), axis) for axis in "tio"] == [1, 128, 1]
    assert [block_along(find_recipe("nvfp4"), axis) for axis in "tio"] == [16, 16, 16]
    assert [block_along(BASELINE, axis) for axis in "tio"] == [1, 1, 1]


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
    assert "[3/3] layer of gpt-tiny, fp8_current, for 8 devices: " in done.stderr
    for words in ("gpt-tiny, 29,365,248 parameters, on 8 × NVIDIA H200: dp=1,fsdp=8,tp=1", "collectives and steps"):
        assert words in done.stdout
    assert f"{written['recipes']['fp8_current']['step_ms']['in_turns']:.2f} ms; all at once" in done.stdout


def _sent(recipe, kind: str, axes: list[str]) -> float:
    return sum(row["sent_bytes"] for row in recipe["traffic"] if (row["kind"], row["axes"]) == (kind, axes))


def test_operands_are_told_from_sums():
    rows = [("all-gather", "f32"), ("collective-permute", "u8"), ("collective-permute", "f32"), ("all-reduce", "f32")]
    assert [of_operands(*row) for row in rows] == [True, True, False, False]


def test_a_plan_that_does_not_fit_says_so():
    setup, rates = Setup(MODELS["llama3-405b"], parse("dp=8"), 1, 8192), find_rates("h100")
    nothing = Compiled([], [], 0)
    plan = report.Plan(setup, rates, "", {"bf16": cost(setup, rates, BASELINE, nothing, nothing)})
    assert "of 80: does not fit" in report.text(plan)


def test_words_for_a_smaller_mesh(monkeypatch):
    monkeypatch.setattr("scaledot.plan.mesh.MOST_COMPILED", 4)
    setup, rates = setup_of("dp=8,tp=2"), find_rates("h200")
    nothing = Compiled([], [], 0)
    plan = report.Plan(setup, rates, "", {"bf16": cost(setup, rates, BASELINE, nothing, nothing)})
    assert "compiled for fsdp=1,dp=2,tp=2: devices along dp repeat each other" in report.text(plan)


def test_the_page_says_what_the_results_say():
    assert scaling.PAGE.read_text() == scaling.text(json.loads((record.RESULTS / scaling.QUOTED).read_text()))

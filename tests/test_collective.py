"""Collective matmuls on CPU devices: results, schedules and memory of rings that overlap transfers with compute."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import LAYOUTS, arrays, cases, first_state, require_same, step
from tables import fp4_optimized, params_of

import scaledot as sd
from scaledot import collective_matmul, train
from scaledot.plan.hlo import collectives
from scaledot.recipes import RECIPES

pytestmark = pytest.mark.jax_versions

OVERLAPPED_LAYOUTS = ("sequence to column", "row to sequence", "fsdp", "all")


def ring(count: int):
    return jax.make_mesh((count,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def mapped(f, count: int, x: P, w: P, y: P):
    return jax.jit(jax.shard_map(lambda x, w: f(x, w, "tp"), mesh=ring(count), in_specs=(x, w), out_specs=y))


gathering = functools.partial(
    mapped, collective_matmul.all_gather_matmul, x=P(None, "tp"), w=P(None, "tp"), y=P(None, None, "tp")
)
scattering = functools.partial(
    mapped, collective_matmul.matmul_reduce_scatter, x=P(None, None, "tp"), w=P("tp"), y=P(None, "tp")
)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_collective_matmuls_of_plain_arrays_on_any_number_of_devices(count):
    x, w = normal(0, (2, 120, 120)), normal(1, (120, 120))
    expected = jnp.matmul(x, w, precision="highest")
    allowed = 2 * 120 * 2.0**-24 * np.matmul(np.abs(x), np.abs(w))
    for f in (gathering(count=count), scattering(count=count)):
        assert (np.abs(f(x, w) - expected) <= allowed).all()


@pytest.mark.parametrize("program", [gathering, scattering], ids=["gathering", "scattering"])
def test_plain_operands_have_gradients(program):
    x, w = normal(0, (2, 64, 64)), normal(1, (64, 32))
    g = normal(2, (2, 64, 32))
    f = program(count=4)
    found = jax.jit(lambda x, w: jax.vjp(f, x, w)[1](g))(x, w)
    expected = jax.vjp(jnp.matmul, x, w)[1](g)
    magnitudes = np.abs(g) @ np.abs(w).T, np.einsum("bmk,bmn->kn", np.abs(x), np.abs(g))
    for a, b, magnitude in zip(found, expected, magnitudes, strict=True):
        assert (np.abs(a - b) <= 2 * 128 * 2.0**-24 * magnitude).all()


@pytest.mark.optimized
@pytest.mark.parametrize("format", params_of(["fp8_e4m3", "mxfp8", "nvfp4", "int8"], ["mxfp8", "int8"]))
def test_quantised_operands_are_transferred_as_codes(format):
    block = {"fp8_e4m3": (1, 1, 128), "int8": (1, 1, 0)}.get(format)
    x = sd.quantize(normal(0, (2, 64, 256)), format, axis=(0, 1, 2) if block else 2, block=block)
    w = sd.quantize(normal(1, (256, 64)), format, axis=0)
    specs = sd.sharding.specs(x, P(None, "tp"), mesh=ring(4)), sd.sharding.specs(w, P(None, "tp"), mesh=ring(4))
    f = gathering(count=4, x=specs[0], w=specs[1])
    np.testing.assert_array_equal(f(x, w), jax.jit(sd.matmul)(x, w))
    transfers = collectives(f.lower(x, w).compile().as_text(), {"tp": 4})
    assert {one.kind for one in transfers} == {"collective-permute"}
    tensor_scale_bytes = 0 if x.tensor_scale is None else x.tensor_scale.nbytes
    assert sum(one.bytes * one.count for one in transfers) == 3 * (x.nbytes - tensor_scale_bytes) // 4


@pytest.mark.parametrize(
    ("name", "layout_name", "mode"),
    fp4_optimized(cases(OVERLAPPED_LAYOUTS, modes=("explicit",), default_layouts=("sequence to column", "all"))),
)
def test_steps_with_overlap_match_one_device(name, layout_name, mode):
    layout, recipe = LAYOUTS[layout_name], RECIPES[name]
    mesh = layout.mesh(AxisType.Explicit)
    run = step(recipe, out_sharding=layout.y, overlap=tuple(axis for axis in ("tp", "fsdp") if axis in layout.axes))
    with jax.set_mesh(mesh):
        found, state = jax.jit(run)(arrays().on(layout, mesh), first_state(recipe))
    require_same(name, found, state)
    specs = {"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}
    for result, value in found.items():
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, specs[result]), value.ndim), result


def test_overlap_inside_a_shard_map():
    layout, recipe = LAYOUTS["sequence to column"], RECIPES["fp8_block"]
    mesh = layout.mesh(AxisType.Auto)
    run = step(recipe, specs=layout.specs, overlap="tp")
    in_specs = (type(arrays())(layout.x, layout.w, layout.bias, layout.y), P())
    out_specs = ({"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}, P())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    require_same("fp8_block", *jax.jit(mapped)(arrays().on(layout, mesh), {}))


ROWS, INPUTS, OUTPUTS, DEVICES = 2048, 1024, 1024, 8
COLUMN = train.Specs(P("tp"), P(None, "tp"), P(None, "tp"))
ROW = train.Specs(P(None, "tp"), P("tp"), P("tp"))


def compiled(specs: train.Specs, overlap):
    """The compiled forward pass of a layer on eight devices."""
    mesh = ring(DEVICES)
    shapes = ((ROWS, INPUTS), specs.x), ((INPUTS, OUTPUTS), specs.w)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes)
    with jax.set_mesh(mesh):
        f = jax.jit(lambda x, w: train.dense(x, w, recipe="fp8_current", specs=specs, overlap=overlap))
        return f.lower(x, w).compile()


def transferred(text: str) -> dict[str, int]:
    """Bytes by kind of collective, without those of scalars."""
    found = [one for one in collectives(text, {"tp": DEVICES}) if one.bytes > 64]
    return {one.kind: sum(each.bytes * each.count for each in found if each.kind == one.kind) for one in found}


def order(text: str) -> str:
    """The schedule of a program: m for each matmul, p for each collective-permute."""
    bodies = dict(re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    entry = text[text.index("\nENTRY") :]
    found = ""
    for line in entry.splitlines():
        called = re.search(r"calls=%?([\w.-]+)", line)
        if " collective-permute" in line:
            found += "p"
        elif " dot(" in line or (called and re.search(r"\bdot\(", bodies.get(called[1], ""))):
            found += "m"
    return found


def require_interleaved(schedule: str):
    """Asserts that at most two matmuls, and one collective-permute per direction, are scheduled in a row."""
    assert schedule.count("m") == DEVICES
    assert schedule.count("p") == DEVICES - 1
    assert max(len(run) for run in re.findall(r"p+|m+", schedule)) <= 2, schedule


@pytest.mark.optimized
def test_shards_of_an_operand_are_multiplied_while_others_are_transferred():
    program = compiled(COLUMN, "tp")
    text = program.as_text()
    assert transferred(text) == {"collective-permute": (DEVICES - 1) * ROWS // DEVICES * INPUTS}  # one byte per code
    require_interleaved(order(text))
    # The gathered operand is never materialised.
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", text)]
    assert max(sizes) < ROWS * INPUTS
    assert _temp_bytes(program) < 2 * ROWS * INPUTS < _temp_bytes(compiled(COLUMN, ()))


@pytest.mark.optimized
def test_partial_results_are_computed_while_accumulators_are_transferred():
    program = compiled(ROW, "tp")
    text = program.as_text()
    assert transferred(text) == {"collective-permute": (DEVICES - 1) * 4 * ROWS // DEVICES * OUTPUTS}  # float32
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", text)]
    assert max(sizes) < ROWS * OUTPUTS
    if jax.__version_info__ < (0, 11):
        pytest.skip("on CPUs XLA of this jax drops the barriers that order partial results")
    require_interleaved(order(text))
    assert _temp_bytes(program) < 4 * ROWS * OUTPUTS < _temp_bytes(compiled(ROW, ()))


def _temp_bytes(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


def test_indivisible_operands_raise():
    x, w = normal(0, (2, 62, 64)), normal(1, (64, 32))
    with pytest.raises(
        ValueError, match="62 rows of `x` cannot be cut into equal shards for 4 devices of 'tp'; 64 would"
    ):
        scattering(count=4)(x, w)
    blocks = sd.quantize(normal(0, (64, 64)), "fp8_e4m3", axis=(0, 1), block=(32, 32))
    replicated = sd.sharding.specs(blocks, P(), mesh=ring(4))
    with pytest.raises(ValueError, match=r"64 rows .* in blocks of 32; 128 would fit"):
        mapped(collective_matmul.matmul_reduce_scatter, 4, replicated, P(), P("tp"))(blocks, w)
    with pytest.raises(ValueError, match="must be matrices"):
        mapped(collective_matmul.all_gather_matmul, 2, P(), P(), P())(w[0], w)


@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
def test_a_scale_that_differs_between_devices_raises(format):
    """Without `amax_axes` a scale for all rows is computed from the rows of one device."""
    x, w = normal(0, (64, 64)) * jnp.arange(1.0, 65.0)[:, None], normal(1, (64, 32))

    def gathered(x, w, axis_name, axes):
        return collective_matmul.all_gather_matmul(sd.quantize(x, format, amax_axes=axes), w, axis_name)

    with pytest.raises(ValueError, match=r"a different scale on each device of 'tp'.*amax_axes=\('tp',\)"):
        mapped(functools.partial(gathered, axes=()), 4, P("tp"), P(), P("tp"))(x, w)
    found = mapped(functools.partial(gathered, axes=("tp",)), 4, P("tp"), P(), P("tp"))(x, w)
    for one in jnp.split(found, 4):
        assert_matmul_up_to_summation_order(one, sd.quantize(x, format), w)


def assert_matmul_up_to_summation_order(found, x, w):
    """Asserts x @ w up to the order of accumulation: twice the bound of its rounding errors, K 2^-24 (|x| @ |w|)."""
    values = sd.dequantize(x, jnp.float32)
    bound = 2 * w.shape[0] * 2.0**-24 * (np.abs(values) @ np.abs(w))
    assert np.all(np.abs(found - np.asarray(values, np.float64) @ np.asarray(w, np.float64)) <= bound)


def test_scales_of_rows_are_transferred_with_their_rows():
    """`quantize_grouped` stores one tensor scale per row."""
    x, w, sizes = normal(0, (64, 64)), normal(1, (64, 32)), jnp.array([20, 44])
    q = sd.quantize_grouped(x * jnp.where(jnp.arange(64) < 20, 1.0, 100.0)[:, None], sizes, "nvfp4")
    specs = dataclasses.replace(q, data=P("tp"), scale=P("tp"), tensor_scale=P("tp"))
    found = mapped(collective_matmul.all_gather_matmul, 4, specs, P(), P("tp"))(q, w)
    for one in jnp.split(found, 4):
        assert_matmul_up_to_summation_order(one, q, w)


OVERLAPPED = train.Specs(P(None, "tp"), P("tp", None), P(None, "tp"))


@pytest.mark.parametrize("columns", [768, 640, 256])
def test_a_ring_does_not_cut_blocks(columns):
    """The result is reduce-scattered along columns, so w is multiplied in shards of columns, which would cut blocks."""
    x, w = normal(0, (128, 512)), normal(1, (512, columns))
    mesh = ring(4)
    dense = functools.partial(train.dense, recipe="fp8_block", specs=OVERLAPPED, overlap="tp")
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"`w` is sharded over 'tp' so .* cut blocks of 128"):
            dense(x, w)
        found = dense(x, w, on_indivisible="gather")
    expected, bound = train.dense(x, w, recipe="fp8_block"), 2 * 512 * 2.0**-24 * (np.abs(x) @ np.abs(w))
    assert np.all(np.abs(found - expected) <= 1.2 * bound)  # two roundings to e4m3: (1 + 2^-4)^2 < 1.2


def test_indivisible_shards_raise():
    """Inside a shard_map, where `on_indivisible` cannot replicate them."""
    specs = train.Specs(P(), P(), P(None, "tp"))
    dense = functools.partial(train.dense, recipe="fp8_block", specs=specs, on_indivisible="gather")
    with pytest.raises(ValueError, match=r"cut blocks of 128; .* times as long(\n|$)"):
        jax.shard_map(dense, mesh=ring(4), in_specs=(P(), P()), out_specs=P(None, "tp"))(
            normal(0, (8, 128)), normal(1, (128, 256))
        )
    rows = functools.partial(train.dense, recipe="fp8_current", specs=train.Specs(P(), P(), P("tp")))
    with pytest.raises(ValueError, match="6 elements on each device, which cannot be cut into 4 shards"):
        jax.shard_map(rows, mesh=ring(4), in_specs=(P(), P()), out_specs=P("tp"))(
            normal(0, (6, 64)), normal(1, (64, 32))
        )

"""Training matmuls of arrays sharded over eight CPU devices match one device, with bit-identical codes and scales."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    LAYOUTS,
    MODES,
    REPRESENTATIVE,
    arrays,
    assert_equal_up_to_summation_order,
    cases,
    first_state,
    require_same,
    step,
)
from tables import EXHAUSTIVE_ONLY_RECIPES, STATELESS, params_of

import scaledot as sd
from scaledot import recipes, train
from scaledot.contraction import Contraction
from scaledot.numerics.hadamard import random_signs
from scaledot.parallel.specs import shardings_of
from scaledot.plan.hlo import collectives
from scaledot.recipes import RECIPES
from scaledot.train.dot import DotOp
from scaledot.train.dot_sharded import ShardedOp
from scaledot.train.flatten import Flattening, flatten
from scaledot.train.options import Options
from scaledot.train.train_op import CastRequest, Operands


def along_explicit_axes(layout, recipe):
    mesh = layout.mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, out_sharding=layout.y))(arrays().on(layout, mesh), first_state(recipe))


def by_specs_along_automatic_axes(layout, recipe):
    mesh = layout.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, specs=layout.specs))(arrays().on(layout, mesh), first_state(recipe))


def by_specs_inside_a_shard_map(layout, recipe):
    mesh = layout.mesh(AxisType.Auto)
    in_specs = (type(arrays())(layout.x, layout.w, layout.bias, layout.y), P())
    out_specs = ({"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}, P())
    mapped = jax.shard_map(step(recipe, specs=layout.specs), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)(arrays().on(layout, mesh), first_state(recipe))


RUNS = dict(zip(MODES, (along_explicit_axes, by_specs_along_automatic_axes, by_specs_inside_a_shard_map), strict=True))


@pytest.mark.parametrize(("name", "layout_name", "mode"), cases(LAYOUTS))
def test_a_step_on_a_mesh_matches_one_device(name, layout_name, mode):
    layout = LAYOUTS[layout_name]
    found, state = RUNS[mode](layout, RECIPES[name])
    require_same(name, found, state)
    specs = {"y": layout.y, "dx": layout.x, "dw": layout.w, "db": layout.bias}
    for result, value in found.items():
        assert value.sharding.is_equivalent_to(NamedSharding(value.sharding.mesh, specs[result]), value.ndim), result


PARTITIONED_BY_XLA = [("fp8_current", "row to sequence"), ("fp8_block", "fsdp")]


@pytest.mark.parametrize(
    ("name", "layout_name"),
    [
        pytest.param(*case, marks=() if case in PARTITIONED_BY_XLA else pytest.mark.exhaustive)
        for case in itertools.product(REPRESENTATIVE, LAYOUTS)
    ],
)
def test_xla_partitions_automatic_axes_without_specs(name, layout_name):
    layout, recipe = LAYOUTS[layout_name], RECIPES[name]
    mesh = layout.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        require_same(name, *jax.jit(step(recipe))(arrays().on(layout, mesh), first_state(recipe)))


def cast_for(kind, tensor: str, matmul: str, resolved, cast: sd.Cast, x, key):
    """The quantised operand of a matmul."""
    draws_signs = cast.rotation is not None and cast.rotation.draws_signs
    signs = {resolved: random_signs(jax.random.fold_in(key, 1), cast.rotation.size)} if draws_signs else {}
    keys = {resolved: None if cast.rounding == "nearest" else key}
    return kind.cast(CastRequest(tensor, {matmul: resolved}, keys, signs=signs), x, None).operands[matmul]


def casts_of(recipe, kind):
    """(matmul, tensor): the cast of a tensor itself, and the same resolved."""
    casts = {(p, t): dataclasses.replace(cast, requantized=False) for p, t, cast in recipe.casts() if not cast.delayed}
    return {(p, t): (cast, kind.resolve_cast(cast, p, t)) for (p, t), cast in casts.items()}


# "all" shards x and w as "column" does, and "row to sequence" as "row" does. mxfp8 and w4a16_qat have scales per block,
# as fp8_block has.
@pytest.mark.optimized
@pytest.mark.parametrize("layout_name", params_of(LAYOUTS, ("column", "row")))
@pytest.mark.parametrize("name", params_of(STATELESS, (*EXHAUSTIVE_ONLY_RECIPES, "mxfp8", "w4a16_qat")))
def test_sharded_casts_are_bit_identical_to_single_device(name, layout_name):
    layout, recipe, full = LAYOUTS[layout_name], RECIPES[name], arrays()
    contraction = Contraction("bsk", "kn", "bsn")
    flat = flatten(contraction, any(cast.has_blocks_or_rotation for *_, cast in recipe.casts()))
    one = DotOp(flat.flat)
    mesh = layout.mesh(AxisType.Auto)
    tensors, specs = {"x": full.x, "w": full.w, "g": full.g}, {"x": layout.x, "w": layout.w, "g": layout.y}
    key = jax.random.key(3)

    def unflattened(of: Flattening, q, shape):
        """Codes, and dequantised values, which also compare scales."""
        sizes = dict(zip(of.labels, shape, strict=True))
        q = dataclasses.replace(q, rotation=None)
        return [of.unflatten(a, sizes) for a in (q.data, sd.dequantize(q, jnp.float32))]

    def on_shards(x, w, g):
        local = {"x": x, "w": w, "g": g}
        shardings = shardings_of(contraction, jax.typeof(x), jax.typeof(w), layout.specs, None)
        kind = ShardedOp.of(one, flat, Operands(x, w, None, None), shardings, Options(recipe, x.dtype))
        return {
            f"{p} {t}": unflattened(
                flat.of_tensor(t),
                cast_for(kind, t, p, shard, cast, local[t], key),
                local[t].shape,
            )
            for (p, t), (cast, shard) in casts_of(recipe, kind).items()
        }

    out_specs = {f"{p} {t}": [specs[t], specs[t]] for p, t in casts_of(recipe, one)}
    mapped = jax.shard_map(on_shards, mesh=mesh, in_specs=tuple(specs.values()), out_specs=out_specs)
    found = jax.jit(mapped)(*tensors.values())
    for (p, t), (cast, resolved) in casts_of(recipe, one).items():
        of = flat.of_tensor(t)
        expected = unflattened(of, cast_for(one, t, p, resolved, cast, of.flatten(tensors[t]), key), tensors[t].shape)
        for a, b in zip(found[f"{p} {t}"], expected, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{t} of {p}"


def collectives_of(layout_name: str, recipe, kind: str):
    """The collectives of one kind in the compiled step."""
    return [
        one for one in collectives(compiled_step(layout_name, recipe), LAYOUTS[layout_name].axes) if one.kind == kind
    ]


@functools.cache
def compiled_step(layout_name: str, recipe) -> str:
    layout = LAYOUTS[layout_name]
    mesh = layout.mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = arrays().on(layout, mesh), first_state(recipe)
        return jax.jit(step(recipe, out_sharding=layout.y)).lower(*arguments).compile().as_text()


@pytest.mark.optimized
@pytest.mark.parametrize(
    "layout_name", params_of(["column", "row", "sequence to column", "fsdp", "all"], ["column", "row", "fsdp"])
)
@pytest.mark.parametrize("name", params_of(["fp8_current", "fp8_block", "mxfp8", "nvfp4"], ["fp8_current", "mxfp8"]))
def test_no_operand_is_all_gathered_in_high_precision(name, layout_name):
    gathered = collectives_of(layout_name, RECIPES[name], "all-gather")
    large = [one for one in gathered if one.dtype != "u8" and one.bytes > 2**15]
    assert not large, large


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "max_ratio"),
    [
        pytest.param("fp8_current", 0.52, marks=pytest.mark.exhaustive),
        ("fp8_block", 0.52),
        ("nvfp4", 0.3),
    ],
)
def test_fsdp_all_gathers_codes(name, max_ratio):
    """Compared with the bytes of the weights in bfloat16."""
    gathered = collectives_of("fsdp", RECIPES[name], "all-gather")
    transferred = sum(one.bytes * one.count for one in gathered)
    assert 0 < transferred <= max_ratio * 2 * arrays().w.size


@pytest.mark.optimized
def test_local_amax_scope_has_fewer_all_reduces():
    local = dataclasses.replace(recipes.FP8_CURRENT, name="mine", amax_scope="local")
    small = [
        sum(one.count for one in collectives_of("column", recipe, "all-reduce") if one.bytes < 64)
        for recipe in (recipes.FP8_CURRENT, local)
    ]
    assert small[1] < small[0]


def test_wrong_shardings_raise_errors_that_name_them():
    x, w = jnp.ones((4, 256, 512), jnp.bfloat16), jnp.ones((512, 64))
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    dense = functools.partial(train.dense, x, w, recipe="fp8_block")
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="the mesh has no axis 'model'; it has 'dp', 'tp'"):
            dense(specs=train.Specs(P("model"), P(), P("model")))
        with pytest.raises(ValueError, match="a device has 16 elements of an axis, which cut blocks of 128"):
            dense(specs=train.Specs(P("dp"), P(None, "tp"), P("dp", None, "tp")))
        with pytest.raises(ValueError, match=r"`specs\.x` .* has 4 entries for an array of 3 axes"):
            dense(specs=train.Specs(P("dp", None, None, None), P(), P()))
        with pytest.raises(ValueError, match="`out_sharding` and `specs` both give"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), out_sharding=P("dp"))
        with pytest.raises(ValueError, match="the mesh has no axis 'sp'"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), overlap="sp")
        with pytest.raises(ValueError, match="`on_indivisible` must be 'raise' or 'gather', not 'drop'"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), on_indivisible="drop")
        with pytest.raises(ValueError, match=r"'.' of .* has global size 512 in `x` and 256 in `w`"):
            train.dense(x, w[:256], recipe="fp8_block", specs=train.Specs(P("dp"), P(), P("dp")))
        with pytest.raises(TypeError, match=r"`specs` must be Specs\(x, w, y\), three PartitionSpecs"):
            dense(specs=P("dp"))
        with pytest.raises(ValueError, match=r"`b` \(1,\) must have the trailing axes of `w`, here \(64,\)"):
            dense(jnp.ones(1), specs=train.Specs(P("dp"), P(), P("dp")))
    with pytest.raises(ValueError, match=r"`b` \(1,\) must have the trailing axes of `w` \(512, 64\)"):
        dense(jnp.ones(1), specs=train.Specs(P(), P(), P()))
    with pytest.raises(ValueError, match=r"no axis 'dp'; it has no axes; set one as the context with jax\.set_mesh"):
        dense(specs=train.Specs(P("dp"), P(), P("dp")))
    assert dense(specs=train.Specs(P(), P(), P())).shape == (4, 256, 64)  # nothing is sharded, so no mesh is needed
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        tokens = jax.device_put(x, NamedSharding(explicit, P(None, None, "tp")))
        kernel = jax.device_put(w, NamedSharding(explicit, P("tp")))
        with pytest.raises(ValueError, match="is sharded in both operands, so the sharding of the result is"):
            train.dense(tokens, kernel, recipe="fp8_current")


@pytest.mark.parametrize("specs", [(P("dp"), P("dp", "tp")), (P(None, None, "tp"), P())], ids=["fsdp", "features"])
def test_the_sharding_of_a_result_is_that_of_jax_lax(specs):
    """On explicit axes; a contracting dim that one operand shards is all-gathered."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    arrays = normal(0, (4, 16, 512)), normal(1, (512, 512))
    numbers = (((2,), (0,)), ((), ()))
    alone = train.dot_general(*arrays, numbers, recipe="fp8_block")
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True))
        y = train.dot_general(x, w, numbers, recipe="fp8_block")
        assert jax.typeof(y).sharding == jax.typeof(jax.lax.dot_general(x, w, numbers)).sharding
    np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit])
def test_on_indivisible_gather_replicates_an_axis_whose_sharding_cuts_blocks(kind):
    """Or is uneven: 63 positions over four devices."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    x, w = normal(0, (4, 64, 256)), normal(1, (256, 192))
    specs = train.Specs(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp"))

    def run(x, w, **options):
        y, pullback = jax.vjp(lambda x, w: train.dense(x, w, recipe="fp8_block", **options), x, w)
        return y, pullback(jnp.ones_like(y))

    expected = jax.jit(run)(x, w)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), specs[:2], strict=True)]
        with pytest.raises(ValueError, match="cut blocks of 128; shard it over fewer devices, make the axis"):
            jax.jit(functools.partial(run, specs=specs))(*sharded)
        found = jax.jit(functools.partial(run, specs=specs, on_indivisible="gather"))(*sharded)
        assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, specs.y), 3)
        if kind == AxisType.Auto:
            uneven = jax.jit(functools.partial(run, specs=specs, on_indivisible="gather"))(x[:, :63], w)
            assert uneven[0].shape == (4, 63, 192)
    assert_equal_up_to_summation_order((found[0], *found[1]), (expected[0], *expected[1]), jnp.matmul, x, w, 256)


def plain_layer(x, w, bias, out_sharding=None):
    y = jnp.einsum("bsk,kn->bsn", x, w.astype(x.dtype), out_sharding=out_sharding)
    return y + bias.astype(x.dtype)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout_name", params_of(LAYOUTS, ("row to sequence", "sequence to column")))
def test_results_and_gradients_are_sharded_as_in_a_bfloat16_program(layout_name, kind, standard_promotion):
    layout = LAYOUTS[layout_name]
    mesh = layout.mesh(kind)

    def step(layer, sharded):
        y, pullback = jax.vjp(constrained(layer), sharded.x, sharded.w, sharded.bias)
        return y, *pullback(sharded.g)

    def constrained(layer):
        if kind == AxisType.Explicit:
            return functools.partial(layer, out_sharding=layout.y)
        return lambda *operands: jax.lax.with_sharding_constraint(layer(*operands), layout.y)

    with jax.set_mesh(mesh):
        sharded = arrays().on(layout, mesh)
        plain = jax.jit(functools.partial(step, plain_layer))(sharded)
        found = jax.jit(functools.partial(step, functools.partial(train.dense, recipe="fp8_block")))(sharded)
    # On automatic axes XLA may shard a bfloat16 gradient unlike its primal; ours may have either sharding.
    for a, b, spec in zip(found, plain, (layout.y, layout.x, layout.w, layout.bias), strict=True):
        allowed = b.sharding, *([NamedSharding(mesh, spec)] if kind == AxisType.Auto else [])
        assert any(a.sharding.is_equivalent_to(sharding, a.ndim) for sharding in allowed), (a.sharding, allowed)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive, id="auto"),
        pytest.param(AxisType.Explicit, id="explicit"),
    ],
)
def test_vmap_over_stacked_layers_on_a_mesh(kind):
    """The axis of layers may be sharded as well."""
    sizes = {"stage": 2, "dp": 2, "tp": 2}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * 3)
    x, w = normal(0, (2, 4, 128, 256)), normal(1, (2, 256, 256))
    options = {"out_sharding": P("dp", None, "tp")} if kind == AxisType.Explicit else {}
    options |= {"specs": train.Specs(P("dp"), P(None, "tp"), P("dp", None, "tp"))} if kind == AxisType.Auto else {}

    def gradients(x, w, **options):
        y, pullback = jax.vjp(lambda x, w: train.dense(x, w, recipe="fp8_block", **options), x, w)
        return y, *pullback(jnp.ones_like(y))

    expected = jax.jit(jax.vmap(gradients))(x, w)
    for name in (None, "stage") if kind == AxisType.Explicit else (None,):
        with jax.set_mesh(mesh):
            specs = P(name, "dp"), P(name, None, "tp")
            sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), specs, strict=True)]
            found = jax.jit(jax.vmap(functools.partial(gradients, **options), spmd_axis_name=name))(*sharded)
        assert_equal_up_to_summation_order(found, expected, jax.vmap(jnp.matmul), x, w, 512)
        for a, spec in zip(found[1:], specs, strict=True):
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


def ragged(x, w, sizes, specs=None):
    return train.ragged_dot(x, w, sizes, recipe="fp8_block", specs=specs)


def convolved(x, w, sizes, specs=None):
    return train.conv_general_dilated(x, w, (1, 1), "SAME", recipe="fp8_current", specs=specs)


def plain_convolution(x, w, sizes):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


@pytest.mark.parametrize(
    ("function", "plain", "x_shape", "w_shape", "specs"),
    [
        (
            ragged,
            jax.lax.ragged_dot,
            (2, 64, 256),
            (2, 4, 256, 256),
            train.Specs(P("dp"), P("dp", None, "tp"), P("dp", "tp")),
        ),
        (
            convolved,
            plain_convolution,
            (2, 32, 64, 4, 4),
            (2, 64, 64, 3, 3),
            train.Specs(P("dp"), P("tp"), P("dp", "tp")),
        ),
    ],
)
def test_vmap_over_stacked_ragged_dots_and_convolutions_on_a_mesh(function, plain, x_shape, w_shape, specs):
    x, w, sizes = normal(0, x_shape), normal(1, w_shape), jnp.array([[10, 0, 20, 34], [0, 64, 0, 0]])

    def gradients(specs=None):
        def of_one(x, w, sizes):
            y, pullback = jax.vjp(lambda x, w: function(x, w, sizes, specs), x, w)
            return y, *pullback(jnp.ones_like(y))

        return jax.jit(jax.vmap(of_one))

    expected = gradients()(x, w, sizes)
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])):
        found = gradients(specs)(x, w, sizes)
    assert_equal_up_to_summation_order(found, expected, lambda x, w: jax.vmap(plain)(x, w, sizes), x, w, 9 * 64)

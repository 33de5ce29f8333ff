"""Products of arrays that are split over eight CPU devices are those of one device, codes and scales to the bit."""

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
    REPRESENTATIVE,
    WAYS,
    arrays,
    cases,
    first_state,
    require_reordered,
    require_same,
    step,
)
from tables import STATELESS_RECIPES, table_of

import scaledot as sd
from scaledot import recipes, train
from scaledot.contraction import Contraction
from scaledot.parallel.specs import splits_of
from scaledot.plan.hlo import collectives
from scaledot.recipes import RECIPES
from scaledot.train.dot import DotOp
from scaledot.train.dot_sharded import ShardedOp
from scaledot.train.flatten import Flattening, flatten
from scaledot.train.options import Options
from scaledot.train.train_op import CastRequest, Operands


def along_explicit_axes(lay, recipe):
    mesh = lay.mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, out_sharding=lay.y))(arrays().on(lay, mesh), first_state(recipe))


def by_specs_along_automatic_axes(lay, recipe):
    mesh = lay.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        return jax.jit(step(recipe, specs=lay.specs))(arrays().on(lay, mesh), first_state(recipe))


def by_specs_inside_a_shard_map(lay, recipe):
    mesh = lay.mesh(AxisType.Auto)
    in_specs = (type(arrays())(lay.x, lay.w, lay.bias, lay.y), P())
    out_specs = ({"y": lay.y, "dx": lay.x, "dw": lay.w, "db": lay.bias}, P())
    mapped = jax.shard_map(step(recipe, specs=lay.specs), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)(arrays().on(lay, mesh), first_state(recipe))


RUNS = dict(zip(WAYS, (along_explicit_axes, by_specs_along_automatic_axes, by_specs_inside_a_shard_map), strict=True))


@pytest.mark.parametrize(("name", "layout", "way"), cases(LAYOUTS))
def test_a_step_on_a_mesh_is_that_of_one_device(name, layout, way):
    lay = LAYOUTS[layout]
    found, state = RUNS[way](lay, RECIPES[name])
    require_same(name, found, state)
    specs = {"y": lay.y, "dx": lay.x, "dw": lay.w, "db": lay.bias}
    for of, value in found.items():
        assert value.sharding.is_equivalent_to(NamedSharding(value.sharding.mesh, specs[of]), value.ndim), of


LEFT_TO_XLA = [("fp8_current", "row to sequence"), ("fp8_block", "fsdp")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*case, marks=() if case in LEFT_TO_XLA else pytest.mark.exhaustive)
        for case in itertools.product(REPRESENTATIVE, LAYOUTS)
    ],
)
def test_automatic_axes_without_specs_are_left_to_xla(name, layout):
    lay, recipe = LAYOUTS[layout], RECIPES[name]
    mesh = lay.mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        require_same(name, *jax.jit(step(recipe))(arrays().on(lay, mesh), first_state(recipe)))


def cast_for(kind, tensor: str, product: str, laid, x, key):
    """The operand that a product takes."""
    return kind.cast(CastRequest(tensor, {product: laid}, {laid: key}), x, None).operands[product]


def casts_of(recipe, kind):
    return {(p, t): kind.resolve_cast(cast, p, t) for p, t, cast in recipe.casts() if cast.delayed is None}


@pytest.mark.optimized
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STATELESS_RECIPES)
def test_devices_find_the_codes_and_scales_of_one(name, layout):
    lay, recipe, whole = LAYOUTS[layout], RECIPES[name], arrays()
    contraction = Contraction("bsk", "kn", "bsn")
    flat = flatten(contraction, any(cast.cuts for *_, cast in recipe.casts()))
    one = DotOp(flat.flat)
    mesh = lay.mesh(AxisType.Auto)
    tensors, specs = {"x": whole.x, "w": whole.w, "g": whole.g}, {"x": lay.x, "w": lay.w, "g": lay.y}
    key = jax.random.key(3)

    def unflattened(of: Flattening, q, shape):
        """Codes, and values, which tell scales apart."""
        sizes = dict(zip(of.labels, shape, strict=True))
        q = dataclasses.replace(q, rotation=None)
        return [of.unflatten(a, sizes) for a in (q.data, sd.dequantize(q, jnp.float32))]

    def on_parts(x, w, g):
        local = {"x": x, "w": w, "g": g}
        splits = splits_of(contraction, jax.typeof(x), jax.typeof(w), lay.specs, None)
        kind = ShardedOp.of(one, flat, Operands(x, w, None, None), splits, Options(recipe, x.dtype))
        return {
            f"{p} {t}": unflattened(
                flat.of_tensor(t),
                cast_for(kind, t, p, part, local[t], key if part.resolved.cast.rounding == "stochastic" else None),
                local[t].shape,
            )
            for (p, t), part in casts_of(recipe, kind).items()
        }

    out_specs = {f"{p} {t}": [specs[t], specs[t]] for p, t in casts_of(recipe, one)}
    mapped = jax.shard_map(on_parts, mesh=mesh, in_specs=tuple(specs.values()), out_specs=out_specs)
    found = jax.jit(mapped)(*tensors.values())
    for (p, t), laid in casts_of(recipe, one).items():
        of = flat.of_tensor(t)
        stochastic = key if laid.cast.rounding == "stochastic" else None
        expected = unflattened(of, cast_for(one, t, p, laid, of.flatten(tensors[t]), stochastic), tensors[t].shape)
        for a, b in zip(found[f"{p} {t}"], expected, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{t} of {p}"


def collectives_of(layout: str, recipe, kind: str):
    """Of that kind in the compiled step."""
    return [one for one in collectives(compiled_step(layout, recipe), LAYOUTS[layout].axes) if one.kind == kind]


@functools.cache
def compiled_step(layout: str, recipe) -> str:
    lay = LAYOUTS[layout]
    mesh = lay.mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        given = arrays().on(lay, mesh), first_state(recipe)
        return jax.jit(step(recipe, out_sharding=lay.y)).lower(*given).compile().as_text()


@pytest.mark.optimized
@pytest.mark.parametrize(
    "layout", table_of(["column", "row", "sequence to column", "fsdp", "all"], ["column", "row", "fsdp"])
)
@pytest.mark.parametrize("name", table_of(["fp8_current", "fp8_block", "mxfp8", "nvfp4"], ["fp8_current", "mxfp8"]))
def test_no_operand_is_gathered_in_high_precision(name, layout):
    gathered = collectives_of(layout, RECIPES[name], "all-gather")
    large = [one for one in gathered if one.dtype != "u8" and one.bytes > 2**15]
    assert not large, large


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("fp8_current", 0.52, marks=pytest.mark.exhaustive),
        ("fp8_block", 0.52),
        ("nvfp4", 0.3),
    ],
)
def test_fsdp_gathers_codes(name, most):
    """Beside the bytes of the same weights in bfloat16."""
    gathered = collectives_of("fsdp", RECIPES[name], "all-gather")
    moved = sum(one.bytes * one.count for one in gathered)
    assert 0 < moved <= most * 2 * arrays().w.size


@pytest.mark.optimized
def test_scales_of_parts_are_a_choice():
    local = dataclasses.replace(recipes.FP8_CURRENT, name="mine", amax_scope="local")
    small = [
        sum(one.count for one in collectives_of("column", recipe, "all-reduce") if one.bytes < 64)
        for recipe in (recipes.FP8_CURRENT, local)
    ]
    assert small[1] < small[0]


def test_what_cannot_be_split_says_why():
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
        with pytest.raises(ValueError, match="`out_sharding` and `specs` both say"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), out_sharding=P("dp"))
        with pytest.raises(ValueError, match="the mesh has no axis 'sp'"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), overlap="sp")
        with pytest.raises(ValueError, match="`on_indivisible` must be 'raise' or 'gather', not 'drop'"):
            dense(specs=train.Specs(P("dp"), P(), P("dp")), on_indivisible="drop")
        with pytest.raises(ValueError, match=r"'.' of .* is 512 long in `x` and 256 in `w`"):
            train.dense(x, w[:256], recipe="fp8_block", specs=train.Specs(P("dp"), P(), P("dp")))
        with pytest.raises(TypeError, match=r"`specs` must be Specs\(x, w, y\), three PartitionSpecs"):
            dense(specs=P("dp"))
        with pytest.raises(ValueError, match=r"`b` \(1,\) must have the trailing axes of `w`, here \(64,\)"):
            dense(jnp.ones(1), specs=train.Specs(P("dp"), P(), P("dp")))
    with pytest.raises(ValueError, match=r"`b` \(1,\) must have the trailing axes of `w` \(512, 64\)"):
        dense(jnp.ones(1), specs=train.Specs(P(), P(), P()))
    with pytest.raises(ValueError, match=r"no axis 'dp'; it has no axes; make one the context with jax\.set_mesh"):
        dense(specs=train.Specs(P("dp"), P(), P("dp")))
    assert dense(specs=train.Specs(P(), P(), P())).shape == (4, 256, 64)  # nothing is split, and no mesh needed
    explicit = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        split = jax.device_put(x, NamedSharding(explicit, P(None, None, "tp")))
        kernel = jax.device_put(w, NamedSharding(explicit, P("tp")))
        with pytest.raises(ValueError, match="is summed and split; say how the result lies"):
            train.dense(split, kernel, recipe="fp8_current")


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive), AxisType.Explicit])
def test_an_axis_that_would_cut_blocks_is_gathered_on_request(kind):
    """And one that does not divide: 63 positions over four devices."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    x, w = normal(0, (4, 64, 256)), normal(1, (256, 192))
    specs = train.Specs(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp"))

    def run(x, w, **how):
        y, pull = jax.vjp(lambda x, w: train.dense(x, w, recipe="fp8_block", **how), x, w)
        return y, pull(jnp.ones_like(y))

    expected = jax.jit(run)(x, w)
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), specs[:2], strict=True)]
        with pytest.raises(ValueError, match="cut blocks of 128; split it over fewer devices, make the axis"):
            jax.jit(functools.partial(run, specs=specs))(*given)
        found = jax.jit(functools.partial(run, specs=specs, on_indivisible="gather"))(*given)
        assert found[0].sharding.is_equivalent_to(NamedSharding(mesh, specs.y), 3)
        if kind == AxisType.Auto:
            uneven = jax.jit(functools.partial(run, specs=specs, on_indivisible="gather"))(x[:, :63], w)
            assert uneven[0].shape == (4, 63, 192)
    require_reordered((found[0], *found[1]), (expected[0], *expected[1]), jnp.matmul, x, w, 256)


def plain_layer(x, w, bias, out_sharding=None):
    y = jnp.einsum("bsk,kn->bsn", x, w.astype(x.dtype), out_sharding=out_sharding)
    return y + bias.astype(x.dtype)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", table_of(LAYOUTS, ("row to sequence", "sequence to column")))
def test_results_and_gradients_lie_as_those_of_a_bfloat16_program(layout, kind, standard_promotion):
    lay = LAYOUTS[layout]
    mesh = lay.mesh(kind)

    def step(layer, given):
        y, pull = jax.vjp(laid_out(layer), given.x, given.w, given.bias)
        return y, *pull(given.g)

    def laid_out(layer):
        if kind == AxisType.Explicit:
            return functools.partial(layer, out_sharding=lay.y)
        return lambda *given: jax.lax.with_sharding_constraint(layer(*given), lay.y)

    with jax.set_mesh(mesh):
        given = arrays().on(lay, mesh)
        plain = jax.jit(functools.partial(step, plain_layer))(given)
        found = jax.jit(functools.partial(step, functools.partial(train.dense, recipe="fp8_block")))(given)
    # Along automatic axes XLA may lay a gradient otherwise than what it is of; ours lies so or so, too.
    for a, b, spec in zip(found, plain, (lay.y, lay.x, lay.w, lay.bias), strict=True):
        allowed = b.sharding, *([NamedSharding(mesh, spec)] if kind == AxisType.Auto else [])
        assert any(a.sharding.is_equivalent_to(sharding, a.ndim) for sharding in allowed), (a.sharding, allowed)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AxisType.Auto, marks=pytest.mark.exhaustive, id="auto"),
        pytest.param(AxisType.Explicit, id="explicit"),
    ],
)
def test_products_on_a_mesh_are_mapped_over_layers(kind):
    """Stacked layers, whose axis may be split, too."""
    sizes = {"stage": 2, "dp": 2, "tp": 2}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * 3)
    x, w = normal(0, (2, 4, 128, 256)), normal(1, (2, 256, 256))
    how = {"out_sharding": P("dp", None, "tp")} if kind == AxisType.Explicit else {}
    how |= {"specs": train.Specs(P("dp"), P(None, "tp"), P("dp", None, "tp"))} if kind == AxisType.Auto else {}

    def gradients(x, w, **how):
        y, pull = jax.vjp(lambda x, w: train.dense(x, w, recipe="fp8_block", **how), x, w)
        return y, *pull(jnp.ones_like(y))

    expected = jax.jit(jax.vmap(gradients))(x, w)
    for name in (None, "stage") if kind == AxisType.Explicit else (None,):
        with jax.set_mesh(mesh):
            lie = P(name, "dp"), P(name, None, "tp")
            given = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, w), lie, strict=True)]
            found = jax.jit(jax.vmap(functools.partial(gradients, **how), spmd_axis_name=name))(*given)
        require_reordered(found, expected, jax.vmap(jnp.matmul), x, w, 512)
        for a, spec in zip(found[1:], lie, strict=True):
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


def grouped(x, w, sizes, specs=None):
    return train.ragged_dot(x, w, sizes, recipe="fp8_block", specs=specs)


def convolved(x, w, sizes, specs=None):
    return train.conv_general_dilated(x, w, (1, 1), "SAME", recipe="fp8_current", specs=specs)


def plain_convolution(x, w, sizes):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


@pytest.mark.parametrize(
    ("verb", "plain", "x_shape", "w_shape", "specs"),
    [
        (
            grouped,
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
def test_other_products_on_a_mesh_are_mapped_over_layers(verb, plain, x_shape, w_shape, specs):
    x, w, sizes = normal(0, x_shape), normal(1, w_shape), jnp.array([[10, 0, 20, 34], [0, 64, 0, 0]])

    def gradients(specs=None):
        def of_one(x, w, sizes):
            y, pull = jax.vjp(lambda x, w: verb(x, w, sizes, specs), x, w)
            return y, *pull(jnp.ones_like(y))

        return jax.jit(jax.vmap(of_one))

    expected = gradients()(x, w, sizes)
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])):
        found = gradients(specs)(x, w, sizes)
    require_reordered(found, expected, lambda x, w: jax.vmap(plain)(x, w, sizes), x, w, 9 * 64)

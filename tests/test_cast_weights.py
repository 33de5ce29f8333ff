"""cast_weights: results bit-identical to casting in every micro-batch, and no cast of a weight inside the loop."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax import nnx
from hopper import lowered_for_hopper, needs_mosaic
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import equations
from tables import STATELESS_RECIPES, fp4_optimized
from training import assert_same, with_casts

import scaledot as sd
from scaledot import train
from scaledot.recipes import FP8_BLOCK, FP8_QAT, INT8_QAT, MXFP8, RECIPES, Gemm

pytestmark = [pytest.mark.jax_versions, pytest.mark.usefixtures("standard_promotion")]  # Flax needs it

KEY = jax.random.key(7)
MICRO, LAYERS, ROWS, WIDTH = 4, 3, 16, 64
XS = normal(0, (MICRO, ROWS, WIDTH)).astype(jnp.bfloat16)


class Case(NamedTuple):
    """A model as a function of parameters and x, its parameters, and keyword arguments of cast_weights."""

    apply: Any
    params: Any
    keywords: dict[str, Any]


def plain_jax(recipe):
    params = {"w": normal(1, (WIDTH, WIDTH), spread=0.1), "bias": jnp.zeros(WIDTH)}

    def apply(params, x):
        return train.dense(x, params["w"].astype(jnp.bfloat16), params["bias"], recipe=recipe, key=KEY)

    return Case(apply, params, {"dtype": jnp.bfloat16, "select": "w"})


def master_weights(recipe):
    """float32 weights that are quantised in float32."""
    params = normal(1, (WIDTH, WIDTH), spread=0.1)
    return Case(lambda w, x: train.dense(x, w, recipe=recipe, key=KEY), params, {})


def linen_case(model, **keywords):
    params = jax.jit(model.init)(jax.random.key(1), XS[0])["params"]
    return Case(lambda params, x: model.apply({"params": params}, x, rngs={"sr_rng": KEY}), params, keywords)


def dot_general_cls(recipe):
    fields = {"dot_general_cls": sd.linen.make_dot_general_cls(recipe), "promote_dtype": sd.linen.promote_dtype}
    return linen_case(nn.Dense(WIDTH, dtype=jnp.bfloat16, **fields), dtype=jnp.bfloat16)


def with_recipe(recipe):
    return linen_case(sd.linen.with_recipe(nn.Dense(WIDTH), recipe))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(WIDTH, dtype=jnp.bfloat16)(x)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "sr_rng": True}, "length": LAYERS}
        return nn.scan(nn.remat(Block, prevent_cse=False), **lifted)(name="layers")(x, None)[0]


def scanned_and_rematerialised(recipe):
    return linen_case(sd.linen.with_recipe(Stack(), recipe), dtype=jnp.bfloat16, stacked={"layers/*": 1})


def nnx_linear(recipe):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    model = sd.nnx.with_recipe(model, recipe, rngs=nnx.Rngs(sr_rng=0))
    graphdef, params, others = nnx.split(model, nnx.Param, ...)

    def apply(params, x):
        variables = jax.tree.map(lambda leaf: leaf, others)  # copies for this trace: rngs count keys in them
        return nnx.merge(graphdef, params, variables)(x)

    return Case(apply, params, {})


CASES = [plain_jax, master_weights, dot_general_cls, with_recipe, scanned_and_rematerialised, nnx_linear]


def mean_square(y):
    """A loss that XLA cannot fuse with the matmul before it, so that equal results have equal losses."""
    return jnp.mean(jax.lax.optimization_barrier(y).astype(jnp.float32) ** 2)


def accumulated(case, recipe, is_cast):
    """A training step: a function from parameters to accumulated gradients and the losses of micro-batches."""

    def step(params):
        cast = train.cast_weights(params, recipe, **case.keywords) if is_cast else None

        def loss(params, x):
            return mean_square(case.apply(params if cast is None else cast.attach(params), x))

        def body(total, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), XS)

    return step


# Recipes whose casts of w are the same in every micro-batch.
CAST_AHEAD = [
    row for row in STATELESS_RECIPES if not any(cast.startswith("w of") for cast in sd.RECIPES[row.id].stochastic)
]


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("recipe", fp4_optimized(CAST_AHEAD))
def test_losses_and_gradients_are_those_of_casting_in_each_micro_batch(recipe, make):
    case = make(recipe)
    plain, cast = (jax.jit(accumulated(case, recipe, is_cast))(case.params) for is_cast in (False, True))
    assert np.all(np.isfinite(cast[1]))
    assert_equal(plain, cast)


def casts_of_weights(step, params, program="quantize_leaves", shape=(WIDTH, WIDTH), dtypes=(jnp.float32, jnp.bfloat16)):
    """The numbers of casts of a weight outside and inside the loop over micro-batches; program: their jit name."""

    def is_cast(equation):
        shapes = [v.aval.shape for v in equation.invars if v.aval.dtype in dtypes]
        return equation.params.get("name") == program and shape in shapes

    jaxpr = jax.make_jaxpr(step)(params).jaxpr
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == MICRO)
    inside = sum(map(is_cast, equations(loop.params["jaxpr"].jaxpr)))
    return sum(map(is_cast, equations(jaxpr))) - inside, inside


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize(("recipe", "casts"), [("mxfp8", 2), ("fp8_block", 1), ("int8_block", 2), ("w4a16_qat", 1)])
def test_a_weight_is_cast_outside_the_loop_and_only_there(recipe, casts, make):
    """fp8_block has one cast for both matmuls. Rematerialised layers without cast_weights cast for fwd twice."""
    case, again = make(recipe), 1 if make is scanned_and_rematerialised else 0
    assert casts_of_weights(accumulated(case, recipe, False), case.params) == (0, casts + again)
    assert casts_of_weights(accumulated(case, recipe, True), case.params) == (casts, 0)


@needs_mosaic
@pytest.mark.parametrize(("recipe", "layout"), [("fp8_block", "Transposed"), ("nvfp4", "RowPairs")])
def test_hopper_kernels_cast_weights_outside_the_loop(monkeypatch, recipe, layout):
    """Codes have the layouts that the matmul kernels read. Traced, not run."""
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def apply(w, x):
        return train.dense(jnp.tile(x, (64, 8)), w, recipe=recipe, key=KEY)

    with lowered_for_hopper(monkeypatch):
        steps = (accumulated(Case(apply, w, {}), recipe, is_cast) for is_cast in (False, True))
        plain, cast = (casts_of_weights(step, w, "_run", w.shape, [w.dtype]) for step in steps)
        codes = jax.eval_shape(lambda w: train.cast_weights(w, recipe), w)
    assert plain[0] == cast[1] == 0 < plain[1] == cast[0]
    assert layout in str(jax.tree.structure(codes))


def test_codes_that_two_matmuls_share_are_stored_once():
    w = normal(0, (256, 128))
    size = {name: len(train.cast_weights(w, name).by_path[""].operands) for name in ("fp8_block", "mxfp8", "fp8_qat")}
    assert size == {"fp8_block": 1, "mxfp8": 2, "fp8_qat": 1}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(train.cast_weights(w, "fp8_block"))} == {"uint8", "float32"}


def with_and_without_codes(f, params, cast):
    """(loss, gradients) with plain parameters, and with codes attached."""

    step = jax.jit(jax.value_and_grad(lambda params, attach: mean_square(f(attach(params)))), static_argnums=1)
    return step(params, lambda params: params), step(params, cast.attach)


CLIPPING = dataclasses.replace(with_casts(FP8_QAT, calibration="absmax,0.7"), name="clipping")
PARTLY = dataclasses.replace(FP8_BLOCK, name="partly", dgrad=Gemm(FP8_BLOCK.dgrad.lhs, None))


@pytest.mark.parametrize("recipe", [CLIPPING, PARTLY], ids=lambda recipe: recipe.name)
def test_straight_through_gradients_of_clipped_weights_and_unquantised_matmuls_are_the_same(recipe):
    """Masks of clipped elements, and an unquantised dgrad, use the master weight."""
    x, w = normal(0, (ROWS, WIDTH)), normal(1, (WIDTH, 32))
    cast = train.cast_weights(w, recipe)
    plain, with_codes = with_and_without_codes(lambda w: train.dense(x, w, recipe=recipe), w, cast)
    assert_equal(plain, with_codes)
    assert recipe is PARTLY or np.any(plain[1] == 0)


def test_several_contracting_axes_in_any_position():
    params = {"out": {"kernel": normal(1, (4, 8, 64), spread=0.1)}, "qkv": {"kernel": normal(2, (3, 64, 32))}}
    x = normal(0, (2, ROWS, 4, 8))

    def f(params):
        y = train.dot_general(x, params["out"]["kernel"], (((2, 3), (0, 1)), ((), ())), recipe="w4a16_qat")
        return train.einsum("bsd,cdh->bsch", y, params["qkv"]["kernel"], recipe="fp8_block")

    rules = {"out": "w4a16_qat", "qkv": "fp8_block"}
    cast = train.cast_weights(params, rules, contracting={"out": 2, "qkv": (1,)})
    assert_equal(*with_and_without_codes(f, params, cast))


def test_layers_of_flax_with_other_kernels_and_rules():
    """An output projection, nn.Einsum and a boxed kernel, with the same rules for with_recipe and cast_weights."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            embed = nn.Embed(8, 32, name="embed")
            x = nn.DenseGeneral(32, axis=(-2, -1), use_bias=False, name="out")(embed(x).reshape(*x.shape, 4, 8))
            x = nn.Einsum((32, 16), "...k,kn->...n", use_bias=False, name="up")(x)
            boxed = nn.with_partitioning(nn.initializers.normal(), (None, "model"))
            x = nn.Dense(32, use_bias=False, name="down", kernel_init=boxed)(x)
            return embed.attend(nn.Dense(32, name="head")(x))

    rules = {"head": None, "embed": None, "out": "w4a16_qat", "*": "w8a16_qat"}
    model, tokens = sd.linen.with_recipe(Model(), rules), jnp.arange(8)[None]
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    cast = train.cast_weights(params, rules, contracting={"out": 2})
    assert repr(cast) == "CastWeights(down/kernel: w8a16_qat, out/kernel: w4a16_qat, up/kernel: w8a16_qat)"
    plain, with_codes = with_and_without_codes(lambda params: model.apply({"params": params}, tokens), params, cast)
    jax.tree.map(assert_same, plain, with_codes)  # XLA accumulates in another order


def test_the_layers_of_scaledot_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = sd.nnx.LinearGeneral(32, (4, 8), recipe="fp8_qat", rngs=rngs)
            self.down = sd.nnx.Einsum("bhk,hkn->bn", (4, 8, 16), recipe="w4a16_qat", rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    model, x = Model(nnx.Rngs(0)), normal(0, (ROWS, 32))
    rules = {"up": "fp8_qat", "down": "w4a16_qat"}
    cast = train.cast_weights(nnx.state(model, nnx.Param), rules, contracting={"down": 2})

    def loss(model, x, cast=None):
        graphdef, params, others = nnx.split(model, nnx.Param, ...)
        params = params if cast is None else cast.attach(params)
        return jnp.mean(nnx.merge(graphdef, params, others)(x) ** 2)

    step = nnx.jit(nnx.value_and_grad(loss))
    assert_equal(step(model, x), step(model, x, cast))


def test_a_stack_scanned_by_jax():
    ws, x = normal(1, (LAYERS, WIDTH, WIDTH), spread=0.1), normal(0, (ROWS, WIDTH))
    cast = train.cast_weights(ws, "w4a16_qat", stacked=1)

    def layer(x, w):
        return jnp.tanh(train.dense(x, w, recipe="w4a16_qat")), None

    assert_equal(*with_and_without_codes(lambda ws: jax.lax.scan(layer, x, ws)[0], ws, cast))
    # A scan over both weights and codes attaches the codes of each layer to its weight.
    sliced, _ = jax.lax.scan(lambda x, one: layer(x, one[1].attach(one[0])), x, (ws, cast))
    np.testing.assert_array_equal(sliced, jax.lax.scan(layer, x, ws)[0])


def test_weights_that_xla_partitions():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    w = jax.device_put(normal(1, (WIDTH, WIDTH), spread=0.1), NamedSharding(mesh, P(None, "fsdp")))
    cast = train.cast_weights(w, "w4a16_qat")
    assert_equal(cast, train.cast_weights(jax.device_put(w, jax.devices()[0]), "w4a16_qat"))
    jax.tree.map(assert_same, *with_and_without_codes(lambda w: train.dense(XS[0], w, recipe="w4a16_qat"), w, cast))


W = normal(0, (WIDTH, 32))
ATTACHED = train.cast_weights(W, "mxfp8").attach(W)
X = normal(1, (ROWS, WIDTH))


def test_a_cast_weight_has_the_attributes_of_its_weight():
    assert (ATTACHED.shape, ATTACHED.ndim, ATTACHED.dtype) == ((WIDTH, 32), 2, jnp.float32)
    assert repr(ATTACHED) == f"CastWeight(float32[{WIDTH},32], mxfp8)"
    assert train.cast_weights(W, "mxfp8", dtype=jnp.bfloat16).attach(W).dtype == jnp.bfloat16
    assert ATTACHED.astype(jnp.float32) is ATTACHED
    assert ATTACHED[...] is ATTACHED
    assert jax.tree.leaves(ATTACHED)[0] is W
    np.testing.assert_array_equal(train.dense(X, ATTACHED, recipe="mxfp8"), train.dense(X, W, recipe="mxfp8"))


def test_recipes_that_do_not_quantise_weights_attach_nothing():
    only_x = dataclasses.replace(INT8_QAT, name="only_x", fwd=Gemm(INT8_QAT.fwd.lhs, None))
    assert train.cast_weights(W, only_x).attach(W) is W


OTHER_MXFP8 = dataclasses.replace(MXFP8, wgrad=None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: train.dense(X, ATTACHED, recipe="fp8_block"),
            "cast under 'mxfp8' and is multiplied under 'fp8_block'",
        ),
        (
            lambda: train.dense(X, ATTACHED, recipe=OTHER_MXFP8),
            "'mxfp8' and is multiplied under another recipe of that",
        ),
        (
            lambda: train.einsum("bk,nk->bn", normal(1, (2, 32)), ATTACHED, recipe="mxfp8"),
            r"cast for contracting axes \(0,\) and is contracted along axes \(1,\)",
        ),
        (
            lambda: train.einsum("kb,kn->kbn", X.T, ATTACHED, recipe="mxfp8"),
            r"along axes \(\), with batch axes \(0,\), here; pass the axes to `cast_weights`",
        ),
        (
            lambda: train.einsum("bk,kn->b", X, ATTACHED, recipe="mxfp8"),
            r"'bk,kn->b' reduces or broadcasts axes of a weight float32\[64,32\] before the contraction",
        ),
        (
            lambda: train.dense(X, ATTACHED, recipe="mxfp8", specs=train.Specs(P("dp"), P(), P("dp"))),
            "was cast as a global array, but matmuls with `specs`",
        ),
        (
            lambda: train.dense(X, train.cast_weights(W[None], "mxfp8", stacked=1).attach(W[None]), recipe="mxfp8"),
            r"`w` is a stack of \(1,\) weights of shape \(64, 32\); scan over it",
        ),
        (
            lambda: ATTACHED.astype(jnp.bfloat16),
            "was quantised in float32, but the layer computes in bfloat16; pass dtype='bfloat16'",
        ),
        (
            lambda: train.cast_weights({"a": W}, "mxfp8", select="a").attach({"a": W.T}),
            r"`params` has float32\[32,64\] at 'a', where float32\[64,32\] was cast",
        ),
        (
            lambda: train.cast_weights(W, "mxfp8").attach(W.astype(jnp.bfloat16)),
            r"`params` has bfloat16\[64,32\] at '', where float32\[64,32\] was cast",
        ),
        (
            lambda: train.cast_weights({"a": W}, "mxfp8", select="a").attach({"b": W}),
            "`params` has no leaf 'a', which was cast; its leaves: 'b'",
        ),
        (
            lambda: train.cast_weights(W, "fp8_delayed"),
            "fp8_delayed scales w by its amax history.*cannot be cast ahead",
        ),
        (
            lambda: train.cast_weights(W, with_casts(MXFP8, rounding="stochastic")),
            "mxfp8 draws random numbers for w of fwd and w of dgrad",
        ),
        (lambda: train.cast_weights({"a": W}, "mxfp8"), "`params` has no leaf named 'kernel'.*from 'a'"),
        (lambda: train.cast_weights({"a": W}, "mxfp8", select="b"), "'b' of `select` matches no.*near paths: a"),
        (lambda: train.cast_weights({"a": {"kernel": W}}, {"b": "mxfp8"}), "'b' of `rules` matches no layer"),
        (
            lambda: train.cast_weights({"a": {"kernel": W}}, "mxfp8", contracting={"b": 1}),
            "'b' of `contracting` matches",
        ),
        (
            lambda: train.cast_weights(W, "mxfp8", contracting=3),
            r"`contracting` 3 must name axes of `params`.*\(64, 32\)",
        ),
        (lambda: train.cast_weights(W, "mxfp8", stacked=2), r"`stacked` 2 must be a number of leading axes"),
    ],
)
def test_bad_values_are_explained(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_weight_on_explicit_mesh_axes_is_refused():
    with jax.set_mesh(jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Explicit,))):
        w = jax.device_put(W, P("tp"))
        with pytest.raises(ValueError, match="`params` is sharded over explicit mesh axes"):
            train.cast_weights(w, "mxfp8")


def layer(**fields):
    return nn.Dense(32, use_bias=False, **fields).apply({"params": {"kernel": ATTACHED}}, X)


MISSING = r"CastWeight\(float32\[64,32\], mxfp8\) was passed to a function of plain arrays.*promote_dtype"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jnp.sin(ATTACHED), MISSING),
        (lambda: np.asarray(ATTACHED), MISSING),
        (layer, MISSING),
        (lambda: layer(dot_general_cls=sd.linen.make_dot_general_cls("mxfp8")), MISSING),
        (lambda: layer(promote_dtype=sd.linen.promote_dtype), "argument to dot_general.*CastWeight"),
        (lambda: ATTACHED[0], "cannot be indexed"),
        (lambda: train.cast_weights(W, "mxfp8", dtype=jnp.int8), "`dtype` of `params` must be a float dtype.*not int8"),
        (
            lambda: train.ragged_dot(X, ATTACHED, jnp.array([ROWS]), recipe="mxfp8"),
            r"train.ragged_dot casts its own weights and does not take CastWeight.*select=",
        ),
        (
            lambda: train.conv_general_dilated(X, ATTACHED, (1,), "SAME", recipe="mxfp8"),
            "train.conv_general_dilated casts its own weights",
        ),
    ],
)
def test_functions_that_take_no_cast_weight_explain_what_to_do(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_a_layer_in_another_dtype_or_without_promotion_is_refused():
    def under(layer):
        return lambda: sd.linen.with_recipe(layer, "mxfp8").apply({"params": {"kernel": ATTACHED}}, X)

    with pytest.raises(ValueError, match="quantised in float32, but the layer computes in bfloat16"):
        under(nn.Dense(32, use_bias=False, dtype=jnp.bfloat16))()
    with pytest.raises(TypeError, match="Dense '' has no `promote_dtype` in this version of Flax"):
        under(nn.Dense(32, use_bias=False, promote_dtype=None))()  # as in older versions of Flax


def test_every_recipe_without_delayed_scaling_is_tested():
    stateless = [name for name in RECIPES if not RECIPES[name].delayed]
    assert [row.values[0] for row in STATELESS_RECIPES] == stateless

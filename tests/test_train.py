"""Matmuls under every recipe, compared with float64 matmuls of operands quantised by an independent implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from independent import quantize as reference_quantize
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_one_rounding, equations
from tables import EACH_RECIPE, EXHAUSTIVE_ONLY_RECIPES, params_of
from training import KEY, assert_same, dense, dot_general, einsum, nearest, residuals_of, vjp_of, without_means

import scaledot as sd
from scaledot import recipes, train
from scaledot.numerics.rounding import uniform_of
from scaledot.recipes import RECIPES, Cast, Gemm, Recipe

HADAMARD = (16, 0xD7E8)

# For each matmul its tensors and their contracting axes; x is (m, k), w is (k, n), g is (m, n). The functions below
# return the arguments of the reference cast for a contracting axis, and EXPECTED has those of every recipe, without
# the mean that some subtract first (test_train_means).
ROLES = {"fwd": (("x", 1), ("w", 0)), "dgrad": (("g", 1), ("w", 1)), "wgrad": (("x", 0), ("g", 0))}


def per_tensor(x, g):
    return {"fwd": (x, x), "dgrad": (g, x), "wgrad": (x, g)}


def along(name, size, **more):
    """Blocks of 1 × size along the contracting axis."""
    return lambda axis: {"format": name, "block": (1, size) if axis else (size, 1), **more}


def default_block(name, **more):
    return lambda axis: {"format": name, **more}


def stochastic(cast):
    return lambda axis: {**cast(axis), "stochastic": True}


def requantised(cast):
    return lambda axis: {**cast(axis), "requantised": True}


def square(name, size, **more):
    return lambda axis: {"format": name, "block": (size, size), **more}


E4M3, E5M2, MX = default_block("fp8_e4m3"), default_block("fp8_e5m2"), default_block("mxfp8")
E4M3_1X128, E4M3_128X128 = along("fp8_e4m3", 128), square("fp8_e4m3", 128)
NV, NV_ROTATED = default_block("nvfp4"), default_block("nvfp4", rotation=HADAMARD)
INT8, INT8_1X128, INT4_1X128 = default_block("int8"), along("int8", 128), along("int4", 128)
INT8_ROTATED = along("int8", 128, rotation=HADAMARD)
# Casts to EDEN take the signs and the random numbers of their matmul and tensor (`random_numbers`).
FOUR_OVER_SIX = default_block("nvfp4", search="four_over_six", scale_max=256)
EDEN = default_block("nvfp4", target=6 * (16 / 17) / 0.93, scale_max=256, eden=True, rotation="drawn", stochastic=True)
UNIFORM_ROTATED = default_block("nvint4", rotation=HADAMARD)


def searched(name, backward):
    forward = default_block(name, search="scales", scale_max=256)
    return {"fwd": (forward, forward), "dgrad": (backward, backward), "wgrad": (backward, backward)}


NVIDIA = {
    "fwd": (NV, square("nvfp4", 16)),
    "dgrad": (stochastic(NV), square("nvfp4", 16)),
    "wgrad": (NV_ROTATED, stochastic(NV_ROTATED)),
}
EXPECTED = {
    "fp8_current": per_tensor(E4M3, E5M2),
    "fp8_delayed": per_tensor(E4M3, E5M2),
    "fp8_block": {
        "fwd": (E4M3_1X128, E4M3_128X128),
        "dgrad": (E4M3_1X128, E4M3_128X128),
        "wgrad": (E4M3_1X128, E4M3_1X128),
    },
    "mxfp8": per_tensor(MX, MX),
    "nvfp4": NVIDIA,
    "nvfp4_four_over_six": {
        "fwd": (default_block("nvfp4", search="four_over_six"), square("nvfp4", 16, search="four_over_six")),
        "dgrad": (stochastic(NV), square("nvfp4", 16, search="four_over_six")),
        "wgrad": (NV_ROTATED, stochastic(NV_ROTATED)),
    },
    "nvfp4_plus": searched("nvfp4", EDEN),
    "if4": searched("if4", default_block("if4", scale_max=256, eden=True, rotation="drawn", stochastic=True)),
    "averis": NVIDIA,
    "ufp4": {
        "fwd": (UNIFORM_ROTATED, UNIFORM_ROTATED),
        "dgrad": (stochastic(UNIFORM_ROTATED), UNIFORM_ROTATED),
        "wgrad": (UNIFORM_ROTATED, stochastic(UNIFORM_ROTATED)),
    },
    "quartet_ii": {
        "fwd": (FOUR_OVER_SIX, FOUR_OVER_SIX),
        "dgrad": (EDEN, requantised(EDEN)),
        "wgrad": (requantised(EDEN), EDEN),
    },
    "int8": {"fwd": (INT8, INT8), "dgrad": (stochastic(INT8), INT8), "wgrad": (INT8, stochastic(INT8))},
    "int8_block": {
        "fwd": (INT8_ROTATED, INT8_ROTATED),
        "dgrad": (stochastic(INT8_1X128), INT8_1X128),
        "wgrad": (INT8_1X128, stochastic(INT8_1X128)),
    },
    "int8_qat": {"fwd": (INT8, INT8)},
    "fp8_qat": {"fwd": (E4M3, E4M3)},
    "w8a16_qat": {"fwd": (None, INT8)},
    "w4a16_qat": {"fwd": (None, INT4_1X128)},
    "w4a8_qat": {"fwd": (INT8, INT4_1X128)},
}
# How often x, w and g are cast in a step.
CASTS_PER_STEP = {
    "fp8_current": (1, 1, 1),
    "fp8_delayed": (1, 1, 1),
    "fp8_block": (2, 1, 2),
    "mxfp8": (2, 2, 2),
    "nvfp4": (2, 1, 2),
    "nvfp4_four_over_six": (2, 1, 2),
    "nvfp4_plus": (2, 2, 2),
    "quartet_ii": (2, 2, 2),
    "averis": (2, 1, 2),
    "ufp4": (2, 2, 2),
    "if4": (2, 2, 2),
    "int8": (2, 2, 2),
    "int8_block": (2, 2, 2),
    "int8_qat": (1, 1, 0),
    "fp8_qat": (1, 1, 0),
    "w8a16_qat": (0, 1, 0),
    "w4a16_qat": (0, 1, 0),
    "w4a8_qat": (1, 1, 0),
}


# A state, random numbers, blocks and straight-through gradients: the others use no other API of jax.
ON_EACH_JAX = ("fp8_delayed", "nvfp4", "fp8_block", "int8_qat")


def test_the_tables_of_these_tests_are_complete():
    assert set(EXPECTED) == set(CASTS_PER_STEP) == set(RECIPES)


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def dequantised(tensors, recipe, matmul, side, multipliers=None):
    """The float64 dequantised values of the lhs (side 0) or rhs (side 1) of a matmul."""
    tensor, axis = ROLES[matmul][side]
    x = tensors[tensor]
    if matmul not in EXPECTED[recipe]:
        # Straight-through: g unquantised, and the operand of fwd, with its rotation undone.
        return exact(x) if tensor == "g" else dequantised(tensors, recipe, "fwd", "xw".index(tensor))
    expected_cast = EXPECTED[recipe][matmul][side]
    if expected_cast is None:
        return exact(x)
    cast, x = expected_cast(axis), np.asarray(x.astype(jnp.float32))
    cast |= random_numbers(cast, matmul, tensor, x.shape, axis)
    if cast.pop("requantised", False):
        x = dequantised(tensors, recipe, "fwd", "xw".index(tensor)).astype(np.float32)
    if multipliers:
        cast["multiplier"] = multipliers[tensor]
    q = reference_quantize(x, cast.pop("format"), axis, **cast)
    return q.values


def random_numbers(cast, matmul, tensor, shape, axis):
    """The signs of a rotation that draws them, and the uniform numbers of a stochastic cast, in its padded shape."""
    drawn, shape = {}, list(shape)
    if cast.get("rotation") == "drawn":
        signs_key = folded_key(6 + list(ROLES).index(matmul))
        drawn["rotation"] = np.where(np.asarray(uniform_of(signs_key, (128,))) < 0.5, np.float32(-1), np.float32(1))
    if cast.pop("stochastic", False):
        order = ["fwd x", "fwd w", "dgrad g", "dgrad w", "wgrad x", "wgrad g"]
        group = 128 if "rotation" in drawn else 16 if "rotation" in cast else 1
        shape[axis] += -shape[axis] % group
        drawn["uniform"] = np.asarray(uniform_of(folded_key(order.index(f"{matmul} {tensor}")), tuple(shape)))
    return drawn


def folded_key(index):
    return jnp.append(jax.random.key_data(KEY), np.uint32(index))


def check_step(recipe, got, x, w, b, g, multipliers=None):
    """Asserts that y, dx, dw and db of matrices are those of the reference, rounded once."""
    y, dx, dw, db = got
    tensors = {"x": x, "w": w, "g": g}
    for result, matmul, text, extra in (
        (y, "fwd", "mk,kn->mn", exact(b)),
        (dx, "dgrad", "mn,kn->mk", 0.0),
        (dw, "wgrad", "mk,mn->kn", 0.0),
    ):
        lhs, rhs = (dequantised(tensors, recipe, matmul, side, multipliers) for side in (0, 1))
        k = lhs.shape[0 if matmul == "wgrad" else 1]
        expected = np.einsum(text, lhs, rhs) + extra
        magnitude = np.einsum(text, np.abs(lhs), np.abs(rhs)) + np.abs(extra)
        assert_one_rounding(result, expected, magnitude, k + 1)
    assert_one_rounding(db, exact(g).sum(0), np.abs(exact(g)).sum(0), g.shape[0])


def step(recipe, x, w, b, g, **options):
    """(y, dx, dw, db, dstate) of dense under a recipe."""
    recipe = RECIPES.get(recipe, recipe)
    state = sd.init_state(recipe) if recipe.delayed else None
    if recipe.delayed:
        (y, _), vjp = jax.vjp(lambda x, w, b, s: dense(x, w, b, recipe=recipe, state=s, **options), x, w, b, state)
        return y, *vjp((g, jax.tree.map(jnp.zeros_like, state)))
    y, vjp = jax.vjp(lambda x, w, b: dense(x, w, b, recipe=recipe, key=KEY, **options), x, w, b)
    return y, *vjp(g), {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=pytest.mark.jax_versions if r in ON_EACH_JAX else ()) for r in EXPECTED]
)
def test_a_step_is_the_matmul_of_independently_quantised_operands(recipe, dtype):
    """35 tokens, 150 and 44 features: no size is a multiple of a block or rotation."""
    x, w, b = normal(0, (5, 7, 150), dtype), normal(1, (150, 44), dtype, 0.1), normal(2, (44,), dtype)
    g = normal(3, (5, 7, 44), dtype, 1e-3)
    y, dx, dw, db, _ = jax.jit(functools.partial(step, without_means(RECIPES[recipe])))(x, w, b, g)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (dtype,) * 4
    multipliers = dict.fromkeys("xwg", np.float32(1)) if recipe == "fp8_delayed" else None
    flat = [a.reshape(35, -1) for a in (y, dx)]
    check_step(recipe, (*flat, dw, db), x.reshape(35, 150), w, b, g.reshape(35, 44), multipliers)


@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_each_tensor_is_cast_as_often_as_its_recipe_needs(recipe):
    x, w, b, g = normal(0, (384, 256)), normal(1, (256, 128)), normal(2, (128,)), normal(3, (384, 128))
    jaxpr = jax.make_jaxpr(functools.partial(step, recipe))(x, w, b, g)
    casts = [e for e in equations(jaxpr.jaxpr) if e.params.get("name") == "quantize_leaves"]
    shapes = [e.invars[0].aval.shape for e in casts]
    assert tuple(shapes.count(a.shape) for a in (x, w, g)) == CASTS_PER_STEP[recipe]


def reference_bytes(recipe, tensor, matmul, shape):
    """The packed bytes of codes and scales of a cast in EXPECTED."""
    side = [t for t, _ in ROLES[matmul]].index(tensor)
    expected_cast = EXPECTED[recipe][matmul][side]
    if expected_cast is None:
        return 4 * shape[0] * shape[1]
    axis = ROLES[matmul][side][1]
    cast = expected_cast(axis)
    bits, scale_bytes, size = {
        "fp8_e4m3": (8, 4, None),
        "mxfp8": (8, 1, 32),
        "nvfp4": (4, 1, 16),
        "nvint4": (4, 1, 16),
        "if4": (4, 1, 16),
        "int8": (8, 4, 0),
        "int4": (4, 4, 0),
    }[cast["format"]]
    block = cast.get("block") or ((0, 0) if size is None else (1, size) if axis else (size, 1))
    scales = np.prod([-(-n // (b or n)) for n, b in zip(shape, block, strict=True)])
    return shape[0] * shape[1] * bits // 8 + scales * scale_bytes + (4 if scale_bytes == 1 and size == 16 else 0)


def packed_bytes(r):
    """The bytes of an array on a device; numpy counts one byte per 4-bit element."""
    four = r.dtype.name in ("float4_e2m1fn", "int4", "uint4")
    return r.size // 2 if four else r.nbytes


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    "recipe", params_of(EXPECTED, (*EXHAUSTIVE_ONLY_RECIPES, "fp8_current", "mxfp8", "int8", "w4a16_qat"))
)
def test_residuals_of_two_layers_are_their_codes_and_scales_only(recipe):
    x, w1, w2 = normal(0, (128, 256)), normal(1, (256, 512)), normal(2, (512, 128))
    state = sd.init_state(recipe)

    def layer(x, w, state):
        if state:
            return dense(x, w, recipe=recipe, state=state)[0]
        return dense(x, w, recipe=recipe, key=KEY)

    residuals = residuals_of(lambda x, w1, w2, state: layer(layer(x, w1, state), w2, state), x, w1, w2, state)
    through = "dgrad" not in EXPECTED[recipe]
    expected = 0
    for rows, w in (((128, 256), w1), ((128, 512), w2)):
        expected += reference_bytes(recipe, "x", "fwd" if through else "wgrad", rows)
        expected += reference_bytes(recipe, "w", "fwd" if through else "dgrad", w.shape)
        # The backward pass adds the mean of x times the sums of g to dw, and the mean of g times w to dx.
        expected += 4 * rows[1] * (("wgrad", "x") in RECIPES[recipe].mean_subtracted)
        expected += w.nbytes * (("dgrad", "g") in RECIPES[recipe].mean_subtracted)
    if state:  # both layers save the same history arrays, and two amaxes each
        expected += sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 4 * 4
    unique = {id(r): r for r in residuals}.values()
    assert sum(map(packed_bytes, unique)) == expected


@pytest.mark.jax_versions
def test_dtypes_are_honoured():
    """A bfloat16 activation by a float32 master weight; gradients have the dtypes of their primals."""
    x, w = normal(0, (8, 64), jnp.bfloat16), normal(1, (64, 32))
    y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe="mxfp8"), x, w)
    dx, dw = vjp(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    numbers = (((1,), (0,)), ((), ()))
    assert dot_general(x, w, numbers, recipe="mxfp8").dtype == jnp.float32
    y = dot_general(x, w.astype(jnp.bfloat16), numbers, preferred_element_type=jnp.float32, recipe="mxfp8")
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize(
    ("text", "x_shape", "w_shape"),
    [
        ("bsd,dhk->bshk", (2, 19, 64), (64, 4, 8)),
        ("bshk,hkd->bsd", (2, 19, 4, 8), (4, 8, 48)),
        ("mk,nk->mn", (20, 48), (24, 48)),
        ("km,kn->nm", (48, 20), (48, 24)),
    ],
)
def test_other_layouts_are_the_same_matrices(recipe, text, x_shape, w_shape):
    """Dims are flattened row-major in the order of the labels; transposing an operand changes nothing."""
    x, w = normal(0, x_shape), normal(1, w_shape)
    inputs, out = text.split("->")
    x_labels, w_labels = inputs.split(",")
    rows, contracting = [c for c in x_labels if c not in w_labels], [c for c in x_labels if c in w_labels]
    columns = [c for c in w_labels if c not in x_labels]
    sizes = dict(zip(x_labels + w_labels, x_shape + w_shape, strict=True))

    def matrix(a, labels, first, second):
        transposed = a.transpose([labels.index(c) for c in first + second])
        return transposed.reshape(np.prod([sizes[c] for c in first]), np.prod([sizes[c] for c in second]))

    def by_matrices(x, w):
        lhs, rhs = matrix(x, x_labels, rows, contracting), matrix(w, w_labels, contracting, columns)
        y = dense(lhs, rhs, recipe=recipe, key=KEY)
        y = y.reshape([sizes[c] for c in rows + columns])
        return y.transpose([(rows + columns).index(c) for c in out])

    g = normal(2, [sizes[c] for c in out])
    got = vjp_of(lambda x, w: einsum(text, x, w, recipe=recipe, key=KEY), g, x, w)
    expected = vjp_of(by_matrices, g, x, w)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


def test_einsum_reduces_labels_of_one_operand():
    x, w = normal(0, (8, 3, 64)), normal(1, (64, 32))
    y = einsum("mak,kn->mn", x, w, recipe="mxfp8")
    np.testing.assert_array_equal(y, dense(x.sum(1), w, recipe="mxfp8"))


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    "recipe", params_of(["fp8_current", "fp8_block", "mxfp8", "int8", "w4a16_qat"], ["mxfp8", "int8", "w4a16_qat"])
)
def test_batch_dims_are_independent_matmuls(recipe):
    """Per-tensor scales span the batch, so every matrix is given the same amax."""
    x, w = normal(0, (3, 16, 64)), normal(1, (3, 64, 32))
    x, w, g = (a.at[:, 0, 0].set(8.0) for a in (x, w, normal(2, (3, 16, 32))))
    numbers = (((2,), (1,)), ((0,), (0,)))
    recipe = nearest(RECIPES[recipe])
    got = vjp_of(lambda x, w: dot_general(x, w, numbers, recipe=recipe), g, x, w)
    expected = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g[0], x[0], w[0])
    for a, b in zip(got, expected, strict=True):
        assert_same(a[0], b)


@pytest.mark.jax_versions
@pytest.mark.parametrize("recipe", params_of(["fp8_block", "nvfp4", "w4a16_qat"], ["nvfp4", "w4a16_qat"]))
def test_vmap_is_a_loop(recipe):
    x, w, g = normal(0, (3, 20, 64)), normal(1, (64, 32)), normal(2, (3, 20, 32))

    def grads(x, w, g):
        y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=recipe, key=KEY), x, w)
        return y, *vjp(g)

    got = jax.jit(jax.vmap(grads, (0, None, 0)))(x, w, g)
    for i in range(3):
        for a, b in zip(got, jax.jit(grads)(x[i], w, g[i]), strict=True):
            assert_same(a[i], b)


@pytest.mark.jax_versions
def test_weights_of_experts_and_ensembles_have_the_gradients_of_a_loop():
    """XLA's CPU backend rejects the bfloat16 matmul that is wgrad of both, a batch or a vmap of "km,kn->mn"."""
    x, ws, g = normal(0, (3, 16, 64)), normal(1, (3, 64, 32)), normal(2, (3, 16, 32))

    def dw(w, x, g, multiply=dense):
        return jax.vjp(lambda w: multiply(x, w, recipe="mxfp8"), w)[1](g)[0]

    def experts(x, w, recipe):
        return einsum("ebk,ekn->ben", x, w, recipe=recipe)

    of_experts = jax.jit(functools.partial(dw, multiply=experts))(ws, x, g.swapaxes(0, 1))
    of_ensemble = jax.jit(jax.vmap(dw, (0, None, 0)))(ws, x[0], g)
    alone = jax.jit(dw)
    for i in range(3):
        assert_same(of_experts[i], alone(ws[i], x[i], g[i]))
        assert_same(of_ensemble[i], alone(ws[i], x[0], g[i]))


@pytest.mark.jax_versions
@pytest.mark.parametrize("recipe", params_of(["fp8_current", "nvfp4"], ["nvfp4"]))
def test_scan_over_layers_is_a_loop(recipe):
    x, stack = normal(0, (20, 64)), normal(1, (3, 64, 64), spread=0.1)
    keys = jax.random.split(KEY, 3)

    def layer(x, w, key):
        return jnp.maximum(dense(x, w, recipe=recipe, key=key), 0)

    def scanned(x, stack):
        return jax.lax.scan(lambda x, wk: (layer(x, *wk), None), x, (stack, keys))[0].sum()

    def looped(x, stack):
        for i in range(3):
            x = layer(x, stack[i], keys[i])
        return x.sum()

    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, stack) for f in (scanned, looped))
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


@pytest.mark.jax_versions
@pytest.mark.parametrize("recipe", params_of(["fp8_current", "mxfp8", "nvfp4"], ["mxfp8", "nvfp4"]))
def test_data_parallel_shards_in_shard_map(recipe):
    """With check_vma: the gradient of a replicated weight is all-reduced."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w = normal(0, (64, 64)), normal(1, (64, 32))

    def loss(x, w):
        return jax.lax.psum(jnp.sum(dense(x, w, recipe=recipe, key=KEY) ** 2), "data")

    def grads(x, w):
        return jax.grad(loss, argnums=(0, 1))(x, w)

    dx, dw = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())))(x, w)
    each = [
        jax.grad(lambda x, w: jnp.sum(dense(x, w, recipe=recipe, key=KEY) ** 2), (0, 1))(s, w) for s in np.split(x, 4)
    ]
    assert_same(dx, np.concatenate([a for a, _ in each]))
    assert_same(dw, sum(b for _, b in each))


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    ("recipe", "axis_type"),
    [
        ("fp8_current", AxisType.Auto),
        pytest.param("mxfp8", AxisType.Auto, marks=pytest.mark.exhaustive),
        pytest.param("nvfp4", AxisType.Auto, marks=pytest.mark.exhaustive),
        pytest.param("fp8_current", AxisType.Explicit, marks=pytest.mark.exhaustive),
        ("mxfp8", AxisType.Explicit),
    ],
)
def test_a_step_on_a_mesh_is_the_step_on_one_device(recipe, axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type, axis_type))
    x, w, g = normal(0, (64, 64)), normal(1, (64, 64)), normal(2, (64, 64))

    def grads(x, w, g):
        y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=recipe, key=KEY), x, w)
        return y, *vjp(g)

    expected = jax.jit(grads)(x, w, g)
    with jax.set_mesh(mesh):
        sharded = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in ((x, P("data")), (w, P(None, "model")), (g, P("data", "model")))
        ]
        got = jax.jit(grads)(*sharded)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


def test_stochastic_gradients_are_unbiased_and_repeat_with_their_key():
    """The error of the mean of wgrad over T keys is that of one key over sqrt(T).

    This holds for unbiased casts that do not clip, such as int8; the error of a biased cast does not fall with T, and
    is far above the bound of 1.5 times.
    """
    x, w, g = normal(0, (32, 64)), normal(1, (64, 16)), normal(2, (32, 16))
    exact_x = dataclasses.replace(recipes.INT8, name="exact_x", wgrad=dataclasses.replace(recipes.INT8.wgrad, lhs=None))

    def wgrad(recipe, key):
        return jax.vjp(lambda w: dense(x, w, recipe=recipe, key=key), w)[1](g)[0]

    keys = jax.random.split(KEY, 400)
    draws = np.asarray(jax.jit(jax.vmap(functools.partial(wgrad, exact_x)))(keys), np.float64)
    truth = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    one = np.sqrt(np.mean((draws - truth) ** 2))
    mean = np.sqrt(np.mean((draws.mean(0) - truth) ** 2))
    assert mean < 1.5 * one / np.sqrt(len(keys))
    np.testing.assert_array_equal(wgrad(exact_x, keys[3]), wgrad(exact_x, keys[3]))
    assert np.any(wgrad(exact_x, keys[3]) != wgrad(exact_x, keys[4]))


@pytest.mark.jax_versions
def test_forward_is_the_same_whether_or_not_it_is_differentiated():
    """A stochastic cast that fwd and wgrad share has one set of random bits."""
    cast = Cast("fp8_e4m3", rounding="stochastic")
    recipe = Recipe("r", Gemm(cast, cast), Gemm(None, cast), Gemm(cast, None))
    x, w = normal(0, (8, 64)), normal(1, (64, 32))
    run = functools.partial(dense, recipe=recipe, key=KEY)
    np.testing.assert_array_equal(run(x, w), jax.vjp(run, x, w)[0])


def test_the_two_casts_of_a_gradient_use_independent_bits():
    """For a symmetric g, equal random bits would make dx the transpose of dw."""
    g = normal(2, (32, 32))
    g = g + g.T
    eye = jnp.eye(32)
    _, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=recipes.INT8, key=KEY), eye, eye)
    dx, dw = vjp(g)
    assert np.mean(np.asarray(dx) != np.asarray(dw).T) > 0.2


@pytest.mark.parametrize("calibration", ["absmax,0.5", "rms,1.5", "percentile,90", "fixed,1.0", "mse", "absmax"])
def test_straight_through_gradients_stop_where_the_calibration_clips(calibration):
    cast = Cast("int8", (0, 0), calibration=calibration)
    recipe = Recipe("mine", Gemm(cast, cast))
    x, w, g = normal(0, (16, 64)), normal(1, (64, 32)), normal(2, (16, 32))
    _, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=recipe), x, w)
    dx, dw = vjp(g)
    for gradient, array in ((dx, x), (dw, w)):
        q = sd.quantize(array, "int8", block=(0, 0), calibration=calibration)
        limit = 127 * float(q.scale[0, 0])
        not_close = np.abs(np.abs(array) - limit) > 1e-5
        np.testing.assert_array_equal(
            (np.asarray(gradient) != 0)[not_close], (np.abs(array) < limit)[not_close] | (calibration == "absmax")
        )


NUMBERS = (((1,), (0,)), ((), ()))


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda x, w: train.dense(x, w, recipe="fp8_delayed"),
            ValueError,
            "needs a `state`; in the first step, pass init_state",
        ),
        (
            lambda x, w: train.dense(x, w, recipe="mxfp8", state=sd.init_state("fp8_delayed")),
            ValueError,
            "has no delayed",
        ),
        (
            lambda x, w: jax.grad(lambda x: train.dense(x, w, recipe="nvfp4").sum())(x),
            ValueError,
            "uses random numbers for g of dgrad, g of wgrad",
        ),
        (lambda x, w: train.dense(x, w, recipe="nvfp4", key=3), TypeError, "`key` must be a key .*, not 3"),
        (
            lambda x, w: train.dense(x, w, recipe="nvfp4", key=jax.random.split(jax.random.key(0), 32)),
            ValueError,
            r"`key` must be one key, not an array of keys of shape \(32,\)",
        ),
        (lambda x, w: train.dense(x.astype(jnp.int32), w, recipe="mxfp8"), TypeError, "`x` must be a float array"),
        (lambda x, w: train.dense(x.astype(jnp.float8_e4m3fn), w, recipe="mxfp8"), TypeError, "at least 16 bits"),
        (lambda x, w: train.dense(sd.quantize(x, "mxfp8"), w, recipe="mxfp8"), TypeError, "already quantised"),
        (lambda x, w: train.dense(x, w[:-1], recipe="mxfp8"), ValueError, r"\(8, 64\) must be as long as .*\(63, 32\)"),
        (lambda x, w: train.dense(x, w, w[0][:-1], recipe="mxfp8"), ValueError, r"`b` \(31,\)"),
        (lambda x, w: train.dense(x, w, recipe="mxpf8"), ValueError, "did you mean 'mxfp8'"),
        (lambda x, w: train.dense(x, w, recipe=8), TypeError, "must be a Recipe"),
        (lambda x, w: train.dense(x, w, recipe="mxfp8", preferred_element_type=jnp.int8), TypeError, "float dtype"),
        (lambda x, w: train.dense(x, w, recipe="mxfp8", kernel="cuda"), ValueError, "`kernel` 'cuda'"),
        (lambda x, w: train.dot_general(x, w, ((1, 0), ((), ())), recipe="mxfp8"), TypeError, "dimension_numbers"),
        (lambda x, w: train.einsum("mk,kn,n->mn", x, w, recipe="mxfp8"), ValueError, "3 operands"),
        (
            lambda x, w: train.ragged_dot(x, w[None], jnp.array([9]), recipe="mxfp8"),
            ValueError,
            "sum to more than 8 rows",
        ),
        (lambda x, w: train.ragged_dot(x, w[None], jnp.array([4, 4]), recipe="mxfp8"), ValueError, "2 groups"),
        (lambda x, w: train.ragged_dot(x, w, jnp.array([8]), recipe="mxfp8"), ValueError, "must share k"),
        (
            lambda x, w: train.ragged_dot(
                x, w[None], jnp.array([8]), recipe=Recipe("r", Gemm(Cast("int8", calibration="rms,2"), None))
            ),
            ValueError,
            "not supported for rows in groups",
        ),
        (
            lambda x, w: train.ragged_dot(
                x, w[None], jnp.array([8]), recipe=Recipe("r", Gemm(Cast("fp8_e4m3", (0, 32)), None))
            ),
            ValueError,
            "use a block of rows",
        ),
        (
            lambda x, w: train.dense(x, w, recipe="mxfp8", preferred_element_type=jnp.float8_e4m3fn),
            TypeError,
            "16 bits",
        ),
        (
            lambda x, w: train.conv_general_dilated(
                x[None],
                w[None, :32],
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=2,
                recipe=recipes.FP8_BLOCK,
            ),
            ValueError,
            "feature groups has 32, which is no multiple of 128",
        ),
        (
            lambda x, w: train.conv_general_dilated(
                x[None], w[None], (1,), ((0, 0), (0, 0)), dimension_numbers=("NWC", "WIO", "NWC"), recipe="mxfp8"
            ),
            ValueError,
            "a pair for each of 1",
        ),
    ],
)
def test_bad_input_is_explained(call, error, words):
    with pytest.raises(error, match=words):
        call(normal(0, (8, 64)), normal(1, (64, 32)))


@pytest.mark.jax_versions
def test_a_forward_pass_alone_needs_no_key():
    x, w = normal(0, (8, 64)), normal(1, (64, 32))
    assert train.dense(x, w, recipe="nvfp4").shape == (8, 32)
    forward = Recipe("forward", Gemm(Cast("int8", rounding="stochastic"), None))
    with pytest.raises(ValueError, match="random numbers for x of fwd"):
        train.dense(x, w, recipe=forward)


def test_explain_shows_the_kernels_of_the_forward_matmul():
    text = sd.explain(train.dense, normal(0, (8, 256)), normal(1, (256, 32)), recipe="fp8_current")
    assert "selected: float8 matmul on CUDA" in text


@pytest.mark.jax_versions
def test_a_second_derivative_is_refused():
    """Codes have no derivative: it would silently be zero."""
    x, w = normal(0, (8, 64)), normal(1, (64, 32))

    def loss(x):
        return jnp.sum(train.dense(x, w, recipe="mxfp8") ** 2)

    with pytest.raises(TypeError, match="can be differentiated once"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_results_may_be_transposed(recipe):
    """XLA would fold the transpose into a dot that its CPU backend does not support."""
    x, w = normal(0, (8, 64)), normal(1, (64, 32))
    expected = train.dense(x, w, recipe=recipe).T
    np.testing.assert_array_equal(train.einsum("mk,kn->nm", x, w, recipe=recipe), expected)
    np.testing.assert_array_equal(jax.jit(lambda x, w: train.dense(x, w, recipe=recipe).T)(x, w), expected)


def test_einsum_has_the_dtype_of_its_operands():
    x = jnp.ones((4, 32), jnp.bfloat16)
    assert train.einsum("ij,kj->i", x, x, recipe="mxfp8").dtype == jnp.bfloat16


def test_a_rotated_forward_cast_has_straight_through_gradients():
    """The contracting dim is padded for the rotation; gradients have the unpadded shape."""
    cast = Cast("int8", rotation=sd.Hadamard())
    recipe = Recipe("r", Gemm(cast, cast))
    x, w, g = normal(0, (4, 20)), normal(1, (20, 8)), normal(2, (4, 8))
    _, dx, dw = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g, x, w)
    x_values = sd.dequantize(sd.quantize(jnp.pad(x, ((0, 0), (0, 12))), "int8", rotation=sd.Hadamard()))[:, :20]
    w_values = sd.dequantize(sd.quantize(jnp.pad(w, ((0, 12), (0, 0))), "int8", axis=0, rotation=sd.Hadamard()))[:20]
    assert_same(dx, g @ w_values.T)
    assert_same(dw, x_values.T @ g)


@pytest.mark.jax_versions
def test_empty_and_single_operands():
    """Vectors and operands without rows have gradients of their own shapes."""
    w = normal(1, (64, 32))
    for x, numbers in ((normal(0, (64,)), (((0,), (0,)), ((), ()))), (jnp.zeros((0, 64)), NUMBERS)):
        y, vjp = jax.vjp(lambda x, w, n=numbers: train.dot_general(x, w, n, recipe="mxfp8"), x, w)
        dx, dw = vjp(jnp.ones_like(y))
        assert (y.shape, dx.shape, dw.shape) == ((*x.shape[:-1], 32), x.shape, w.shape)
        assert np.all(np.isfinite(dw))


@pytest.mark.jax_versions
@pytest.mark.optimized
def test_xla_does_not_reduce_the_constant_gradient_of_a_sum_at_compile_time():
    """Constant folding would take 17 s for the amax of 2048 × 2048 elements."""
    gradients = jax.grad(lambda x, w: train.dense(x, w, recipe="fp8_current").sum(), argnums=(0, 1))
    program = jax.jit(gradients).lower(normal(0, (32, 64)), normal(1, (64, 32))).compile().as_text()
    backward = [line for line in program.splitlines() if " reduce(" in line and "transpose(jvp(" in line]
    assert backward, "the amax of the gradient was constant-folded"


def test_mx_blocks_may_be_square(monkeypatch):
    """A format with a 2D block: one cast of each tensor serves both of its matmuls."""
    cast = Cast(dataclasses.replace(sd.FORMATS["mxfp8"], block=(32, 32)))
    recipe = recipes.of_tensors("mx_square", cast, cast, cast)
    monkeypatch.setitem(EXPECTED, recipe.name, per_tensor(square("mxfp8", 32), square("mxfp8", 32)))
    x, w, b, g = (normal(seed, shape) for seed, shape in enumerate([(35, 70), (70, 44), (44,), (35, 44)]))
    run = jax.jit(functools.partial(step, recipe)).trace(x, w, b, g)
    quantised = [
        e.invars[0].aval.shape for e in equations(run.jaxpr.jaxpr) if e.params.get("name") == "quantize_leaves"
    ]
    assert [quantised.count(a.shape) for a in (x, w, g)] == [1, 1, 1]
    y, dx, dw, db, _ = run.lower().compile()(x, w, b, g)
    check_step(recipe.name, (y, dx, dw, db), x, w, b, g)

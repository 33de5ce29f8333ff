"""Casts that subtract the mean over tokens, against float64 matmuls of independently quantised differences.

The data have means that float32 sums in any order give exactly, so that codes do not depend on the order.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from independent import quantize
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import LAYOUTS, Arrays, summation_order_bound
from reference import assert_one_rounding
from tables import params_of
from training import (
    KEY,
    assert_same,
    assert_same_bits,
    dense,
    einsum,
    nearest,
    ragged_dot,
    residuals_of,
    vjp_of,
    without_means,
)

import scaledot as sd
from scaledot import train
from scaledot.kernels.hopper import cast_8bit, cast_microscaled
from scaledot.kernels.spec import CastArguments, CastOutput, CastProblem
from scaledot.recipes import RECIPES, Cast, Delayed, Gemm, Recipe
from scaledot.train.resolved_cast import OperandDims, ResolvedCast


def subtracting(recipe: Recipe, tensors: str = "xg") -> Recipe:
    """The recipe with `subtract_mean` in each cast of these tensors."""

    def changed(gemm: Gemm, names: str) -> Gemm:
        casts = zip((gemm.lhs, gemm.rhs), names, strict=True)
        return Gemm(*(dataclasses.replace(cast, subtract_mean=name in tensors) for cast, name in casts))

    assert recipe.dgrad is not None
    assert recipe.wgrad is not None
    gemms = changed(recipe.fwd, "xw"), changed(recipe.dgrad, "gw"), changed(recipe.wgrad, "xg")
    return Recipe(f"{recipe.name}_mean_{tensors}", *gemms)


NVFP4, FP8, INT8, MXFP8 = (nearest(RECIPES[name]) for name in ("nvfp4", "fp8_current", "int8", "mxfp8"))


def tokens(seed: int, count: int, features: int, dtype=jnp.float32, spread: float = 1.0) -> jax.Array:
    """Rows of multiples of spread / 8 around a mean of each feature, which rounds to no bfloat16 for even counts.

    Rows come in pairs whose differences to the mean cancel. One element per feature is an eighth larger for a power of
    two, so that the mean is still exact.
    """
    rng = np.random.default_rng(seed)
    half = rng.integers(-15, 16, (count // 2, features))
    differences = np.concatenate([half, -half, np.zeros((count % 2, features), int)])
    if count & (count - 1) == 0:
        differences[0] += 1
    x = rng.permutation(differences, axis=0) + rng.integers(-160, 161, features)
    x = jnp.asarray(x.astype(np.float32) * np.float32(spread / 8)).astype(dtype)
    np.testing.assert_array_equal(exact(x), np.asarray(x, np.float64))
    return x


@functools.cache
def dense_step(recipe: Recipe):
    """A jitted function from x, w, b and g to y, dx, dw and db."""

    @jax.jit
    def run(x, w, b, g):
        y, vjp = jax.vjp(lambda x, w, b: dense(x, w, b, recipe=recipe), x, w, b)
        return y, *vjp(g)

    return run


def exact(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


SUBTRACTING = [name for name, recipe in RECIPES.items() if recipe.mean_subtracted]
ROLES = {"fwd": (("x", 1), ("w", 0)), "dgrad": (("g", 1), ("w", 1)), "wgrad": (("x", 0), ("g", 0))}
TEXTS = {"fwd": "mk,kn->mn", "dgrad": "mn,kn->mk", "wgrad": "mk,mn->kn"}


def quantised(base: Recipe, matmul: str, tensor: str, axis: int, x: np.ndarray) -> np.ndarray:
    """The dequantised values of an operand with the contracting dim `axis`, independently of the library."""
    options: dict = {}
    if base is NVFP4:
        options |= {"block": (16, 16)} if tensor == "w" else {}
        options |= {"rotation": (16, 0xD7E8)} if matmul == "wgrad" else {}
    format = {NVFP4: "nvfp4", INT8: "int8", FP8: "fp8_e5m2" if tensor == "g" else "fp8_e4m3"}[base]
    return quantize(x.astype(np.float32), format, axis, **options).values


def mean_terms(tensors: str, x: np.ndarray, w: np.ndarray, g: np.ndarray) -> dict[str, np.ndarray]:
    """The term of each matmul if the means of `tensors` are subtracted."""
    mean_x, mean_g = x.mean(0), g.mean(0)
    wgrad = {
        "xg": len(x) * np.outer(mean_x, mean_g),
        "x": np.outer(mean_x, g.sum(0)),
        "g": np.outer(x.sum(0), mean_g),
    }
    fwd, dgrad = mean_x @ w * ("x" in tensors), mean_g @ w.T * ("g" in tensors)
    return {"fwd": fwd[None], "dgrad": dgrad[None], "wgrad": wgrad[tensors]}


@pytest.mark.parametrize(
    ("base", "tensors", "dtype", "shape"),
    [
        pytest.param(NVFP4, "xg", jnp.float32, (5, 7), id="nvfp4-x and g-padded"),
        pytest.param(NVFP4, "xg", jnp.bfloat16, (4, 8), id="nvfp4-x and g-bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(FP8, "xg", jnp.bfloat16, (4, 8), id="fp8-x and g-bfloat16"),
        pytest.param(INT8, "x", jnp.float32, (5, 7), id="int8-x"),
        pytest.param(INT8, "g", jnp.bfloat16, (5, 7), id="int8-g"),
    ],
)
def test_a_step_is_the_matmul_of_quantised_differences_plus_that_of_means(base, tensors, dtype, shape):
    """35 tokens are padded to 48 by the rotation of wgrad, with zeros and not with negative means."""
    count, k, n = shape[0] * shape[1], 150, 44
    x, g = tokens(0, count, k, dtype), tokens(1, count, n, spread=2.0**-10)
    w, b = normal(2, (k, n), spread=0.1), normal(3, (n,))
    recipe = subtracting(base, tensors)

    def layer(x, w, b):
        return dense(x, w, b, recipe=recipe, preferred_element_type=jnp.float32)

    y, dx, dw, db = vjp_of(layer, g.reshape(*shape, n), x.reshape(*shape, k), w, b)
    results = {"fwd": y.reshape(count, n), "dgrad": dx.reshape(count, k), "wgrad": dw}
    values = {name: exact(a) for name, a in (("x", x), ("w", w), ("g", g))}
    terms, magnitudes = mean_terms(tensors, **values), mean_terms(tensors, **{t: np.abs(a) for t, a in values.items()})
    for matmul, result in results.items():
        lhs, rhs = (
            quantised(base, matmul, t, axis, values[t] - (values[t].mean(0) if t in tensors else 0))
            for t, axis in ROLES[matmul]
        )
        bias = exact(b) if matmul == "fwd" else np.zeros(1)
        expected = np.einsum(TEXTS[matmul], lhs, rhs) + terms[matmul] + bias
        magnitude = np.einsum(TEXTS[matmul], np.abs(lhs), np.abs(rhs)) + magnitudes[matmul] + np.abs(bias)
        added = {"fwd": 2 * k, "dgrad": 2 * n, "wgrad": lhs.shape[0]}[matmul] + 2  # products, the term and a bias
        assert_one_rounding(result, expected, magnitude, added)
    assert_one_rounding(db, values["g"].sum(0), np.abs(values["g"]).sum(0), count)


@pytest.mark.parametrize("name", params_of(SUBTRACTING, set(SUBTRACTING) - {"nvfp4_plus"}))
def test_a_recipe_that_subtracts_means_is_one_without_of_differences(name):
    """32 tokens are padded to 128 by the rotation of wgrad. Keys are the same, so random numbers are."""
    recipe = RECIPES[name]
    subtracts = {tensor for _, tensor in recipe.mean_subtracted}
    x, g, w = tokens(0, 32, 160), tokens(1, 32, 96, spread=2.0**-10), normal(2, (160, 96), spread=0.1)
    found = vjp_of(lambda x, w: dense(x, w, recipe=recipe, key=KEY), g, x, w)
    values = {tensor: exact(a) for tensor, a in (("x", x), ("w", w), ("g", g))}
    differences = {t: jnp.asarray(a - a.mean(0) if t in subtracts else a, jnp.float32) for t, a in values.items()}
    without = vjp_of(
        lambda x, w: dense(x, w, recipe=without_means(recipe), key=KEY), *(differences[tensor] for tensor in "gxw")
    )
    terms = mean_terms("".join(sorted(subtracts, reverse=True)), **values)
    for a, product, term in zip(found, without, terms.values(), strict=True):
        assert_same(a, exact(product) + term)


def test_differences_to_a_large_mean_are_quantised_more_accurately():
    """Means are 64 times the spread. Errors scale with the amax of a block: over 60, or under 6 without means."""
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((256, k)) + 64 * rng.choice([-1, 1], k), jnp.float32) for k in (128, 96))
    w = normal(1, (128, 96), spread=0.1)
    exact_results = exact(x) @ exact(w), exact(g) @ exact(w).T, exact(x).T @ exact(g)

    def errors(recipe):
        found = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g, x, w)
        return [np.linalg.norm(exact(a) - e) for a, e in zip(found, exact_results, strict=True)]

    for with_mean, without in zip(errors(subtracting(NVFP4)), errors(NVFP4), strict=True):
        assert 8 * with_mean < without


@pytest.mark.jax_versions
@pytest.mark.parametrize("base", params_of([MXFP8, NVFP4], ["nvfp4"], name=lambda recipe: recipe.name))
def test_a_ragged_dot_has_a_mean_for_each_group(base):
    """Two groups and an empty one. Rows of no group are large, and enter no mean."""
    sizes = np.array([29, 0, 29])
    x, g = (
        jnp.concatenate(
            [*(tokens(10 * seed + i, size, k) for i, size in enumerate(sizes) if size), 1e4 * jnp.ones((6, k))]
        )
        for seed, k in ((0, 96), (1, 48))
    )
    w, b = normal(1, (3, 96, 48)), normal(2, (3, 48))
    recipe = subtracting(base)
    y, dx, dw, db = vjp_of(lambda x, w, b: ragged_dot(x, w, jnp.asarray(sizes), b, recipe=recipe), g, x, w, b)
    for i, rows in ((0, slice(29)), (2, slice(29, 58))):
        for a, e in zip(
            (y[rows], dx[rows], dw[i], db[i]), dense_step(recipe)(x[rows], w[i], b[i], g[rows]), strict=True
        ):
            assert_same(a, e)
    assert not np.any(dw[1])
    assert not np.any(y[58:])
    assert not np.any(dx[58:])


def test_each_batch_index_has_a_mean_of_its_own():
    """mxfp8 has no scale that spans the batch, so every index is a matmul of its own."""
    x, g = (jnp.stack([tokens(10 * seed + i, 32, k) for i in range(3)]) for seed, k in ((0, 96), (1, 64)))
    w, recipe = normal(1, (3, 96, 64)), subtracting(MXFP8)
    together = vjp_of(lambda x, w: einsum("bmk,bkn->bmn", x, w, recipe=recipe), g, x, w)
    for i in range(3):
        y, dx, dw, _ = dense_step(recipe)(x[i], w[i], jnp.zeros(64), g[i])
        for a, e in zip(together, (y, dx, dw), strict=True):
            assert_same(a[i], e)


def test_several_free_and_contracting_dims_give_one_mean_per_feature():
    """fp8_current keeps dims unflattened."""
    x, g = tokens(0, 32, 96).reshape(4, 8, 2, 48), tokens(1, 32, 64).reshape(4, 8, 64)
    w, recipe = normal(2, (64, 48, 2)), subtracting(FP8)
    found = vjp_of(lambda x, w: einsum("abkh,nhk->abn", x, w, recipe=recipe), g, x, w)
    matrix = w.transpose(2, 1, 0).reshape(96, 64)
    y, dx, dw = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g, x.reshape(4, 8, 96), matrix)
    assert_same(found[0], y)
    assert_same(found[1], dx.reshape(x.shape))
    assert_same(found[2], dw.reshape(2, 48, 64).transpose(2, 1, 0))


@pytest.mark.jax_versions
def test_x_is_saved_as_codes_and_its_mean():
    x, w = tokens(0, 64, 96), normal(1, (96, 48))
    residuals = residuals_of(lambda x, w: dense(x, w, recipe=subtracting(RECIPES["nvfp4"]), key=KEY), x, w)
    of_x = [r for r in residuals if r.size == x.size]
    assert {r.dtype.name for r in of_x} == {"uint4"}
    assert any(r.shape == (1, 96) and np.array_equal(r[0], np.mean(np.asarray(x), 0)) for r in residuals)


@pytest.mark.jax_versions
def test_rematerialised_gradients_are_equal():
    x, w, g = tokens(0, 32, 96), normal(1, (96, 48)), tokens(2, 32, 48)

    def layer(x, w):
        return dense(x, w, recipe=subtracting(MXFP8))

    expected = vjp_of(layer, g, x, w)
    for policy in (None, sd.checkpoint_policies.save_quantized_residuals):
        assert_same_bits(vjp_of(jax.checkpoint(layer, policy=policy), g, x, w), expected)


@pytest.mark.jax_versions
def test_weights_that_are_cast_ahead_give_equal_results():
    x, w, g, recipe = tokens(0, 32, 96), normal(1, (96, 48)), tokens(2, 32, 48), subtracting(MXFP8)
    cast = train.cast_weights(w, recipe)
    found = vjp_of(lambda x, w: dense(x, cast.attach(w), recipe=recipe), g, x, w)
    assert_same_bits(found, vjp_of(lambda x, w: dense(x, w, recipe=recipe), g, x, w))


@pytest.mark.jax_versions
def test_an_x_without_tokens_gives_a_zero_gradient_of_w():
    x, w, b, g = jnp.zeros((0, 64)), normal(1, (64, 32)), jnp.zeros(32), jnp.zeros((0, 32))
    y, dx, dw, _ = dense_step(subtracting(FP8))(x, w, b, g)
    assert (y.shape, dx.shape) == ((0, 32), (0, 64))
    np.testing.assert_array_equal(dw, np.zeros((64, 32)))


def layer_arrays() -> Arrays:
    x, g = (tokens(seed, 256, k, jnp.bfloat16).reshape(4, 64, k) for seed, k in ((0, 128), (1, 128)))
    return Arrays(x, normal(2, (128, 128)), normal(3, (128,)), g)


def magnitudes(x, w, b, g) -> list[tuple[np.ndarray, int]]:
    """For y, dx, dw and db: the sums of magnitudes, and the number of products and terms that each adds up."""
    x, g, w = (exact(a).reshape(-1, a.shape[-1]) for a in (x, g, w))
    absolute = [np.abs(a - a.mean(0)) for a in (x, g)]
    terms = mean_terms("xg", *map(np.abs, (x, w, g)))
    return [
        (absolute[0] @ np.abs(w) + terms["fwd"] + np.abs(exact(b)), 2 * w.shape[0] + 2),
        (absolute[1] @ np.abs(w).T + terms["dgrad"], 2 * w.shape[1] + 2),
        (absolute[0].T @ absolute[1] + terms["wgrad"], len(x) + 1),
        (np.abs(g).sum(0), len(g)),
    ]


def step(arrays: Arrays, **options):
    y, vjp = jax.vjp(lambda x, w, b: dense(x, w, b, recipe=subtracting(MXFP8), **options), *arrays[:3])
    return y, *vjp(arrays.g)


def explicit(layout, mesh, arrays):
    return jax.jit(lambda arrays: step(arrays, out_sharding=layout.y))(arrays)


def specs(layout, mesh, arrays):
    return jax.jit(lambda arrays: step(arrays, specs=layout.specs))(arrays)


def shard_map(layout, mesh, arrays):
    in_specs = Arrays(layout.x, layout.w, layout.bias, layout.y)
    run = lambda arrays: step(arrays, specs=layout.specs)  # noqa: E731
    out_specs = layout.y, layout.x, layout.w, layout.bias
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs))(arrays)


def automatic(layout, mesh, arrays):
    return jax.jit(step)(arrays)


MODES = {
    "explicit": (explicit, AxisType.Explicit),
    "specs": (specs, AxisType.Auto),
    "shard_map": (shard_map, AxisType.Auto),
    "automatic": (automatic, AxisType.Auto),
}
DEFAULT_CASES = [
    ("row", "specs"),
    ("sequence to column", "shard_map"),
    ("row to sequence", "explicit"),
    ("fsdp", "automatic"),
]


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    ("layout_name", "mode"),
    [
        pytest.param(*case, marks=() if case in DEFAULT_CASES else pytest.mark.exhaustive)
        for case in itertools.product(LAYOUTS, MODES)
    ],
)
def test_a_step_on_a_mesh_subtracts_the_mean_of_all_tokens(layout_name, mode):
    layout, (run, kind), arrays = LAYOUTS[layout_name], MODES[mode], layer_arrays()
    mesh = layout.mesh(kind)
    with jax.set_mesh(mesh):
        found = run(layout, mesh, arrays.on(layout, mesh))
    placed = layout.y, layout.x, layout.w, layout.bias
    results = zip(found, dense_step(subtracting(MXFP8))(*arrays), magnitudes(*arrays), placed, strict=True)
    for a, e, (magnitude, added), spec in results:
        bound = summation_order_bound(magnitude.reshape(a.shape), added, e)
        assert (np.abs(exact(a) - exact(e)) <= bound).all()
        assert mode == "automatic" or a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


@pytest.mark.jax_versions
def test_shards_without_specs_have_means_of_their_own():
    """dw is the sum over devices, as if each multiplied its tokens alone."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
    x, w, b, g = layer_arrays()
    run = jax.shard_map(
        lambda x, w, b, g: step(Arrays(x, w, b, g)),
        mesh=mesh,
        in_specs=(P("dp"), P(), P(), P("dp")),
        out_specs=(P("dp"), P("dp"), P(), P()),
    )
    y, dx, dw, db = jax.jit(run)(x, w, b, g)
    alone = [dense_step(subtracting(MXFP8))(x[i : i + 1], w, b, g[i : i + 1]) for i in range(4)]
    assert_same_bits((y, dx), [jnp.concatenate(parts) for parts in list(zip(*alone, strict=True))[:2]])
    assert_same(dw, sum(results[2] for results in alone))
    assert_same(db, sum(results[3] for results in alone))


def test_experts_on_a_mesh_have_the_means_of_one_device():
    sizes = jnp.array([64, 32, 0, 32])
    parts = [
        [tokens(10 * seed + i, int(size), k) for i, size in enumerate(sizes) if size] for seed, k in ((0, 64), (1, 96))
    ]
    x, g = map(jnp.concatenate, parts)
    w, recipe = normal(1, (4, 64, 96)), subtracting(FP8)
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = train.Specs(P("ep", "tp"), P("ep", "tp", None), P("ep", None))
    with jax.set_mesh(mesh):
        found = vjp_of(lambda x, w: ragged_dot(x, w, sizes, recipe=recipe, specs=specs), g, x, w)
    for a, e in zip(found, vjp_of(lambda x, w: ragged_dot(x, w, sizes, recipe=recipe), g, x, w), strict=True):
        assert_same(a, e)


def with_mean(format="nvfp4", **fields) -> Cast:
    return Cast(format, subtract_mean=True, **fields)


def convolution():
    x, w = jnp.ones((1, 32, 8)), jnp.ones((32, 32, 3))
    return train.conv_general_dilated(x, w, (1,), "SAME", recipe=subtracting(MXFP8))


@pytest.mark.jax_versions
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: subtracting(NVFP4, "w"), ValueError, "w has no tokens"),
        (lambda: Recipe("qat", Gemm(with_mean(), None)), ValueError, "dgrad of qat is straight-through"),
        (
            lambda: Recipe("half", Gemm(with_mean()), Gemm(), Gemm(Cast("nvfp4"))),
            ValueError,
            "x of half has `subtract_mean` in fwd and not in wgrad",
        ),
        (
            lambda: Recipe("half", Gemm(), Gemm(Cast("nvfp4")), Gemm(None, with_mean())),
            ValueError,
            "g of half has `subtract_mean` in wgrad and not in dgrad",
        ),
        (lambda: with_mean("fp8_e4m3", delayed=Delayed()), ValueError, "delayed scaling uses the amax"),
        (lambda: Cast("nvfp4", subtract_mean=1), TypeError, "must be True or False"),
        (convolution, ValueError, "convolutions do not support"),
    ],
    ids=["w", "straight-through", "x in fwd only", "g in wgrad only", "delayed", "not a bool", "convolution"],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_forward_pass_alone_may_be_quantised():
    """An operand that is not quantised has nothing to subtract from, and no term."""
    recipe = Recipe("forward", Gemm(with_mean(), Cast("nvfp4")), Gemm(), Gemm())
    x, w, g = tokens(0, 32, 96), normal(1, (96, 48)), tokens(2, 32, 48)
    y, dx, dw = vjp_of(lambda x, w: dense(x, w, recipe=recipe), g, x, w)
    one_matmul = dataclasses.replace(subtracting(NVFP4), fwd=recipe.fwd)
    assert_same_bits(y, jax.jit(lambda x, w: dense(x, w, recipe=one_matmul))(x, w))
    assert_same(dx, exact(g) @ exact(w).T)
    assert_same(dw, exact(x).T @ exact(g))


def test_recipes_print_and_encode_mean_subtraction():
    recipe = subtracting(MXFP8, "x")
    assert "x mxfp8 1×32 mean " in str(recipe)
    assert str(recipe).count("mean") == 3  # also in its name
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize("kernel", [cast_8bit, cast_microscaled], ids=["8 bit", "microscaled"])
def test_casts_to_8_bits_and_microscaled_ones_refuse_a_mean(kernel):
    format = "fp8_e4m3" if kernel is cast_8bit else "nvfp4"
    spec = ResolvedCast.on(with_mean(format), OperandDims("mk", "m", "k")).spec((256, 256), jnp.bfloat16)
    output, mean = CastOutput(spec, contracted=1), jnp.ones((1, 256))
    plain = CastProblem((256, 256), (output,))
    assert kernel.problem_reason(plain) is None
    passed = CastArguments(mean=mean).passed
    assert kernel.problem_reason(dataclasses.replace(plain, passed_arguments=passed)) == "it does not subtract a mean"

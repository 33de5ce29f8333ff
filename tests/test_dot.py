"""dot_general and matmul with every format of either operand: float32 accumulation and one rounding."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal_by_axis
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import check_einsum
from tables import EXHAUSTIVE_ONLY_FORMATS, params_of

import scaledot as sd
from scaledot import format_variants

MXINT8 = replace(sd.FORMATS["int8"], name="mxint8", scale="float8_e8m0fnu", block=(32,), rule="floor")
CASTS = {  # name: (format, options of quantize)
    **{name: (name, {}) for name in sd.FORMATS},
    "fp8 1x128": ("fp8_e4m3", {"block": (128,)}),
    "fp8 per channel": ("fp8_e4m3", {"block": (0,)}),
    "int8 per tensor": ("int8", {"block": (0, 0)}),
    "int8 tiles": ("int8", {"block": (128,)}),
    "int8 zeros": ("int8", {"calibration": "minmax"}),
    "int8 tiles zeros": ("int8", {"block": (128,), "calibration": "minmax"}),
    "int4 groups zeros": ("int4", {"block": (32,), "calibration": "minmax"}),
    "int8 in its dtype": (format_variants.qwix.int8, {"block": (0,)}),
    "mxint8": (MXINT8, {}),
    "nvfp4 of torchao": (format_variants.torchao.nvfp4, {}),
    "nvfp4 rotated": ("nvfp4", {"rotation": sd.Hadamard()}),
    "int8 tiles rotated": ("int8", {"block": (128,), "rotation": sd.Hadamard()}),
}
# Casts that share every code path with others, tested by `make test-all` only.
EXHAUSTIVE_ONLY = [
    *EXHAUSTIVE_ONLY_FORMATS,
    *("mxint8", "int8 tiles zeros", "int4 groups zeros", "nvfp4 rotated", "int8 tiles rotated"),
    "fp8 per channel",
    "int8 per tensor",
    "int8 in its dtype",
    "nvfp4 of torchao",
]
EACH_CAST = params_of(CASTS, EXHAUSTIVE_ONLY)
# FP8 tensor cores accumulate with fewer bits than float32, which the error bounds assume.
PRECISION = "highest" if jax.default_backend() == "gpu" else None
SIDES = {"both": (True, True), "lhs": (True, False), "rhs": (False, True)}
CASES = {  # name: (einsum text, sizes); blocks are along the last contracted label
    "matrix": ("mk,kn->mn", {"m": 24, "k": 256, "n": 16}),
    "both K-major": ("mk,nk->nm", {"m": 8, "k": 256, "n": 16}),
    "batch": ("bmk,kbn->bmn", {"b": 3, "m": 4, "k": 128, "n": 8}),
    "two axes, unsorted": ("mjk,kjn->mn", {"m": 4, "j": 3, "k": 128, "n": 5}),
    "three axes": ("imjk,kjni->nm", {"m": 4, "i": 2, "j": 3, "k": 64, "n": 5}),
    "odd sizes": ("mk,kn->mn", {"m": 7, "k": 208, "n": 3}),
}


def operands(text, sizes, cast, sides, dtype=jnp.float32):
    """Operands of an einsum, quantised along the last contracted label where `sides` is True."""
    return _operands(text, tuple(sizes.items()), cast, sides, dtype)


@functools.cache
def _operands(text, sizes, cast, sides, dtype):
    sizes = dict(sizes)
    format, options = CASTS[cast]
    inputs, out = text.split("->")
    lhs = inputs.split(",")[0]
    contracted = [c for c in lhs if c not in out][-1]
    arrays = []
    for key, (labels, scaled) in enumerate(zip(inputs.split(","), sides, strict=True)):
        x = normal_by_axis(key, [sizes[c] for c in labels], dtype)
        if scaled:
            cast_options = {**options, "rotation": options.get("rotation") if all(sides) else None}
            axis = labels.index(contracted)
            if cast_options.get("block") == (0, 0):
                axis, cast_options["block"] = tuple(range(x.ndim)), (0,) * x.ndim
            x = sd.quantize(x, format, axis=axis, pad=True, **cast_options)
        arrays.append(x)
    return arrays


def numbers_of(text):
    """The dimension numbers of an einsum, and the labels of the result of dot_general."""
    lhs, rhs = text.split("->")[0].split(",")
    out = text.split("->")[1]
    contracted = [c for c in lhs if c in rhs and c not in out]
    batch = [c for c in lhs if c in rhs and c in out]
    natural = "".join(batch + [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs])
    dims = [[of.index(c) for c in labels] for labels in (contracted, batch) for of in (lhs, rhs)]
    return ((dims[0], dims[1]), (dims[2], dims[3])), natural


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cast", EACH_CAST)
def test_a_dot_is_the_float64_dot_of_dequantised_operands_rounded_once(cast, case, sides):
    text, sizes = CASES[case]
    lhs, rhs = operands(text, sizes, cast, SIDES[sides])
    numbers, natural = numbers_of(text)
    y = sd.dot_general(lhs, rhs, numbers, PRECISION)
    assert y.dtype == jnp.float32
    check_einsum(y, text.split("->")[0] + "->" + natural, lhs, rhs)


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("cast", EACH_CAST)
def test_a_bfloat16_dot_is_rounded_once(cast, sides):
    lhs, rhs = operands("mk,kn->mn", {"m": 16, "k": 256, "n": 8}, cast, SIDES[sides], jnp.bfloat16)
    y = jax.jit(lambda a, b: sd.matmul(a, b, precision=PRECISION))(lhs, rhs)
    assert y.dtype == jnp.bfloat16
    check_einsum(y, "mk,kn->mn", lhs, rhs)


@pytest.mark.parametrize("cast", EACH_CAST)
def test_operands_of_different_dtypes_promote(cast):
    lhs, rhs = operands("mk,kn->mn", {"m": 4, "k": 128, "n": 8}, cast, (False, True))
    assert sd.matmul(lhs.astype(jnp.bfloat16), rhs).dtype == jnp.float32
    y = sd.matmul(lhs.astype(jnp.float16), rhs.astype(jnp.bfloat16), preferred_element_type=jnp.float16)
    assert y.dtype == jnp.float16
    check_einsum(y, "mk,kn->mn", lhs.astype(jnp.float16), rhs)


@pytest.mark.parametrize("block", [(128, 128), (16, 16), (1, 32), (32, 1)])
@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "nvfp4", "mxfp4"])
def test_blocks_may_be_along_any_axes(format, block):
    x, w = normal_by_axis(0, (32, 256)), normal_by_axis(1, (256, 128))
    for lhs, rhs in ((sd.quantize(x, format, block=block, pad=True), sd.quantize(w, format, block=block, pad=True)),):
        check_einsum(sd.matmul(lhs, w), "mk,kn->mn", lhs, w)
        check_einsum(sd.matmul(x, rhs), "mk,kn->mn", x, rhs)


def test_different_blocks_along_k_are_retiled_where_they_nest():
    x, w = normal_by_axis(0, (8, 512)), normal_by_axis(1, (512, 8))
    pairs = [
        ("int8", 256, "int8", 128),
        ("int8", 0, "int4", 32),
        ("mxfp8", 32, "nvfp4", 16),
        ("fp8_e4m3", 128, "mxfp8", 32),
    ]
    for left, a, right, b in pairs:
        lhs, rhs = sd.quantize(x, left, block=a), sd.quantize(w, right, axis=0, block=b)
        check_einsum(sd.matmul(lhs, rhs), "mk,kn->mn", lhs, rhs)
    with pytest.raises(ValueError, match=r"blocks of 48 and of 32 .* do not nest.*int8\[8,512\].*int4\[512,8\]"):
        sd.matmul(sd.quantize(x, "int8", block=48, pad=True), sd.quantize(w, "int4", axis=0, block=32))


def test_a_tensor_scale_per_leading_index_is_kept_apart():
    w = normal_by_axis(1, (3, 64, 8)) * jnp.array([1e-3, 1.0, 1e3])[:, None, None]
    level = jnp.max(jnp.abs(w), axis=(1, 2)) / 2688
    q = sd.quantize(w, "nvfp4", axis=1, tensor_scale=level)
    x = normal_by_axis(0, (3, 5, 64))
    check_einsum(sd.matmul(x, q), "bmk,bkn->bmn", x, q)
    check_einsum(sd.einsum("mbk,bkn->mn", x.swapaxes(0, 1), q), "mbk,bkn->mn", x.swapaxes(0, 1), q)


def test_a_rotation_along_a_free_dim_is_undone():
    w = sd.quantize(normal_by_axis(1, (64, 32)), "nvfp4", rotation=sd.Hadamard())
    x = normal_by_axis(0, (8, 64))
    assert "rotated along 'n'" in sd.explain(sd.matmul, x, w)
    check_einsum(sd.matmul(x, w), "mk,kn->mn", x, sd.dequantize(w))


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        ((64,), (64, 8)),
        ((4, 64), (64,)),
        ((1, 5, 64), (3, 64, 8)),
        ((3, 5, 64), (1, 64, 8)),
        ((2, 1, 4, 64), (3, 64, 8)),
    ],
)
def test_matmul_broadcasts_as_numpy_does(lhs, rhs):
    x, w = normal_by_axis(0, lhs), normal_by_axis(1, rhs)
    q = sd.quantize(w, "mxfp8", axis=max(w.ndim - 2, 0))
    y = sd.matmul(x, q)
    assert y.shape == np.matmul(np.zeros(lhs), np.zeros(rhs)).shape
    np.testing.assert_allclose(y, np.matmul(x, sd.dequantize(q)), rtol=1e-5, atol=1e-4)


def test_numpy_arrays_and_plain_pairs_are_taken():
    x, w = np.ones((4, 64), np.float32), sd.quantize(np.ones((64, 4), np.float32), "int8", axis=0)
    np.testing.assert_array_equal(sd.matmul(x, w), np.full((4, 4), 64.0, np.float32))
    np.testing.assert_array_equal(sd.matmul(x, x.T), x @ x.T)
    assert sd.matmul(np.ones((4, 64), np.int8), w).dtype == jnp.float32


@pytest.mark.parametrize("size", [0, 1])
def test_contracting_dims_of_size_0_and_1(size):
    x, w = jnp.ones((4, size)), sd.quantize(jnp.ones((size, 3)), "int8", axis=0)
    np.testing.assert_array_equal(sd.matmul(x, w), np.full((4, 3), size, np.float32))
    np.testing.assert_array_equal(sd.matmul(sd.quantize(x, "int8"), w), np.full((4, 3), size, np.float32))


def test_integer_accumulation_is_exact_where_float32_is_not():
    x = jnp.full((1, 4096), 127.0).at[0, 0].set(126.0)
    q = sd.quantize(x, "int8", scale=jnp.ones((1, 1)))
    y = sd.matmul(q, q.T)
    assert float(y[0, 0]) == np.float32(127**2 * 4095 + 126**2)


@pytest.mark.parametrize("zeros", [(True, True), (True, False), (False, False)])
def test_integer_accumulators_do_not_overflow(zeros):
    a = np.ones((1, 140000), np.float32)
    a[0, 0] = 0
    lhs, rhs = (sd.quantize(a, "int8", calibration="minmax" if z else "absmax") for z in zeros)
    np.testing.assert_allclose(sd.matmul(lhs, rhs.T), [[139999.0]], rtol=1e-3)


@pytest.mark.parametrize("cast", ["fp8_e4m3", "fp8 1x128", "int8", "int8 tiles", "int8 tiles zeros", "nvfp4", "mxfp8"])
@pytest.mark.parametrize(("left", "right"), [(1e37, 1e-20), (1e-30, 1e28), (1e-14, 1e-15), (1e18, 1e17)])
def test_products_of_large_and_small_scales_do_not_overflow(cast, left, right):
    format, options = CASTS[cast]
    lhs = sd.quantize(left * normal_by_axis(0, (4, 256)) / 64, format, **options)
    rhs = sd.quantize(right * normal_by_axis(1, (256, 4)) / 64, format, axis=0, **options)
    check_einsum(sd.matmul(lhs, rhs), "mk,kn->mn", lhs, rhs)


@pytest.mark.parametrize("cast", ["mxfp8", "nvfp4", "int8", "int8 tiles", "nf4"])
def test_an_empty_contracting_dim_gives_zeros(cast):
    format, options = CASTS[cast]
    q = sd.quantize(jnp.ones((0, 4)), format, axis=0, pad=True, **options)
    for lhs in (jnp.ones((3, 0)), q.T[:3]):
        np.testing.assert_array_equal(sd.matmul(lhs, q), np.zeros((3, 4)))


def test_float64_results_accumulate_in_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)))
        w = sd.quantize(jnp.asarray(np.random.default_rng(1).normal(size=(64, 8)), jnp.float32), "int8", axis=0)
        expected = np.asarray(x) @ np.asarray(sd.dequantize(w, jnp.float32), np.float64)
        np.testing.assert_allclose(sd.matmul(x, w), expected, rtol=1e-6, atol=1e-6)
        y = sd.matmul(x.astype(jnp.float32), w, preferred_element_type=jnp.float64)
        assert y.dtype == jnp.float64


# ------------------------------------------------------------------------------------------------ transformations

LEAN = ["fp8_e4m3", "mxfp8", "nvfp4", "int8", "int8 tiles", "int8 tiles zeros", "nf4"]
EACH_LEAN = params_of(LEAN, ["fp8_e4m3", "int8 tiles", "nf4"])


@pytest.mark.parametrize("cast", EACH_LEAN)
def test_vmap_and_scan_are_loops(cast):
    x = normal_by_axis(0, (3, 4, 256))
    _, w = operands("mk,kn->mn", {"m": 1, "k": 256, "n": 8}, cast, (False, True))
    loop = jnp.stack([sd.matmul(row, w) for row in x])
    np.testing.assert_allclose(jax.vmap(lambda row: sd.matmul(row, w))(x), loop, rtol=1e-6, atol=1e-5)
    _, scanned = jax.lax.scan(lambda c, row: (c, sd.matmul(row, w)), 0, x)
    np.testing.assert_allclose(scanned, loop, rtol=1e-6, atol=1e-5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), w, w, w)
    np.testing.assert_allclose(jax.vmap(sd.matmul)(x, stacked), loop, rtol=1e-6, atol=1e-5)
    format, options = CASTS[cast]
    rows = jax.vmap(lambda row: sd.quantize(row, format, pad=True, **options))(x)
    both = jnp.stack([sd.matmul(jax.tree.map(lambda leaf, i=i: leaf[i], rows), w) for i in range(3)])
    np.testing.assert_allclose(jax.vmap(sd.matmul, in_axes=(0, None))(rows, w), both, rtol=1e-6, atol=1e-5)


# Each formulation of a matmul once, each dtype several times.
GRADIENTS = [("fp8_e4m3", jnp.bfloat16), ("mxfp8", jnp.float32), ("nvfp4", jnp.bfloat16), ("nf4", jnp.float32)]
GRADIENTS += [("int8", jnp.float32), ("int8 tiles", jnp.bfloat16), ("int8 tiles zeros", jnp.float32)]


# If one operand is rotated, both are, and so both are scaled.
@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        pytest.param(
            c, dtype, marks=() if (c, dtype) in GRADIENTS else pytest.mark.exhaustive, id=f"{c}-{dtype.__name__}"
        )
        for c in CASTS
        for dtype in (jnp.bfloat16, jnp.float32)
        if "rotated" not in c
    ],
)
def test_the_gradient_of_the_plain_operand_treats_the_scaled_one_as_a_constant(cast, dtype):
    for sides, text, wrt in ((SIDES["rhs"], "mn,kn->mk", 0), (SIDES["lhs"], "mk,mn->kn", 1)):
        lhs, rhs = operands("mk,kn->mn", {"m": 8, "k": 128, "n": 16}, cast, sides)
        plain, constant = ((lhs, rhs), (rhs, lhs))[wrt]
        plain = plain.astype(dtype)
        g = normal_by_axis(2, (8, 16), dtype)

        def multiply(x, constant=constant, wrt=wrt):
            pair = (x, constant) if wrt == 0 else (constant, x)
            return sd.matmul(*pair, preferred_element_type=dtype)

        _, pullback = jax.vjp(jax.jit(multiply), plain)
        (gradient,) = pullback(g)
        assert gradient.dtype == dtype
        check_einsum(gradient, text, *((g, constant) if wrt == 0 else (constant, g)))
        _, tangent = jax.jvp(multiply, (plain,), (plain,))
        np.testing.assert_array_equal(tangent, multiply(plain))


def test_residuals_are_codes_not_dequantised_values():
    w = sd.quantize(normal_by_axis(1, (64, 32)), "int8", axis=0)
    _, pullback = jax.vjp(lambda x: sd.matmul(x, w), normal_by_axis(0, (8, 64)))
    residuals = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", None) == (64, 32)]
    assert residuals
    assert all(leaf.dtype == jnp.int8 for leaf in residuals)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "mxfp8"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_gradient_of_a_scaled_operand_raises(name, wrap):
    x, w = normal_by_axis(0, (4, 32)), sd.quantize(normal_by_axis(1, (32, 8)), name, axis=0)
    with pytest.raises(TypeError, match=r"a ScaledArray is a constant.*\[32,8\]"):
        jax.grad(wrap(lambda w: sd.matmul(x, w).sum()), allow_int=True)(w)


def shard_divisible(mesh, x, spec):
    def place(leaf):
        fits = [s if s and n % mesh.shape[s] == 0 else None for s, n in zip(spec, leaf.shape, strict=False)]
        return jax.device_put(leaf, NamedSharding(mesh, P(*fits[: leaf.ndim])))

    return jax.tree.map(place, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("cast", EACH_LEAN)
def test_sharded_operands(cast, kind):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    layouts = [
        (("a", None), (None, "b"), P("a", "b")),
        (("b", "a"), ("a", None), P("b", None)),
        ((None, "b"), ("b", "a"), P(None, "a")),
    ]
    for sides in SIDES.values():
        lhs, rhs = operands("mk,kn->mn", {"m": 8, "k": 512, "n": 16}, cast, sides)
        for lhs_spec, rhs_spec, out_spec in layouts:
            with jax.set_mesh(mesh):
                out_sharding = NamedSharding(mesh, out_spec) if kind == AxisType.Explicit else None
                sharded = shard_divisible(mesh, lhs, lhs_spec), shard_divisible(mesh, rhs, rhs_spec)
                y = jax.jit(functools.partial(sd.matmul, out_sharding=out_sharding))(*sharded)
            if out_sharding is not None:
                assert y.sharding.spec == out_spec
            check_einsum(jax.device_get(y), "mk,kn->mn", lhs, rhs)


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x = normal_by_axis(0, (8, 256))
    for cast in LEAN:
        _, w = operands("mk,kn->mn", {"m": 1, "k": 256, "n": 8}, cast, (False, True))
        run = jax.jit(jax.shard_map(sd.matmul, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")))
        check_einsum(jax.device_get(run(x, w)), "mk,kn->mn", x, w)
        lhs, _ = operands("mk,kn->mn", {"m": 8, "k": 256, "n": 8}, cast, (True, False))
        if lhs.scale.shape[0] == 8 and lhs.tensor_scale is None:  # one spec for both leaves
            check_einsum(jax.device_get(run(lhs, w)), "mk,kn->mn", lhs, w)


# ------------------------------------------------------------------------------------------------------ bad input


def test_mismatched_sizes_name_both_operands():
    with pytest.raises(
        ValueError, match=r"axis 1 of lhs has 8 elements and axis 0 of rhs has 64.*float32\[4,8\].*int8\[64,2\]"
    ):
        sd.matmul(jnp.ones((4, 8)), sd.quantize(jnp.ones((64, 2)), "int8", axis=0))


def test_a_rotation_of_one_operand_only_raises():
    x, w = jnp.ones((4, 64)), jnp.ones((64, 4))
    rotated = sd.quantize(w, "nvfp4", axis=0, rotation=sd.Hadamard())
    for lhs in (x, sd.quantize(x, "nvfp4")):
        with pytest.raises(ValueError, match=r"rhs was rotated before it was quantised and lhs was not"):
            sd.matmul(lhs, rotated)
    other = sd.quantize(x, "nvfp4", rotation=sd.Hadamard(mask=1))
    with pytest.raises(ValueError, match="different rotations"):
        sd.matmul(other, rotated)


def test_a_scale_that_does_not_match_its_data_raises():
    q = sd.quantize(jnp.ones((64, 4)), "mxfp8", axis=0)
    with pytest.raises(
        ValueError, match=r"`rhs.scale` has shape \(1, 4\), but blocks of \(32, 1\) cut \(64, 4\) into \(2, 4\)"
    ):
        sd.matmul(jnp.ones((2, 64)), replace(q, scale=q.scale[:1]))
    with pytest.raises(TypeError, match=r"`lhs.data` is int8"):
        sd.matmul(replace(q.T, data=q.T.data.astype(jnp.int8)), jnp.ones((64, 2)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((object(), jnp.ones(3)), {}, TypeError, "`lhs` must be a ScaledArray or an array"),
        ((jnp.ones(3, jnp.complex64), jnp.ones(3)), {}, TypeError, "real numbers"),
        ((jnp.ones(()), jnp.ones(3)), {}, ValueError, "at least one axis"),
        (
            (jnp.ones(3), sd.quantize(jnp.ones(3), "int8")),
            {"preferred_element_type": jnp.int32},
            TypeError,
            "float dtype",
        ),
        ((jnp.ones(3), sd.quantize(jnp.ones(3), "int8")), {"preferred_element_type": "wide"}, TypeError, "not a dtype"),
        (
            (jnp.ones(3), sd.quantize(jnp.ones(3), "int8")),
            {"kernel": "xla_intger"},
            ValueError,
            "did you mean xla_integer",
        ),
        (
            (jnp.ones(3), sd.quantize(jnp.ones(3), "int8")),
            {"kernel": "xla_integer"},
            NotImplementedError,
            "not integer codes",
        ),
    ],
)
def test_wrong_arguments_raise_errors_that_name_them(arguments, options, error, message):
    with pytest.raises(error, match=message):
        sd.matmul(*arguments, **options)


@pytest.mark.parametrize("k", params_of((1, 2, 3, 5, 6, 7, 33, 44), (2, 5, 7, 33)))
@pytest.mark.parametrize("calibration", ["absmax", "minmax"])
def test_integer_sums_of_any_length(calibration, k):
    """XLA's GPU backend returns twice the result of some short int8 matmuls, with and without fused casts."""

    @jax.jit
    def cast_and_multiply(a, b):
        x, w = (sd.quantize(array, "int8", axis=0, calibration=calibration) for array in (a, b))
        return sd.dot_general(x, w, (((0,), (0,)), ((), ())), kernel="xla_integer"), x, w

    y, x, w = cast_and_multiply(normal_by_axis(0, (k, 16)), normal_by_axis(1, (k, 16)))
    check_einsum(y, "km,kn->mn", x, w)

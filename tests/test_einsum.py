"""einsum of scaled and plain operands: any number of them, ellipses, diagonals, reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal_by_axis
from reference import check_einsum
from test_dot import EACH_CAST, SIDES, operands

import scaledot as sd


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("cast", EACH_CAST)
def test_every_format_on_either_side(cast, sides):
    text, sizes = "bmk,hkd->bhmd", {"b": 2, "m": 3, "k": 128, "h": 4, "d": 5}
    lhs, rhs = operands(text, sizes, cast, SIDES[sides])
    y = sd.einsum(text, lhs, rhs)
    check_einsum(y, text, lhs, rhs)


@pytest.mark.parametrize("name", ["mxfp8", "int8", "nvfp4"])
def test_more_operands_are_contracted_in_pairs_and_rounded_once(name):
    x, w = normal_by_axis(0, (4, 64), jnp.bfloat16), normal_by_axis(1, (64, 32), jnp.bfloat16)
    v = normal_by_axis(2, (32, 8), jnp.bfloat16)
    qw, qv = sd.quantize(w, name, axis=0), sd.quantize(v, name, axis=0)
    y = jax.jit(lambda *a: sd.einsum("mk,kn,nj->jm", *a))(x, qw, qv)
    assert y.dtype == jnp.bfloat16
    check_einsum(y, "mk,kn,nj->jm", x, qw, qv)
    four = sd.einsum("mk,kn,nj,m->j", x, qw, qv, jnp.ones(4, jnp.bfloat16), preferred_element_type=jnp.float32)
    check_einsum(four, "mk,kn,nj,m->j", x, qw, qv, jnp.ones(4, jnp.bfloat16))


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("...k,kn->...n", ((2, 3, 64), (64, 8))),
        ("...mk,...kn->...mn", ((2, 1, 3, 64), (5, 64, 8))),
        ("...k,...kn", ((4, 64), (4, 64, 8))),
        ("b...k,nk...->n...b", ((2, 3, 64), (8, 64, 3))),
        ("mk,kn", ((4, 64), (64, 8))),
        ("mk,nk", ((4, 64), (8, 64))),
    ],
)
def test_ellipses_and_implicit_results_follow_numpy(text, shapes):
    x, w = (normal_by_axis(key, shape) for key, shape in enumerate(shapes))
    q = sd.quantize(w, "mxfp8", axis=w.shape.index(64))
    expected = np.einsum(text, x, sd.dequantize(q))
    y = sd.einsum(text, x, q)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "text", ["ij->ji", "ii->i", "ii->", "ij->i", "ij,k->k", "ij,j->i", "ii,ij->j", "ij,ij->", "ij,ik->ijk"]
)
def test_operands_with_diagonals_or_labels_of_their_own_are_dequantised(text):
    q = sd.quantize(normal_by_axis(0, (32, 32)), "mxfp8")
    rest = [normal_by_axis(1, (32,) * len(labels)) for labels in text.split("->")[0].split(",")[1:]]
    check_einsum(sd.einsum(text, q, *rest), text, q, *rest)


def test_axes_of_size_1_broadcast_as_in_numpy():
    q = sd.quantize(normal_by_axis(0, (4, 5)), "int8", axis=0)
    np.testing.assert_allclose(
        sd.einsum("ij,jk->ik", jnp.ones((3, 1)), q),
        np.einsum("ij,jk->ik", np.ones((3, 1)), sd.dequantize(q)),
        rtol=1e-5,
    )


@pytest.mark.parametrize("text", ["ij->", "ij,jk->k", "ii->i"])
def test_the_gradient_of_a_scaled_operand_raises(text):
    q = sd.quantize(normal_by_axis(0, (32, 32)), "mxfp8")
    rest = [jnp.ones((32, 3))] if "," in text else []
    with pytest.raises(TypeError, match="a ScaledArray is a constant"):
        jax.grad(lambda q: jnp.sum(sd.einsum(text, q, *rest)))(q)


def test_one_operand_has_no_matmul():
    q = sd.quantize(normal_by_axis(0, (32, 32)), "mxfp8")
    assert sd.explain(sd.einsum, "ij->j", q) == "no matmul and no cast"
    with pytest.raises(ValueError, match="an einsum of one operand has no matmul"):
        sd.einsum("ij->j", q, kernel="xla_codes")
    with pytest.raises(TypeError, match="must be a float dtype"):
        sd.einsum("ij->j", q, preferred_element_type=jnp.int32)


def test_a_path_of_numpy_is_followed():
    q = sd.quantize(normal_by_axis(0, (4, 5)), "int8", axis=0)
    path = ["einsum_path", (1, 2), (0, 1)]
    check_einsum(
        sd.einsum("ij,jk,kl->il", jnp.ones((3, 4)), q, jnp.ones((5, 2)), optimize=path),
        "ij,jk,kl->il",
        jnp.ones((3, 4)),
        q,
        jnp.ones((5, 2)),
    )


def test_mismatched_sizes_of_a_label_raise():
    q = sd.quantize(jnp.ones((64, 4)), "int8", axis=0)
    with pytest.raises(ValueError, match=r"'k' of 'mk,kn->mn' is 8 and 64.*float32\[2,8\].*int8\[64,4\]"):
        sd.einsum("mk,kn->mn", jnp.ones((2, 8)), q)


def test_integer_operands_with_scaled_ones():
    q = sd.quantize(normal_by_axis(0, (8, 3)), "int8", axis=0)
    a, b = (jax.random.randint(jax.random.key(key), shape, -5, 6) for key, shape in ((1, (2, 4)), (2, (4, 8))))
    check_einsum(sd.einsum("ij,jk,kl->il", a, b, q), "ij,jk,kl->il", a, b, q)
    np.testing.assert_array_equal(sd.einsum("ij,jk", a, b), np.einsum("ij,jk", a, b))
    assert sd.matmul(jnp.ones((2, 8), jnp.bfloat16), jnp.ones((8, 2))).dtype == jnp.float32


def test_explain_lists_the_kernel_of_each_pair():
    q = sd.quantize(jnp.ones((64, 32)), "int8", axis=0)
    text = sd.explain(sd.einsum, "mk,kn,nj->mj", jnp.ones((4, 64), jnp.bfloat16), q, jnp.ones((32, 8)))
    assert text.count("selected") == 2


def test_plain_operands_have_gradients():
    x, v = normal_by_axis(0, (4, 64)), normal_by_axis(2, (32, 8))
    q = sd.quantize(normal_by_axis(1, (64, 32)), "nvfp4", axis=0)
    with jax.default_matmul_precision("highest"):  # a pair of plain operands follows the caller's default
        ours = jax.grad(lambda x, v: jnp.sum(sd.einsum("mk,kn,nj->mj", x, q, v) ** 2), argnums=(0, 1))(x, v)
    w = sd.dequantize(q)
    with jax.default_matmul_precision("highest"):
        theirs = jax.grad(lambda x, v: jnp.sum(jnp.einsum("mk,kn,nj->mj", x, w, v) ** 2), argnums=(0, 1))(x, v)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))


def test_an_axis_of_one_int8_operand_is_not_reduced_in_int8():
    q = sd.quantize(jnp.ones((3, 4)), "int8", axis=0)
    y = sd.einsum("ijk,jl->il", jnp.full((2, 3, 200), 100, jnp.int8), q)
    np.testing.assert_allclose(y, np.full((2, 4), 200 * 100 * 3), rtol=1e-6)

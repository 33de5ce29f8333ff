"""Contractions as label strings, parsed from dimension numbers, shapes and einsum subscripts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaledot.contraction import Contraction, for_matmul, from_dimension_numbers, labels, parse_einsum


def test_contracting_axes_keep_their_pairs():
    c = from_dimension_numbers((((1, 2), (2, 1)), ((), ())), 3, 3)
    assert (c.lhs, c.rhs, c.out) == ("abc", "dcb", "ad")
    (lhs, rhs), _ = c.dimension_numbers
    assert dict(zip(lhs, rhs, strict=True)) == {1: 2, 2: 1}


def test_batch_axes_come_first_in_the_order_of_dimension_numbers():
    c = from_dimension_numbers((((3,), (0,)), ((2, 0), (1, 3))), 4, 4)
    assert c.out[:2] == c.lhs[2] + c.lhs[0] == c.rhs[1] + c.rhs[3]
    assert c.dimension_numbers == (((3,), (0,)), ((2, 0), (1, 3)))


@given(st.permutations("bmk"), st.permutations("bkn"), st.permutations("bmn"))
def test_dgrad_contracts_n_and_wgrad_contracts_m(lhs, rhs, out):
    fwd = Contraction("".join(lhs), "".join(rhs), "".join(out))
    assert (fwd.contracting, fwd.batch, fwd.lhs_free, fwd.rhs_free) == ("k", "b", "m", "n")
    assert (fwd.dgrad.contracting, fwd.dgrad.out) == ("n", fwd.lhs)
    assert (fwd.wgrad.contracting, fwd.wgrad.out) == ("m", fwd.rhs)
    assert fwd.dgrad.dgrad == fwd
    assert fwd.wgrad.wgrad == fwd


def test_more_axes_than_letters_have_labels():
    many = labels(200, "abc")
    assert len(set(many)) == 200
    assert not set(many) & set("abc")


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((3,), (3,)), "k,k->"),
        (((3,), (3, 4)), "k,kn->n"),
        (((2, 3), (3,)), "mk,k->m"),
        (((5, 2, 3), (3, 4)), "amk,kn->amn"),
        (((5, 2, 3), (6, 1, 3, 4)), "bmk,abkn->abmn"),
    ],
)
def test_matmul_follows_numpy(shapes, expected):
    c = for_matmul(*shapes)
    assert f"{c.lhs},{c.rhs}->{c.out}" == expected


@pytest.mark.parametrize(
    ("text", "ndims", "expected"),
    [
        ("ij,jk->ki", (2, 2), (["ij", "jk"], "ki")),
        ("ij, jk", (2, 2), (["ij", "jk"], "ik")),
        ("...ij,...jk->...ik", (3, 4), (["bij", "abjk"], "abik")),
        ("...,...", (1, 2), (["b", "ab"], "ab")),
    ],
)
def test_einsum_subscripts_are_expanded(text, ndims, expected):
    assert parse_einsum(text, ndims) == expected


@pytest.mark.parametrize(
    ("text", "ndims", "message"),
    [
        ("ij,jk->ik", (2,), "has 2 operands, but 1 were passed"),
        ("ij->i", (3,), "names 2 axes of an operand that has 3"),
        ("ijk...->i", (2,), "names 3 axes of an operand that has 2"),
        ("ij->ik", (2,), "which no operand has"),
        ("ij->ii", (2,), "names a label twice"),
        ("i1->i", (2,), "labels are letters"),
        ("i....->i", (3,), "may only occur as one"),
    ],
)
def test_invalid_einsum_subscripts_are_refused(text, ndims, message):
    with pytest.raises(ValueError, match=message):
        parse_einsum(text, ndims)


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ((((1,), (0, 1)), ((), ())), ValueError, "as many axes of lhs as of rhs"),
        ((((5,), (0,)), ((), ())), ValueError, "which has axes 0 to 1"),
        ((((1, 1), (0, 1)), ((), ())), ValueError, "twice"),
        (((1,), (0,)), TypeError, "four sequences of axes"),
    ],
)
def test_invalid_dimension_numbers_are_refused(numbers, error, message):
    with pytest.raises(error, match=message):
        from_dimension_numbers(numbers, 2, 2)

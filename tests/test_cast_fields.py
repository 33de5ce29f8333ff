"""Cast kernels and the fields of a Format: a kernel returns a reason, or codes bit-identical to the reference."""

import dataclasses

import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

import scaledot as sd
from scaledot.formats import E8M0_RULES, FLOAT_RULES, NF4_CODEBOOK, TWO_LEVEL_RULES, Format, Quirks
from scaledot.kernels.hopper import cast_8bit, cast_microscaled

pytestmark = pytest.mark.jax_versions

# Values of every field. A new field needs values here, and a decision in `SUPPORTED_FIELDS` of the cast kernels.
VALUES = {
    "name": ("another",),
    "element": ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float6_e2m3fn", "int8", "int4", "uint4"),
    "scale": ("float32", "bfloat16", "float8_e8m0fnu", "float8_e4m3fn", "input"),
    "block": (None, (0,), (16,), (24,), (32,), (64,), (128,), (16, 16), (24, 24), (32, 32), (128, 128)),
    "rule": (*E8M0_RULES, *FLOAT_RULES, *TWO_LEVEL_RULES),
    "pow2": (False, True),
    "codebook": (NF4_CODEBOOK,),
    "bound": ("full", "half"),
    "two_level": (False, True),
    "guard": (False, True),
    "search": (None, "four_over_six", "scales"),
    "target": (None, 4.0),
    "scale_max": (448.0, 256.0),
    "grids": (None, ("float4_e2m1fn", "int4")),
    "quirks": (),  # see QUIRKS
}
QUIRKS = {
    "divide": True,
    "own_dtype": True,
    "zero_first": True,
    "scales_first": True,
    "unsigned_zero": True,
    "log2_pow2": True,
    "least_amax": 1e-4,
    "least_scale": 0.01,
    "empty_scale": "eps",
}
# For each kind of cast, a format and its block; SUPPORTED lists the values of VALUES that the kernel also supports.
KINDS = {
    "one scale": (sd.FORMATS["fp8_e4m3"], None),
    "1x128": (sd.FORMATS["int8"], (128,)),
    "128x128": (sd.FORMATS["fp8_e4m3"], (128, 128)),
    "mxfp8": (sd.FORMATS["mxfp8"], (32,)),
    "nvfp4": (sd.FORMATS["nvfp4"], (16,)),
}
_8BIT = {
    "name": ("another",),
    "element": ("float8_e4m3fn", "float8_e5m2", "int8"),
    "rule": FLOAT_RULES,
    "pow2": (True,),
    "bound": ("half",),
}
SUPPORTED = {
    "one scale": _8BIT | {"block": ((128,), (128, 128))},
    "1x128": _8BIT | {"block": (None, (128, 128))},
    "128x128": _8BIT | {"block": (None, (128,))},
    "mxfp8": {"name": ("another",), "element": ("float8_e5m2",), "rule": E8M0_RULES, "block": ((32, 32),)},
    "nvfp4": {"name": ("another",), "block": ((16, 16),)},
}


def variants(kind: str) -> list[tuple[str, object, Format, tuple | None]]:
    """Returns (field, value, format, block) for each value of each field that differs from the format of this kind."""
    format, block = KINDS[kind]
    rows = [
        (field, value, dataclasses.replace(format, **{field: value}), value if field == "block" else block)
        for field, values in VALUES.items()
        for value in values
        if value != (block if field == "block" else getattr(format, field))
    ]
    quirks = ((field, value, Quirks(**{field: value})) for field, value in QUIRKS.items())
    return rows + [(f, value, dataclasses.replace(format, quirks=quirk), block) for f, value, quirk in quirks]


def both_outputs(format: Format, block):
    """Returns the row-wise and the column-wise cast that training requests."""
    from benchmarks.gpu.cast import MatrixCast

    free, contracting = (1, *((0, 0) if block is None else block))[-2:]
    rowwise = MatrixCast(format, (free, contracting), 1, is_residual=True)
    return rowwise, MatrixCast(format, (contracting, free), 0, is_residual=True)


def reason_of(case) -> str | None:
    """Returns why no kernel supports a case, or None."""
    problems = case.problems(jnp.ones((256, 256), case.dtype))
    reasons = [(cast_8bit.problem_reason(p), cast_microscaled.problem_reason(p)) for p in problems]
    return next((f"{first}; {second}" for first, second in reasons if first and second), None)


def test_every_field_of_a_format_has_values_here():
    assert set(VALUES) == {field.name for field in dataclasses.fields(Format)}
    assert set(QUIRKS) == {field.name for field in dataclasses.fields(Quirks)}
    assert all(value != getattr(Quirks(), field) for field, value in QUIRKS.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_cast_kernel_returns_a_reason_for_unsupported_fields(kind):
    from benchmarks.gpu import cast

    supported = SUPPORTED[kind]
    for field, value, format, block in variants(kind):
        reason = reason_of(cast.Case("", jnp.bfloat16, both_outputs(format, block)))
        group_reason = reason_of(cast.GroupCase("", jnp.bfloat16, both_outputs(format, block)[:1]))
        assert (reason is None) == (value in supported.get(field, ())), (field, value, reason)
        assert reason is None or group_reason is not None, (field, value)


# Casts that have every supported value of a field between them, except for those of `benchmarks.gpu.cast.CASES`, which
# test_hopper_casts compares with the reference.
CHECKED = [
    ("one scale", {"rule": "amax_over_f", "pow2": True}),
    ("1x128", {"rule": "f_over_amax", "bound": "half"}),
    ("mxfp8", {"element": "float8_e5m2", "rule": "floor", "block": (32, 32)}),
    ("mxfp8", {"rule": "even"}),
    ("mxfp8", {"rule": "even1"}),
    ("mxfp8", {"rule": "ceil_log2"}),
]


def test_every_supported_value_of_a_field_is_compared_with_the_reference():
    from benchmarks.gpu import cast

    checked: dict[str, set] = {"name": {"another"}}
    for kind, fields in CHECKED:
        _, block = KINDS[kind]
        for field, value in {"block": block, **fields}.items():
            checked.setdefault(field, set()).add(value)
    for output in (output for case in cast.CASES for output in case.casts):
        for field in ("element", "rule", "pow2", "bound"):
            checked.setdefault(field, set()).add(getattr(output.format, field))
        checked["block"] |= {None if output.tile == (0, 0) else tuple(b for b in output.tile if b > 1)}
    for fields in SUPPORTED.values():
        supported = {(field, value) for field, values in fields.items() for value in values}
        assert not {(field, value) for field, value in supported if value not in checked[field]}


@needs_mosaic
@pytest.mark.parametrize(("kind", "fields"), CHECKED)
def test_casts_with_supported_fields_are_bit_identical_to_the_reference(hopper, kind, fields):
    from benchmarks.gpu import cast

    format, block = KINDS[kind]
    outputs = both_outputs(dataclasses.replace(format, **fields), fields.get("block", block))
    cast.check(cast.Case(format.name, jnp.bfloat16, outputs if "block" in fields else outputs[:1]), (104, 128))

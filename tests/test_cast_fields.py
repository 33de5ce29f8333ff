"""Cast kernels and the fields of a format: each is refused with a reason, or computed to the bits of the reference."""

import dataclasses

import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

import scaledot as sd
from scaledot.formats import E8M0_RULES, FLOAT_RULES, NF4_CODEBOOK, TWO_LEVEL_RULES, Format, Quirks
from scaledot.kernels.hopper import cast_8bit, cast_microscaled

pytestmark = pytest.mark.jax_versions

# Values of every field. A new field needs values here, and a decision in `COMPUTED` of the cast kernels.
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
    "search": (None, "four_over_six"),
    "quirks": (),  # by its own fields
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
# A format of each cast kernel and its blocks there; then what of all of the above the kernel computes.
KERNELS = {
    "one scale": (sd.FORMATS["fp8_e4m3"], None),
    "lines": (sd.FORMATS["int8"], (128,)),
    "squares": (sd.FORMATS["fp8_e4m3"], (128, 128)),
    "mxfp8": (sd.FORMATS["mxfp8"], (32,)),
    "nvfp4": (sd.FORMATS["nvfp4"], (16,)),
}
_TILES = {
    "name": ("another",),
    "element": ("float8_e4m3fn", "float8_e5m2", "int8"),
    "rule": FLOAT_RULES,
    "pow2": (True,),
    "bound": ("half",),
}
COMPUTED = {
    "one scale": _TILES | {"block": ((128,), (128, 128))},
    "lines": _TILES | {"block": (None, (128, 128))},
    "squares": _TILES | {"block": (None, (128,))},
    "mxfp8": {"name": ("another",), "element": ("float8_e5m2",), "rule": E8M0_RULES, "block": ((32, 32),)},
    "nvfp4": {"name": ("another",), "block": ((16, 16),)},
}


def changed(kernel: str) -> list[tuple[str, object, Format, tuple | None]]:
    """(field, value, format, block) for every value of every field that differs from the kernel's format."""
    row, block = KERNELS[kernel]
    rows = [
        (field, value, dataclasses.replace(row, **{field: value}), value if field == "block" else block)
        for field, values in VALUES.items()
        for value in values
        if value != (block if field == "block" else getattr(row, field))
    ]
    quirks = ((field, value, Quirks(**{field: value})) for field, value in QUIRKS.items())
    return rows + [(f, value, dataclasses.replace(row, quirks=quirk), block) for f, value, quirk in quirks]


def wanted(row: Format, block):
    """Both orientations, as training asks for them."""
    from benchmarks.gpu.cast import MatrixCast

    kept, summed = sd.Cast(row, (0, 0) if block is None else block).tile
    return MatrixCast(row, (kept, summed), 1, is_residual=True), MatrixCast(row, (summed, kept), 0, is_residual=True)


def reason_of(case) -> str | None:
    """Why no kernel makes what a case asks for."""
    problems = case.problems(jnp.ones((256, 256), case.dtype))
    reasons = [(cast_8bit.problem_reason(p), cast_microscaled.problem_reason(p)) for p in problems]
    return next((f"{first}; {second}" for first, second in reasons if first and second), None)


def test_every_field_of_a_format_has_values_here():
    assert set(VALUES) == {field.name for field in dataclasses.fields(Format)}
    assert set(QUIRKS) == {field.name for field in dataclasses.fields(Quirks)}
    assert all(value != getattr(Quirks(), field) for field, value in QUIRKS.items())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cast_kernel_refuses_what_it_does_not_compute(kernel):
    from benchmarks.gpu import cast

    computed = COMPUTED[kernel]
    for field, value, row, block in changed(kernel):
        reason = reason_of(cast.Case("", jnp.bfloat16, wanted(row, block)))
        in_groups = reason_of(cast.GroupCase("", jnp.bfloat16, wanted(row, block)[:1]))
        assert (reason is None) == (value in computed.get(field, ())), (field, value, reason)
        assert reason is None or in_groups is not None, (field, value)


# Casts that together have every value that is computed, but for those of `benchmarks.gpu.cast.CASES`, whose bytes
# test_hopper_kernels compares.
PROOFS = [
    ("one scale", {"rule": "amax_over_f", "pow2": True}),
    ("lines", {"rule": "f_over_amax", "bound": "half"}),
    ("mxfp8", {"element": "float8_e5m2", "rule": "floor", "block": (32, 32)}),
    ("mxfp8", {"rule": "even"}),
    ("mxfp8", {"rule": "even1"}),
    ("mxfp8", {"rule": "ceil_log2"}),
]


def test_every_value_that_a_cast_kernel_accepts_is_held_to_the_reference():
    from benchmarks.gpu import cast

    proven: dict[str, set] = {"name": {"another"}}
    for kernel, fields in PROOFS:
        _, block = KERNELS[kernel]
        for field, value in {"block": block, **fields}.items():
            proven.setdefault(field, set()).add(value)
    for output in (output for case in cast.CASES for output in case.casts):
        for field in ("element", "rule", "pow2", "bound"):
            proven.setdefault(field, set()).add(getattr(output.format, field))
        proven["block"] |= {None if output.tile == (0, 0) else tuple(b for b in output.tile if b > 1)}
    for fields in COMPUTED.values():
        computed = {(field, value) for field, values in fields.items() for value in values}
        assert not {(field, value) for field, value in computed if value not in proven[field]}


@needs_mosaic
@pytest.mark.parametrize(("kernel", "fields"), PROOFS)
def test_a_value_that_a_cast_kernel_accepts_has_the_bits_of_the_reference(hopper, kernel, fields):
    from benchmarks.gpu import cast

    row, block = KERNELS[kernel]
    made = wanted(dataclasses.replace(row, **fields), fields.get("block", block))
    cast.check(cast.Case(row.name, jnp.bfloat16, made if "block" in fields else made[:1]), (104, 128))

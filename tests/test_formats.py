"""The table of formats and the properties computed from its rows."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import scaledot as sd
from scaledot import format_variants
from scaledot.formats import rules_of

NAMES = ["fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvint4", "if4"]
NAMES += ["int8", "int7", "int6", "int5", "int4", "int3", "int2", "nf4"]


def test_names_of_the_table():
    assert list(sd.FORMATS) == NAMES


@pytest.mark.parametrize(
    ("name", "bits", "largest", "emax"),
    [
        ("fp8_e4m3", 8, 448, 8),
        ("fp8_e5m2", 8, 57344, 15),
        ("mxfp6_e2m3", 6, 7.5, 2),
        ("mxfp6_e3m2", 6, 28, 4),
        ("mxfp4", 4, 6, 2),
        ("int8", 8, 127, 6),
        ("int4", 4, 7, 2),
        ("int3", 3, 3, 1),
        ("nf4", 4, 1, 0),
        ("if4", 4, 6, 2),
    ],
)
def test_bits_maximum_and_exponent_of_elements(name, bits, largest, emax):
    row = sd.FORMATS[name]
    assert (row.bits, row.max, row.emax) == (bits, largest, emax)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mxfp8", 8.25),
        ("nvfp4", 4.5),
        ("nvint4", 4.5),
        ("if4", 4.5),
        ("nf4", 4.5),
        ("fp8_e4m3", 8.0),
        ("mxfp6_e2m3", 6.25),
    ],
)
def test_bits_per_element_include_the_scale(name, expected):
    assert sd.FORMATS[name].bits_per_element == expected


def test_half_bound_maps_amax_half_a_step_higher():
    half = dataclasses.replace(sd.FORMATS["int8"], bound="half")
    assert (half.max, half.integer_range) == (127.5, (-128, 127))
    assert sd.FORMATS["int8"].integer_range == (-127, 127)


def test_a_misspelt_name_lists_the_nearest():
    with pytest.raises(ValueError, match=r"`format` 'mxpf8' is not in FORMATS; did you mean 'mxfp8'"):
        sd.find_format("mxpf8")
    with pytest.raises(TypeError, match=r"`format` must be a Format or one of the names"):
        sd.find_format(8)  # pyright: ignore[reportArgumentType]


def test_rows_are_immutable():
    row = sd.FORMATS["mxfp8"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.rule = "floor"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        sd.FORMATS["new"] = row  # pyright: ignore[reportIndexIssue]
    assert hash(dataclasses.replace(row)) == hash(row)


@pytest.mark.parametrize("name", NAMES)
def test_each_row_uses_a_rule_of_its_scale_dtype(name):
    row = sd.FORMATS[name]
    assert row.rule in rules_of(row)


def test_each_variant_uses_a_rule_of_its_scale_dtype():
    libraries = [
        format_variants.torchao,
        format_variants.compressed_tensors,
        format_variants.deepgemm,
        format_variants.modelopt,
        format_variants.te_jax,
    ]
    rows = [row for library in libraries for row in vars(library).values()]
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.rule in rules_of(row) for row in rows)


def test_formats_need_no_jax():
    code = "import sys; sys.modules['jax'] = None; import scaledot.formats as f; print(f.FORMATS['nvfp4'].max)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "6.0"


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_stored_in_a_numpy_dtype_of_one_byte(name):
    row = sd.FORMATS[name]
    assert row.code_dtype.itemsize == 1
    assert isinstance(row.code_dtype, np.dtype)

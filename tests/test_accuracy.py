"""Signal-to-noise ratio of float formats, int8, int4 and nf4 on 1024 x 1024 tensors, against independent values.

The SNRs were computed in numpy, without this library, by two programs with equal results: one rounds by casts of
ml_dtypes, the other searches the nearest representable value. The tolerances were chosen with them, before this code
was measured. Entries are left out where one extreme element
of the sample determines the SNR (integers per tensor or row on heavy-tailed data); these formats are tested against the
variance of uniform rounding noise instead. Rotated formats are 4-bit ones only: scaledot rounds to bfloat16 before and
after a rotation, which the independent implementations do not, and that is measurable in 8-bit formats.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import scaledot as sd
from benchmarks import snr as snr_benchmark

pytestmark = pytest.mark.optimized  # casts millions of elements, which is too slow under `--compilation cheap`

FORMATS = sd.FORMATS
SR = {"rounding": "stochastic", "key": jax.random.key(1)}
MINMAX = {"calibration": "minmax"}
ROTATED = {"rotation": sd.Hadamard()}
FP8_POW2 = replace(FORMATS["fp8_e4m3"], pow2=True)
FOUR_OVER_SIX = replace(FORMATS["nvfp4"], search="four_over_six")
SEARCHED = replace(FORMATS["nvfp4"], search="scales")

TABLE = [  # name, format, options, then SNR in dB on N(0, 1), Laplace, Student-t3
    ("int8 block128", FORMATS["int8"], {"block": 128}, 43.80, 41.01, 37.29),
    ("int8 asym block128", FORMATS["int8"], {"block": 128, **MINMAX}, 44.57, 42.26, 40.05),
    ("mxint8", replace(FORMATS["int8"], scale="float8_e8m0fnu", rule="floor", block=(32,)), {}, 41.66, 40.05, 38.08),
    ("fp8 e4m3", FORMATS["fp8_e4m3"], {}, 31.56, 31.54, 31.52),
    ("fp8 e4m3 pow2", FP8_POW2, {}, 31.51, 31.53, 31.50),
    ("fp8 e4m3 scale 1", FORMATS["fp8_e4m3"], {"scale": 1.0}, 31.51, 31.53, 31.50),
    ("fp8 e4m3 per row", FORMATS["fp8_e4m3"], {"block": 0}, 31.56, 31.65, 32.19),
    ("fp8 e4m3 1x128", FORMATS["fp8_e4m3"], {"block": 128}, 31.79, 32.10, 33.00),
    ("fp8 e4m3 1x128 pow2", FP8_POW2, {"block": 128}, 31.51, 31.53, 31.50),
    ("fp8 e4m3 128x128", FORMATS["fp8_e4m3"], {"block": (128, 128)}, 31.54, 31.54, 31.75),
    ("mxfp8 floor", FORMATS["mxfp8"], {"rule": "floor"}, 30.65, 30.05, 29.49),
    ("mxfp8", FORMATS["mxfp8"], {}, 31.51, 31.53, 31.50),
    ("fp8 e5m2", FORMATS["fp8_e5m2"], {}, 25.58, 25.56, 25.55),
    ("mxfp8 e5m2", FORMATS["mxfp8_e5m2"], {}, 25.55, 25.56, 25.55),
    ("mxfp6 e2m3", FORMATS["mxfp6_e2m3"], {}, 30.95, 30.26, 29.18),
    ("mxfp6 e3m2", FORMATS["mxfp6_e3m2"], {}, 25.55, 25.56, 25.54),
    ("mxfp4 floor", FORMATS["mxfp4"], {"rule": "floor"}, 18.79, 17.99, 17.00),
    ("mxfp4 ceil", FORMATS["mxfp4"], {"rule": "ceil"}, 18.76, 17.57, 16.44),
    ("mxfp4", FORMATS["mxfp4"], {}, 19.03, 18.16, 17.15),
    ("mxfp4 mse", FORMATS["mxfp4"], {"calibration": "mse"}, 19.05, 18.25, 17.27),
    ("mxfp4 ceil stochastic", FORMATS["mxfp4"], {"rule": "ceil", **SR}, 15.67, 14.49, 13.27),
    ("nvfp4", FORMATS["nvfp4"], {}, 20.43, 20.66, 20.84),
    ("nvfp4 one level", replace(FORMATS["nvfp4"], two_level=False), {}, 20.43, 20.66, 20.84),
    ("nvfp4 16x16", FORMATS["nvfp4"], {"block": (16, 16)}, 19.07, 17.77, 14.82),
    ("nvfp4 four over six", FOUR_OVER_SIX, {}, 21.21, 21.20, 21.21),
    ("nvfp4 four over six 16x16", FOUR_OVER_SIX, {"block": (16, 16)}, 19.07, 17.77, 14.83),
    ("nvfp4 scale search", SEARCHED, {}, 21.81, 21.68, 21.55),
    ("nvfp4 stochastic", FORMATS["nvfp4"], SR, 17.25, 17.38, 17.44),
    ("nvfp4 stochastic guard", replace(FORMATS["nvfp4"], guard=True), SR, 16.28, 16.05, 15.68),
    ("nvint4", FORMATS["nvint4"], {}, 21.28, 19.78, 18.83),
    ("if4", FORMATS["if4"], {}, 22.11, 21.55, 21.41),
    ("nf4", FORMATS["nf4"], {}, 20.72, 19.70, 18.17),
    ("int4 block32", FORMATS["int4"], {"block": 32}, 20.27, 18.35, 16.81),
    ("int4 block128", FORMATS["int4"], {"block": 128}, 18.63, 15.93, 12.97),
    ("int4 asym block32", FORMATS["int4"], {"block": 32, **MINMAX}, 21.86, 20.51, 19.81),
    ("int4 asym block128", FORMATS["int4"], {"block": 128, **MINMAX}, 19.96, 17.71, 15.64),
    ("int8 per row", FORMATS["int8"], {}, 42.12, None, None),
    ("int4 per row", FORMATS["int4"], {}, 16.95, None, None),
    ("nvfp4 rotated", FORMATS["nvfp4"], ROTATED, 20.43, 20.35, 20.12),
    ("int4 block32 rotated", FORMATS["int4"], {"block": 32, **ROTATED}, 20.27, 20.38, 20.76),
    ("nf4 rotated", FORMATS["nf4"], ROTATED, 20.73, 20.70, 20.51),
]
# Rows that only `--all` runs: variants of rows that always run, element types (E5M2, FP6) whose codes test_encode
# tests exhaustively, and searched scales that test_scale_search compares with numpy bit for bit.
RUN_BY_ALL_ONLY = (
    *("fp8 e4m3 pow2", "fp8 e4m3 scale 1", "fp8 e4m3 per row", "fp8 e4m3 1x128 pow2", "fp8 e5m2", "mxfp8 e5m2"),
    *("mxfp6 e3m2", "mxfp4 floor", "mxfp4 ceil", "nvfp4 one level", "nvfp4 four over six 16x16", "nvfp4 stochastic"),
    *("int4 block128", "int4 asym block128", "int4 per row", "int4 block32 rotated", "nf4 rotated"),
    *("fp8 e4m3 128x128", "mxfp6 e2m3", "mxfp4", "mxfp4 ceil stochastic", "int4 block32"),
    *("nvfp4 four over six", "nvint4", "if4"),
)
TOLERANCE = {"normal": 0.05, "laplace": 0.1, "student": 0.3}
LOOSE = {"int8 per row", "int4 per row"}  # 0.25 dB: the scale depends on one extreme element


@pytest.fixture(scope="module")
def tensors():
    """Three samples of each distribution: their mean SNR depends less on the extremes of one sample."""
    rng = np.random.default_rng(0)
    shape = (3, 1024, 1024)
    drawn = rng.standard_normal(shape), rng.laplace(size=shape), rng.standard_t(3, size=shape)
    return dict(zip(TOLERANCE, (x.astype(np.float32) for x in drawn), strict=True))


def snr_of(x, format, options):
    values = np.asarray(sd.dequantize(sd.quantize(x, format, **options)), np.float64)
    return 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum((x - values) ** 2))


def snr(samples, format, options):
    return np.mean([snr_of(x, format, options) for x in samples])


@pytest.mark.parametrize(
    ("name", "format", "options", "expected"),
    [
        pytest.param(*row[:3], row[3:], id=row[0], marks=[pytest.mark.exhaustive] if row[0] in RUN_BY_ALL_ONLY else [])
        for row in TABLE
    ],
)
def test_snr_equals_that_of_independent_implementations(tensors, name, format, options, expected):
    for (distribution, x), decibels in zip(tensors.items(), expected, strict=True):
        if decibels is not None:
            tolerance = 0.25 if name in LOOSE else TOLERANCE[distribution]
            assert snr(x, format, options) == pytest.approx(decibels, abs=tolerance), distribution


@pytest.mark.parametrize("name", ["normal", "laplace", "student"])
@pytest.mark.parametrize("bits", [8, 7, 6])
def test_integer_formats_have_uniform_rounding_noise(tensors, name, bits):
    """The noise power is step^2 / 12 if the step is small compared with the data."""
    x = tensors[name][0] if name != "student" else np.clip(tensors[name][0], -8, 8)
    step = np.abs(x).max() / (2 ** (bits - 1) - 1)
    expected = 10 * np.log10(np.mean(x.astype(np.float64) ** 2) / (step**2 / 12))
    assert snr_of(x, FORMATS[f"int{bits}"], {"block": (0, 0)}) == pytest.approx(
        expected, abs=0.25 if bits == 8 else 0.5
    )


@pytest.mark.parametrize(
    ("format", "options", "expected"),
    [
        ("int8", {"block": 128}, 44.56),
        ("int8", {"block": 128, **MINMAX}, 50.61),
        ("int4", {"block": 32}, 21.36),
        ("int4", {"block": 32, **MINMAX}, 28.00),
        ("int4", {"block": 128}, 19.38),
        ("int4", {"block": 128, **MINMAX}, 26.00),
        ("nvfp4", {}, 21.32),
        ("mxfp4", {"rule": "ceil"}, 18.95),
        ("mxfp8", {}, 31.52),
    ],
)
def test_snr_of_nonnegative_data_with_and_without_zero_points(tensors, format, options, expected):
    assert snr(np.maximum(tensors["normal"], 0), FORMATS[format], options) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("sigma", [1e4, 1.0, 1e-3, 1e-8])
@pytest.mark.parametrize(
    ("format", "low", "high"),
    [
        ("fp8_e4m3", 31.55, 31.55),
        ("mxfp8", 31.51, 31.56),
        ("mxfp4", 18.9, 19.1),
        ("nvfp4", 20.43, 20.43),
        ("nf4", 20.72, 20.72),
        ("int8", 42.12, 42.12),
    ],
)
def test_accuracy_does_not_depend_on_magnitude(tensors, format, low, high, sigma):
    tolerance = 0.25 if format == "int8" else 0.05
    got = snr(tensors["normal"] * np.float32(sigma), FORMATS[format], {})
    assert low - tolerance <= got <= high + tolerance


def test_nvfp4_of_small_tensors_needs_the_tensor_scale(tensors):
    """Without a tensor scale, an E4M3 block scale of 1e-4 underflows to 0."""
    x = tensors["normal"] * np.float32(1e-3)
    assert snr(x, replace(FORMATS["nvfp4"], two_level=False), {}) < 1
    assert snr(x, FORMATS["nvfp4"], {}) > 20.3


def test_the_docs_have_the_snrs_of_the_results():
    root = Path(__file__).parents[1]
    (results,) = (root / "benchmarks" / "results").glob("snr-*.json")
    guide = (root / "docs" / "howto" / "quantize.md").read_text()
    for row in json.loads(results.read_text())["rows"]:
        if row["format"] in snr_benchmark.FORMATS:
            assert f"| {' | '.join(f'{decibels:.2f}' for decibels in row['snr_db'].values())} |" in guide, row["format"]

"""Formats with the arithmetic of other libraries, as rows of the table.

Codes and scales of `torchao`, `compressed_tensors` and `deepgemm` are bit-identical to those that the libraries compute
(`tests/test_golden.py`). Those of `qwix` agree with Qwix up to rounding (`tests/test_compat_qwix.py`). Those of
`modelopt` and `te_jax` (TransformerEngine/JAX) were not compared.

Loading a checkpoint never quantises again, so a variant is only needed to write codes for that library or to compare
with its results. Each is a `dataclasses.replace` of a row of FORMATS:

>>> from scaledot import format_variants
>>> format_variants.torchao.nvfp4
Format('torchao.nvfp4')
"""

from dataclasses import replace
from types import SimpleNamespace

from scaledot.formats import FORMATS, Format, Quirks


def _variants(library: str, **rows: Format) -> SimpleNamespace:
    return SimpleNamespace(**{name: replace(row, name=f"{library}.{name}") for name, row in rows.items()})


_FP8 = FORMATS["fp8_e4m3"]
_NVFP4 = FORMATS["nvfp4"]

_TORCHAO_TRAINING = Quirks(least_amax=1e-12, log2_pow2=True)

torchao = _variants(
    "torchao",
    fp8_training=replace(_FP8, quirks=_TORCHAO_TRAINING),
    fp8_training_e5m2=replace(FORMATS["fp8_e5m2"], quirks=_TORCHAO_TRAINING),
    fp8=replace(_FP8, rule="amax_over_f", quirks=Quirks(divide=True)),
    nvfp4=replace(_NVFP4, rule="divide_divide", quirks=Quirks(least_scale=2.0**-6, scales_first=True)),
    nvfp4_single_level=replace(_NVFP4, rule="divide_divide", two_level=False, quirks=Quirks(least_scale=2.0**-6)),
)

deepgemm = _variants(
    "deepgemm",
    fp8=replace(_FP8, block=(128,), rule="amax_over_f", quirks=Quirks(least_amax=1e-4)),
    fp8_ue8m0=replace(_FP8, block=(128,), rule="amax_over_f", pow2=True, quirks=Quirks(least_amax=1e-4)),
)

modelopt = _variants(
    "modelopt",
    nvfp4=replace(
        _NVFP4,
        rule="divide_by_product",
        quirks=Quirks(divide=True, scales_first=True, least_scale=2.0**-9, empty_scale=1.0, unsigned_zero=True),
    ),
)

# Scales are stored in the dtype of the weights, and x / scale (+ zero point) is rounded to it as well.
_IN_MODEL_DTYPE = Quirks(divide=True, own_dtype=True, zero_first=True, empty_scale="eps")


def _ct_integer(bits: int) -> Format:
    return replace(FORMATS[f"int{bits}"], scale="input", bound="half", quirks=_IN_MODEL_DTYPE)


compressed_tensors = _variants(
    "compressed_tensors",
    **{f"int{bits}": _ct_integer(bits) for bits in range(2, 9)},
    fp8=replace(_FP8, scale="input", rule="amax_over_f", quirks=_IN_MODEL_DTYPE),
    nvfp4=replace(_NVFP4, rule="round_divide_multiply", quirks=Quirks(divide=True, empty_scale=0.125)),
    mxfp8=replace(FORMATS["mxfp8"], rule="even1"),
    mxfp6=replace(FORMATS["mxfp6_e2m3"], rule="even"),
    mxfp4=FORMATS["mxfp4"],
)

# As compressed-tensors, except that a block of zeros has scale 1. MX scales are powers of two in the input dtype.
_IN_INPUT_DTYPE = Quirks(divide=True, own_dtype=True, zero_first=True)


def _qwix(row: Format, **changed) -> Format:
    return replace(row, scale="input", block=None, rule="amax_over_f", quirks=_IN_INPUT_DTYPE, **changed)


_FLOAT8 = (
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e3m4",
    "float8_e4m3",  # IEEE 754: its largest number is 240, below which infinity and NaN have codes of their own
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
)

qwix = _variants(
    "qwix",
    **{f"int{bits}": _qwix(FORMATS[f"int{bits}"], bound="half") for bits in range(2, 9)},
    **{f"uint{bits}": _qwix(Format("", f"uint{bits}"), bound="half") for bits in (4, 8)},
    **{element: _qwix(Format("", element)) for element in _FLOAT8},
    float4_e2m1fn=_qwix(FORMATS["mxfp4"]),
    mxfp8=_qwix(FORMATS["mxfp8"], pow2=True),
    mxfp4=_qwix(FORMATS["mxfp4"], pow2=True),
    nf4=_qwix(FORMATS["nf4"]),
)

te_jax = _variants("te_jax", nvfp4=replace(_NVFP4, rule="divide_multiply"))

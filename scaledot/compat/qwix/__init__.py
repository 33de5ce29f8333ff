"""Drop-in replacement of Qwix 0.1.8: QArray, quantisation functions, operators, quantised training and whole models.

    from scaledot.compat import qwix          # instead of: import qwix

Names, argument order and numerics are Qwix's: it quantises in the input's dtype, and integer formats clip at
half-integer bounds. Known defects of Qwix are not reproduced: negative axes are honoured; int32 accumulators are
scaled in float32 (Qwix rounds them to bfloat16 first); sub-channel matmuls do not materialise the partial accumulators
of all tiles at once; nf4 works in ragged_dot; mismatched dims raise; and a float16 array does not become zeros because
its scale is below 2^-7.

Scales of mxfp8 and mxfp4 are the smallest power of two 2^e for which no element saturates, with e read from the bits of
amax / F (F = 448 or 6), so that equal bfloat16 and float32 arrays have equal scales. Qwix computes e = ceil(log2(amax /
F)) in the dtype of the array. A bfloat16 log2 has 8 significant bits: for amax / F between 2^-32 and 2^-16, which is
usual for gradients, it is a multiple of 1/8, and a ratio of up to 1.044 times a power of two is rounded down to it. The
largest elements of such a block then saturate. For amax = 1.8203125 * 2^-12 Qwix's scale is 2^-20 and the largest
element is dequantised 3.9% too small; here the scale is 2^-19.

Names of `qwix` are here, and so are those of its core modules (`qwix._src.core`) that models and libraries use; public
names that are not provided raise an error that says what to use instead. `quantize` is Qwix's function of arguments,
and also takes a HowToQuantize as second argument. `to_qwix` and `from_qwix` convert to and from the real `qwix.QArray`.
"""

from scaledot.compat import hints
from scaledot.compat.qwix.array import (
    MaybeQArray,
    QArray,
    ShapeT,
    broadcast_to,
    call_with_generic_broadcast,
    get_tiled_axes,
    reshape,
    rewriting_take,
    split_axis,
    transpose_array,
    validate_qarray,
)
from scaledot.compat.qwix.convert import from_qwix, to_qwix
from scaledot.compat.qwix.model import quantize_model
from scaledot.compat.qwix.operators import (
    conv_general_dilated,
    dot,
    dot_general,
    einsum,
    get_accumulator_and_result_type,
    ragged_dot,
    ragged_dot_general,
)
from scaledot.compat.qwix.ptq import quantize_params
from scaledot.compat.qwix.qt import conv_general_qt, dot_general_qt, einsum_qt, ragged_dot_qt
from scaledot.compat.qwix.qt_config import ConvGeneralQtConfig, DotGeneralQtConfig, RaggedDotQtConfig
from scaledot.compat.qwix.quantizers import (
    HowToQuantize,
    calibrate,
    clip_gradient_to_calibration,
    clip_to_calibration,
    compute_scale_zero_point,
    dequantize,
    get_scale_shape,
    quantize_api,
    quantize_with_scale_zero_point,
)
from scaledot.compat.qwix.rules import PtqProvider, QtProvider, QtRule, QuantizationProvider, QuantizationRule
from scaledot.compat.qwix.stochastic_rounding import get_noise_fn
from scaledot.compat.qwix.unsupported import INSTEAD

__all__ = [
    "ConvGeneralQtConfig",
    "DotGeneralQtConfig",
    "HowToQuantize",
    "MaybeQArray",
    "PtqProvider",
    "QArray",
    "QtProvider",
    "QtRule",
    "QuantizationProvider",
    "QuantizationRule",
    "RaggedDotQtConfig",
    "ShapeT",
    "broadcast_to",
    "calibrate",
    "call_with_generic_broadcast",
    "clip_gradient_to_calibration",
    "clip_to_calibration",
    "compute_scale_zero_point",
    "conv_general_dilated",
    "conv_general_qt",
    "dequantize",
    "dot",
    "dot_general",
    "dot_general_qt",
    "einsum",
    "einsum_qt",
    "from_qwix",
    "get_accumulator_and_result_type",
    "get_noise_fn",
    "get_scale_shape",
    "get_tiled_axes",
    "quantize",
    "quantize_api",
    "quantize_model",
    "quantize_params",
    "quantize_with_scale_zero_point",
    "ragged_dot",
    "ragged_dot_general",
    "ragged_dot_qt",
    "reshape",
    "rewriting_take",
    "split_axis",
    "to_qwix",
    "transpose_array",
    "validate_qarray",
]

quantize = quantize_api  # the name under which Qwix exports it
__getattr__ = hints.module_getattr("Qwix", INSTEAD, __name__)

"""Drop-in replacement of Qwix 0.1.8's QArray, quantisation functions and operators.

    from scaledot.compat import qwix          # instead of: import qwix

Names, argument order and numerics are Qwix's: it quantises in the input's dtype, and integer formats clip at
half-integer bounds. Known defects of Qwix are not reproduced: negative axes are honoured; int32 accumulators are
scaled in float32 (Qwix rounds them to bfloat16 first); sub-channel matmuls do not materialise the partial accumulators
of all tiles at once; nf4 works in ragged_dot; mismatched dims raise; and a float16 array does not become zeros because
its scale is below 2^-7.

`to_qwix` and `from_qwix` convert to and from the real `qwix.QArray`. Qwix's providers and rules, which rewrite models,
are not part of this module.
"""

from scaledot.compat.qwix.array import (
    MaybeQArray,
    QArray,
    ShapeT,
    call_with_generic_broadcast,
    get_tiled_axes,
    reshape,
    rewriting_take,
    split_axis,
    transpose_array,
    validate_qarray,
)
from scaledot.compat.qwix.convert import from_qwix, to_qwix
from scaledot.compat.qwix.operators import (
    conv_general_dilated,
    dot_general,
    einsum,
    get_accumulator_and_result_type,
    ragged_dot,
    ragged_dot_general,
)
from scaledot.compat.qwix.quantizers import (
    HowToQuantize,
    calibrate,
    clip_gradient_to_calibration,
    clip_to_calibration,
    compute_scale_zero_point,
    dequantize,
    get_scale_shape,
    quantize,
    quantize_api,
    quantize_with_scale_zero_point,
)

__all__ = [
    "HowToQuantize",
    "MaybeQArray",
    "QArray",
    "ShapeT",
    "calibrate",
    "call_with_generic_broadcast",
    "clip_gradient_to_calibration",
    "clip_to_calibration",
    "compute_scale_zero_point",
    "conv_general_dilated",
    "dequantize",
    "dot_general",
    "einsum",
    "from_qwix",
    "get_accumulator_and_result_type",
    "get_scale_shape",
    "get_tiled_axes",
    "quantize",
    "quantize_api",
    "quantize_with_scale_zero_point",
    "ragged_dot",
    "ragged_dot_general",
    "reshape",
    "rewriting_take",
    "split_axis",
    "to_qwix",
    "transpose_array",
    "validate_qarray",
]

"""Qwix's public names that scaledot does not provide, with their replacements."""

_LORA = "quantise the frozen kernels with quantize_params, and add the low-rank matmuls to the model"
_ODML = "it converts models for LiteRT; scaledot targets XLA"
_CHECKPOINT = (
    "store the pytree of quantize_params, whose arrays any checkpoint library takes, and `rules` as Python code"
)

INSTEAD = {
    "BoxedParamProvider": "use PtqProvider",
    "LoraProvider": _LORA,
    "LoraRule": _LORA,
    "apply_lora_to_model": _LORA,
    "OdmlConversionProvider": _ODML,
    "OdmlQatProvider": _ODML + "; train with QtProvider",
    "QuantStat": "static activation ranges are not collected; use act_calibration_method='fixed,8' or 'rms,6'",
    "contrib": "use scaledot.quantize(x, format, calibration='mse') for weights, and rotation=Hadamard() for outliers",
    "pallas": "kernels are chosen by scaledot.matmul and scaledot.dot_general; see scaledot.explain",
    "process_prequantized_params": _CHECKPOINT,
    "restore_quantization_rules": _CHECKPOINT,
}

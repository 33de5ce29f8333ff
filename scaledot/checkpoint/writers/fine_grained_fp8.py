"""Writes Hugging Face's `fp8`: E4M3 codes with one scale per block of a matrix, or one per tensor."""

from typing import Any

from scaledot.array import ScaledArray
from scaledot.checkpoint.writers.parts import (
    E8M0,
    Contents,
    Part,
    Written,
    array_part,
    matrix_block,
    module_of,
    scale_part,
    shared,
    unsupported,
)

_LAYOUT = "hf-fp8"
_SUPPORTED = "float8_e4m3fn codes with one scale per tensor or per 2-D block"


def plan(contents: Contents) -> Written:
    weights = contents.weights
    blocks = {name: _block(name, q) for name, q in weights.items()}
    shared({name: f"blocks of {blocks[name]} and {q.scale.dtype} scales" for name, q in weights.items()}, _LAYOUT)
    block = next(iter(blocks.values()), None)
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": _activation_scheme(contents),
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": contents.unquantized,
    }
    if any(q.scale.dtype == E8M0 for q in weights.values()):
        config["scale_fmt"] = "ue8m0"
    return Written({name: _parts(name, q, block) for name, q in weights.items()}, config if weights else None)


def _activation_scheme(contents: Contents) -> str:
    """There is no weight-only scheme: activations without static scales are quantised at run time."""
    modes = {contents.activations_of(name, ".activation_scale") for name in contents.weights}
    return "static" if modes == {"static"} else "dynamic"


def _block(name: str, q: ScaledArray) -> tuple[int, int] | None:
    rows, inputs = matrix_block(name, q, _LAYOUT)
    if q.format.element != "float8_e4m3fn" or q.tensor_scale is not None:
        raise unsupported(name, q, _LAYOUT, _SUPPORTED)
    if rows == inputs == 0:
        return None
    if rows == 0 or inputs == 0:
        raise unsupported(name, q, _LAYOUT, _SUPPORTED)
    return rows, inputs


def _parts(name: str, q: ScaledArray, block: tuple[int, int] | None) -> list[Part]:
    scale_name = f"{module_of(name)}.weight_scale_inv"
    return [
        array_part(name, q.data, lambda q: q.data),
        scale_part(scale_name, q, () if block is None else None),
    ]

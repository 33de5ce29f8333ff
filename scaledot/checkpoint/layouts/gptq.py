"""GPTQ: `X.qweight` (inputs packed in int32 words, outputs), `X.scales`, `X.qzeros` and `X.g_idx` (groups, outputs).

Codes and zero points are dense little-endian bit streams of unsigned integers; both are shifted to signed ones. Files
of version 1 (`checkpoint_format` "gptq") store zero points minus 1, modulo 2^bits; files of "gptq_v2" store them as
they are. `g_idx` has the group of each input. If it is not sorted (`desc_act`), the weight is a `Permuted` array, whose
inputs are in the order of their groups.
"""

import numpy as np

from scaledot.array import ScaledArray
from scaledot.checkpoint import lazy
from scaledot.checkpoint.errors import CheckpointError, quoted
from scaledot.checkpoint.forms import Permuted
from scaledot.checkpoint.layouts.building import format_of, scaled
from scaledot.checkpoint.layouts.settings import group_size, setting
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.source import Source
from scaledot.checkpoint.tensors import Tensors

RESERVED = (".qweight", ".qzeros", ".scales", ".g_idx")


def matches(source: Source) -> bool:
    return source.quantization.get("quant_method") == "gptq"


def weights(tensors: Tensors) -> dict[str, ScaledArray | Permuted]:
    source = tensors.source
    bits = setting(source, "bits", among=(2, 3, 4, 8), default=None)
    group = group_size(source, "group_size")
    version = setting(source, "checkpoint_format", "format", among=("gptq", "gptq_v2"), default="gptq")
    setting(source, "is_marlin_format", among=(False,), default=False)
    setting(source, "pack_dtype", among=("int32", "torch.int32"), default="int32")
    _check_not_dynamic(source)
    return {
        f"{module}.weight": _weight(tensors, module, bits, group, is_v1=version == "gptq")
        for module in tensors.ending(".qweight")
    }


def _check_not_dynamic(source: Source) -> None:
    """Raises if modules have settings of their own; keys that begin with "-" only exclude modules."""
    dynamic = source.quantization.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(key.startswith("-") for key in dynamic):
        raise CheckpointError(source.path, f"`dynamic` settings of modules are not supported: {quoted(dynamic)}")


def _weight(tensors: Tensors, module: str, bits: int, group: int, is_v1: bool) -> ScaledArray | Permuted:
    name = f"{module}.qweight"
    words = tensors.take(name, "I32")
    if words.ndim != 2 or not words.size or words.shape[0] * 32 % bits:
        tensors.fail(name, f"the shape is {list(words.shape)}; expected [inputs * {bits} / 32, outputs]")
    inputs, outputs = words.shape[0] * 32 // bits, words.shape[1]
    group = inputs if group == -1 else group
    groups = -(-inputs // group)
    scale = tensors.take(f"{module}.scales", "F16", "BF16", "F32", shape=(groups, outputs), required_by=name)
    format = format_of(f"int{bits}", scale.dtype)
    codes = lazy.bit_stream(words, bits, inputs, format.code_dtype, axis=0, offset=-(2 ** (bits - 1))).T
    zeros_shape = (groups, -(-outputs * bits // 32))
    zeros = tensors.take(f"{module}.qzeros", "I32", shape=zeros_shape, required_by=name)
    zero = _zero_points(zeros, bits, outputs, format.code_dtype, is_v1).T
    permutation = _permutation(tensors, module, inputs, group)
    if permutation is not None:
        codes = lazy.take(codes, permutation, axis=1)
    array = scaled(codes, scale.T, format, (group,), tensors.model_dtype(), zero=zero)
    return array if permutation is None else Permuted(array, lazy.constant(permutation))


def _zero_points(words: LazyArray, bits: int, outputs: int, dtype: np.dtype, is_v1: bool) -> LazyArray:
    stored = lazy.bit_stream(words, bits, outputs, np.uint8, axis=1)
    half, mask = 2 ** (bits - 1), np.uint8(2**bits - 1)

    def signed(zeros: np.ndarray) -> np.ndarray:
        zeros = (zeros + np.uint8(is_v1)) & mask
        return (zeros.astype(np.int16) - half).astype(np.int8).astype(dtype)

    return stored.map(signed, dtype)


def _permutation(tensors: Tensors, module: str, inputs: int, group: int) -> np.ndarray | None:
    """The order of inputs that sorts them by group; None if they are sorted."""
    name = f"{module}.g_idx"
    if name not in tensors and not setting(tensors.source, "desc_act", among=(True, False), default=False):
        return None
    group_of_input = tensors.take(name, "I32", "I64", shape=(inputs,), required_by=f"{module}.qweight").numpy()
    permutation = np.argsort(group_of_input, kind="stable").astype(np.int32)
    expected = np.arange(inputs) // group
    if not np.array_equal(group_of_input[permutation], expected):
        tensors.fail(name, f"the groups do not have {group} inputs each")
    return None if np.array_equal(group_of_input, expected) else permutation

"""`pack-quantized` of compressed-tensors: integers of 2 to 8 bits in int32 words, with optional zero points.

Codes are q + 2^(b-1) in a dense little-endian bit stream along the inputs; `X.weight_shape` has the number of inputs.
Zero points are packed in the same way along the outputs. Older releases padded words of 3-, 5-, 6- and 7-bit codes
instead of splitting codes between words; such rows have more words, which is an error.
"""

import ml_dtypes
import numpy as np

from scaledot import format_variants
from scaledot.checkpoint import lazy
from scaledot.checkpoint.layouts.building import with_rank
from scaledot.checkpoint.layouts.compressed_tensors_config import Scheme
from scaledot.checkpoint.lazy import LazyArray
from scaledot.checkpoint.tensors import Tensors
from scaledot.formats import Format

_WORD_BITS = 32


def words(count: int, bits: int) -> int:
    """The number of int32 words of `count` codes."""
    return -(-count * bits // _WORD_BITS)


def declared_shape(tensors: Tensors, module: str) -> tuple[int, ...]:
    """The shape of a weight in `X.weight_shape`, which is checked against that of its words."""
    name, packed_name = f"{module}.weight_shape", f"{module}.weight_packed"
    packed_shape = tensors.info(packed_name).shape
    if name not in tensors:
        tensors.fail(packed_name, f"{name!r}, which belongs to it, is missing")
    stored = tensors.info(name)
    if stored.dtype not in ("I64", "I32") or stored.shape != (len(packed_shape),):
        tensors.fail(name, f"expected {len(packed_shape)} integers, not {stored.dtype}{list(stored.shape)}")
    shape = tuple(int(size) for size in stored.array(tensors.source.reader).numpy())
    if shape[:-1] != packed_shape[:-1] or shape[-1] < 0:
        tensors.fail(name, f"{list(shape)} does not fit codes of shape {list(packed_shape)}")
    return shape


def unpacked(tensors: Tensors, module: str, packed: LazyArray, scheme: Scheme) -> tuple[LazyArray, Format]:
    """The codes in the words of `X.weight_packed`, and their format."""
    name = f"{module}.weight_packed"
    inputs = declared_shape(tensors, module)[-1]
    tensors.take(f"{module}.weight_shape")
    bits = scheme.bits if scheme.bits is not None else _only_bits(tensors, name, inputs, packed.shape[-1])
    if packed.shape[-1] != words(inputs, bits):
        tensors.fail(
            name,
            f"rows have {packed.shape[-1]} words; {inputs} codes of {bits} bits take {words(inputs, bits)} words",
        )
    format = getattr(format_variants.compressed_tensors, f"int{bits}")
    if bits == 4 and inputs == 8 * packed.shape[-1]:
        # An offset of 8 is the sign bit inverted, so that bytes of the file become bytes of two int4 codes.
        twos_complement = lazy.octets(packed).map(lambda octets: octets ^ np.uint8(0x88), np.uint8)
        return lazy.nibbles(twos_complement, ml_dtypes.int4), format
    return lazy.bit_stream(packed, bits, inputs, format.code_dtype, offset=-_half(bits)), format


def _only_bits(tensors: Tensors, name: str, inputs: int, found: int) -> int:
    """The bits of codes without a configuration, from the number of words in a row."""
    fitting = [bits for bits in range(2, 9) if words(inputs, bits) == found]
    if len(fitting) != 1:
        tensors.fail(name, f"without a configuration, rows of {found} words do not tell the bits of {inputs} codes")
    return fitting[0]


def zero_point(
    tensors: Tensors, module: str, scale_shape: tuple[int, ...], scheme: Scheme, format: Format
) -> LazyArray | None:
    """The zero points of a weight of any integer format: int8, or packed along the outputs; None if there are none."""
    name = f"{module}.weight_zero_point"
    if scheme.is_symmetric and name not in tensors:
        return None
    if name in tensors and tensors.info(name).dtype == "I8":
        zero = with_rank(tensors.take(name), len(scale_shape))
        if zero.shape != scale_shape:
            tensors.fail(name, f"the shape is {list(zero.shape)}; its scales have shape {list(scale_shape)}")
        return zero
    *leading, outputs, groups = scale_shape
    packed_shape = (*leading, words(outputs, format.bits), groups)
    packed = tensors.take(name, "I32", "I8", shape=packed_shape, required_by=f"{module}.weight_scale")
    return lazy.bit_stream(packed, format.bits, outputs, format.code_dtype, axis=-2, offset=-_half(format.bits))


def _half(bits: int) -> int:
    return 2 ** (bits - 1)

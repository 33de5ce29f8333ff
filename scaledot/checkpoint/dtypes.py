"""The dtypes of safetensors files.

Sub-byte dtypes (F4, F6) have logical shapes in the header and packed bytes in the file.
"""

from types import MappingProxyType

import ml_dtypes
import numpy as np

DTYPES = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "I16": np.dtype(np.int16),
        "U16": np.dtype(np.uint16),
        "I32": np.dtype(np.int32),
        "U32": np.dtype(np.uint32),
        "I64": np.dtype(np.int64),
        "U64": np.dtype(np.uint64),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F32": np.dtype(np.float32),
        "F64": np.dtype(np.float64),
        "C64": np.dtype(np.complex64),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
        "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
        "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    }
)
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_SUB_BYTE_BITS = {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}


def bits(name: str) -> int:
    """Bits of one element in the file.

    >>> bits("F4"), bits("BF16")
    (4, 16)
    """
    return _SUB_BYTE_BITS.get(name, 8 * DTYPES[name].itemsize)


def named(name: str | None) -> np.dtype | None:
    """The dtype of a torch dtype's name, with or without "torch."; None for names that are not float dtypes.

    >>> named("torch.bfloat16"), named("int8")
    (dtype(bfloat16), None)
    """
    torch_names = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    dtype = torch_names.get(str(name).removeprefix("torch."))
    return None if dtype is None else np.dtype(dtype)

"""Old names of renamed public API: each still works, with a DeprecationWarning that contains the new name.

All renamed public names but two, the properties `AmaxHistory.factor` and `Cast.tile`, are listed here and nowhere else.
They are removed one release later.

>>> import warnings
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     current("scale rule", "te", SCALE_RULES)
'multiply'
>>> str(caught[0].message)
"scale rule 'te' was renamed to 'multiply'; the old name will be removed in the next release"
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# Attributes of the package `scaledot`; dotted names are relative to it.
ATTRIBUTES = {
    "collective": "collective_matmul",
    "flavours": "format_variants",
    "get_scaled_dot_general_config": "compat.jax_nn.get_scaled_dot_general_config",
    "scaled_dot_general": "compat.jax_nn.scaled_dot_general",
    "scaled_matmul": "compat.jax_nn.scaled_matmul",
}
KERNELS = {
    "mosaic_cast_8bit": "hopper_cast_8bit",
    "mosaic_cast_microscaled": "hopper_cast_microscaled",
    "mosaic_float8": "hopper_fp8",
    "mosaic_grouped": "hopper_grouped",
    "mosaic_int8": "hopper_int8",
    "mosaic_values": "hopper_bf16",
    "mosaic_weight_only": "hopper_weight_only",
}
SCALE_RULES = {
    "compressed_tensors": "round_divide_multiply",
    "modelopt": "divide_by_product",
    "te": "multiply",
    "te_jax": "divide_multiply",
    "torchao": "divide_divide",
}
ARGUMENTS = {"factor": "multiplier"}


def current(kind: str, name: str, renamed: Mapping[str, str]) -> str:
    """The new name of `name`, with a warning, if it was renamed; otherwise `name`."""
    if name not in renamed:
        return name
    warn(f"{kind} {name!r} was renamed to {renamed[name]!r}")
    return renamed[name]


def warn(sentence: str, frames: int = 2) -> None:
    """Issues a DeprecationWarning that points at the caller of scaledot.

    frames: how many functions of scaledot are between that caller and this function, 1 for a property.
    """
    removal = "the old name will be removed in the next release"
    warnings.warn(f"{sentence}; {removal}", DeprecationWarning, stacklevel=2 + frames)


def accepts_renamed_arguments(function: Function) -> Function:
    """Decorator: the function also accepts the old names of its renamed keyword arguments."""

    @functools.wraps(function)
    def with_current_names(*args, **kwargs):
        for old, new in ARGUMENTS.items():
            if old in kwargs:
                warn(f"argument `{old}` of {function.__name__} was renamed to `{new}`", frames=1)
                kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return cast(Function, with_current_names)

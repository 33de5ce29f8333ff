"""conv_general_dilated on scaled and plain operands."""

import jax
from jax import lax

from scaledot.contraction import Contraction, labels
from scaledot.ops.operands import KernelChoice, as_operand, make_problem, run_problem


def conv_general_dilated(
    lhs,
    rhs,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type=None,
    *,
    out_sharding=None,
    kernel: KernelChoice = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` where either operand (image, weight) may be a ScaledArray.

    With one scale per image and per output feature, codes are convolved and scales and zero points of the image are
    applied to the result. An operand with other blocks is dequantised first.

    >>> import jax.numpy as jnp, scaledot as sd
    >>> image = jnp.arange(4.0).reshape(1, 1, 4)
    >>> weight = sd.quantize(jnp.array([[[1.0, 1.0]]]), "int8", block=(0, 0))
    >>> conv_general_dilated(image, weight, (1,), "VALID")
    Array([[[1., 3., 5.]]], dtype=float32)
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    window = {
        "window_strides": _sequence("window_strides", window_strides),
        "padding": padding
        if isinstance(padding, str)
        else tuple(_sequence("padding", p) for p in _sequence("padding", padding)),
        "lhs_dilation": None if lhs_dilation is None else _sequence("lhs_dilation", lhs_dilation),
        "rhs_dilation": None if rhs_dilation is None else _sequence("rhs_dilation", rhs_dilation),
        "dimension_numbers": numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "out_sharding": out_sharding,
    }
    problem = make_problem(
        "conv",
        _contraction_of(numbers, has_image_batch=batch_group_count == 1),
        lhs,
        rhs,
        precision=precision,
        preferred=preferred_element_type,
        lax_arguments=tuple(window.items()),
    )
    return run_problem(problem, kernel, lhs, rhs)


def _sequence(name: str, value) -> tuple:
    try:
        return tuple(value)
    except TypeError:
        what = "a pair" if name == "padding" else "one number"
        raise TypeError(f"`{name}` must hold {what} for each spatial axis, not {value!r}") from None


def _contraction_of(numbers: lax.ConvDimensionNumbers, has_image_batch: bool) -> Contraction:
    """Labels of image, weight and result; the result shares labels with an operand only for images and features."""
    spatial = len(numbers.lhs_spec) - 2
    spatial_labels = labels(3 * spatial, "gncoi")
    image = ("n" if has_image_batch else "g") + "c" + spatial_labels[:spatial]
    weight = "oi" + spatial_labels[spatial : 2 * spatial]
    result = "no" + spatial_labels[2 * spatial :]
    return Contraction(
        *(
            "".join(of[spec.index(axis)] for axis in range(len(spec)))
            for of, spec in ((image, numbers.lhs_spec), (weight, numbers.rhs_spec), (result, numbers.out_spec))
        )
    )

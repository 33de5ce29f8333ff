"""ScaledTensorFactory: tensors from codes and scales that one has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.grouped import summing_groups
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.quantize.views import (
    GroupedScaledTensor1x,
    NoScaleTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    cut_at,
    tensor_scale_of,
)
from scaledot.numerics import blocks


class ScaledTensorFactory:
    """Tensors from codes and scales that you have.

    The mode decides how they are multiplied out; a `dequantizer` is accepted and not needed.

    >>> codes, scale = jnp.ones((2, 64), jnp.float8_e4m3fn), jnp.full((2, 2), 2, jnp.float8_e8m0fnu)
    >>> tensor = ScaledTensorFactory.create(codes, scale, scaling_mode=ScalingMode.MXFP8_1D_SCALING)
    >>> tensor.dequantize()[0, :2]
    Array([2, 2], dtype=bfloat16)
    """

    @staticmethod
    def create_1x(
        data,
        scale_inv,
        amax=None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        dequantizer=None,
        dq_dtype=jnp.bfloat16,
        is_colwise: bool = False,
        data_layout: str = "N",
        flatten_axis: int = -1,
        group_sizes=None,
        original_shape: tuple[int, ...] | None = None,
        has_rht_applied: bool = False,
    ) -> Any:
        """One orientation. `flatten_axis` is that of the untransposed tensor.

        With `original_shape`, rows in groups of `group_sizes`, or one matrix per group without them.

        >>> codes = jnp.ones((3, 2), jnp.float8_e4m3fn)
        >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
        >>> turned = ScaledTensorFactory.create_1x(codes, jnp.ones(1), None, mode, is_colwise=True, data_layout="T")
        >>> turned.array.shape
        (2, 3)
        """
        if scaling_mode is ScalingMode.NO_SCALING:
            return NoScaleTensor(data, amax)
        if isinstance(dequantizer, np.dtype) or hasattr(dequantizer, "dtype"):
            raise TypeError(f"`dequantizer` is {dequantizer!r}; a dtype is given as dq_dtype=")
        how = {"scaling_mode": scaling_mode, "dq_dtype": np.dtype(dq_dtype), "is_colwise": is_colwise}
        if original_shape is not None:
            if data_layout != "N":
                raise ValueError("`data_layout` of a grouped tensor is 'N': its rows are not transposed")
            return _grouped(data, scale_inv, amax, group_sizes, tuple(original_shape), how)
        if group_sizes is not None:
            raise ValueError("`group_sizes` are given without an `original_shape`")
        _check_layout(scaling_mode, data_layout, is_colwise)
        rank = data.ndim
        cut = cut_at(flatten_axis, rank)
        layout = {"data_layout": data_layout, "flatten_axis": rank - cut if data_layout == "T" else cut, "rank": rank}
        tensor = ScaledTensor1x(data, scale_inv, amax, **how, **layout, has_rht_applied=has_rht_applied)
        _check_scale(tensor)
        return tensor

    @staticmethod
    def create_2x(data, scale_inv, colwise_data, colwise_scale_inv, *others, **options) -> ScaledTensor2x:
        """Both orientations; other arguments are those of `create`, and `data_layout` has a letter for each.

        >>> codes, scale = jnp.ones((3, 2), jnp.float8_e4m3fn), jnp.ones(1)
        >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
        >>> ScaledTensorFactory.create_2x(codes, scale, codes.T, scale, scaling_mode=mode).colwise.data.shape
        (2, 3)
        """
        both = (data, scale_inv, colwise_data, colwise_scale_inv)
        return ScaledTensorFactory.create(*both, *others, q_layout=QuantizeLayout.ROWWISE_COLWISE, **options)

    @staticmethod
    def create(
        data,
        scale_inv,
        colwise_data=None,
        colwise_scale_inv=None,
        amax=None,
        colwise_amax=None,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        dequantizer=None,
        dq_dtype=jnp.bfloat16,
        data_layout: str | None = None,
        q_layout: QuantizeLayout = QuantizeLayout.ROWWISE,
        flatten_axis: int = -1,
        group_sizes=None,
        original_shape: tuple[int, ...] | None = None,
        rowwise_has_rht_applied: bool = False,
        colwise_has_rht_applied: bool = False,
    ) -> Any:
        """A tensor in the orientations of `q_layout`; one that is colwise only may give its codes first.

        >>> codes, scale = jnp.ones((3, 2), jnp.float8_e4m3fn), jnp.ones(1)
        >>> how = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING, "q_layout": QuantizeLayout.COLWISE}
        >>> ScaledTensorFactory.create(codes, scale, **how).is_colwise
        True
        """
        if q_layout.is_colwise_only:
            colwise_data = data if colwise_data is None else colwise_data
            colwise_scale_inv = scale_inv if colwise_scale_inv is None else colwise_scale_inv
        elif q_layout.is_rowwise_colwise and (colwise_data is None or colwise_scale_inv is None):
            raise ValueError("`q_layout` ROWWISE_COLWISE needs `colwise_data` and `colwise_scale_inv`")
        layouts = data_layout or ("NN" if original_shape is not None else scaling_mode.get_data_layout())
        shared = {
            "scaling_mode": scaling_mode,
            "dequantizer": dequantizer,
            "dq_dtype": dq_dtype,
            "flatten_axis": flatten_axis,
            "group_sizes": group_sizes,
            "original_shape": original_shape,
        }
        tensors = []
        if q_layout.has_rowwise:
            how = {"data_layout": layouts[0], "has_rht_applied": rowwise_has_rht_applied}
            tensors.append(ScaledTensorFactory.create_1x(data, scale_inv, amax, **how, **shared))
        if q_layout.has_colwise:
            how = {"data_layout": layouts[-1], "has_rht_applied": colwise_has_rht_applied, "is_colwise": True}
            largest = amax if colwise_amax is None else colwise_amax
            tensors.append(ScaledTensorFactory.create_1x(colwise_data, colwise_scale_inv, largest, **how, **shared))
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)


def _check_layout(mode: ScalingMode, data_layout: str, is_colwise: bool) -> None:
    if data_layout not in ("N", "T"):
        raise ValueError(f"`data_layout` must be 'N' or 'T', not {data_layout!r}")
    expected = mode.row.colwise_layout if is_colwise else "N"
    if mode.is_block_scaling and data_layout != expected:
        side = "colwise" if is_colwise else "rowwise"
        raise ValueError(f"{side} data of {mode.name} have `data_layout` {expected!r}, not {data_layout!r}")


def _check_scale(tensor: ScaledTensor1x) -> None:
    q = tensor.stored
    expected = blocks.grid(q.shape, q.block)
    if tuple(q.scale.shape) != expected:
        raise ValueError(
            f"`scale_inv` {tuple(tensor.scale_inv.shape)} does not fit codes {q.shape} of {tensor.scaling_mode.name}; "
            f"it should be {(1,) if tensor.scaling_mode.is_tensor_scaling() else expected}"
        )


def _grouped(data, scale_inv, amax, group_sizes, shape: tuple[int, ...], how: dict[str, Any]) -> GroupedScaledTensor1x:
    """Codes may be flat, as theirs are; scales and amax of groups are repeated for their rows."""
    if group_sizes is not None:
        group_sizes = summing_groups(group_sizes, shape[0])
        scale_inv, amax = (_per_row(of_groups, group_sizes, shape[0]) for of_groups in (scale_inv, amax))
    elif scale_inv.ndim == 1:
        scale_inv = scale_inv.reshape(-1, *(1,) * (len(shape) - 1))
    second = None if amax is None or not how["scaling_mode"].is_nvfp4_scaling else tensor_scale_of(amax).reshape(-1)
    layout = {"flatten_axis": len(shape) - 1, "rank": len(shape), "original_shape": shape}
    tensor = GroupedScaledTensor1x(data.reshape(shape), scale_inv, amax, second, group_sizes, **how, **layout)
    _check_scale(tensor)
    return tensor


def _per_row(of_groups, group_sizes: jax.Array, rows: int):
    if of_groups is None or of_groups.ndim != 1:
        return of_groups
    return jnp.repeat(of_groups, group_sizes, total_repeat_length=rows)[:, None]

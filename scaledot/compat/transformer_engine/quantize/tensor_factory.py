"""ScaledTensorFactory: creates quantised tensors from existing codes and scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.grouped import checked_group_sizes
from scaledot.compat.transformer_engine.quantize.grouped_tensors import GroupedNoScaleTensor, GroupedScaledTensor1x
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.quantize.tensor_classes import (
    NoScaleTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    normalize_flatten_axis,
    tensor_scale_of,
)
from scaledot.numerics import blocks


class ScaledTensorFactory:
    """Creates quantised tensors from existing codes and scales.

    `dequantizer` is accepted for compatibility and ignored, because the scaling mode determines dequantisation; only a
    dtype, probably meant for `dq_dtype`, raises an error.

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
        first_dims=None,
        last_dims=None,
    ) -> Any:
        """Returns a tensor of one orientation. `flatten_axis` refers to the untransposed tensor.

        With `original_shape` the tensor is grouped: (m, k) with `first_dims`, the number of rows of each group (also
        accepted as `group_sizes`), or (groups, m, k) without.

        >>> codes = jnp.ones((3, 2), jnp.float8_e4m3fn)
        >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
        >>> tensor = ScaledTensorFactory.create_1x(codes, jnp.ones(1), None, mode, is_colwise=True, data_layout="T")
        >>> tensor.array.shape
        (2, 3)
        """
        if last_dims is not None:
            raise ValueError("`last_dims` must be None: groups are along the first dim")
        group_sizes = first_dims if group_sizes is None else group_sizes
        if scaling_mode is ScalingMode.NO_SCALING and original_shape is not None:
            return GroupedNoScaleTensor(data.reshape(original_shape), amax, group_sizes)
        if scaling_mode is ScalingMode.NO_SCALING:
            return NoScaleTensor(data, amax)
        if isinstance(dequantizer, np.dtype) or hasattr(dequantizer, "dtype"):
            raise TypeError(f"`dequantizer` is {dequantizer!r}; pass a dtype as dq_dtype=")
        fields = {"scaling_mode": scaling_mode, "dq_dtype": np.dtype(dq_dtype), "is_colwise": is_colwise}
        if original_shape is not None:
            if data_layout != "N":
                raise ValueError(f"`data_layout` of a grouped tensor must be 'N' (not transposed), not {data_layout!r}")
            return _create_grouped(data, scale_inv, amax, group_sizes, tuple(original_shape), fields)
        if group_sizes is not None:
            raise ValueError("`group_sizes` must be passed with `original_shape`")
        _check_layout(scaling_mode, data_layout, is_colwise)
        rank = data.ndim
        flatten_axis = normalize_flatten_axis(flatten_axis, rank)
        stored_flatten_axis = rank - flatten_axis if data_layout == "T" else flatten_axis
        layout = {"data_layout": data_layout, "flatten_axis": stored_flatten_axis, "rank": rank}
        tensor = ScaledTensor1x(data, scale_inv, amax, **fields, **layout, has_rht_applied=has_rht_applied)
        _check_scale(tensor)
        return tensor

    @staticmethod
    def create_2x(data, scale_inv, colwise_data, colwise_scale_inv, *others, **options) -> ScaledTensor2x:
        """Returns a tensor of both orientations; other arguments are those of `create`.

        `data_layout` has two letters, for the rowwise and the colwise codes.

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
        first_dims=None,
        last_dims=None,
    ) -> Any:
        """Returns a tensor in the orientations of `q_layout`.

        If `q_layout` is COLWISE, codes and scales may be passed as `data` and `scale_inv`.

        >>> codes, scale = jnp.ones((3, 2), jnp.float8_e4m3fn), jnp.ones(1)
        >>> mode = ScalingMode.CURRENT_TENSOR_SCALING
        >>> ScaledTensorFactory.create(codes, scale, scaling_mode=mode, q_layout=QuantizeLayout.COLWISE).is_colwise
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
            "first_dims": first_dims,
            "last_dims": last_dims,
        }
        tensors = []
        if q_layout.has_rowwise:
            own = {"data_layout": layouts[0], "has_rht_applied": rowwise_has_rht_applied}
            tensors.append(ScaledTensorFactory.create_1x(data, scale_inv, amax, **own, **shared))
        if q_layout.has_colwise:
            own = {"data_layout": layouts[-1], "has_rht_applied": colwise_has_rht_applied, "is_colwise": True}
            colwise_amax = amax if colwise_amax is None else colwise_amax
            tensors.append(
                ScaledTensorFactory.create_1x(colwise_data, colwise_scale_inv, colwise_amax, **own, **shared)
            )
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)


def _check_layout(mode: ScalingMode, data_layout: str, is_colwise: bool) -> None:
    if data_layout not in ("N", "T"):
        raise ValueError(f"`data_layout` must be 'N' or 'T', not {data_layout!r}")
    expected = mode.spec.colwise_layout if is_colwise else "N"
    if mode.is_block_scaling and data_layout != expected:
        orientation = "colwise" if is_colwise else "rowwise"
        raise ValueError(f"`data_layout` of {orientation} {mode.name} codes must be {expected!r}, not {data_layout!r}")


def _check_scale(tensor: ScaledTensor1x) -> None:
    q = tensor.stored_array
    expected = blocks.grid(q.shape, q.block)
    if tuple(q.scale.shape) != expected:
        raise ValueError(
            f"`scale_inv` {tuple(tensor.scale_inv.shape)} does not fit codes {q.shape} of {tensor.scaling_mode.name}; "
            f"it should be {(1,) if tensor.scaling_mode.is_tensor_scaling() else expected}"
        )


def _create_grouped(
    data, scale_inv, amax, group_sizes, shape: tuple[int, ...], fields: dict[str, Any]
) -> GroupedScaledTensor1x:
    """Creates a grouped tensor. Codes may be flat, as TransformerEngine's; scales and amax may have shape (groups,)."""
    if group_sizes is not None:
        group_sizes = checked_group_sizes(group_sizes, shape[0])
        scale_inv, amax = (_repeat_per_row(x, group_sizes, shape[0]) for x in (scale_inv, amax))
    elif scale_inv.ndim == 1:
        scale_inv = scale_inv.reshape(-1, *(1,) * (len(shape) - 1))
    two_level = amax is not None and fields["scaling_mode"].is_nvfp4_scaling
    tensor_scale = tensor_scale_of(amax).reshape(-1) if two_level else None
    layout = {"flatten_axis": len(shape) - 1, "rank": len(shape), "original_shape": shape}
    tensor = GroupedScaledTensor1x(data.reshape(shape), scale_inv, amax, tensor_scale, group_sizes, **fields, **layout)
    _check_scale(tensor)
    return tensor


def _repeat_per_row(x, group_sizes: jax.Array, rows: int):
    """Repeats one number per group, shape (groups,), to one per row, shape (rows, 1); returns other arrays as is."""
    if x is None or x.ndim != 1:
        return x
    return jnp.repeat(x, group_sizes, total_repeat_length=rows)[:, None]

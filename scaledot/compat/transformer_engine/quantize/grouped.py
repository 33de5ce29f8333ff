"""Quantisation of grouped tensors: row groups of a matrix, or one matrix per group."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.tensor_classes import GroupedScaledTensor1x, normalize_flatten_axis
from scaledot.ops.cast_spec import checked_groups
from scaledot.ops.quantize import quantize, quantize_grouped


class GroupedCasts:
    """Quantises x (m, k) with `group_sizes`, or x (groups, m, k) without, in the orientations of a Quantizer."""

    def __init__(self, quantizer: Any, x: jax.Array, group_sizes, flatten_axis: int, dtype):
        self.quantizer, self.x, self.dtype = quantizer, x, dtype
        if normalize_flatten_axis(flatten_axis, x.ndim) != x.ndim - 1:
            raise ValueError(f"`flatten_axis` {flatten_axis} of a grouped tensor must be -1")
        if quantizer.use_rht or quantizer.scaling_mode.spec.delayed:
            feature = "a Hadamard transform" if quantizer.use_rht else "delayed scaling"
            raise ValueError(f"grouped_quantize does not support {feature}; use `grouped_dense`, which does")
        self.group_sizes = group_sizes if group_sizes is None else checked_group_sizes(group_sizes, x.shape[0])
        num_groups = (x if self.group_sizes is None else self.group_sizes).shape[0]
        if quantizer.n_groups not in (None, num_groups):
            raise ValueError(f"`n_groups` of the quantizer is {quantizer.n_groups}, but there are {num_groups} groups")
        rank = 3 if group_sizes is None else 2
        if x.ndim != rank:
            shape = "(groups, m, k) without `group_sizes`" if group_sizes is None else "(m, k) with `group_sizes`"
            raise ValueError(f"`x` must have shape {shape}, not {x.shape}")

    def tensor(self, is_colwise: bool) -> GroupedScaledTensor1x:
        q = self._quantize_matrices(is_colwise) if self.group_sizes is None else self._quantize_row_groups(is_colwise)
        return GroupedScaledTensor1x(
            q.data,
            q.scale,
            None,
            q.tensor_scale,
            self.group_sizes,
            scaling_mode=self.quantizer.scaling_mode,
            dq_dtype=np.dtype(self.dtype),
            is_colwise=is_colwise,
            flatten_axis=self.x.ndim - 1,
            rank=self.x.ndim,
            format=self.quantizer.format,
            original_shape=self.x.shape,
        )

    def _quantize_row_groups(self, is_colwise: bool) -> ScaledArray:
        cast = self.quantizer.cast(is_colwise)
        axes = (1, 0) if is_colwise else (0, 1)  # (free, contracting), the order of cast.block_2d
        options = {"rounding": cast.rounding, "key": self.quantizer.orientation_key(is_colwise), "pad": True}
        return quantize_grouped(self.x, self.group_sizes, cast.format, axis=axes, block=cast.block_2d, **options)

    def _quantize_matrices(self, is_colwise: bool) -> ScaledArray:
        key = self.quantizer.orientation_key(is_colwise)
        if key is None:
            return jax.vmap(lambda matrix: _quantize_matrix(self.quantizer, matrix, is_colwise, None))(self.x)
        keys = jax.random.split(key, self.x.shape[0])
        return jax.vmap(lambda matrix, key: _quantize_matrix(self.quantizer, matrix, is_colwise, key))(self.x, keys)


def _quantize_matrix(quantizer: Any, x: jax.Array, is_colwise: bool, key: jax.Array | None) -> ScaledArray:
    cast = quantizer.cast(is_colwise)
    axes = (1, 0) if is_colwise else (0, 1)  # (free, contracting), the order of cast.block_2d
    return quantize(x, cast.format, axis=axes, block=cast.block_2d, rounding=cast.rounding, key=key, pad=True)


def checked_group_sizes(group_sizes, rows: int) -> jax.Array:
    """Returns `group_sizes` as an array; raises if concrete sizes do not sum to `rows`."""
    groups = checked_groups(group_sizes, rows)
    if not isinstance(groups, Tracer) and int(np.sum(np.asarray(groups))) != rows:
        raise ValueError(f"`group_sizes` {np.asarray(groups).tolist()} sum to {int(groups.sum())}, not to {rows} rows")
    return groups

"""Casts of rows in groups, and of one matrix per group."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.views import GroupedScaledTensor1x, cut_at
from scaledot.ops.cast_spec import checked_groups
from scaledot.ops.quantize import quantize, quantize_grouped


class GroupedCasts:
    """Both orientations of rows in groups, or of one matrix per group, as a Quantizer asks for them."""

    def __init__(self, quantizer: Any, x: jax.Array, group_sizes, flatten_axis: int, dtype):
        self.quantizer, self.x, self.dtype = quantizer, x, dtype
        if cut_at(flatten_axis, x.ndim) != x.ndim - 1:
            raise ValueError(f"`flatten_axis` {flatten_axis} of a grouped tensor can only be -1")
        if quantizer.use_rht or quantizer.scaling_mode.row.delayed:
            what = "a Hadamard transform" if quantizer.use_rht else "delayed scaling"
            raise ValueError(f"grouped tensors are not quantised with {what}; `grouped_dense` is")
        self.group_sizes = group_sizes if group_sizes is None else summing_groups(group_sizes, x.shape[0])
        found = (x if self.group_sizes is None else self.group_sizes).shape[0]
        if quantizer.n_groups not in (None, found):
            raise ValueError(f"the quantizer is for {quantizer.n_groups} groups, and there are {found}")
        expected = 3 if group_sizes is None else 2
        if x.ndim != expected:
            kind = "one matrix per group" if group_sizes is None else "rows in groups"
            raise ValueError(f"`x` must have {expected} axes for {kind}, not {x.shape}")

    def tensor(self, is_colwise: bool) -> GroupedScaledTensor1x:
        q = self._of_matrices(is_colwise) if self.group_sizes is None else self._of_rows(is_colwise)
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

    def _of_rows(self, is_colwise: bool) -> ScaledArray:
        cast = self.quantizer.cast(is_colwise)
        axes = (1, 0) if is_colwise else (0, 1)  # of the kept and of the summed entry of a tile
        how = {"rounding": cast.rounding, "key": self.quantizer.bits(is_colwise), "pad": True}
        return quantize_grouped(self.x, self.group_sizes, cast.format, axis=axes, block=cast.tile, **how)

    def _of_matrices(self, is_colwise: bool) -> ScaledArray:
        key = self.quantizer.bits(is_colwise)
        if key is None:
            return jax.vmap(lambda matrix: _matrix(self.quantizer, matrix, is_colwise, None))(self.x)
        keys = jax.random.split(key, self.x.shape[0])
        return jax.vmap(lambda matrix, key: _matrix(self.quantizer, matrix, is_colwise, key))(self.x, keys)


def _matrix(quantizer: Any, x: jax.Array, is_colwise: bool, key: jax.Array | None) -> ScaledArray:
    cast = quantizer.cast(is_colwise)
    axes = (1, 0) if is_colwise else (0, 1)
    how = {"rounding": cast.rounding, "key": key, "pad": True}
    return quantize(x, cast.format, axis=axes, block=cast.tile, **how)


def summing_groups(group_sizes, rows: int) -> jax.Array:
    """Checked group sizes that cover all rows, which can only be seen where they are concrete."""
    groups = checked_groups(group_sizes, rows)
    if not isinstance(groups, Tracer) and int(np.sum(np.asarray(groups))) != rows:
        raise ValueError(f"`group_sizes` {np.asarray(groups).tolist()} sum to {int(groups.sum())}, not to {rows} rows")
    return groups

"""Quantisation of grouped tensors: row groups of a matrix, or one matrix per group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.grouped_tensors import GroupedScaledTensor1x
from scaledot.compat.transformer_engine.quantize.tensor_classes import normalize_flatten_axis
from scaledot.ops.cast_spec import checked_groups
from scaledot.ops.quantize import amax, amax_of_groups, quantize, quantize_grouped
from scaledot.state import multiplier_of


class GroupedCasts:
    """Quantises x (m, k) with `group_sizes`, or x (groups, m, k) without, in the orientations of a Quantizer."""

    def __init__(self, quantizer: Any, x: jax.Array, group_sizes, flatten_axis: int, dtype):
        self.quantizer, self.x, self.dtype = quantizer, x, dtype
        if normalize_flatten_axis(flatten_axis, x.ndim) != x.ndim - 1:
            raise ValueError(f"`flatten_axis` {flatten_axis} of a grouped tensor must be -1")
        if quantizer.use_rht:
            raise ValueError("grouped_quantize does not support a Hadamard transform; use `grouped_dense`, which does")
        self.group_sizes = group_sizes if group_sizes is None else checked_group_sizes(group_sizes, x.shape[0])
        self.num_groups = (x if self.group_sizes is None else self.group_sizes).shape[0]
        if quantizer.n_groups not in (None, self.num_groups):
            raise ValueError(
                f"`n_groups` of the quantizer is {quantizer.n_groups}, but there are {self.num_groups} groups"
            )
        rank = 3 if group_sizes is None else 2
        if x.ndim != rank:
            shape = "(groups, m, k) without `group_sizes`" if group_sizes is None else "(m, k) with `group_sizes`"
            raise ValueError(f"`x` must have shape {shape}, not {x.shape}")

    def tensor(self, is_colwise: bool) -> GroupedScaledTensor1x:
        q = self._quantize_matrices(is_colwise) if self.group_sizes is None else self._quantize_row_groups(is_colwise)
        return GroupedScaledTensor1x(
            q.data,
            q.scale,
            self._amax() if self.quantizer.scaling_mode.is_tensor_scaling() else None,
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

    def _amax(self) -> jax.Array:
        """The amax of each group, (groups,)."""
        if self.group_sizes is None:
            return amax(self.x, axis=(1, 2), block=(0, 0)).reshape(-1)
        return amax_of_groups(self.x, self.group_sizes)

    def _multipliers(self) -> jax.Array | None:
        """The quantisation multiplier of each group under delayed scaling, (groups,)."""
        cast = self.quantizer.cast()
        if cast.delayed is None:
            return None
        return jnp.broadcast_to(multiplier_of(cast, self.quantizer.state), (self.num_groups,))

    def _quantize_row_groups(self, is_colwise: bool) -> ScaledArray:
        cast = self.quantizer.cast(is_colwise)
        axes = (1, 0) if is_colwise else (0, 1)  # (free, contracting), the order of cast.block_2d
        options = {"rounding": cast.rounding, "key": self.quantizer.orientation_key(is_colwise), "pad": True}
        options["multiplier"] = self._multipliers()
        return quantize_grouped(self.x, self.group_sizes, cast.format, axis=axes, block=cast.block_2d, **options)

    def _quantize_matrices(self, is_colwise: bool) -> ScaledArray:
        key = self.quantizer.orientation_key(is_colwise)
        keys = None if key is None else jax.random.split(key, self.num_groups)
        cast = self.quantizer.cast(is_colwise)
        axes = (1, 0) if is_colwise else (0, 1)  # (free, contracting), the order of cast.block_2d
        options = {"axis": axes, "block": cast.block_2d, "rounding": cast.rounding, "pad": True}

        def quantize_matrix(x: jax.Array, key, multiplier) -> ScaledArray:
            return quantize(x, cast.format, key=key, multiplier=multiplier, **options)

        return jax.vmap(quantize_matrix)(self.x, keys, self._multipliers())


def checked_group_sizes(group_sizes, rows: int) -> jax.Array:
    """Returns `group_sizes` as an array; raises if concrete sizes do not sum to `rows`."""
    groups = checked_groups(group_sizes, rows)
    if not isinstance(groups, Tracer) and int(np.sum(np.asarray(groups))) != rows:
        raise ValueError(f"`group_sizes` {np.asarray(groups).tolist()} sum to {int(groups.sum())}, not to {rows} rows")
    return groups

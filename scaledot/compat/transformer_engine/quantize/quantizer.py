"""Quantizers: a mode, a dtype and an orientation, as one frozen class over our casts.

A Quantizer is the Cast that it stands for and nothing more: `quantize` lays it on an array in each orientation. Delayed
scaling keeps its state in the quantizer, as theirs does, but nothing is changed in place: `update` returns the next
quantizer, and in a differentiated step the gradient of a quantizer set is the next set.
"""

import dataclasses
import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.grouped import GroupedCasts
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.quantize.views import (
    ROTATION,
    NoScaleTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    cut_at,
    tensor_scale_of,
)
from scaledot.formats import Format
from scaledot.numerics.hadamard import rotate
from scaledot.ops.cast_spec import float_array
from scaledot.ops.quantize import amax as largest
from scaledot.recipes import Cast, Delayed
from scaledot.state import AmaxHistory, advance, multiplier_from, multiplier_of
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Quantizer:
    """How one tensor is quantised; `QuantizerFactory.create` makes them.

    scale, amax_history: the state of delayed scaling; `scale` is what the tensor is multiplied by.
    stochastic_rounding_rng_state: a JAX key, or (4,) or (devices, 4) numbers as theirs; None rounds to nearest.
    use_rht: a random Hadamard transform before colwise casts of NVFP4_1D_SCALING.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> quantizer = QuantizerFactory.create(1, ScalingMode.DELAYED_TENSOR_SCALING, jnp.float8_e4m3fn)
    >>> tensor = quantizer.quantize(jnp.full((2, 16), 8.0))
    >>> quantizer = quantizer.update(tensor.rowwise.amax)
    >>> quantizer.scale
    Array([56.], dtype=float32)
    """

    scale: Any = None
    amax_history: Any = None
    stochastic_rounding_rng_state: Any = None
    _: dataclasses.KW_ONLY
    q_dtype: Any = dataclasses.field(metadata=_STATIC)
    scaling_mode: ScalingMode = dataclasses.field(metadata=_STATIC)
    q_layout: QuantizeLayout = dataclasses.field(default=QuantizeLayout.ROWWISE_COLWISE, metadata=_STATIC)
    checkpoint_name: str | None = dataclasses.field(default=None, metadata=_STATIC)
    margin: int = dataclasses.field(default=0, metadata=_STATIC)
    amax_compute_algo: str = dataclasses.field(default="max", metadata=_STATIC)
    use_rht: bool = dataclasses.field(default=False, metadata=_STATIC)
    n_groups: int | None = dataclasses.field(default=None, metadata=_STATIC)
    format: Format | None = dataclasses.field(default=None, metadata=_STATIC)

    @property
    def data_layout(self) -> str:
        return self.scaling_mode.get_data_layout()

    def get_data_layout(self) -> str:
        """The letters of those orientations that are made."""
        both = self.data_layout
        return both if self.q_layout.is_rowwise_colwise else both[int(self.q_layout.is_colwise_only)]

    def get_scale_dtype(self) -> np.dtype:
        return self.scaling_mode.get_scale_dtype()

    def cast(self, is_colwise: bool = False) -> Cast:
        """Our cast in one orientation."""
        row = self.scaling_mode.row
        delayed = None
        if row.delayed:
            delayed = Delayed(self.amax_history.shape[-1], self.amax_compute_algo, self.margin)
        plain = Cast(self.format or self.scaling_mode.format_of(self.q_dtype))
        return dataclasses.replace(
            plain,
            block=plain.block if row.tile in (None, plain.tile) else row.tile,
            rounding="nearest" if self.stochastic_rounding_rng_state is None else "stochastic",
            rotation=ROTATION if self._rotates(is_colwise) else None,
            delayed=delayed,
        )

    @property
    def state(self) -> AmaxHistory:
        """Of delayed scaling."""
        return AmaxHistory(self.amax_history, self.scale)

    def with_state(self, state: AmaxHistory) -> "Quantizer":
        return dataclasses.replace(self, amax_history=state.history, scale=state.multiplier)

    def _rotates(self, is_colwise: bool) -> bool:
        return self.use_rht and is_colwise and self.scaling_mode is ScalingMode.NVFP4_1D_SCALING

    @property
    def key(self) -> jax.Array | None:
        """The key of stochastic rounding."""
        state = self.stochastic_rounding_rng_state
        if state is None or jnp.issubdtype(state.dtype, jax.dtypes.prng_key) or state.shape == (2,):
            return state
        if state.shape[-1] != 4 or state.ndim > 2:
            raise ValueError(
                f"`stochastic_rounding_rng_state` must be a key or of shape (4,) or (devices, 4), not {state.shape}"
            )
        high, low, *folded = state.reshape(-1, 4)[0]
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        return functools.reduce(jax.random.fold_in, folded, key)

    def bits(self, is_colwise: bool) -> jax.Array | None:
        """The key of one orientation; both are rounded by independent chance."""
        return self.key if self.key is None or not is_colwise else jax.random.fold_in(self.key, 1)

    def quantize(self, x, is_rowwise=None, is_colwise=None, dq_dtype=None, flatten_axis: int = -1, group_sizes=None):
        """x, an array or a NoScaleTensor, in the orientations of `q_layout` or of the arguments.

        Axes need not divide by the block. The `amax` of a NoScaleTensor takes the place of the array's own, where there
        is one scale per tensor and no rotation. With `n_groups`, rows in groups of `group_sizes`, or one matrix per
        group.
        """
        given_amax = x.amax if isinstance(x, NoScaleTensor) else None
        x = float_array(x.data if isinstance(x, NoScaleTensor) else x)
        rowwise = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        colwise = self.q_layout.has_colwise if is_colwise is None else is_colwise
        if not rowwise and not colwise:
            raise ValueError("neither `is_rowwise` nor `is_colwise`: nothing to quantise")
        dtype = x.dtype if dq_dtype is None else dq_dtype
        if self.n_groups is None and group_sizes is None:
            made = _Casts(self, x, cut_at(flatten_axis, x.ndim), dtype, given_amax)
        else:
            made = GroupedCasts(self, x, group_sizes, flatten_axis, dtype)
        tensors = [made.tensor(is_colwise=side) for side, wanted in ((False, rowwise), (True, colwise)) if wanted]
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)

    def update(self, new_amax) -> "Quantizer":
        """The quantizer of the next step, given the largest magnitude of this one."""
        if not self.scaling_mode.row.delayed:
            return self
        return self.with_state(advance(self.cast(), self.state, jnp.reshape(new_amax, ())))


class _Casts:
    """Both orientations of an array; casts that lie on it alike are made once."""

    def __init__(self, quantizer: Quantizer, x: jax.Array, cut: int, dtype, given_amax):
        self.quantizer, self.x, self.cut, self.dtype = quantizer, x, cut, dtype
        self.given_amax = None if given_amax is None else jnp.asarray(given_amax, jnp.float32).reshape(())
        self.seen: dict[ResolvedCast, ScaledArray] = {}

    def tensor(self, is_colwise: bool) -> ScaledTensor1x:
        mode, ndim = self.quantizer.scaling_mode, self.x.ndim
        q = self._quantized(is_colwise)
        transposed = is_colwise and mode.is_colwise_transposed
        if transposed:
            q = q.transpose(*range(self.cut, ndim), *range(self.cut))
        return ScaledTensor1x(
            q.data,
            q.scale.reshape(1) if mode.is_tensor_scaling() else q.scale,
            self._amax(q),
            q.tensor_scale,
            scaling_mode=mode,
            dq_dtype=np.dtype(self.dtype),
            is_colwise=is_colwise,
            data_layout="T" if transposed else "N",
            flatten_axis=ndim - self.cut if transposed else self.cut,
            has_rht_applied=q.rotation is not None,
            rank=ndim,
            format=self.quantizer.format,
        )

    def _quantized(self, is_colwise: bool) -> ScaledArray:
        left, right = (string.ascii_letters[: self.x.ndim][at] for at in (slice(self.cut), slice(self.cut, None)))
        kept, summed = (right, left) if is_colwise else (left, right)
        cast = self.quantizer.cast(is_colwise)
        laid = ResolvedCast.on(cast, OperandDims(left + right, kept[::-1], summed[::-1]))
        if cast.rotation is not None and self.x.shape[self.cut - 1] % cast.rotation.size:
            raise ValueError(
                f"axis {self.cut - 1} of {self.x.shape} must be a multiple of {cast.rotation.size} for the Hadamard "
                "transform of its colwise cast; pad it, or use use_rht=False"
            )
        if laid not in self.seen:
            key, tensor_scale = self.quantizer.bits(is_colwise), self._tensor_scale(cast)
            self.seen[laid] = laid.quantize(self.x, self._multiplier(cast), key, tensor_scale)
        return self.seen[laid]

    def _multiplier(self, cast: Cast) -> jax.Array | None:
        if cast.delayed is not None:
            return multiplier_of(cast, self.quantizer.state)
        if self.given_amax is None or not cast.is_per_tensor:
            return None
        multiplier = multiplier_from(cast.format, self.given_amax)
        return jnp.where(multiplier > 0, multiplier, np.float32(1))

    def _tensor_scale(self, cast: Cast) -> jax.Array | None:
        if self.given_amax is None or not cast.format.two_level or cast.rotation is not None:
            return None
        return tensor_scale_of(self.given_amax)

    def _amax(self, q: ScaledArray) -> jax.Array | None:
        mode = self.quantizer.scaling_mode
        if not mode.is_tensor_scaling() and not mode.is_nvfp4_scaling:
            return None
        if q.rotation is not None:
            turned = rotate(self.x.astype(jnp.float32), dataclasses.replace(ROTATION, axis=self.cut - 1))
            return largest(turned).reshape(1)
        return (largest(self.x) if self.given_amax is None else self.given_amax).reshape(1)

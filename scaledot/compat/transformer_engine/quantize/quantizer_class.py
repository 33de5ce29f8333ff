"""Quantizer: scaling mode, code dtype and orientations of one quantised tensor.

One class replaces TransformerEngine's six (CurrentScaleQuantizer, GroupedQuantizer, ...). `cast` converts a quantizer
to a scaledot.Cast, and `quantize` applies it in each orientation. Delayed scaling stores its state in the quantizer, as
in TransformerEngine, but no function of this package updates it in place: `update` returns the quantizer for the next
step, and the gradient of a quantizer set is the set for the next step. Users may assign fields, such as `q_dtype`, as
in TransformerEngine; a jitted function of the quantizer is then traced again.
"""

import dataclasses
import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.array import ScaledArray
from scaledot.compat.transformer_engine.quantize.amax_compute_algo import AmaxComputeAlgo
from scaledot.compat.transformer_engine.quantize.grouped import GroupedCasts
from scaledot.compat.transformer_engine.quantize.scaling_modes import QuantizeLayout, ScalingMode
from scaledot.compat.transformer_engine.quantize.tensor_classes import (
    ROTATION,
    NoScaleTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    normalize_flatten_axis,
    scale_per_row,
    tensor_scale_of,
)
from scaledot.formats import Format
from scaledot.numerics.hadamard import rotate
from scaledot.ops.cast_spec import float_array
from scaledot.ops.quantize import amax as compute_amax
from scaledot.recipes import Cast, Delayed
from scaledot.state import AmaxHistory, advance, multiplier_from, multiplier_of
from scaledot.train.resolved_cast import OperandDims, ResolvedCast

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Quantizer:
    """How to quantise one tensor; created by `QuantizerFactory.create`.

    scale, amax_history: the state of delayed scaling, (1,) and (length,), or (groups,) and (groups, length) with
      `n_groups`; `scale` is the quantisation multiplier, as in TransformerEngine.
    stochastic_rounding_rng_state: a JAX key, or TransformerEngine's uint32 state of shape (4,) or (devices, 4); None
      rounds to nearest.
    amax_compute_algo: an AmaxComputeAlgo; its value, "max" or "most_recent", is converted when assigned.
    use_rht: whether NVFP4_1D_SCALING applies a random Hadamard transform before colwise quantisation.
    n_groups: the number of groups of grouped tensors, otherwise None.
    format: replaces the mode's Format, for example to restrict scales to powers of two.

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
    amax_compute_algo: AmaxComputeAlgo = dataclasses.field(default=AmaxComputeAlgo.MAX, metadata=_STATIC)
    use_rht: bool = dataclasses.field(default=False, metadata=_STATIC)
    n_groups: int | None = dataclasses.field(default=None, metadata=_STATIC)
    format: Format | None = dataclasses.field(default=None, metadata=_STATIC)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "q_dtype":
            value = self._checked_dtype(value)
        elif name == "amax_compute_algo":
            value = AmaxComputeAlgo(value)
        super().__setattr__(name, value)

    def _checked_dtype(self, q_dtype: Any) -> np.dtype:
        """Returns the dtype; raises if an existing quantizer's mode or format does not support it."""
        dtype = np.dtype(q_dtype)
        if "format" not in self.__dict__:  # not yet initialised; QuantizerFactory checks
            return dtype
        if self.format is None:
            self.scaling_mode.format_of(dtype)
        elif self.format.element != dtype.name:
            raise ValueError(f"`q_dtype` must be {self.format.element}, as the quantizer's `format`, not {dtype.name}")
        return dtype

    @property
    def quantizers(self) -> tuple["Quantizer", ...]:
        """The quantizers of the groups, as copies: assign to a field of the grouped quantizer itself to change it."""
        count, scale, history = self.n_groups or 1, self.scale, self.amax_history
        states: list[dict[str, Any]] = [{}] * count
        if scale is not None and history is not None and history.ndim == 2:
            states = [{"scale": scale[i : i + 1], "amax_history": history[i]} for i in range(count)]
        return tuple(dataclasses.replace(self, n_groups=None, **state) for state in states)

    @property
    def data_layout(self) -> str:
        return self.scaling_mode.get_data_layout()

    def get_data_layout(self) -> str:
        """Returns the layout letters ("N" or "T") of the orientations in `q_layout`."""
        layouts = self.data_layout
        return layouts if self.q_layout.is_rowwise_colwise else layouts[int(self.q_layout.is_colwise_only)]

    def get_scale_dtype(self) -> np.dtype:
        return self.scaling_mode.get_scale_dtype()

    def cast(self, is_colwise: bool = False) -> Cast:
        """Returns the scaledot.Cast of one orientation."""
        spec = self.scaling_mode.spec
        delayed = None
        if spec.delayed:
            delayed = Delayed(self.amax_history.shape[-1], self.amax_compute_algo.value, self.margin)
        default = Cast(self.format or self.scaling_mode.format_of(self.q_dtype))
        return dataclasses.replace(
            default,
            block=default.block if spec.block in (None, default.block_2d) else spec.block,
            rounding="nearest" if self.stochastic_rounding_rng_state is None else "stochastic",
            rotation=ROTATION if self._applies_rht(is_colwise) else None,
            delayed=delayed,
        )

    @property
    def state(self) -> AmaxHistory:
        """The state of delayed scaling."""
        return AmaxHistory(self.amax_history, self.scale)

    def with_state(self, state: AmaxHistory) -> "Quantizer":
        return dataclasses.replace(self, amax_history=state.history, scale=state.multiplier)

    def _applies_rht(self, is_colwise: bool) -> bool:
        return self.use_rht and is_colwise and self.scaling_mode is ScalingMode.NVFP4_1D_SCALING

    @property
    def key(self) -> jax.Array | None:
        """The key of stochastic rounding."""
        state = self.stochastic_rounding_rng_state
        if state is None or jnp.issubdtype(state.dtype, jax.dtypes.prng_key) or state.shape == (2,):
            return state
        if state.shape[-1] != 4 or state.ndim > 2:
            raise ValueError(
                f"`stochastic_rounding_rng_state` must be a key or have shape (4,) or (devices, 4), not {state.shape}"
            )
        high, low, *folded = state.reshape(-1, 4)[0]
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32), impl="threefry2x32")
        return functools.reduce(jax.random.fold_in, folded, key)

    def orientation_key(self, is_colwise: bool) -> jax.Array | None:
        """The stochastic-rounding key of one orientation; the two orientations draw independent bits."""
        return self.key if self.key is None or not is_colwise else jax.random.fold_in(self.key, 1)

    def quantize(self, x, is_rowwise=None, is_colwise=None, dq_dtype=None, flatten_axis: int = -1, group_sizes=None):
        """Quantises x, an array or a NoScaleTensor, in the orientations of the arguments or else of `q_layout`.

        Dims need not be multiples of the block. If a NoScaleTensor has an `amax`, per-tensor scales are computed from
        it instead of from x, unless a Hadamard transform is applied. With `n_groups`, x is (m, k) with `group_sizes`,
        or (groups, m, k) without.
        """
        amax = x.amax if isinstance(x, NoScaleTensor) else None
        x = float_array(x.data if isinstance(x, NoScaleTensor) else x)
        rowwise = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        colwise = self.q_layout.has_colwise if is_colwise is None else is_colwise
        if not rowwise and not colwise:
            raise ValueError("`is_rowwise` and `is_colwise` are both False; at least one must be True")
        dtype = x.dtype if dq_dtype is None else dq_dtype
        if self.n_groups is None and group_sizes is None:
            casts = _Casts(self, x, normalize_flatten_axis(flatten_axis, x.ndim), dtype, amax)
        else:
            casts = GroupedCasts(self, x, group_sizes, flatten_axis, dtype)
        tensors = [casts.tensor(is_colwise) for is_colwise, enabled in ((False, rowwise), (True, colwise)) if enabled]
        return tensors[0] if len(tensors) == 1 else ScaledTensor2x(*tensors)

    def update(self, new_amax) -> "Quantizer":
        """Returns the quantizer for the next step, given the amax of this one, or of each group."""
        if not self.scaling_mode.spec.delayed:
            return self
        return self.with_state(advance(self.cast(), self.state, jnp.reshape(new_amax, self.amax_history.shape[:-1])))


class _Casts:
    """Quantises an array in one or both orientations.

    If both need the same codes, these are computed once; stochastic rounding draws different ones for each.
    """

    def __init__(self, quantizer: Quantizer, x: jax.Array, flatten_axis: int, dtype, amax):
        self.quantizer, self.x, self.flatten_axis, self.dtype = quantizer, x, flatten_axis, dtype
        self.amax = None if amax is None else jnp.asarray(amax, jnp.float32).reshape(())
        self.cache: dict[tuple[ResolvedCast, bool], ScaledArray] = {}

    def tensor(self, is_colwise: bool) -> ScaledTensor1x:
        mode, ndim = self.quantizer.scaling_mode, self.x.ndim
        q = self._quantized(is_colwise)
        transposed = is_colwise and mode.is_colwise_transposed
        flatten_axis = ndim - self.flatten_axis if transposed else self.flatten_axis
        if transposed:
            q = q.transpose(*range(self.flatten_axis, ndim), *range(self.flatten_axis))
        return ScaledTensor1x(
            q.data,
            q.scale.reshape(1) if mode.is_tensor_scaling() else scale_per_row(mode, q, flatten_axis),
            self._amax(q),
            q.tensor_scale,
            scaling_mode=mode,
            dq_dtype=np.dtype(self.dtype),
            is_colwise=is_colwise,
            data_layout="T" if transposed else "N",
            flatten_axis=flatten_axis,
            has_rht_applied=q.rotation is not None,
            rank=ndim,
            format=self.quantizer.format,
        )

    def _quantized(self, is_colwise: bool) -> ScaledArray:
        dims = string.ascii_letters[: self.x.ndim]
        left, right = dims[: self.flatten_axis], dims[self.flatten_axis :]
        free, contracting = (right, left) if is_colwise else (left, right)
        cast = self.quantizer.cast(is_colwise)
        resolved = ResolvedCast.on(cast, OperandDims(dims, free[::-1], contracting[::-1]))
        if cast.rotation is not None and self.x.shape[self.flatten_axis - 1] % cast.rotation.size:
            raise ValueError(
                f"axis {self.flatten_axis - 1} of {self.x.shape} must be a multiple of {cast.rotation.size} for the "
                "Hadamard transform of colwise quantisation; pad it, or set use_rht=False"
            )
        entry = resolved, is_colwise and cast.rounding == "stochastic"
        if entry not in self.cache:
            key, tensor_scale = self.quantizer.orientation_key(is_colwise), self._tensor_scale(cast)
            self.cache[entry] = resolved.quantize(self.x, self._multiplier(cast), key, tensor_scale=tensor_scale)
        return self.cache[entry]

    def _multiplier(self, cast: Cast) -> jax.Array | None:
        if cast.delayed is not None:
            return multiplier_of(cast, self.quantizer.state)
        if self.amax is None or not cast.is_per_tensor:
            return None
        multiplier = multiplier_from(cast.format, self.amax)
        return jnp.where(multiplier > 0, multiplier, np.float32(1))

    def _tensor_scale(self, cast: Cast) -> jax.Array | None:
        if self.amax is None or not cast.format.two_level or cast.rotation is not None:
            return None
        return tensor_scale_of(self.amax)

    def _amax(self, q: ScaledArray) -> jax.Array | None:
        mode = self.quantizer.scaling_mode
        if not mode.is_tensor_scaling() and not mode.is_nvfp4_scaling:
            return None
        if q.rotation is not None:
            rotated = rotate(self.x.astype(jnp.float32), dataclasses.replace(ROTATION, axis=self.flatten_axis - 1))
            return compute_amax(rotated).reshape(1)
        return (compute_amax(self.x) if self.amax is None else self.amax).reshape(1)

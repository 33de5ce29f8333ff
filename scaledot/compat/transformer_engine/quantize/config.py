"""QuantizeConfig: the settings of a recipe under TransformerEngine's names."""

import dataclasses
import enum
import functools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from scaledot.compat.transformer_engine.quantize.amax_compute_algo import AmaxComputeAlgo
from scaledot.compat.transformer_engine.quantize.quantizer_factory import mode_of
from scaledot.compat.transformer_engine.quantize.scaling_modes import ScalingMode, is_scaling_mode_supported
from scaledot.compat.transformer_engine.recipe import core_recipe
from scaledot.recipes import Cast, Delayed, Recipe

NVTE_FP8_COLLECTION_NAME = "_overwrite_with_gradient"


class TensorSource(enum.Enum):
    """The tensor of a layer that a quantizer is for.

    >>> get_quantize_config_with_recipe("nvfp4").get_scaling_mode(TensorSource.KERNEL).name
    'NVFP4_2D_SCALING'
    """

    X = 0
    KERNEL = 1
    DGRAD = 2


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """The settings of a recipe, read only; a recipe of None is unquantised.

    COLLECTION_NAME: the collection in which linen modules store the state of delayed scaling.
    """

    recipe: Any = None
    COLLECTION_NAME: ClassVar[str] = NVTE_FP8_COLLECTION_NAME

    @functools.cached_property
    def core(self) -> Recipe:
        """The equivalent scaledot.Recipe."""
        return core_recipe(self.recipe)

    def is_fp8_enabled(self) -> bool:
        """Whether there is a recipe."""
        return self.recipe is not None

    def get_scaling_mode(self, tensor_source: TensorSource) -> ScalingMode:
        """Returns the scaling mode of a tensor."""
        cast = self._cast(tensor_source)
        return ScalingMode.NO_SCALING if cast is None else mode_of(self.core, cast)

    def is_supported(self) -> tuple[bool, str]:
        """Returns (True, ""): every recipe runs on every device."""
        return is_scaling_mode_supported(self.get_scaling_mode(TensorSource.X))

    @property
    def FWD_DTYPE(self) -> np.dtype | None:
        """The code dtype of x and kernel."""
        return _dtype(self._cast(TensorSource.X))

    @property
    def BWD_DTYPE(self) -> np.dtype | None:
        """The code dtype of gradients."""
        return _dtype(self._cast(TensorSource.DGRAD))

    @property
    def MARGIN(self) -> float:
        """The exponent by which delayed scaling lowers multipliers; 0 for other recipes."""
        return self._delayed.margin if self._delayed else 0.0

    @property
    def AMAX_HISTORY_LEN(self) -> int:
        """The length of amax histories; 0 without delayed scaling."""
        return self._delayed.length if self._delayed else 0

    @property
    def AMAX_COMPUTE_ALGO(self) -> AmaxComputeAlgo:
        return AmaxComputeAlgo(self._delayed.algorithm) if self._delayed else AmaxComputeAlgo.MAX

    @property
    def DISABLE_STOCHASTIC_ROUNDING(self) -> bool:
        return not self.core.stochastic

    @property
    def DISABLE_RHT(self) -> bool:
        wgrad = self.core.wgrad
        return wgrad is None or wgrad.lhs is None or wgrad.lhs.rotation is None

    @property
    def DISABLE_2D_QUANTIZATION(self) -> bool:
        kernel = self._cast(TensorSource.KERNEL)
        return kernel is None or kernel.is_per_tensor or kernel.block_2d[0] == 1

    def _cast(self, source: TensorSource) -> Cast | None:
        if source is TensorSource.DGRAD:
            return None if self.core.dgrad is None else self.core.dgrad.lhs
        return self.core.fwd.lhs if source is TensorSource.X else self.core.fwd.rhs

    @property
    def _delayed(self) -> Delayed | None:
        cast = self._cast(TensorSource.X)
        return None if cast is None else cast.delayed


def _dtype(cast: Cast | None) -> np.dtype | None:
    return None if cast is None else np.dtype(jnp.dtype(cast.format.element))


def get_quantize_config_with_recipe(fp8_recipe: Any) -> QuantizeConfig:
    """Returns the settings of a recipe under TransformerEngine's names.

    >>> get_quantize_config_with_recipe("mxfp8").FWD_DTYPE
    dtype(float8_e4m3fn)
    """
    return QuantizeConfig(fp8_recipe)

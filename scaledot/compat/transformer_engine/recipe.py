"""TransformerEngine's recipe classes: frozen dataclasses, each convertible to a scaledot.Recipe.

    recipe = DelayedScaling(amax_history_len=16)
    recipe.core                # the scaledot.Recipe that the functions of this package use

Functions of this package that take a recipe also accept a scaledot.Recipe or its name. A field that scaledot does not
support raises ValueError unless it has its default.
"""

import dataclasses
import enum
import inspect
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

from scaledot import recipes
from scaledot.compat.transformer_engine.unsupported import module_getattr
from scaledot.formats import FORMATS
from scaledot.numerics.hadamard import Hadamard
from scaledot.recipes import FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4, Cast, Delayed, Gemm, find_recipe, of_tensors

_BLOCK = 128


class Format(enum.Enum):
    """The dtypes of codes: those of activations and weights, and those of gradients.

    >>> Format.HYBRID.value
    ('e4m3', 'e5m2')
    """

    E2M1 = ("e2m1", "e2m1")
    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")


E4M3, HYBRID = Format.E4M3, Format.HYBRID


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base class of the recipe classes.

    backward_override: None quantises the backward matmuls; "high_precision" computes them from unquantised operands,
      "dequantized" from unquantised gradients and the dequantised operands of the forward matmul.

    >>> isinstance(MXFP8BlockScaling(), Recipe)
    True
    """

    _: dataclasses.KW_ONLY
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    # Fields that only support their default, with the reason or the alternative for the error message.
    FIXED: ClassVar[dict[str, str]] = {}

    def __post_init__(self):
        attention = "attention is not quantised; compute its matmuls with `scaledot.train` to quantise them"
        for name, reason in {"fp8_dpa": attention, "fp8_mha": attention, **self.FIXED}.items():
            default = next(f.default for f in dataclasses.fields(self) if f.name == name)
            if getattr(self, name) != default:
                raise ValueError(f"`{name}` of {type(self).__name__} can only be {default!r}: {reason}")
        if self.backward_override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f"`backward_override` must be None, 'high_precision' or 'dequantized', not {self.backward_override!r}"
            )
        fp8_format = getattr(self, "fp8_format", Format.HYBRID)
        if not isinstance(fp8_format, Format):
            raise TypeError(f"`fp8_format` must be Format.HYBRID or Format.E4M3, not {fp8_format!r}")
        if fp8_format in (Format.E5M2, Format.E2M1):
            bits = "only two mantissa bits for weights" if fp8_format is Format.E5M2 else "four bits"
            raise ValueError(f"`fp8_format` {fp8_format.name} has {bits}; use Format.HYBRID or Format.E4M3")

    @property
    def core(self) -> recipes.Recipe:
        """The equivalent scaledot.Recipe."""
        recipe = self._quantized_backward()
        if self.backward_override is None:
            return recipe
        backward = Gemm() if self.backward_override == "high_precision" else None
        name = f"{recipe.name}_{self.backward_override}"
        return dataclasses.replace(recipe, name=name, dgrad=backward, wgrad=backward)

    def _quantized_backward(self) -> recipes.Recipe:
        """The recipe without `backward_override`."""
        raise TypeError("Recipe is the base class of recipes; use a subclass, such as MXFP8BlockScaling()")

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def custom(cls) -> bool:
        return False

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)


def _variant_of(base: recipes.Recipe, casts: Iterable[Cast]) -> recipes.Recipe:
    """Returns a recipe named as `base`, with the casts of x, w and g passed."""
    return of_tensors(base.name, *casts)


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amax history of earlier steps.

    >>> DelayedScaling().core == recipes.FP8_DELAYED
    True
    >>> DelayedScaling(amax_history_len=16, margin=1).core.fwd.lhs.delayed
    Delayed(length=16, algorithm='max', margin=1)
    """

    margin: float = 0
    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    FIXED: ClassVar[dict[str, str]] = {
        "backward_override": "delayed scaling quantises all three matmuls; use Float8CurrentScaling",
        "scaling_factor_compute_algo": "the quantisation multiplier is (largest code / amax) / 2^margin",
        "reduce_amax": "amax is always reduced over the devices that share a state",
    }

    def __post_init__(self):
        super().__post_init__()
        if callable(self.amax_compute_algo):
            raise ValueError("`amax_compute_algo` of DelayedScaling must be 'max' or 'most_recent', not a function")
        self._delayed()  # raises if a field is invalid

    def _delayed(self) -> Delayed:
        return Delayed(self.amax_history_len, self.amax_compute_algo, self.margin)

    def _quantized_backward(self) -> recipes.Recipe:
        forward, backward = (Cast(FORMATS[f"fp8_{name}"], delayed=self._delayed()) for name in self.fp8_format.value)
        return _variant_of(FP8_DELAYED, (forward, forward, backward))


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from its current amax.

    margin: has no effect, as in TransformerEngine; a warning says so unless it is 0.

    >>> Float8CurrentScaling().core == recipes.FP8_CURRENT
    True
    >>> print(Float8CurrentScaling(fp8_format=E4M3).core.dgrad.lhs)
    fp8_e4m3
    """

    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    margin: dataclasses.InitVar[float] = 0

    def __post_init__(self, margin: float):
        super().__post_init__()
        if margin:
            warnings.warn(
                f"`margin` {margin} of Float8CurrentScaling has no effect: scales come from the current amax",
                stacklevel=3,  # the caller of __init__
            )

    def _quantized_backward(self) -> recipes.Recipe:
        forward, backward = (Cast(_fp8_format(f"fp8_{n}", self.use_power_2_scales)) for n in self.fp8_format.value)
        return _variant_of(FP8_CURRENT, (forward, forward, backward))


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: blocks of 32 with power-of-two scales.

    >>> MXFP8BlockScaling().core == recipes.MXFP8
    True
    """

    margin: int = 0
    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False

    FIXED: ClassVar[dict[str, str]] = {"margin": "block scales come from the current data and need no margin"}

    def _quantized_backward(self) -> recipes.Recipe:
        forward, backward = (Cast(FORMATS["mxfp8" if n == "e4m3" else f"mxfp8_{n}"]) for n in self.fp8_format.value)
        weights = dataclasses.replace(forward, block=(32, 32)) if self.enable_2d_quantization else forward
        return _variant_of(MXFP8, (forward, weights, backward))


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 in blocks of 1×128 and, for weights, 128×128; runs on any device.

    Scales are float32, as in DeepSeek-V3's training; `use_f32_scales=False` rounds them up to powers of two, which is
    TransformerEngine's default.

    >>> Float8BlockScaling().core == recipes.FP8_BLOCK
    True
    """

    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = True
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name in ("x", "w", "grad"):
            if (dim := getattr(self, f"{name}_block_scaling_dim")) not in (1, 2):
                raise ValueError(f"`{name}_block_scaling_dim` must be 1 (1×128) or 2 (128×128), not {dim!r}")

    def _quantized_backward(self) -> recipes.Recipe:
        forward, backward = (_fp8_format(f"fp8_{n}", not self.use_f32_scales) for n in self.fp8_format.value)
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        blocks = [(1, _BLOCK) if dim == 1 else (_BLOCK, _BLOCK) for dim in dims]
        return _variant_of(recipes.FP8_BLOCK, map(Cast, (forward, forward, backward), blocks))


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: blocks of 1×16 (16×16 for weights), stochastic rounding of gradients, random Hadamard transform in wgrad.

    >>> NVFP4BlockScaling().core == recipes.NVFP4
    True
    >>> print(NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True).core)
    nvfp4
      fwd    x nvfp4 1×16      w nvfp4 16×16
      dgrad  g nvfp4 1×16      w nvfp4 16×16
      wgrad  x nvfp4 1×16      g nvfp4 1×16
    """

    _: dataclasses.KW_ONLY
    fp4_format: Format = Format.E2M1
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"

    FIXED: ClassVar[dict[str, str]] = {
        "fp4_format": "NVFP4 has no other code dtype",
        "row_scaled_activation": "activations have one tensor scale",
        "nvfp4_4over6": "pass scaledot.recipes.NVFP4_FOUR_OVER_SIX as the recipe",
    }

    def _quantized_backward(self) -> recipes.Recipe:
        x = Cast(FORMATS["nvfp4"])
        w = x if self.disable_2d_quantization else dataclasses.replace(x, block=(16, 16))
        g = x if self.disable_stochastic_rounding else dataclasses.replace(x, rounding="stochastic")
        rotation = None if self.disable_rht else Hadamard()
        wgrad = Gemm(*(dataclasses.replace(cast, rotation=rotation) for cast in (x, g)))
        return recipes.Recipe(NVFP4.name, fwd=Gemm(x, w), dgrad=Gemm(g, w), wgrad=wgrad)


def _fp8_format(name: str, power_2_scales: bool):
    format = FORMATS[name]
    return dataclasses.replace(format, name=f"{name}_fp8_format", pow2=True) if power_2_scales else format


def core_recipe(recipe: Any) -> recipes.Recipe:
    """Converts a TransformerEngine recipe, a scaledot.Recipe or a name to a scaledot.Recipe; None to UNQUANTISED.

    >>> core_recipe(MXFP8BlockScaling()) == core_recipe("mxfp8") == recipes.MXFP8
    True
    """
    if recipe is None:
        return recipes.UNQUANTISED
    if isinstance(recipe, Recipe):
        return recipe.core
    if inspect.isclass(recipe) and issubclass(recipe, Recipe):
        raise TypeError(f"`recipe` is the class {recipe.__name__}; pass an instance, {recipe.__name__}()")
    if not isinstance(recipe, (str, recipes.Recipe)):
        known = (
            "DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()"
        )
        raise TypeError(f"`recipe` must be one of {known}, a scaledot.Recipe or its name, not {recipe!r}")
    return find_recipe(recipe)


__getattr__ = module_getattr(__name__)

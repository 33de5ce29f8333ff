"""Their recipe classes: small frozen values, each of which is one of our recipes.

    recipe = DelayedScaling(amax_history_len=16)
    recipe.core                # the scaledot.Recipe that every function here works with

Wherever a recipe is wanted, ours are taken as well, and their names. What a class of theirs can ask for and we do not
have is refused by name.
"""

import dataclasses
import enum
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar

from scaledot import recipes
from scaledot.compat.transformer_engine.not_offered import refuse
from scaledot.formats import FORMATS
from scaledot.recipes import FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4, Cast, Delayed, Gemm, find_recipe, of_tensors

_BLOCK = 128


class Format(enum.Enum):
    """8-bit floats of the forward and of the backward pass.

    >>> Format.HYBRID.value
    ('e4m3', 'e5m2')
    """

    E4M3 = ("e4m3", "e4m3")
    E5M2 = ("e5m2", "e5m2")
    HYBRID = ("e4m3", "e5m2")


E4M3, HYBRID = Format.E4M3, Format.HYBRID


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What all of them share; not a recipe by itself.

    `backward_override`: None quantises the backward pass, too; "high_precision" leaves it as it would be without a
    recipe; "dequantized" multiplies unquantised gradients by the values that forward multiplied.

    >>> isinstance(MXFP8BlockScaling(), Recipe)
    True
    """

    _: dataclasses.KW_ONLY
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    # Fields whose only value is their default, and what to do instead of changing them.
    FIXED: ClassVar[dict[str, str]] = {}

    def __post_init__(self):
        attention = "attention is not quantised; call its products through `scaledot.train` if you want that"
        for name, instead in {"fp8_dpa": attention, "fp8_mha": attention, **self.FIXED}.items():
            default = next(f.default for f in dataclasses.fields(self) if f.name == name)
            if getattr(self, name) != default:
                raise ValueError(f"`{name}` of {type(self).__name__} can only be {default!r}: {instead}")
        if self.backward_override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f"`backward_override` must be None, 'high_precision' or 'dequantized', not {self.backward_override!r}"
            )
        fp8_format = getattr(self, "fp8_format", Format.HYBRID)
        if not isinstance(fp8_format, Format):
            raise TypeError(f"`fp8_format` must be Format.HYBRID or Format.E4M3, not {fp8_format!r}")
        if fp8_format is Format.E5M2:
            raise ValueError("`fp8_format` E5M2 would leave two bits to weights; use Format.HYBRID or Format.E4M3")

    @property
    def core(self) -> recipes.Recipe:
        """The recipe that this one stands for."""
        whole = self._whole()
        if self.backward_override is None:
            return whole
        backward = Gemm() if self.backward_override == "high_precision" else None
        name = f"{whole.name}_{self.backward_override}"
        return dataclasses.replace(whole, name=name, dgrad=backward, wgrad=backward)

    def _whole(self) -> recipes.Recipe:
        raise TypeError("Recipe is what recipe classes share; use one of them, such as MXFP8BlockScaling()")

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
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)


def _of_tensors(like: recipes.Recipe, casts: Iterable[Cast]) -> recipes.Recipe:
    """A recipe of casts of x, w and g under the name of one that it varies."""
    return of_tensors(like.name, *casts)


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the largest magnitudes of earlier steps.

    >>> DelayedScaling().core == recipes.FP8_DELAYED
    True
    >>> DelayedScaling(amax_history_len=16, margin=1).core.fwd.lhs.delayed
    Delayed(length=16, algorithm='max', margin=1)
    """

    margin: int = 0
    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True

    FIXED: ClassVar[dict[str, str]] = {
        "backward_override": "a delayed recipe quantises all three products; use Float8CurrentScaling",
        "scaling_factor_compute_algo": "the factor is (F / amax) / 2^margin",
        "reduce_amax": "devices that share a state share its magnitudes",
    }

    def __post_init__(self):
        super().__post_init__()
        if callable(self.amax_compute_algo):
            raise ValueError("`amax_compute_algo` of DelayedScaling must be 'max' or 'most_recent', not a function")
        self._how()  # raises where a field is wrong

    def _how(self) -> Delayed:
        return Delayed(self.amax_history_len, self.amax_compute_algo, self.margin)

    def _whole(self) -> recipes.Recipe:
        forward, backward = (Cast(FORMATS[f"fp8_{name}"], delayed=self._how()) for name in self.fp8_format.value)
        return _of_tensors(FP8_DELAYED, (forward, forward, backward))


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor itself.

    >>> Float8CurrentScaling().core == recipes.FP8_CURRENT
    True
    >>> print(Float8CurrentScaling(fp8_format=E4M3).core.dgrad.lhs)
    fp8_e4m3
    """

    _: dataclasses.KW_ONLY
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False

    def _whole(self) -> recipes.Recipe:
        forward, backward = (Cast(_pow2(f"fp8_{n}", self.use_power_2_scales)) for n in self.fp8_format.value)
        return _of_tensors(FP8_CURRENT, (forward, forward, backward))


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

    FIXED: ClassVar[dict[str, str]] = {"margin": "every block has a scale of its own, which needs none"}

    def _whole(self) -> recipes.Recipe:
        forward, backward = (Cast(FORMATS["mxfp8" if n == "e4m3" else f"mxfp8_{n}"]) for n in self.fp8_format.value)
        weights = dataclasses.replace(forward, block=(32, 32)) if self.enable_2d_quantization else forward
        return _of_tensors(MXFP8, (forward, weights, backward))


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 in blocks of 1×128 and, for weights, 128×128; works on any device.

    Scales are float32, as DeepSeek-V3 trains; `use_f32_scales=False` rounds them up to powers of two, which is
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

    def _whole(self) -> recipes.Recipe:
        forward, backward = (_pow2(f"fp8_{n}", not self.use_f32_scales) for n in self.fp8_format.value)
        dims = self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim
        blocks = [(1, _BLOCK) if dim == 1 else (_BLOCK, _BLOCK) for dim in dims]
        return _of_tensors(recipes.FP8_BLOCK, map(Cast, (forward, forward, backward), blocks))


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: blocks of 16 (16×16 for weights), stochastic gradients, a random Hadamard transform in wgrad.

    >>> NVFP4BlockScaling().core == recipes.NVFP4
    True
    >>> print(NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True).core)
    nvfp4
      fwd    x nvfp4 1×16      w nvfp4 16×16
      dgrad  g nvfp4 1×16      w nvfp4 16×16
      wgrad  x nvfp4 1×16      g nvfp4 1×16
    """

    _: dataclasses.KW_ONLY
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"

    FIXED: ClassVar[dict[str, str]] = {
        "row_scaled_activation": "activations have one tensor scale",
        "nvfp4_4over6": "give scaledot.recipes.NVFP4_FOUR_OVER_SIX instead of this class",
    }

    def _whole(self) -> recipes.Recipe:
        x = Cast(FORMATS["nvfp4"])
        w = x if self.disable_2d_quantization else dataclasses.replace(x, block=(16, 16))
        g = x if self.disable_stochastic_rounding else dataclasses.replace(x, rounding="stochastic")
        rotation = None if self.disable_rht else recipes.Hadamard()
        turned = Gemm(*(dataclasses.replace(cast, rotation=rotation) for cast in (x, g)))
        return recipes.Recipe(NVFP4.name, fwd=Gemm(x, w), dgrad=Gemm(g, w), wgrad=turned)


def _pow2(name: str, wanted: bool):
    row = FORMATS[name]
    return dataclasses.replace(row, name=f"{name}_pow2", pow2=True) if wanted else row


def core_recipe(given: Any) -> recipes.Recipe:
    """Our recipe for one of theirs, one of ours or a name; None quantises nothing.

    >>> core_recipe(MXFP8BlockScaling()) == core_recipe("mxfp8") == recipes.MXFP8
    True
    """
    if given is None:
        return recipes.UNQUANTISED
    if isinstance(given, Recipe):
        return given.core
    if inspect.isclass(given) and issubclass(given, Recipe):
        raise TypeError(f"`recipe` is the class {given.__name__}; give a value of it, {given.__name__}()")
    if not isinstance(given, (str, recipes.Recipe)):
        known = (
            "DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()"
        )
        raise TypeError(f"`recipe` must be one of {known}, a scaledot.Recipe or its name, not {given!r}")
    return find_recipe(given)


__getattr__ = refuse(__name__)

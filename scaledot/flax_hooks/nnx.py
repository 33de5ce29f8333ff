"""Flax NNX: layers that multiply by a kernel, and the attributes that have their matmuls."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx.nn import dtypes

from scaledot.flax_hooks import MatmulUnderRecipe
from scaledot.train.weight_codes import promote_around


class Hook(NamedTuple):
    """The attribute of a layer class that has its matmul, and Flax's default for it (`plain`)."""

    layer_class: type[nnx.Module]
    attribute: str
    plain: Any

    def holds_other(self, layer: nnx.Module) -> bool:
        """Whether a layer has a matmul that is neither Flax's default nor a module of this library."""
        matmul = getattr(layer, self.attribute)
        return not isinstance(matmul, MatmulUnderRecipe) and matmul not in (None, self.plain)


HOOKS = (
    Hook(nnx.Linear, "dot_general", jax.lax.dot_general),
    Hook(nnx.LinearGeneral, "dot_general", jax.lax.dot_general),
    Hook(nnx.Einsum, "einsum_op", jax.numpy.einsum),
    Hook(nnx.Conv, "conv_general_dilated", jax.lax.conv_general_dilated),
)
WITHOUT_HOOK, NO_HOOK = (nnx.ConvTranspose, nnx.LoRA), "Flax has no hook for its contraction"


def multiplying(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """(path, layer) for each layer that multiplies by a kernel."""
    modules = list(nnx.iter_modules(model))
    classes = (*(hook.layer_class for hook in HOOKS), *WITHOUT_HOOK)
    return [("/".join(map(str, path)), layer) for path, layer in modules if isinstance(layer, classes)]


def hook_of(layer: nnx.Module) -> Hook | None:
    return next((hook for hook in HOOKS if isinstance(layer, hook.layer_class)), None)


def promote_dtype(args: tuple, /, *, dtype=None, inexact=True) -> tuple:
    """`flax.nnx.nn.dtypes.promote_dtype` that also accepts a `train.CastWeight` or a ScaledArray, and keeps its codes.

    For layers whose parameters come from `train.CastWeights.attach` or `quantize_params`; `with_recipe`,
    `quantize_params` and the layers of `scaledot.nnx` set it. Raises ValueError for a CastWeight that was quantised in
    another dtype than the layer computes in.
    """
    promote = functools.partial(dtypes.promote_dtype, dtype=dtype, inexact=inexact)
    return tuple(promote_around(lambda arrays: promote(tuple(arrays)), args))


def promotes_itself(layer: nnx.Module) -> bool:
    """Whether a layer has a `promote_dtype` of its own, or none in this version of Flax."""
    return getattr(layer, "promote_dtype", None) not in (dtypes.promote_dtype, promote_dtype)

"""conv_general_dilated under a recipe.

Blocks and rotations run along features in fwd and dgrad and along images in wgrad: these are the axes that each product
sums over and that no window moves across. A cast over a whole axis takes in the positions as well, so "per token" is
one scale per image. The gradients of a convolution are convolutions with other windows, and take the same kernels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, labels
from scaledot.ops.conv import conv_general_dilated as scaled_conv
from scaledot.ops.operands import float_operand
from scaledot.ops.quantize import dequantize
from scaledot.parallel.specs import Shardings, shardings_of
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.recipes import Cast, Recipe
from scaledot.state import State
from scaledot.train.casts import Arrays
from scaledot.train.dot_sharded import Sharded, multiply_sharded
from scaledot.train.flatten import Flattened
from scaledot.train.kind import Matmul, Operands, Step
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.vjp import multiply
from scaledot.train.weight_codes import plain_weight

Pairs = tuple[tuple[int, int], ...]


def conv_general_dilated(
    x,
    w,
    window_strides,
    padding,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    **options: Unpack[Keywords],
):
    """`jax.lax.conv_general_dilated` of image x and kernel w under a recipe.

    Other arguments as in `dot_general`, without `overlap`. On a mesh images and features may be sharded, features in
    groups and positions not.

    >>> image, kernel = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2))
    >>> conv_general_dilated(image, kernel, (1,), "VALID", recipe="fp8_current").shape
    (1, 1, 3)
    """
    x, w = float_operand(x, "x"), plain_weight(w, "conv_general_dilated")
    if batch_group_count != 1:
        raise ValueError(f"`batch_group_count` {batch_group_count} is not offered in training; use feature groups")
    how = Options.of(
        recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options, refused=("overlap",)
    )
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    spatial = len(numbers.lhs_spec) - 2
    ones = (1,) * spatial
    strides, before, within = (
        ones if given is None else _one_per_axis(name, given, spatial)
        for name, given in (
            ("window_strides", window_strides),
            ("lhs_dilation", lhs_dilation),
            ("rhs_dilation", rhs_dilation),
        )
    )
    window = Window(numbers, x.shape, w.shape, strides, (), before, within, feature_group_count)
    window = dataclasses.replace(window, padding=window.pairs(padding))
    reason = groups_reason(how.recipe, feature_group_count, *window.features_of_a_group)
    if reason is not None:
        raise ValueError(reason)
    kind, operands, state = Conv(window, partitioning_of(x, w)), Operands(x, w, None, None), how.checked_state(state, w)
    splits = shardings_of(kind.contraction, jax.typeof(x), jax.typeof(w), how.specs, how.out_sharding)
    if splits is None:
        return how.returned(*multiply(Step(kind, how), operands, state, key))
    _check_splits(splits, features_too=feature_group_count == 1)
    shards = Sharded.of(kind, Flattened.unchanged(kind.contraction, kind.features), operands, splits, how)
    sizes = dict(shards.sizes) | window.result_sizes(kind.contraction.out)
    shards = dataclasses.replace(shards, sizes=tuple(sizes.items()))
    return how.returned(*multiply_sharded(shards, how, operands, state, key))


def _one_per_axis(name: str, given, spatial: int) -> tuple[int, ...]:
    sizes = tuple(map(int, given))
    if len(sizes) != spatial:
        raise ValueError(f"`{name}` {sizes} must have one number for each of {spatial} spatial axes")
    return sizes


def groups_reason(recipe: Recipe, groups: int, inputs: int, outputs: int) -> str | None:
    """Why a recipe cannot cast features in groups of so many inputs and outputs; None if it can.

    Blocks and rotations along features must stay within a group.
    """
    sizes = {"x": inputs, "g": outputs}
    for _, tensor, cast in recipe.casts() if groups > 1 else ():
        if not cast.cuts:
            continue
        needed = max(*cast.tile, cast.rotation.size if cast.rotation else 1)
        for name in sizes if tensor == "w" else (tensor,):
            if sizes[name] % needed:
                return (
                    f"{cast} of {tensor} runs along features, and each of {groups} groups has {sizes[name]}, that "
                    f"cannot be padded to {needed} within its group; use a recipe with a scale per tensor"
                )
    return None


def _check_splits(splits: Shardings, features_too: bool) -> None:
    """Raise where windows would need what other devices have."""
    for tensor, split in zip("xwy", splits, strict=True):
        for label, axes in split:
            over = f"`{tensor}` is split over {' and '.join(map(repr, axes))} along"
            if label not in "ncoi":
                raise ValueError(f"{over} positions, across which windows move; split images or features instead")
            if label != "n" and not features_too:
                raise ValueError(f"{over} features that come in groups; split images instead, or gather it first")


@dataclasses.dataclass(frozen=True)
class Window:
    """A convolution before data, and the windows of its gradients."""

    numbers: lax.ConvDimensionNumbers
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int

    def pairs(self, padding) -> Pairs:
        """Padding as a pair for each spatial axis."""
        if isinstance(padding, str):
            if any(d != 1 for d in self.lhs_dilation):
                raise ValueError(f"`padding` {padding!r} must be spelt out where the image is dilated")
            sizes = [self.x_shape[a] for a in self.numbers.lhs_spec[2:]]
            padding = lax.padtype_to_pads(
                sizes, self._reach(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation), self.strides, padding
            )
        found = tuple((int(low), int(high)) for low, high in padding)
        if len(found) != len(self.strides):
            raise ValueError(f"`padding` {padding} must hold a pair for each of {len(self.strides)} spatial axes")
        return found

    @staticmethod
    def _reach(shape: tuple[int, ...], spec: Sequence[int], dilation: tuple[int, ...]) -> list[int]:
        """Spatial sizes of a dilated array."""
        return [(shape[a] - 1) * d + 1 for a, d in zip(spec[2:], dilation, strict=True)]

    def _reaches(self, g_shape: tuple[int, ...]):
        """For each spatial axis the reach of image, kernel and result, and the padding in front."""
        return zip(
            self._reach(self.x_shape, self.numbers.lhs_spec, self.lhs_dilation),
            self._reach(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation),
            self._reach(g_shape, self.numbers.out_spec, self.strides),
            (low for low, _ in self.padding),
            strict=True,
        )

    def result_sizes(self, labels: str) -> dict[str, int]:
        """Of the positions of the result, by its labels."""
        reaches = zip(
            self._reach(self.x_shape, self.numbers.lhs_spec, self.lhs_dilation),
            self._reach(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation),
            self.padding,
            self.strides,
            strict=True,
        )
        sizes = [max((image + sum(pads) - kernel) // step + 1, 0) for image, kernel, pads, step in reaches]
        return {labels[axis]: size for axis, size in zip(self.numbers.out_spec[2:], sizes, strict=True)}

    @property
    def features_of_a_group(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.w_shape[self.numbers.rhs_spec[1]], self.w_shape[self.numbers.rhs_spec[0]] // self.groups

    def fwd(self, x, w, **wanted) -> jax.Array:
        return scaled_conv(
            x, w, self.strides, self.padding, self.lhs_dilation, self.rhs_dilation, self.numbers, self.groups, **wanted
        )

    def dgrad(self, g, w, **wanted) -> jax.Array:
        """The image's gradient: the kernel turned round slides over the result's."""
        lhs, rhs, out = self.numbers
        padding = []
        for image, kernel, result, low in self._reaches(g.shape):
            padding.append((kernel - 1 - low, image - result + low))
        swapped = lax.ConvDimensionNumbers(out, (rhs[1], rhs[0], *rhs[2:]), lhs)
        turned = _reversed(_groups_to_inputs(w, rhs, self.groups), rhs[2:])
        return scaled_conv(
            g, turned, self.lhs_dilation, padding, self.strides, self.rhs_dilation, swapped, self.groups, **wanted
        )

    def wgrad(self, x, g, **wanted) -> jax.Array:
        """The kernel's gradient: the result's slides over the image, and images are summed over."""
        (n, c, *image_axes), (o, i, *kernel_axes), (m, f, *result_axes) = self.numbers
        if self.groups > 1 and isinstance(x, ScaledArray) and x.rotation is not None and x.rotation.axis + x.ndim == c:
            x = dequantize(x, jnp.float32)  # turned back, because features are not summed over here
        padding = []
        for image, kernel, result, low in self._reaches(g.shape):
            padding.append((low, kernel - 1 - low + result - image))
        swapped = lax.ConvDimensionNumbers((c, n, *image_axes), (f, m, *result_axes), (i, o, *kernel_axes))
        return scaled_conv(
            x,
            g,
            self.rhs_dilation,
            padding,
            self.lhs_dilation,
            self.strides,
            swapped,
            batch_group_count=self.groups,
            **wanted,
        )


def _groups_to_inputs(w, spec: Sequence[int], groups: int):
    """A kernel (groups x out, in) as (out, groups x in); scales that span groups are multiplied out."""
    if groups == 1:
        return w
    if isinstance(w, ScaledArray) and w.scale.size > 1:
        w = dequantize(w, jnp.float32)
    o, i = spec[:2]
    shape = list(w.shape)
    split = w.reshape(*shape[:o], groups, shape[o] // groups, *shape[o + 1 :])
    order = [a for a in range(len(shape) + 1) if a != o]
    at = order.index(i + 1 if i > o else i)
    moved = split.transpose([*order[:at], o, *order[at:]])
    shape[o], shape[i] = shape[o] // groups, groups * shape[i]
    return moved.reshape(*shape)


def _reversed(w, axes):
    """The kernel turned round in space; blocks do not run there, so scales turn with their codes."""
    if not isinstance(w, ScaledArray):
        return lax.rev(w, axes)
    data, scale, zero = (None if leaf is None else lax.rev(leaf, axes) for leaf in (w.data, w.scale, w.zero))
    return dataclasses.replace(w, data=data, scale=scale, zero=zero)


_FIRST = {"x": "nc", "w": "oi", "g": "no"}  # the two axes of each tensor that are not positions


@dataclasses.dataclass(frozen=True)
class Conv(Arrays):
    """x is images of features, w kernels from features to features."""

    window: Window
    partitioning: Partitioning = ONE_DEVICE
    has_batch = False
    features = "o"

    @property
    def out(self) -> str:
        return self._labels("g")

    @property
    def contraction(self) -> Contraction:
        """The free and contracted axes of each matmul, apart from windows: positions of each tensor have own labels.

        Features of the kernel are those of the image unless they come in groups.
        """
        spatial = len(self.window.strides)
        letters, firsts = labels(3 * spatial, "ncio"), ("nc", "oc" if self.window.groups == 1 else "oi", "no")
        positions = (letters[at * spatial : (at + 1) * spatial] for at in range(3))
        return Contraction(
            *(
                "".join((first + own)[spec.index(axis)] for axis in range(len(spec)))
                for first, own, spec in zip(firsts, positions, self.window.numbers, strict=True)
            )
        )

    def _labels(self, tensor: str) -> str:
        """n images, c, i and o features, other letters for positions, in the order of the tensor's axes."""
        spec = self.window.numbers["xwg".index(tensor)]
        letters = _FIRST[tensor] + labels(len(spec) - 2, "ncio")
        return "".join(letters[spec.index(axis)] for axis in range(len(spec)))

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast:
        of, summed = self._labels(tensor), {"fwd": "ci", "dgrad": "o", "wgrad": "n"}[matmul]
        [kept], [along] = ([c for c in _FIRST[tensor] if (c in summed) == is_summed] for is_summed in (False, True))
        return ResolvedCast.on(cast, OperandDims(of, kept, along + "".join(c for c in of if c not in _FIRST[tensor])))

    def multiply(self, matmul: Matmul, lhs, rhs, groups, bias: jax.Array | None = None) -> jax.Array:
        assert bias is None, "the verb takes none"
        return getattr(self.window, matmul.name)(lhs, rhs, **matmul.keywords)

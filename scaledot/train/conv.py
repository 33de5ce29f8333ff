"""`conv_general_dilated` with operands quantised by a recipe.

| matmul | computes | contracting dims | blocks and rotations along |
|---|---|---|---|
| fwd | y (images, outputs, positions) | input features, kernel positions | input features |
| dgrad | dx (images, inputs, positions) | output features, kernel positions | output features |
| wgrad | dw (outputs, inputs, positions) | images, result positions | images |

Blocks run along the contracting dim that windows do not slide along. A block of a whole axis covers positions as well,
so "per token" is one scale per image. dgrad and wgrad are convolutions with other strides, padding and dilation, and
use the same kernels as fwd.
"""

import dataclasses
import math
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
from scaledot.train.casts import NonRaggedOp
from scaledot.train.dot_sharded import ShardedOp, multiply_sharded
from scaledot.train.flatten import FlattenedContraction
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.scope import ContractionScope
from scaledot.train.train_op import Matmul, MeanTerm, Operands, StaticArgs, TokenMeans
from scaledot.train.vjp import quantised_matmul
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
    """`jax.lax.conv_general_dilated` of images x and kernel w, quantised by a recipe.

    Other arguments as in `dot_general`, without `overlap`. Images and, if `feature_group_count` is 1, features may be
    sharded over mesh axes; positions may not.

    >>> image, kernel = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2))
    >>> conv_general_dilated(image, kernel, (1,), "VALID", recipe="fp8_current").shape
    (1, 1, 3)
    """
    x, w = float_operand(x, "x"), plain_weight(w, "conv_general_dilated")
    if batch_group_count != 1:
        raise ValueError(
            f"`batch_group_count` {batch_group_count} is not supported in training, only 1; use `feature_group_count`"
        )
    opts = Options.of(
        recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options, unsupported=("overlap",)
    )
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    spatial = len(numbers.lhs_spec) - 2
    ones = (1,) * spatial
    strides, image_dilation, kernel_dilation = (
        ones if value is None else _one_per_axis(name, value, spatial)
        for name, value in (
            ("window_strides", window_strides),
            ("lhs_dilation", lhs_dilation),
            ("rhs_dilation", rhs_dilation),
        )
    )
    window = Window(numbers, x.shape, w.shape, strides, (), image_dilation, kernel_dilation, feature_group_count)
    window = dataclasses.replace(window, padding=window.pairs(padding))
    reason = groups_reason(opts.recipe, feature_group_count, *window.features_of_a_group)
    if reason is not None:
        raise ValueError(reason)
    op, operands, state = (
        ConvOp(window, partitioning_of(x, w)),
        Operands(x, w, None, None),
        opts.checked_state(state, w),
    )
    shardings = shardings_of(op.contraction, jax.typeof(x), jax.typeof(w), opts.specs, opts.out_sharding)
    inputs, _ = window.features_of_a_group
    products = inputs * math.prod(w.shape[axis] for axis in numbers.rhs_spec[2:])
    scope = ContractionScope(opts.recipe.name, "conv_general_dilated", products).named_scope
    if shardings is None:
        with scope():
            return opts.returned(*quantised_matmul(StaticArgs(op, opts), operands, state, key))
    _check_shardings(shardings, has_feature_groups=feature_group_count > 1)
    flattened = FlattenedContraction.unchanged(op.contraction, op.features)
    sharded_op = ShardedOp.of(op, flattened, operands, shardings, opts)
    sizes = dict(sharded_op.sizes) | window.result_sizes(op.contraction.out)
    sharded_op = dataclasses.replace(sharded_op, sizes=tuple(sizes.items()))
    with scope():
        return opts.returned(*multiply_sharded(sharded_op, opts, operands, state, key))


def _one_per_axis(name: str, value, spatial: int) -> tuple[int, ...]:
    entries = tuple(map(int, value))
    if len(entries) != spatial:
        raise ValueError(f"`{name}` {entries} must have one number for each of {spatial} spatial axes")
    return entries


def groups_reason(recipe: Recipe, groups: int, inputs: int, outputs: int) -> str | None:
    """Why a recipe does not support `groups` feature groups of `inputs` and `outputs` features each; None if it does.

    Blocks and rotations along features must not straddle groups. Means over positions are not supported: windows that
    extend into the padding would need a term of their own.
    """
    if recipe.mean_subtracted:
        return f"{recipe.name} has `subtract_mean`, which convolutions do not support; use a recipe without it"
    sizes = {"x": inputs, "g": outputs}
    for _, tensor, cast in recipe.casts() if groups > 1 else ():
        if not cast.has_blocks_or_rotation:
            continue
        multiple = max(*cast.block_2d, cast.rotation.size if cast.rotation else 1)
        for name in sizes if tensor == "w" else (tensor,):
            if sizes[name] % multiple:
                return (
                    f"{cast} of {tensor} runs along features, and each of the {groups} feature groups has "
                    f"{sizes[name]}, which is no multiple of {multiple}; use a recipe with a scale per tensor"
                )
    return None


def _check_shardings(shardings: Shardings, has_feature_groups: bool) -> None:
    """Raises ValueError for shardings that would need a halo exchange or cut feature groups."""
    for tensor, sharding in zip("xwy", shardings, strict=True):
        for label, axes in sharding:
            over = f"`{tensor}` is split over {' and '.join(map(repr, axes))} along"
            if label not in "ncoi":
                raise ValueError(f"{over} positions, along which windows slide; split images or features instead")
            if label != "n" and has_feature_groups:
                raise ValueError(
                    f"{over} features, of which there are groups; split images instead, or gather it first"
                )


@dataclasses.dataclass(frozen=True)
class Window:
    """The static arguments of a convolution, and fwd, dgrad and wgrad as convolutions."""

    numbers: lax.ConvDimensionNumbers
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int

    def pairs(self, padding) -> Pairs:
        """`padding` as a (low, high) pair for each spatial axis."""
        if isinstance(padding, str):
            if any(d != 1 for d in self.lhs_dilation):
                raise ValueError(f"`padding` {padding!r} must be pairs of numbers where `lhs_dilation` is not 1")
            sizes = [self.x_shape[a] for a in self.numbers.lhs_spec[2:]]
            padding = lax.padtype_to_pads(
                sizes,
                self._dilated_sizes(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation),
                self.strides,
                padding,
            )
        found = tuple((int(low), int(high)) for low, high in padding)
        if len(found) != len(self.strides):
            raise ValueError(f"`padding` {padding} must hold a pair for each of {len(self.strides)} spatial axes")
        return found

    @staticmethod
    def _dilated_sizes(shape: tuple[int, ...], spec: Sequence[int], dilation: tuple[int, ...]) -> list[int]:
        """The spatial sizes of an array after dilation."""
        return [(shape[a] - 1) * d + 1 for a, d in zip(spec[2:], dilation, strict=True)]

    def _spatial_sizes(self, g_shape: tuple[int, ...]):
        """For each spatial axis the dilated sizes of image, kernel and result, and the low padding of fwd."""
        return zip(
            self._dilated_sizes(self.x_shape, self.numbers.lhs_spec, self.lhs_dilation),
            self._dilated_sizes(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation),
            self._dilated_sizes(g_shape, self.numbers.out_spec, self.strides),
            (low for low, _ in self.padding),
            strict=True,
        )

    def result_sizes(self, labels: str) -> dict[str, int]:
        """The spatial sizes of the result, by label."""
        windows = zip(
            self._dilated_sizes(self.x_shape, self.numbers.lhs_spec, self.lhs_dilation),
            self._dilated_sizes(self.w_shape, self.numbers.rhs_spec, self.rhs_dilation),
            self.padding,
            self.strides,
            strict=True,
        )
        sizes = [max((image + sum(pads) - kernel) // stride + 1, 0) for image, kernel, pads, stride in windows]
        return {labels[axis]: size for axis, size in zip(self.numbers.out_spec[2:], sizes, strict=True)}

    @property
    def features_of_a_group(self) -> tuple[int, int]:
        """The input and output features of one group."""
        return self.w_shape[self.numbers.rhs_spec[1]], self.w_shape[self.numbers.rhs_spec[0]] // self.groups

    def fwd(self, x, w, **keywords) -> jax.Array:
        return scaled_conv(
            x,
            w,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.numbers,
            self.groups,
            **keywords,
        )

    def dgrad(self, g, w, **keywords) -> jax.Array:
        """The gradient of x: a convolution of g with the spatially reversed kernel."""
        lhs, rhs, out = self.numbers
        padding = []
        for image, kernel, result, low in self._spatial_sizes(g.shape):
            padding.append((kernel - 1 - low, image - result + low))
        swapped = lax.ConvDimensionNumbers(out, (rhs[1], rhs[0], *rhs[2:]), lhs)
        reversed_w = _reversed(_groups_to_inputs(w, rhs, self.groups), rhs[2:])
        return scaled_conv(
            g, reversed_w, self.lhs_dilation, padding, self.strides, self.rhs_dilation, swapped, self.groups, **keywords
        )

    def wgrad(self, x, g, **keywords) -> jax.Array:
        """The gradient of w: a convolution of x with g as the kernel and images as features."""
        (n, c, *image_axes), (o, i, *kernel_axes), (m, f, *result_axes) = self.numbers
        if self.groups > 1 and isinstance(x, ScaledArray) and x.rotation is not None and x.rotation.axis + x.ndim == c:
            x = dequantize(x, jnp.float32)  # undoes the rotation: features are free dims here
        padding = []
        for image, kernel, result, low in self._spatial_sizes(g.shape):
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
            **keywords,
        )


def _groups_to_inputs(w, spec: Sequence[int], groups: int):
    """A kernel (groups × out, in) as (out, groups × in); dequantised if it has more than one scale."""
    if groups == 1:
        return w
    if isinstance(w, ScaledArray) and w.scale.size > 1:
        w = dequantize(w, jnp.float32)
    o, i = spec[:2]
    shape = list(w.shape)
    split = w.reshape(*shape[:o], groups, shape[o] // groups, *shape[o + 1 :])
    order = [a for a in range(len(shape) + 1) if a != o]
    at = order.index(i + 1 if i > o else i)
    transposed = split.transpose([*order[:at], o, *order[at:]])
    shape[o], shape[i] = shape[o] // groups, groups * shape[i]
    return transposed.reshape(*shape)


def _reversed(w, axes):
    """The kernel reversed along spatial axes; blocks do not run along these, so scales are reversed with the codes."""
    if not isinstance(w, ScaledArray):
        return lax.rev(w, axes)
    data, scale, zero = (None if leaf is None else lax.rev(leaf, axes) for leaf in (w.data, w.scale, w.zero))
    return dataclasses.replace(w, data=data, scale=scale, zero=zero)


_NON_SPATIAL = {"x": "nc", "w": "oi", "g": "no"}  # the labels of the two dims of each tensor that are not spatial


@dataclasses.dataclass(frozen=True)
class ConvOp(NonRaggedOp):
    """A convolution of images x with a kernel w. Labels: n images, c and i input features, o output features."""

    window: Window
    partitioning: Partitioning = ONE_DEVICE
    has_batch = False
    sums_tokens = False
    features = "o"

    @property
    def out(self) -> str:
        return self._labels("g")

    @property
    def contraction(self) -> Contraction:
        """The contraction whose labels shardings refer to; spatial dims of each tensor have labels of their own.

        Input features of w have the label of those of x unless there are feature groups.
        """
        spatial = len(self.window.strides)
        letters, non_spatial = labels(3 * spatial, "ncio"), ("nc", "oc" if self.window.groups == 1 else "oi", "no")
        positions = (letters[at * spatial : (at + 1) * spatial] for at in range(3))
        return Contraction(
            *(
                "".join((first + rest)[spec.index(axis)] for axis in range(len(spec)))
                for first, rest, spec in zip(non_spatial, positions, self.window.numbers, strict=True)
            )
        )

    def _labels(self, tensor: str) -> str:
        """The labels of a tensor in the order of its dims: n, c, i and o, other letters for spatial dims."""
        spec = self.window.numbers["xwg".index(tensor)]
        letters = _NON_SPATIAL[tensor] + labels(len(spec) - 2, "ncio")
        return "".join(letters[spec.index(axis)] for axis in range(len(spec)))

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast:
        dims, contracting = self._labels(tensor), {"fwd": "ci", "dgrad": "o", "wgrad": "n"}[matmul]
        [free] = [c for c in _NON_SPATIAL[tensor] if c not in contracting]
        [contracting_dim] = [c for c in _NON_SPATIAL[tensor] if c in contracting]
        spatial = "".join(c for c in dims if c not in _NON_SPATIAL[tensor])
        return ResolvedCast.on(cast, OperandDims(dims, free, contracting_dim + spatial))

    def token_means(self, tensor: str, x: jax.Array, groups) -> TokenMeans:
        raise AssertionError("conv_general_dilated refuses recipes with `subtract_mean`")

    def multiply(
        self,
        matmul: Matmul,
        lhs,
        rhs,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        assert bias is None, "conv_general_dilated has no bias"
        assert mean_term is None
        return getattr(self.window, matmul.name)(lhs, rhs, **matmul.keywords)

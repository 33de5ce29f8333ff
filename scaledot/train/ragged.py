"""ragged_dot under a recipe: rows in groups, each with its own matrix, as in a mixture of experts.

Every group is quantised as if it were alone (`kernels.xla_casts` says how). Down the rows, which wgrad sums over within
each group, groups start at whole blocks, with zeros between. What is one number for a whole group (a scale per tensor
or per channel, the tensor scale of a two-level format) is kept per group, beside the codes, and meets the result of
wgrad, which has one matrix per group.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.kernels import table
from scaledot.kernels.layouts import PerGroup, logical
from scaledot.kernels.spec import CastProblem, CastResult, View, accumulation_dtype
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.grouped import group_of, members, padded_capacity, spaced, whole_groups
from scaledot.numerics.rounding import numbered
from scaledot.ops.cast_spec import checked_groups, make_cast_spec, propagating
from scaledot.ops.casts import make_casts
from scaledot.ops.operands import Choice, float_operand
from scaledot.ops.quantize import amax, grouped_cast_spec
from scaledot.ops.ragged import contract_groups, ragged_dot_general
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.recipes import Cast, Gemm, Recipe
from scaledot.state import State
from scaledot.train.kind import CastOperands, CastRequest, Matmul, Operands, Step
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.ragged_sharded import experts_of, multiply_experts
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.vjp import multiply
from scaledot.train.weight_codes import plain_weight


def ragged_dot(
    x,
    w,
    group_sizes,
    b=None,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    **options: Unpack[Keywords],
):
    """`jax.lax.ragged_dot` under a recipe: x (m, k), w (groups, k, n), b (groups, n) or None -> (m, n).

    Rows come in consecutive groups, which may be empty; rows past the last one give zeros and take no part in scales
    or gradients. Every group is quantised as if it were alone, except that delayed scaling has one factor for all.
    Other arguments as in `dot_general`, without `overlap` and `on_indivisible`. On a mesh weights may be sharded along
    groups, as experts are, and b as they are; `group_sizes` are those of all groups, on every device.

    >>> x, w = jnp.ones((4, 32)), jnp.stack([jnp.ones((32, 2)), 3 * jnp.ones((32, 2))])
    >>> ragged_dot(x, w, jnp.array([1, 2]), recipe="mxfp8")[:, 0]
    Array([32., 96., 96.,  0.], dtype=float32)
    """
    x, w = float_operand(x, "x"), plain_weight(w, "ragged_dot")
    b = None if b is None else float_operand(b, "b")
    dtype, refused = result_dtype(preferred_element_type, x.dtype, w.dtype), ("overlap", "on_indivisible")
    how = Options.of(recipe, dtype, precision, options, refused)
    if x.ndim != 2 or w.ndim != 3 or (how.specs is None and x.shape[1] != w.shape[1]):
        raise ValueError(f"`x` (rows, k) and `w` (groups, k, n) must share k, not be of shapes {x.shape} and {w.shape}")
    experts = experts_of(x, w, how.specs, how.out_sharding)
    rows, count = (x.shape[0], w.shape[0]) if experts is None else (experts.sizes["t"], experts.sizes["g"])
    groups = checked_groups(group_sizes, rows)
    if groups.shape[0] != count:
        raise ValueError(f"`group_sizes` has {groups.shape[0]} groups, but `w` {w.shape} has {count} matrices")
    if b is not None and b.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"`b` {b.shape} must have one row of {w.shape[2]} for each of {w.shape[0]} groups")
    operands, state, partitioning = Operands(x, w, b, groups), how.checked_state(state, w), _partitioning(x, w)
    how = dataclasses.replace(how, out_sharding=None)  # the matmuls of shards, or of whole arrays, have none

    def kind_of(groups: int, rows: int, k: int, n: int) -> Ragged:
        arrays = jax.ShapeDtypeStruct((rows, k), x.dtype), jax.ShapeDtypeStruct((rows, n), dtype)
        return Ragged(_spacing(how.recipe.wgrad, groups, how.kernel, arrays, partitioning), partitioning)

    if experts is not None:
        return how.returned(*multiply_experts(kind_of, how, experts, operands, state, key))
    x = x if rows else jnp.zeros((1, x.shape[1]), x.dtype)  # a row of no group stands for none
    step = Step(kind_of(count, rows, *w.shape[1:]), how)
    y, state = multiply(step, operands._replace(x=x), state, key)
    return how.returned(y[:rows], state)


def _partitioning(x: jax.Array, w: jax.Array) -> Partitioning:
    """How XLA partitions them: kernels of groups have no partitioning of their own."""
    return partitioning_of(x, w)._replace(is_automatic=False)


def _spacing(wgrad: Gemm | None, groups: int, kernel: Choice, rows: tuple[Any, Any], partitioning: Partitioning) -> int:
    """What sizes of groups are rounded up to in wgrad: what its casts need, or more where kernels make both of them.

    A cast that rounds stochastically must have the same codes on every device, so what serves two products still does.
    """
    needed = _row_alignment(wgrad)
    if wgrad is None or isinstance(kernel, str):
        return needed
    multiples = set()
    for x, cast in zip(rows, (wgrad.lhs, wgrad.rhs), strict=True):
        if cast is None or not cast.is_per_tensor or cast.rounding != "nearest":
            return needed
        view = View(ResolvedRowCast(cast, cast.tile, 1, 1).spec(x.shape, x.dtype, groups), contracted=0)
        given = frozenset() if cast.delayed is None else frozenset({"multiplier"})
        problem = CastProblem(x.shape, (view,), given, groups=groups, group_multiple=needed, partitioning=partitioning)
        multiples.add(table.spacing(problem))
    return max(multiples) if len(multiples) == 1 else needed


def _row_alignment(wgrad: Gemm | None) -> int:
    """How many rows of one group a block or a rotation of wgrad needs."""
    sizes = [1]
    for cast in (wgrad.lhs, wgrad.rhs) if wgrad else ():
        if cast is not None:
            sizes += [max(cast.tile[1], 1), cast.rotation.size if cast.rotation else 1]
    return math.lcm(*sizes)


class ResolvedRowCast(NamedTuple):
    """A cast of rows in groups. tile: (rows, features) that share a scale. together: rows that groups come in."""

    cast: Cast
    tile: tuple[int, int]
    axis: int  # that blocks and rotations run along
    row_alignment: int

    @property
    def rows_reason(self) -> str | None:
        """Why groups whose sizes are data cannot be cast so, or None."""
        if self.cast.calibration != "absmax":
            return f"has `calibration` {self.cast.calibration!r}, which is not offered for rows in groups"
        (down, across), along_features = self.tile, self.axis == 1
        is_tensor_or_channel = across == 0 or (across == 1 and not along_features)
        if down or (is_tensor_or_channel and (along_features or self.cast.rotation is None)):
            return None
        return (
            "has scales for all rows of a group at once, which rows in groups take for whole tensors or channels "
            "without a rotation down the rows; use a block of rows"
        )

    def spec(self, shape: tuple[int, ...], dtype, groups: int, amax_axes: tuple[str, ...] = ()) -> CastSpec:
        """The cast of rows of that shape in so many groups."""
        rows, features = (
            shape[0] if self.row_alignment == 1 else padded_capacity(shape[0], groups, self.row_alignment),
            shape[1],
        )
        format, rotation, (down, across) = self.cast.format, self.cast.rotation, self.tile
        if self.axis == 0 and down:
            x = jax.ShapeDtypeStruct((rows, features), dtype)
            spec = make_cast_spec(x, format, (1, 0), (across, down), "absmax", None, rotation, None, pad=True)
            return dataclasses.replace(propagating(spec, 2), amax_axes=amax_axes)
        features += 0 if rotation is None else -features % rotation.size
        x = jax.ShapeDtypeStruct((rows, features), dtype)
        return propagating(grouped_cast_spec(x, format, (0, 1), self.tile, None, rotation, None, True, amax_axes), 2)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """x and g are rows in groups, w has one matrix per group; in wgrad groups start at multiples of `row_alignment`."""

    row_alignment: int
    partitioning: Partitioning = ONE_DEVICE
    has_batch = False

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast | ResolvedRowCast:
        if tensor == "w":
            return ResolvedCast.on(
                cast, OperandDims("kn", "n", "k") if matmul == "fwd" else OperandDims("kn", "k", "n")
            )
        free, contracted = cast.tile
        # One scale without a rotation gives the same codes for both matmuls of a tensor: they are made once.
        along_features = matmul != "wgrad" or (cast.is_per_tensor and cast.rotation is None)
        tile, axis = ((free, contracted), 1) if along_features else ((contracted, free), 0)
        resolved = ResolvedRowCast(cast, tile, axis, self.row_alignment if matmul == "wgrad" else 1)
        reason = resolved.rows_reason
        if reason is not None:
            raise ValueError(f"{cast} of {tensor} in {matmul} {reason}")
        return resolved

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """A pass for each cast: in wgrad groups are spaced, elsewhere they are not."""
        made: dict[Any, CastResult] = {}
        for matmul, resolved in request.resolved.items():
            if resolved not in made and request.tensor == "w":
                made[resolved] = _cast_weights(request, resolved, x)
            elif resolved not in made:
                made[resolved] = self._cast_rows(request, matmul, resolved, x, groups, is_first=not made)
        first = next(iter(made.values()))
        return CastOperands({m: made[resolved].arrays[0] for m, resolved in request.resolved.items()}, first.amax)

    def _cast_rows(
        self, request: CastRequest, matmul: str, resolved: ResolvedRowCast, x: jax.Array, groups, is_first: bool
    ) -> CastResult:
        """Rows cast for one matmul, each group as if it were alone."""
        spec = resolved.spec(x.shape, x.dtype, groups.shape[0], request.amax_axes.get(resolved, ()))
        view = View(spec, request.key_index(resolved), contracted=0 if matmul == "wgrad" else 1)
        multiplier = None if request.multiplier is None else request.multiplier.reshape(1, 1)
        given = request.arguments(multiplier, groups)
        wanted = {"amax": request.amax and is_first, "group_multiple": resolved.row_alignment}
        return make_casts(x, (view,), given, request.kernel, self.partitioning, **wanted)

    def plain(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return spaced(x, groups, self.row_alignment) if matmul == "wgrad" else x

    def unclipped_mask(self, resolved, x: jax.Array, q) -> jax.Array | None:
        if isinstance(resolved, ResolvedCast):
            return jax.vmap(resolved.unclipped_mask)(x, q)
        return ResolvedCast(resolved.cast, (0, 0), None).unclipped_mask(
            x, q
        )  # of rows only delayed scaling clips, with one scale for all

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x if tensor == "w" else members(x, groups))

    def multiply(self, matmul: Matmul, lhs, rhs, groups, bias: jax.Array | None = None) -> jax.Array:
        if bias is not None:
            y = self.multiply(matmul.wide, lhs, rhs, groups)
            return self.add_bias(y, bias.astype(y.dtype), groups).astype(matmul.dtype)
        if matmul.name == "wgrad":
            return self._multiply_within_groups(matmul, lhs, rhs, groups)
        lhs = _by_row(lhs, groups) if isinstance(lhs, PerGroup) else lhs
        contracted = 1 if matmul.name == "fwd" else 2
        numbers = lax.RaggedDotDimensionNumbers((((1,), (contracted,)), ((), ())), [0], [0])
        return ragged_dot_general(lhs, rhs, groups, numbers, **matmul.keywords)

    def _multiply_within_groups(self, matmul: Matmul, lhs, rhs, groups) -> jax.Array:
        """wgrad, which contracts the rows of each group: (groups, k, n)."""
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        more: dict[str, Any] = {"precision": matmul.precision, "preferred": matmul.dtype}
        if isinstance(lhs, PerGroup) or isinstance(rhs, PerGroup):
            one = jnp.ones((groups.shape[0], 1), jnp.float32)
            (lhs, left), (rhs, right) = (
                (x.codes, x.scale) if isinstance(x, PerGroup) else (x, one) for x in (lhs, rhs)
            )
            more["multipliers"] = left, right
        lhs, rhs = logical(lhs), logical(rhs)
        sizes = whole_groups(groups, self.row_alignment)
        return contract_groups(lhs, rhs, sizes, numbers, matmul.kernel, group_multiple=self.row_alignment, **more)

    def add_bias(self, y: jax.Array, bias: jax.Array, groups) -> jax.Array:
        group = group_of(groups, y.shape[0])
        return y + jnp.append(bias, jnp.zeros_like(bias[:1]), axis=0)[group]

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        count, wide = groups.shape[0], g.astype(accumulation_dtype(g.dtype))
        return jax.ops.segment_sum(wide, group_of(groups, g.shape[0]), count + 1)[:count]


def _cast_weights(request: CastRequest, resolved: ResolvedCast, w: jax.Array) -> CastResult:
    """The matrix of each group cast by itself: by XLA, because kernels are not made to be mapped."""
    key, uniform, axes = request.keys[resolved], request.uniforms.get(resolved), request.amax_axes.get(resolved, ())
    keys = None
    if key is not None and uniform is None:
        keys = numbered(key, jnp.arange(w.shape[0]))
    each = functools.partial(resolved.quantize, amax_axes=axes, kernel=table.XLA_CAST.name)
    codes = jax.vmap(lambda w, key, uniform: each(w, request.multiplier, key, None, uniform))(w, keys, uniform)
    return CastResult((codes,))


def _by_row(x: PerGroup, groups: jax.Array) -> ScaledArray:
    """An ordinary array whose scale is repeated for every row."""
    group = jnp.minimum(group_of(groups, x.codes.shape[0]), groups.shape[0] - 1)
    return dataclasses.replace(x.codes, scale=x.scale[group], block=(0,))

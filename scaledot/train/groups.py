"""ragged_dot under a recipe: rows in groups, each with its own matrix, as in a mixture of experts.

Every group is quantised as if it were alone. Along features that needs nothing new. Down the rows, which wgrad sums
over within each group, blocks and rotations must not straddle groups whose sizes are known only at run time: rows are
first moved so that every group starts at a whole block, with zeros between. What is one number for a whole group (a
scale per tensor or per channel, the tensor scale of a two-level format) is kept per group, beside the codes, and meets
the result of wgrad, which has one matrix per group.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.formats import Format
from scaledot.kernels.mosaic import casts
from scaledot.kernels.mosaic.support import devices_of
from scaledot.kernels.spec import sum_dtype
from scaledot.numerics import blocks, calibrate
from scaledot.numerics.bits import flush
from scaledot.numerics.grouped import group_rows, quantize_tiles_parts, room, spaced, whole_groups
from scaledot.numerics.scale import Levels, levels_or_nan
from scaledot.ops.operands import Choice, float_operand
from scaledot.ops.plan import checked_groups, make_plan, propagating
from scaledot.ops.quantize import amax, plan_of_groups, quantize_groups_planned
from scaledot.ops.ragged import contract_groups, ragged_dot_general
from scaledot.recipes import Cast, Gemm, Recipe, find_recipe
from scaledot.state import State
from scaledot.train.arguments import checked_state, result_dtype, returned
from scaledot.train.casts import Laid, Sides, padded
from scaledot.train.experts import experts_of, product_of_experts
from scaledot.train.product import Made, Operands, Rule, multiply_then_add, product
from scaledot.train.splits import Specs


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
    out_sharding=None,
    specs: Specs | None = None,
    kernel: Choice = None,
):
    """`jax.lax.ragged_dot` under a recipe: x (m, k), w (groups, k, n), b (groups, n) or None -> (m, n).

    Rows come in consecutive groups, which may be empty; rows past the last one give zeros and take no part in scales
    or gradients. Every group is quantised as if it were alone, except that delayed scaling has one factor for all.
    Other arguments as in `dot_general`. On a mesh matrices may be split along groups, as experts are, and b lies as
    they do; `group_sizes` are those of all groups, on every device.

    >>> x, w = jnp.ones((4, 32)), jnp.stack([jnp.ones((32, 2)), 3 * jnp.ones((32, 2))])
    >>> ragged_dot(x, w, jnp.array([1, 2]), recipe="mxfp8")[:, 0]
    Array([32., 96., 96.,  0.], dtype=float32)
    """
    x, w = float_operand(x, "x"), float_operand(w, "w")
    b = None if b is None else float_operand(b, "b")
    if x.ndim != 2 or w.ndim != 3 or (specs is None and x.shape[1] != w.shape[1]):
        raise ValueError(f"`x` (rows, k) and `w` (groups, k, n) must share k, not be of shapes {x.shape} and {w.shape}")
    experts = experts_of(x, w, specs, out_sharding)
    rows, count = (x.shape[0], w.shape[0]) if experts is None else (experts.sizes["t"], experts.sizes["g"])
    groups = checked_groups(group_sizes, rows)
    if groups.shape[0] != count:
        raise ValueError(f"`group_sizes` has {groups.shape[0]} groups, but `w` {w.shape} has {count} matrices")
    if b is not None and b.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"`b` {b.shape} must have one row of {w.shape[2]} for each of {w.shape[0]} groups")
    recipe = find_recipe(recipe)
    dtype = result_dtype(preferred_element_type, x, w)

    def kind_of(groups: int, rows: int, k: int, n: int) -> Groups:
        arrays = jax.ShapeDtypeStruct((rows, k), x.dtype), jax.ShapeDtypeStruct((rows, n), dtype)
        return Groups(_spacing(recipe.wgrad, groups, kernel, arrays))

    rule = Rule(kind_of(count, rows, *w.shape[1:]), recipe, dtype, precision, kernel=kernel)
    operands, state = Operands(x, w, b, groups), checked_state(recipe, state, w)
    if experts is not None:
        return returned(recipe, *product_of_experts(rule, kind_of, experts, operands, state, key))
    x = x if rows else jnp.zeros((1, x.shape[1]), x.dtype)  # a row of no group stands for none
    y, state = product(rule, operands._replace(x=x), state, key)
    return returned(recipe, y[:rows], state)


def _spacing(wgrad: Gemm | None, groups: int, kernel: Choice, rows: tuple[Any, Any]) -> int:
    """What sizes of groups are rounded up to in wgrad: what its casts need, or more where kernels make both of them.

    A cast that rounds by chance must have the same codes on every device, so what serves two products still does.
    """
    needed = _rows_together(wgrad)
    if wgrad is None or isinstance(kernel, str):
        return needed
    for x, cast in zip(rows, (wgrad.lhs, wgrad.rhs), strict=True):
        if cast is None or not cast.is_per_tensor or cast.rounding != "nearest":
            return needed
        view = _view("wgrad", LaidRows(cast, cast.tile, 1, casts.LINE))
        if casts.rows_reason(x.shape, x.dtype, groups, view, devices_of(x)) is not None:
            return needed
    return casts.LINE


def _rows_together(wgrad: Gemm | None) -> int:
    """How many rows of one group a block or a rotation of wgrad needs."""
    sizes = [1]
    for cast in (wgrad.lhs, wgrad.rhs) if wgrad else ():
        if cast is not None:
            sizes += [max(cast.tile[1], 1), cast.rotation.size if cast.rotation else 1]
    return math.lcm(*sizes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerGroup:
    """Codes of rows, perhaps Transposed, and the scales that each group has for itself: (groups, 1 or features)."""

    codes: Any
    scale: jax.Array


class LaidRows(NamedTuple):
    """A cast of rows in groups. tile: (rows, features) that share a scale. together: rows that groups come in."""

    cast: Cast
    tile: tuple[int, int]
    axis: int  # that blocks and rotations run along
    together: int


@dataclasses.dataclass(frozen=True)
class Groups:
    """x and g are rows in groups, w has one matrix per group; in wgrad groups come in multiples of `together` rows."""

    together: int
    has_batch = False

    def lay(self, cast: Cast, product: str, tensor: str) -> Laid | LaidRows:
        if tensor == "w":
            return Laid.on(cast, Sides("kn", "n", "k") if product == "fwd" else Sides("kn", "k", "n"))
        if cast.calibration != "absmax":
            raise ValueError(f"`calibration` {cast.calibration!r} of {cast} is not offered for rows in groups")
        kept, summed = cast.tile
        along_features = product != "wgrad" or (cast.is_per_tensor and cast.rotation is None)
        tile, axis = ((kept, summed), 1) if along_features else ((summed, kept), 0)
        if tile[0] == 0 and (tile[1] > 1 or (tile[1] == 1 and along_features) or (cast.rotation and axis == 0)):
            raise ValueError(
                f"{cast} of {tensor} in {product} has scales for all rows of a group at once, which rows in groups "
                "take for whole tensors or channels without a rotation down the rows; use a block of rows"
            )
        return LaidRows(cast, tile, axis, self.together if product == "wgrad" else 1)

    def quantize(self, laid, x: jax.Array, groups, factor, key, uniform=None, amax_axes: tuple[str, ...] = ()) -> Any:
        """Codes of x; on parts of features `uniform` is drawn by their places, and scales are shared over some axes."""
        how = {"key": key, "uniform": uniform, "amax_axes": amax_axes}
        if isinstance(laid, Laid):
            return _each_matrix(laid, x, factor, **how)
        x, groups = spaced(x, groups, laid.together), whole_groups(groups, laid.together)
        if factor is not None:
            return Laid(laid.cast, laid.tile, None).quantize(_members(x, groups), factor, **how)
        if laid.tile[0] == 0:
            return _per_group(laid, padded(x, 1, laid.cast), groups, **how)
        if laid.axis == 1:
            return _along_features(laid, padded(x, 1, laid.cast), groups, **how)
        return _down_the_rows(laid, x, groups, **how)

    def fused(
        self, tensor: str, laid: dict[str, Any], keys, later, x, groups, factor, amax: bool, sums: bool
    ) -> Made | None:
        """A pass for each product: in wgrad groups are spaced, elsewhere they are not."""
        if tensor == "w" or len({each.cast.delayed for each in laid.values()}) > 1:
            return None
        views = {p: _view(p, each) for p, each in laid.items()}
        if any(laid[p].together != (1 if view.summed else casts.LINE) for p, view in views.items()):
            return None
        what = x.shape, x.dtype, groups.size
        if any(casts.rows_reason(*what, view, devices_of(x)) is not None for view in views.values()):
            return None
        first = next(iter(views))  # the one that looks for the largest magnitude
        made = {
            p: cast_rows(laid[p], view, x, groups, keys[p], factor, amax and p == first) for p, view in views.items()
        }
        return Made({p: operand for p, (operand, _) in made.items()}, made[first][1])

    def plain(self, product: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return spaced(x, groups, self.together) if product == "wgrad" else x

    def inside(self, laid, x: jax.Array, q) -> jax.Array | None:
        if isinstance(laid, Laid):
            return jax.vmap(laid.inside)(x, q)
        return Laid(laid.cast, (0, 0), None).inside(x, q)  # of rows only delayed scaling clips, with one scale for all

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x if tensor == "w" else _members(x, groups))

    def multiply(self, product: str, lhs, rhs, groups, **wanted) -> jax.Array:
        wanted.pop("out_sharding")
        if product != "wgrad":
            lhs = _by_row(lhs, groups) if isinstance(lhs, PerGroup) else lhs
            summed = 1 if product == "fwd" else 2
            numbers = lax.RaggedDotDimensionNumbers((((1,), (summed,)), ((), ())), [0], [0])
            return ragged_dot_general(lhs, rhs, groups, numbers, **wanted)
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        more = {"precision": wanted["precision"], "preferred": wanted["preferred_element_type"]}
        if isinstance(lhs, PerGroup) or isinstance(rhs, PerGroup):
            one = jnp.ones((groups.shape[0], 1), jnp.float32)
            (lhs, left), (rhs, right) = (
                (x.codes, x.scale) if isinstance(x, PerGroup) else (x, one) for x in (lhs, rhs)
            )
            more["factors"] = left, right
        lhs, rhs = casts.logical(lhs), casts.logical(rhs)
        sizes = whole_groups(groups, self.together)
        return contract_groups(lhs, rhs, sizes, numbers, wanted["kernel"], group_multiple=self.together, **more)

    def multiply_and_add(self, x, w, bias: jax.Array, groups, **wanted) -> jax.Array:
        return multiply_then_add(self, x, w, bias, groups, **wanted)

    def add_bias(self, y: jax.Array, bias: jax.Array, groups) -> jax.Array:
        group = _group_of(groups, y.shape[0])
        return y + jnp.append(bias, jnp.zeros_like(bias[:1]), axis=0)[group]

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        count, wide = groups.shape[0], g.astype(sum_dtype(g.dtype))
        return jax.ops.segment_sum(wide, _group_of(groups, g.shape[0]), count + 1)[:count]


def _view(product: str, laid: LaidRows) -> casts.View:
    cast, summed = laid.cast, 0 if product == "wgrad" else 1
    return casts.View(cast.format, laid.tile, summed, stochastic=cast.rounding == "stochastic", rotation=cast.rotation)


def cast_rows(laid: LaidRows, view: casts.View, x: jax.Array, groups, key, factor, amax: bool) -> tuple[Any, Any]:
    """An operand that a kernel made, and the largest magnitude that it saw."""
    if factor is not None or not laid.cast.is_per_tensor:
        return casts.run_rows(x, groups, view, key, factor, amax)
    levels = _levels_of_groups(x, groups, laid.cast.format)
    factors = _of_rows(levels, groups, x.shape[0], laid.together)
    codes, seen = casts.run_rows(x, groups, view, key, factors, amax)
    return PerGroup(codes, levels.scale[:-1, None]), seen


def _levels_of_groups(x: jax.Array, groups: jax.Array, format: Format) -> Levels:
    """Scales of whole groups, and one more for rows of none, which count as zeros."""
    count = groups.shape[0]
    row_amax = calibrate.block_amax if format.is_float else calibrate.block_amax_or_inf  # floats have NaN codes
    of_rows = row_amax(flush(x.astype(jnp.float32)), (1, 0))[:, 0]
    largest = jax.ops.segment_max(of_rows, _group_of(groups, x.shape[0]), count + 1, indices_are_sorted=True)
    return levels_or_nan(jnp.maximum(largest, 0).at[count].set(0), format, x.dtype)


def _of_rows(levels: Levels, groups: jax.Array, rows: int, together: int) -> jax.Array:
    """The factor of each row when groups come in so many."""
    (factor,) = levels.factors
    rows = rows if together == 1 else room(rows, groups.shape[0], together)
    return factor[_group_of(whole_groups(groups, together), rows)]


def _each_matrix(laid: Laid, w: jax.Array, factor, key, uniform, amax_axes) -> ScaledArray:
    keys = None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(w.shape[0]))
    return jax.vmap(lambda matrix, k, u: laid.quantize(matrix, factor, k, None, u, amax_axes))(w, keys, uniform)


def _per_group(laid: LaidRows, x: jax.Array, groups: jax.Array, **how) -> PerGroup:
    """One scale, or one per feature, for all rows of a group."""
    q = _along_features(laid, x, groups, **how)
    scale = q.scale[_first_rows(groups, x.shape[0])]  # a group without rows has found that of another, which may be NaN
    return PerGroup(_unscaled(q), jnp.where((groups > 0)[:, None], scale, jnp.ones_like(scale)))


def _along_features(laid: LaidRows, x: jax.Array, groups: jax.Array, key, uniform, amax_axes) -> ScaledArray:
    cast = laid.cast
    plan = plan_of_groups(x, cast.format, (0, 1), laid.tile, None, cast.rotation, None, True, amax_axes)
    return quantize_groups_planned(propagating(plan, 2), x, groups, cast.rounding, key, uniform)


def _down_the_rows(laid: LaidRows, x: jax.Array, groups: jax.Array, key, uniform, amax_axes) -> PerGroup | ScaledArray:
    """Blocks that run down rows which come in whole blocks of one group."""
    tiles = x.reshape(-1, laid.together, x.shape[1])
    rows, features = laid.tile
    plan = make_plan(
        tiles, laid.cast.format, (0, 2, 1), (1, features, rows), "absmax", None, laid.cast.rotation, None, pad=True
    )
    plan = dataclasses.replace(propagating(plan, tiles.ndim), amax_axes=amax_axes)
    group = _group_of(groups // laid.together, tiles.shape[0])
    uniform = None if uniform is None else uniform.reshape(tiles.shape)
    parts = _quantize_tiles(plan, tiles, group, groups.shape[0] + 1, key, uniform)
    rotation = plan.rotation and dataclasses.replace(plan.rotation, axis=-2)
    flat = ScaledArray(
        parts.data.reshape(x.shape),
        parts.scale.reshape(-1, parts.scale.shape[-1]),
        format=plan.format,
        block=blocks.trim((rows, features)),
        dtype=plan.dtype,
        rotation=rotation,
    )
    if parts.tensor_scale is None:
        return flat
    scale = parts.tensor_scale[_first_rows(groups // laid.together, tiles.shape[0])][:, None]
    return PerGroup(dataclasses.replace(flat, tensor_scale=jnp.ones((), jnp.float32)), scale)


_quantize_tiles = jax.jit(quantize_tiles_parts, static_argnums=(0, 3))


def _unscaled(q: ScaledArray) -> ScaledArray:
    return dataclasses.replace(q, scale=jnp.ones((1, 1), q.scale.dtype), block=(0, 0))


def _by_row(x: PerGroup, groups: jax.Array) -> ScaledArray:
    """An ordinary array whose scale is repeated for every row."""
    group = jnp.minimum(_group_of(groups, x.codes.shape[0]), groups.shape[0] - 1)
    return dataclasses.replace(x.codes, scale=x.scale[group], block=(0,))


def _group_of(groups: jax.Array, rows: int) -> jax.Array:
    """The group of each row; as many as there are groups for rows past the last."""
    return group_rows(groups, rows, 0)[0]


def _first_rows(groups: jax.Array, rows: int) -> jax.Array:
    return jnp.minimum(jnp.cumsum(groups) - groups, rows - 1)


def _members(x: jax.Array, groups: jax.Array) -> jax.Array:
    """x with zeros in rows of no group."""
    inside = jnp.arange(x.shape[0]) < jnp.sum(groups)
    return jnp.where(inside[:, None], x, jnp.zeros_like(x))

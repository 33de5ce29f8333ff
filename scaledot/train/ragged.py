"""`ragged_dot` with operands quantised by a recipe: rows in consecutive groups, each multiplied by its own matrix.

Every group is quantised as if it were an array of its own (see `numerics.grouped`). wgrad contracts the rows of each
group, so its blocks run down rows: groups are aligned to start at a multiple of the block, with zero rows between. One
scale for a whole group (per tensor, per channel, or the tensor scale of a two-level format) is stored apart from the
codes (`PerGroup`) and multiplies the result of wgrad, which has one matrix per group.

Rows x (300, k) in groups of 130 and 170 with 128×1 blocks in wgrad: the groups start at rows 0 and 256, of 512.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction
from scaledot.kernels import table
from scaledot.kernels.layouts import PerGroup, logical
from scaledot.kernels.operands import dequantized_values
from scaledot.kernels.spec import CastOutput, CastProblem, CastResult, accumulation_dtype
from scaledot.numerics.cast import CastSpec
from scaledot.numerics.grouped import (
    align_groups,
    aligned_group_sizes,
    group_of,
    padded_capacity,
    rows_of_groups,
    zero_ungrouped_rows,
)
from scaledot.numerics.rounding import fold_in_traced
from scaledot.ops.cast_spec import checked_groups, make_cast_spec, propagate_nonfinite, with_rounding
from scaledot.ops.casts import run_casts
from scaledot.ops.operands import KernelChoice, float_operand
from scaledot.ops.quantize import amax, amax_of_groups, grouped_cast_spec
from scaledot.ops.ragged import contract_groups, ragged_dot_general
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.recipes import Cast, Gemm, Recipe
from scaledot.state import State, is_per_group
from scaledot.train.means import contract_means, token_means
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.ragged_sharded import experts_of, multiply_experts
from scaledot.train.resolved_cast import OperandDims, ResolvedCast, cast_input_dtype
from scaledot.train.scope import ContractionScope
from scaledot.train.train_op import CastOperands, CastRequest, Matmul, MeanTerm, Operands, StaticArgs, TokenMeans
from scaledot.train.vjp import quantised_matmul
from scaledot.train.weight_codes import plain_weight

_TERM = Contraction("gk", "gkn", "gn")  # a mean per group by the matrix of each group


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
    """`jax.lax.ragged_dot` quantised by a recipe: x (m, k), w (groups, k, n), b (groups, n) or None -> (m, n).

    Groups are consecutive rows of x and may be empty; traced sizes that exceed the rows are clipped, as in
    jax.lax.ragged_dot. Rows after the last group give zeros; they enter neither scales nor gradients. Every group is
    quantised as if it were an array of its own; under delayed scaling, each has its own quantisation multiplier if
    `state` comes from init_state(recipe, groups=...), otherwise all share one. Other arguments as in `dot_general`,
    without `overlap` and `on_indivisible`. With expert parallelism, w and b are sharded along groups, and `group_sizes`
    and a state of all groups are replicated.

    >>> x, w = jnp.ones((4, 32)), jnp.stack([jnp.ones((32, 2)), 3 * jnp.ones((32, 2))])
    >>> ragged_dot(x, w, jnp.array([1, 2]), recipe="mxfp8")[:, 0]
    Array([32., 96., 96.,  0.], dtype=float32)
    """
    x, w = float_operand(x, "x"), plain_weight(w, "ragged_dot")
    b = None if b is None else float_operand(b, "b")
    dtype, unsupported = result_dtype(preferred_element_type, x.dtype, w.dtype), ("overlap", "on_indivisible")
    opts = Options.of(recipe, dtype, precision, options, unsupported)
    if x.ndim != 2 or w.ndim != 3 or (opts.specs is None and x.shape[1] != w.shape[1]):
        raise ValueError(f"`x` (rows, k) and `w` (groups, k, n) must share k, not be of shapes {x.shape} and {w.shape}")
    experts = experts_of(x, w, opts.specs, opts.out_sharding)
    rows, count = (x.shape[0], w.shape[0]) if experts is None else (experts.sizes["t"], experts.sizes["g"])
    groups = checked_groups(group_sizes, rows)
    if groups.shape[0] != count:
        raise ValueError(f"`group_sizes` has {groups.shape[0]} groups, but `w` {w.shape} has {count} matrices")
    if b is not None and b.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"`b` {b.shape} must have one row of {w.shape[2]} for each of {w.shape[0]} groups")
    operands, partitioning = Operands(x, w, b, groups), _partitioning(x, w)
    state = opts.checked_state(state, w, count)
    per_group = is_per_group(state)
    opts = dataclasses.replace(opts, out_sharding=None)  # `experts` has it; unsharded results need none

    def local_op(groups: int, rows: int, k: int, n: int) -> RaggedDotOp:
        arrays = jax.ShapeDtypeStruct((rows, k), x.dtype), jax.ShapeDtypeStruct((rows, n), dtype)
        alignment = _group_alignment(opts.recipe.wgrad, groups, opts.kernel, arrays, partitioning, per_group)
        return RaggedDotOp(alignment, per_group, partitioning)

    scope = ContractionScope(opts.recipe.name, "ragged_dot_general", x.shape[1]).named_scope
    if experts is not None:
        with scope():
            return opts.returned(*multiply_experts(local_op, opts, experts, operands, state, key))
    x = x if rows else jnp.zeros((1, x.shape[1]), x.dtype)  # kernels need a row; this one belongs to no group
    static = StaticArgs(local_op(count, rows, *w.shape[1:]), opts)
    with scope():
        y, state = quantised_matmul(static, operands._replace(x=x), state, key)
    return opts.returned(y[:rows], state)


def _partitioning(x: jax.Array, w: jax.Array) -> Partitioning:
    """The partitioning of the arrays, with `is_automatic` false, because grouped kernels have no partitioning rule."""
    return partitioning_of(x, w)._replace(is_automatic=False)


def _group_alignment(
    wgrad: Gemm | None,
    groups: int,
    kernel: KernelChoice,
    rows: tuple[Any, Any],
    partitioning: Partitioning,
    per_group: bool,
) -> int:
    """The number of rows that group sizes are rounded up to in wgrad.

    It is the least that blocks and rotations need, or a larger multiple if kernels that cast both operands require it.
    A stochastic cast keeps the least: its codes depend on row indices, and must be equal on every backend.
    """
    needed = _row_alignment(wgrad)
    if wgrad is None or isinstance(kernel, str):
        return needed
    multiples = set()
    for x, cast in zip(rows, (wgrad.lhs, wgrad.rhs), strict=True):
        if cast is None or not cast.is_per_tensor or cast.rounding != "nearest":
            return needed
        output = CastOutput(ResolvedRowCast(cast, cast.block_2d, 1, 1).spec(x.shape, x.dtype, groups), contracted=0)
        multiplier = "group_multiplier" if per_group else "multiplier"
        names = frozenset() if cast.delayed is None else frozenset({multiplier})
        names |= {"mean"} if cast.subtract_mean else set()
        problem = CastProblem(
            x.shape, (output,), names, groups=groups, group_multiple=needed, partitioning=partitioning
        )
        multiples.add(table.group_row_multiple(problem))
    return max(multiples) if len(multiples) == 1 else needed


def _row_alignment(wgrad: Gemm | None) -> int:
    """The least common multiple of the block and rotation sizes down the rows of wgrad."""
    sizes = [1]
    for cast in (wgrad.lhs, wgrad.rhs) if wgrad else ():
        if cast is not None:
            sizes += [max(cast.block_2d[1], 1), cast.rotation.size if cast.rotation else 1]
    return math.lcm(*sizes)


class ResolvedRowCast(NamedTuple):
    """A cast of rows in groups.

    block: the block (rows, features); 0 is the whole dim. axis: the dim that blocks and rotations run along.
    row_alignment: the number of rows that group sizes are rounded up to.
    """

    cast: Cast
    block: tuple[int, int]
    axis: int
    row_alignment: int

    @property
    def rows_reason(self) -> str | None:
        """Why groups whose sizes are known only at run time do not support this cast; None if they do."""
        if self.cast.calibration != "absmax":
            return (
                f"has `calibration` {self.cast.calibration!r}, which is not supported for rows in groups; use 'absmax'"
            )
        (row_block, feature_block), along_features = self.block, self.axis == 1
        is_tensor_or_channel = feature_block == 0 or (feature_block == 1 and not along_features)
        if row_block or (is_tensor_or_channel and (along_features or self.cast.rotation is None)):
            return None
        return (
            "has one scale for all rows of a group, which is supported only per tensor or per channel, without a "
            "rotation down the rows; use a block of rows"
        )

    def spec(self, shape: tuple[int, ...], dtype, groups: int, amax_axes: tuple[str, ...] = ()) -> CastSpec:
        """The CastSpec for rows of `shape` in `groups` groups."""
        rows, features = (
            shape[0] if self.row_alignment == 1 else padded_capacity(shape[0], groups, self.row_alignment),
            shape[1],
        )
        format, rotation, (row_block, feature_block) = self.cast.format, self.cast.rotation, self.block
        input_dtype = cast_input_dtype(self.cast, dtype)
        if self.axis == 0 and row_block:
            x = jax.ShapeDtypeStruct((rows, features), input_dtype)
            spec = make_cast_spec(
                x, format, (1, 0), (feature_block, row_block), "absmax", None, rotation, dtype, pad=True
            )
            spec = with_rounding(propagate_nonfinite(spec, 2), self.cast.rounding)
            return dataclasses.replace(spec, amax_axes=amax_axes)
        features += 0 if rotation is None else -features % rotation.size
        x = jax.ShapeDtypeStruct((rows, features), input_dtype)
        spec = grouped_cast_spec(x, format, (0, 1), self.block, None, rotation, dtype, True, amax_axes)
        return with_rounding(propagate_nonfinite(spec, 2), self.cast.rounding)


@dataclasses.dataclass(frozen=True)
class RaggedDotOp:
    """x (m, k) and g (m, n) are rows in groups, w is (groups, k, n).

    In wgrad, groups start at multiples of `row_alignment` rows. per_group: whether delayed scaling has a history for
    each group.
    """

    row_alignment: int
    per_group: bool = False
    partitioning: Partitioning = ONE_DEVICE
    has_batch = False
    sums_tokens = False

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast | ResolvedRowCast:
        if tensor == "w":
            return ResolvedCast.on(
                cast, OperandDims("kn", "n", "k") if matmul == "fwd" else OperandDims("kn", "k", "n")
            )
        free, contracting = cast.block_2d
        # Per-tensor scales without a rotation give equal codes for both matmuls: equal ResolvedRowCasts are cast once.
        along_features = matmul != "wgrad" or (cast.is_per_tensor and cast.rotation is None)
        block, axis = ((free, contracting), 1) if along_features else ((contracting, free), 0)
        resolved = ResolvedRowCast(cast, block, axis, self.row_alignment if matmul == "wgrad" else 1)
        reason = resolved.rows_reason
        if reason is not None:
            raise ValueError(f"{cast} of {tensor} in {matmul} {reason}")
        return resolved

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """x quantised for each matmul, each distinct cast in its own pass, because only wgrad aligns groups."""
        if request.requantized is None:
            return self._cast(request, x, groups)
        direct = self._cast(request.direct, x, groups)
        again = self._cast(request.requantized, _dequantized(direct.operands["fwd"], x, groups), groups)
        return direct._replace(operands=direct.operands | again.operands)

    def _cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        results: dict[Any, CastResult] = {}
        for matmul, resolved in request.resolved.items():
            if resolved not in results and request.tensor == "w":
                results[resolved] = _cast_weights(request, resolved, x)
            elif resolved not in results:
                results[resolved] = self._cast_rows(request, matmul, resolved, x, groups, is_first=not results)
        amax = next(iter(results.values())).amax
        return CastOperands({m: results[resolved].arrays[0] for m, resolved in request.resolved.items()}, amax)

    def _cast_rows(
        self, request: CastRequest, matmul: str, resolved: ResolvedRowCast, x: jax.Array, groups, is_first: bool
    ) -> CastResult:
        """Rows cast for one matmul, each group as if it were an array of its own."""
        spec = resolved.spec(x.shape, x.dtype, groups.shape[0], request.amax_axes.get(resolved, ()))
        output = CastOutput(
            spec,
            request.key_index(resolved),
            contracted=0 if matmul == "wgrad" else 1,
            signs=request.signs_index(resolved),
        )
        multiplier = None if request.multiplier is None else request.multiplier.reshape(-1, 1)
        return run_casts(
            x,
            (output,),
            request.arguments(multiplier, groups),
            request.kernel,
            self.partitioning,
            amax=request.amax and is_first,
            group_multiple=resolved.row_alignment,
        )

    def unquantised_operand(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return align_groups(x, groups, self.row_alignment) if matmul == "wgrad" else x

    def unclipped_mask(self, resolved, x: jax.Array, q, groups) -> jax.Array | None:
        if isinstance(resolved, ResolvedCast):
            return jax.vmap(resolved.unclipped_mask)(x, q)
        # Among casts of rows only those with delayed scaling clip, and these have one scale, or one for each group.
        if isinstance(q, PerGroup):
            return ResolvedCast(resolved.cast, (1, 0), None).unclipped_mask(x, _by_row(q, groups))
        return ResolvedCast(resolved.cast, (0, 0), None).unclipped_mask(x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        if not self.per_group:
            return amax(x if tensor == "w" else zero_ungrouped_rows(x, groups))
        if tensor == "w":
            return amax(x, axis=(1, 2), block=(0, 0)).reshape(-1)
        return amax_of_groups(x, groups)

    def token_means(self, tensor: str, x: jax.Array, groups) -> TokenMeans:
        return token_means(self.bias_gradient(x.astype(jnp.float32), groups), groups[:, None])

    def multiply(
        self,
        matmul: Matmul,
        lhs,
        rhs,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        if mean_term is not None:
            term = contract_means(_TERM.for_gemm(matmul.name), mean_term, matmul.dtype)
            if matmul.name == "wgrad":
                return (self.multiply(matmul.unrounded, lhs, rhs, groups) + term).astype(matmul.dtype)
            bias = term if bias is None else term + bias.astype(term.dtype)
        if bias is not None:
            y = self.multiply(matmul.unrounded, lhs, rhs, groups)
            return self.add_bias(y, bias.astype(y.dtype), groups).astype(matmul.dtype)
        if matmul.name == "wgrad":
            return self._multiply_within_groups(matmul, lhs, rhs, groups)
        lhs = _by_row(lhs, groups) if isinstance(lhs, PerGroup) else lhs
        w_contracting = 1 if matmul.name == "fwd" else 2
        numbers = lax.RaggedDotDimensionNumbers((((1,), (w_contracting,)), ((), ())), [0], [0])
        return ragged_dot_general(lhs, rhs, groups, numbers, **matmul.keywords)

    def _multiply_within_groups(self, matmul: Matmul, lhs, rhs, groups) -> jax.Array:
        """wgrad, which contracts the rows of each group: (groups, k, n)."""
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        result_scales = None
        if isinstance(lhs, PerGroup) or isinstance(rhs, PerGroup):
            ones = jnp.ones((groups.shape[0], 1), jnp.float32)
            (lhs, lhs_scale), (rhs, rhs_scale) = (
                (x.codes, x.scale) if isinstance(x, PerGroup) else (x, ones) for x in (lhs, rhs)
            )
            result_scales = lhs_scale, rhs_scale
        return contract_groups(
            logical(lhs),
            logical(rhs),
            aligned_group_sizes(groups, self.row_alignment),
            numbers,
            matmul.kernel,
            result_scales=result_scales,
            group_multiple=self.row_alignment,
            precision=matmul.precision,
            preferred=matmul.dtype,
        )

    def add_bias(self, y: jax.Array, bias: jax.Array, groups) -> jax.Array:
        return y + rows_of_groups(bias, groups, y.shape[0])

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        count, g = groups.shape[0], g.astype(accumulation_dtype(g.dtype))
        return jax.ops.segment_sum(g, group_of(groups, g.shape[0]), count + 1)[:count]


def _cast_weights(request: CastRequest, resolved: ResolvedCast, w: jax.Array) -> CastResult:
    """The matrix of each group cast by itself, by XLA: the cast kernels have no batching rule."""
    key, uniform, axes = request.keys[resolved], request.uniforms.get(resolved), request.amax_axes.get(resolved, ())
    keys = None
    if key is not None and uniform is None:
        keys = fold_in_traced(key, jnp.arange(w.shape[0]))
    signs = request.signs.get(resolved)
    quantize = functools.partial(resolved.quantize, amax_axes=axes, kernel=table.XLA_CAST.name, signs=signs)
    multiplier = request.multiplier
    axes = (0, 0 if multiplier is not None and multiplier.ndim else None, 0, 0)
    codes = jax.vmap(quantize, axes)(w, multiplier, keys, uniform)
    return CastResult((codes,))


def _dequantized(q: Any, x: jax.Array, groups: jax.Array) -> jax.Array:
    """The dequantised values of the operand q of fwd, in the shape of x."""
    q = logical(_by_row(q, groups) if isinstance(q, PerGroup) else q)
    return dequantized_values(q, jnp.float32, unrotate=True)[tuple(map(slice, x.shape))]


def _by_row(x: PerGroup, groups: jax.Array) -> ScaledArray:
    """A ScaledArray with one scale per row, that of the row's group."""
    group = jnp.minimum(group_of(groups, x.codes.shape[0]), groups.shape[0] - 1)
    return dataclasses.replace(x.codes, scale=x.scale[group], block=(0,))

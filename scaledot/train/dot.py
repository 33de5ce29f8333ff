"""`dense`, `dot_general` and `einsum` with operands quantised by a recipe."""

import dataclasses
import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels import table
from scaledot.kernels.layouts import logical, stored_operand
from scaledot.kernels.operands import Bias
from scaledot.ops.einsum import two_operands
from scaledot.ops.operands import contract, float_operand
from scaledot.parallel.specs import Shardings, shardings_of
from scaledot.parallel.types import ONE_DEVICE, Partitioning, partitioning_of
from scaledot.recipes import Cast, Recipe
from scaledot.recipes.casts import GEMM_OPERANDS
from scaledot.state import State
from scaledot.train.casts import NonRaggedOp
from scaledot.train.dot_sharded import ShardedOp, multiply_sharded
from scaledot.train.flatten import FlattenedContraction, flatten
from scaledot.train.means import bias_of_means, contract_means, token_means
from scaledot.train.options import Keywords, Options, result_dtype
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.train.scope import ContractionScope
from scaledot.train.train_op import Matmul, MeanTerm, Operands, StaticArgs, TokenMeans
from scaledot.train.vjp import quantised_matmul
from scaledot.train.weight_codes import WeightCodes, weight_operand


def dot_general(
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    **options: Unpack[Keywords],
):
    """`jax.lax.dot_general` with operands quantised in the forward and the backward pass, by a recipe.

    The result has dtype `preferred_element_type`, or the promotion of both operands; gradients have the dtypes of x and
    w. Residuals of operands that the recipe casts are codes and scales.

    Args:
      w: an array, or a weight that `cast_weights` has cast under the same recipe.
      recipe: a Recipe or its name.
      state: for a recipe with delayed scaling, from `init_state`. The call then returns (y, state); pass that state to
        the next use within the same differentiated function. The gradient of a state is the state of the next step.
      key: for a recipe with stochastic rounding, a new one in each step. Without differentiation it is needed only if
        casts of fwd are stochastic.
      **options: `out_sharding`, `specs`, `overlap`, `on_indivisible`, `kernel` and `residual_name`; see
        `scaledot.train.options.Keywords`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 64)), jnp.ones((64, 3))
    >>> dot_general(x, w, (((1,), (0,)), ((), ())), recipe="mxfp8")
    Array([[64., 64., 64.],
           [64., 64., 64.]], dtype=float32)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    contraction = from_dimension_numbers(dimension_numbers, x.ndim, w.ndim)
    opts = Options.of(recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options)
    return contract_with_recipe(opts, contraction, x, w, None, state, key, codes)


def einsum(
    subscripts: str,
    x,
    w,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    precision=None,
    preferred_element_type=None,
    **options: Unpack[Keywords],
):
    """`jnp.einsum` of two operands under a recipe; arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 5, 32)), jnp.ones((32, 4, 8))
    >>> einsum("bsd,dhk->bshk", x, w, recipe="fp8_current").shape
    (2, 5, 4, 8)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    shape = w.shape
    opts = Options.of(recipe, result_dtype(preferred_element_type, x.dtype, w.dtype), precision, options)
    (x_labels, x), (w_labels, w), out = two_operands(subscripts, x, w)
    if codes is not None and w.shape != shape:
        raise ValueError(
            f"{subscripts!r} reduces or broadcasts axes of {codes.spec} before the contraction, but its codes have the "
            "full shape; leave the weight out of cast_weights with `select`"
        )
    return contract_with_recipe(opts, Contraction(x_labels, w_labels, out), x, w, None, state, key, codes)


def dense(
    x,
    w,
    b=None,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key=None,
    precision=None,
    preferred_element_type=None,
    **options: Unpack[Keywords],
):
    """Returns x (..., k) times w (k, ...) plus b.

    The result has the leading dims of x, then the dims of w after the first; b has the latter. The bias is added
    to the float32 accumulator, before the result is rounded once, to `preferred_element_type` or the dtype of x: w may
    be a float32 master weight. Other arguments as in `dot_general`.

    >>> import jax.numpy as jnp
    >>> dense(jnp.ones((2, 32)), jnp.ones((32, 2)), jnp.array([0.0, 0.5]), recipe="mxfp8")
    Array([[32. , 32.5],
           [32. , 32.5]], dtype=float32)
    """
    x, (w, codes) = float_operand(x, "x"), weight_operand(w)
    b = None if b is None else float_operand(b, "b")
    # Inside a shard_map x and w may be sharded differently along k: global sizes are compared later.
    may_be_shards = options.get("specs") is not None
    if not x.ndim or not w.ndim or (not may_be_shards and x.shape[-1] != w.shape[0]):
        raise ValueError(f"the last axis of `x` {x.shape} must be as long as the first of `w` {w.shape}")
    if b is not None and b.ndim != w.ndim - 1:
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")
    contraction = _dense_contraction(x.ndim, w.ndim)
    preferred = x.dtype if preferred_element_type is None else preferred_element_type
    opts = Options.of(recipe, result_dtype(preferred, x.dtype, w.dtype), precision, options)
    return contract_with_recipe(opts, contraction, x, w, b, state, key, codes)


@functools.cache
def _dense_contraction(x_ndim: int, w_ndim: int) -> Contraction:
    """The contraction of the last dim of x with the first of w."""
    return from_dimension_numbers((((x_ndim - 1,), (0,)), ((), ())), x_ndim, w_ndim)


def contract_with_recipe(
    options: Options, contraction: Contraction, x, w, b, state: State | None, key, codes: WeightCodes | None = None
):
    """y, or (y, state) with delayed scaling, of checked operands.

    codes: the codes of w if it was cast by `cast_weights`, else None.
    """
    if codes is not None:
        codes.spec.check_use(options.recipe, contraction)
    operands, state = Operands(x, w, b, None), options.checked_state(state, w)
    shardings = shardings_of(contraction, jax.typeof(x), jax.typeof(w), options.specs, options.out_sharding)
    products = math.prod(x.shape[contraction.lhs.index(c)] for c in contraction.contracting)
    equation = f"{contraction.lhs},{contraction.rhs}->{contraction.out}"
    scope = ContractionScope(options.recipe.name, "dot_general", products, equation).named_scope
    if shardings is None:
        with scope():
            return options.returned(*_contract_unsharded(options, contraction, operands, state, key, codes))
    if codes is not None:
        raise ValueError(
            f"{codes.spec} was cast as a global array, but matmuls with `specs`, or of arrays that are sharded over "
            "explicit mesh axes, cast shards: leave the weight out of cast_weights with `select`"
        )
    with scope():
        return options.returned(*_contract_sharded(options, contraction, shardings, operands, state, key))


def _contract_unsharded(options: Options, contraction: Contraction, operands: Operands, state: State, key, codes):
    """The contraction on one device, or along automatic mesh axes, where XLA chooses the partitioning."""
    _check_bias(contraction, operands)
    partitioning = partitioning_of(operands.x, operands.w)
    to_matrices = table.has_matrix_cast_kernels(partitioning) or options.recipe.has_blocks_or_rotation
    flat = flatten(contraction, to_matrices if codes is None else codes.spec.to_matrices)
    sharding = options.out_sharding if flat.g.dim_groups else None  # its dims are those of the unflattened result
    if sharding is not None:
        options = dataclasses.replace(options, out_sharding=None)
    x, w, b, _ = operands
    operands = Operands(flat.x.flatten(x), flat.w.flatten(w), None if b is None else flat.bias.flatten(b), None)
    sizes = dict(zip(contraction.lhs + contraction.rhs, x.shape + w.shape, strict=True))
    y, state = quantised_matmul(StaticArgs(DotOp.of(flat, partitioning, sizes), options), operands, state, key, codes)
    y = flat.g.unflatten(y, sizes)
    return y if sharding is None else jax.sharding.reshard(y, sharding), state


def _check_bias(contraction: Contraction, operands: Operands) -> None:
    w, b = operands.w, operands.bias
    features = tuple(size for c, size in zip(contraction.rhs, w.shape, strict=True) if c in contraction.rhs_free)
    if b is not None and b.shape != features:
        raise ValueError(f"`b` {b.shape} must have the trailing axes of `w` {w.shape}")


def _contract_sharded(options: Options, contraction: Contraction, shardings: Shardings, operands: Operands, state, key):
    """The contraction of operands that are sharded as in `shardings`, inside a shard_map."""
    flat = flatten(contraction, table.has_matrix_cast_kernels(None) or options.recipe.has_blocks_or_rotation)
    op = ShardedOp.of(DotOp(flat.flat), flat, operands, shardings, options)
    return multiply_sharded(op, options, operands, state, key)


@dataclasses.dataclass(frozen=True)
class DotOp(NonRaggedOp):
    """A contraction of x (batch, free, contracting) and w (batch, contracting, free), with dims in any order.

    flattened_sizes: for each label, the sizes of the dims that were flattened to it; empty on one device.
    """

    contraction: Contraction
    partitioning: Partitioning = ONE_DEVICE
    flattened_sizes: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, flat: FlattenedContraction, partitioning: Partitioning, sizes: dict[str, int]) -> "DotOp":
        """The operation of a flattened contraction. sizes: those of the labels before flattening."""
        return cls(flat.flat, partitioning, () if partitioning.devices == 1 else flat.flattened_sizes(sizes))

    @property
    def out(self) -> str:
        return self.contraction.out

    @property
    def features(self) -> str:
        return self.contraction.rhs_free

    @property
    def has_batch(self) -> bool:
        return bool(self.contraction.batch)

    @property
    def sums_tokens(self) -> bool:
        return not self.has_batch and self.out.endswith(self.features)

    def operand_dims(self, matmul: str, tensor: str) -> OperandDims:
        contraction, index = self.contraction.for_gemm(matmul), GEMM_OPERANDS[matmul].index(tensor)
        labels = (contraction.lhs, contraction.rhs)[index]
        return OperandDims(labels, (contraction.lhs_free, contraction.rhs_free)[index], contraction.contracting)

    def resolve_cast(self, cast: Cast, matmul: str, tensor: str) -> ResolvedCast:
        return ResolvedCast.on(cast, self.operand_dims(matmul, tensor))

    def contracting_axis(self, matmul: str, tensor: str, ndim: int) -> int | None:
        return self.operand_dims(matmul, tensor).axis if ndim == 2 else None

    def unclipped_mask(self, resolved: ResolvedCast, x: jax.Array, q, groups) -> jax.Array | None:
        return super().unclipped_mask(resolved, x, logical(q), groups)

    def to_logical_layout(self, q) -> Any:
        return logical(q)

    def token_means(self, tensor: str, x: jax.Array, groups) -> TokenMeans:
        labels, tokens = {"x": self.contraction.lhs, "g": self.contraction.out}[tensor], self.contraction.lhs_free
        axes = tuple(labels.index(c) for c in tokens)
        sums = jnp.sum(x.astype(jnp.float32), axes, keepdims=True)
        return token_means(sums, math.prod(x.shape[axis] for axis in axes))

    def multiply(
        self,
        matmul: Matmul,
        lhs,
        rhs,
        groups,
        bias: jax.Array | None = None,
        mean_term: MeanTerm | None = None,
    ) -> jax.Array:
        logical_dims = self.contraction.for_gemm(matmul.name)
        added: Bias | None = bias
        if mean_term is not None:
            if self.has_batch:
                y = self.multiply(matmul.unrounded, lhs, rhs, groups, bias)
                return (y + contract_means(logical_dims, mean_term, matmul.dtype)).astype(matmul.dtype)
            # Without batch dims the term is a bias, which kernels add to their accumulators.
            added = bias_of_means(matmul.name, logical_dims, mean_term, matmul.dtype, bias)
        lhs, lhs_labels = stored_operand(lhs, logical_dims.lhs)
        rhs, rhs_labels = stored_operand(rhs, logical_dims.rhs)
        return contract(
            Contraction(lhs_labels, rhs_labels, logical_dims.out),
            lhs,
            rhs,
            bias=added,
            partitioning=self.partitioning,
            flattened_sizes=dict(self.flattened_sizes),
            **matmul.keywords,
        )

    def flattened_sizes_of(self, matmul: str, tensor: str) -> tuple[tuple[int, ...], ...] | None:
        return (
            tuple(dict(self.flattened_sizes)[c] for c in self.operand_dims(matmul, tensor).labels)
            if self.flattened_sizes
            else None
        )

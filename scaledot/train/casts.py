"""Casts the tensors of one forward or backward pass to the operands of their matmuls.

A tensor that is an operand of two matmuls is cast for each of them, from full precision or, if `requantized`, from the
operand of fwd; if both casts give equal codes, it is cast once. Its casts are one CastRequest, so that one kernel can
read the tensor once and write all of them, unless their delayed scaling differs.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot import state as states
from scaledot.kernels.operands import dequantized_values
from scaledot.kernels.spec import CastOutput, accumulation_dtype
from scaledot.kernels.table import XLA_CAST, scalar_runner, tables
from scaledot.numerics.hadamard import random_signs
from scaledot.numerics.rounding import FoldedKey, Key, raw_key
from scaledot.ops.cast_spec import checked_multiplier
from scaledot.ops.casts import run_casts
from scaledot.ops.quantize import amax
from scaledot.parallel.types import ONE_DEVICE, Partitioning
from scaledot.programs import program
from scaledot.recipes import Cast, Gemm, Recipe
from scaledot.recipes.casts import GEMM_OPERANDS
from scaledot.state import State
from scaledot.train.means import reads_mean, token_means
from scaledot.train.residuals import named
from scaledot.train.resolved_cast import ResolvedCast
from scaledot.train.train_op import CastOperands, CastRequest, StaticArgs, TokenMeans
from scaledot.train.weight_codes import WeightCodes

# The index folded into the key of a matmul's signs; casts of operands use 0 to 5.
_SIGNS_INDEX = {matmul: 6 + i for i, matmul in enumerate(GEMM_OPERANDS)}


class OperandCaster:
    """The casts of one forward or backward pass.

    weight_codes: the codes of w if it was cast by `cast_weights`, else None.
    """

    def __init__(
        self,
        static: StaticArgs,
        groups: jax.Array | None,
        state: State,
        key: jax.Array | None,
        weight_codes: WeightCodes | None = None,
    ):
        self.op, self.recipe, self.options = static.op, static.options.recipe, static.options
        self.groups, self.state, self.key = groups, state, key
        self.weight_codes = {} if weight_codes is None else {"w": weight_codes}

    def cast(
        self,
        tensor: str,
        x: jax.Array,
        matmuls: tuple[str, ...],
        residual_gemm: str | None = None,
        column_sums: bool = False,
        means: TokenMeans | None = None,
    ) -> CastOperands:
        """x as an operand of each matmul: quantised, or unquantised if the recipe has no cast for it.

        residual_gemm: the matmul whose operand is saved as a residual. column_sums: see CastRequest. means: from
        `token_means`.
        """
        if tensor in self.weight_codes:
            return self._already_cast(tensor, x, matmuls)
        casts = {m: cast for m in matmuls if (cast := cast_of(self.recipe, m, tensor)) is not None}
        unquantised = {m: self.op.unquantised_operand(m, tensor, x, self.groups) for m in matmuls if m not in casts}
        results = []
        # A CastRequest has one multiplier, so casts with different delayed scaling are different requests.
        for delayed in dict.fromkeys(cast.delayed for cast in casts.values()):
            requested = {m: cast for m, cast in casts.items() if cast.delayed == delayed}
            request = self._request(tensor, requested, residual_gemm, column_sums and not results)
            if any(cast.subtract_mean for cast in requested.values()):
                assert means is not None
                request = dataclasses.replace(request, mean=means.mean)
            results.append(self.op.cast(request, x, self.groups))
        operands = functools.reduce(operator.or_, (result.operands for result in results), unquantised)
        amax = next((result.amax for result in results if result.amax is not None), None)
        return CastOperands({m: operands[m] for m in matmuls}, amax, results[0].column_sums if results else None)

    def _already_cast(self, tensor: str, x: jax.Array, matmuls: tuple[str, ...]) -> CastOperands:
        """The operands of a tensor that `cast_weights` has cast."""

        def operand(matmul: str) -> Any:
            if cast_of(self.recipe, matmul, tensor) is None:
                return self.op.unquantised_operand(matmul, tensor, x, self.groups)
            return self.weight_codes[tensor].operand(matmul)

        return CastOperands({m: operand(m) for m in matmuls})

    def _request(
        self, tensor: str, casts: dict[str, Cast], residual_gemm: str | None, column_sums: bool
    ) -> CastRequest:
        resolved = {m: self.op.resolve_cast(cast, m, tensor) for m, cast in casts.items()}
        keys = {resolved[m]: self._key(resolved[m], cast, tensor) for m, cast in casts.items()}
        signs = {resolved[m]: self._signs(cast, m, tensor) for m, cast in casts.items()}
        multiplier = self._multiplier(next(iter(casts.values())), tensor)
        # A name in `kernel` is that of a matmul kernel; XLA then computes the casts.
        kernel = XLA_CAST.name if isinstance(self.options.kernel, str) else self.options.kernel
        return CastRequest(
            tensor, resolved, keys, residual_gemm, multiplier, tensor in self.state, column_sums, kernel, signs
        )

    def token_means(self, tensor: str, x: jax.Array, matmuls: tuple[str, ...]) -> TokenMeans | None:
        """The means of x over tokens, if a term of one of these matmuls depends on them; else None."""
        if not any(reads_mean(self.recipe, matmul, tensor) for matmul in matmuls):
            return None
        return self.op.token_means(tensor, x, self.groups)

    def cast_and_save(
        self, tensor: str, x: jax.Array, backward: str, means: TokenMeans | None = None
    ) -> tuple[CastOperands, Any]:
        """The operands of fwd and of the matmul `backward`, and the one to save as a residual.

        If the recipe is straight-through (it has no Gemm for `backward`), the residual is the operand of fwd. The
        residual carries the checkpoint name of `options`. If both operands have equal codes, fwd uses the named array.
        """
        backward = "fwd" if getattr(self.recipe, backward) is None else backward
        cast = self.cast(tensor, x, (backward, "fwd"), backward, means=means)
        residual = cast.operands[backward]
        if cast_of(self.recipe, backward, tensor) is None:
            return cast, residual
        if tensor in self.weight_codes:  # unnamed, as an input of a rematerialised function is kept in memory anyway
            return cast, self.weight_codes[tensor].bits(backward)
        saved = named(residual, self.options.residual_name)
        return cast._replace(operands={m: saved if q is residual else q for m, q in cast.operands.items()}), saved

    def cast_gradient(self, g: jax.Array, has_bias: bool) -> tuple[CastOperands, TokenMeans | None]:
        """The operands of dgrad and wgrad, and the means of g if they are subtracted, or a term depends on its sums.

        If g is cast without subtraction, the cast kernel may compute its sums, in which subnormals count as 0.
        """
        matmuls = "dgrad", "wgrad"
        is_subtracted = any(tensor == "g" for _, tensor in self.recipe.mean_subtracted)
        sums_in_cast = self.op.sums_tokens and not is_subtracted and reads_mean(self.recipe, "wgrad", "g")
        means = None if sums_in_cast else self.token_means("g", g, matmuls)
        cast = self.cast("g", g, matmuls, column_sums=has_bias or sums_in_cast, means=means)
        if sums_in_cast:
            means = self._means_from_sums(g, cast.column_sums)
        return cast, means

    def _means_from_sums(self, g: jax.Array, sums: jax.Array | None) -> TokenMeans | None:
        """The means of g over its leading dims, from their sums if the cast kernel computed them."""
        if sums is None:
            return self.token_means("g", g, ("dgrad", "wgrad"))
        token_dims = range(g.ndim - sums.ndim)
        return token_means(jnp.expand_dims(sums, token_dims), math.prod(g.shape[dim] for dim in token_dims))

    def amax(self, tensor: str, x: jax.Array, cast: CastOperands) -> jax.Array:
        """The amax of x, from the cast kernel if it computed it, otherwise by a separate reduction."""
        return self.op.amax(tensor, x, self.groups) if cast.amax is None else cast.amax

    def bias_gradient(self, g: jax.Array, cast: CastOperands) -> jax.Array:
        """The gradient of the bias, from the cast kernel of g if it computed it, otherwise by a separate reduction."""
        return self.op.bias_gradient(g, self.groups) if cast.column_sums is None else cast.column_sums

    def unclipped_mask(self, backward: str, tensor: str, x: jax.Array, q) -> jax.Array | None:
        """The mask of a straight-through gradient: true where fwd's cast of x to q did not clip; None for no mask.

        backward: the matmul that computes the gradient of x. Masks apply only if the recipe has no Gemm for it.
        """
        cast = cast_of(self.recipe, "fwd", tensor)
        if cast is None or not cast.clips or getattr(self.recipe, backward) is not None:
            return None
        return self.op.unclipped_mask(self.op.resolve_cast(cast, "fwd", tensor), x, q, self.groups)

    def _multiplier(self, cast: Cast, tensor: str) -> jax.Array | None:
        if cast.delayed is None:
            return None
        return program(_multiplier_of, tables(), cast, self.op.partitioning)(self.state[tensor])

    def _key(self, resolved: Hashable, cast: Cast, tensor: str) -> Key | None:
        """The key of a stochastic cast, distinct for each cast; one shared by two matmuls uses the key of the first."""
        if cast.rounding == "nearest":
            return None
        operands = [(m, t) for m, tensors in GEMM_OPERANDS.items() for t in tensors]
        casts = ((m, cast_of(self.recipe, m, t)) for m, t in operands if t == tensor)
        first = next(m for m, c in casts if c is not None and self.op.resolve_cast(c, m, tensor) == resolved)
        check_key(self.recipe, self.key, (f"{tensor} of {first}",))
        assert self.key is not None
        return FoldedKey(raw_key(self.key), operands.index((first, tensor)))

    def _signs(self, cast: Cast, matmul: str, tensor: str) -> jax.Array | None:
        """The signs of a rotation that draws them, the same for both operands of a matmul."""
        if cast.rotation is None or not cast.rotation.draws_signs:
            return None
        check_key(self.recipe, self.key, (f"{tensor} of {matmul}",))
        assert self.key is not None
        return random_signs(FoldedKey(raw_key(self.key), _SIGNS_INDEX[matmul]), cast.rotation.size)


def _multiplier_of(
    kernel_tables, cast: Cast, partitioning: Partitioning | None, state: states.AmaxHistory
) -> jax.Array:
    """`states.multiplier_of`; the tables are an argument because the cache of jitted programs is keyed by them."""
    return states.multiplier_of(cast, state, scalar_runner(partitioning))


def cast_of(recipe: Recipe, matmul: str, tensor: str) -> Cast | None:
    """The recipe's cast of a tensor ("x", "w" or "g") for a matmul; None if it is not quantised there."""
    gemm: Gemm | None = getattr(recipe, matmul)
    return None if gemm is None else (gemm.lhs, gemm.rhs)[GEMM_OPERANDS[matmul].index(tensor)]


def check_key(recipe: Recipe, key, stochastic: tuple[str, ...]) -> None:
    """Raises ValueError if there are casts that draw random numbers, such as "g of dgrad", and no key."""
    if stochastic and key is None:
        raise ValueError(
            f"{recipe.name} uses random numbers for {', '.join(stochastic)}; pass a `key`, a new one in each step "
            "(in Flax a stream `sr_rng`: in linen, apply(..., rngs={'sr_rng': key}); in NNX, with_recipe(..., "
            "rngs=nnx.Rngs(sr_rng=0)) or the `rngs` of each layer; with transform.quantized, `sr_key`)"
        )


class NonRaggedOp:
    """Base class of DotOp and ConvOp: operands are arrays that are not cut into ragged groups.

    out: the labels of the result's dims. features: those of the bias. partitioning: how XLA partitions the computation.
    """

    out: str
    features: str
    partitioning: Partitioning = ONE_DEVICE

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """x quantised for each matmul of the request, in one pass if one kernel can write all of them."""
        if request.requantized is None:
            return self._cast(request, x)
        direct = self._cast(request.direct, x)
        values = dequantized_values(self.to_logical_layout(direct.operands["fwd"]), jnp.float32, unrotate=True)
        again = self._cast(request.requantized, values[tuple(map(slice, x.shape))])
        return direct._replace(operands=direct.operands | again.operands)

    def _cast(self, request: CastRequest, x: jax.Array) -> CastOperands:
        specs = {
            resolved: resolved.spec(x.shape, x.dtype, request.amax_axes.get(resolved, ()))
            for resolved in request.distinct
        }
        outputs = tuple(
            CastOutput(
                specs[resolved],
                request.key_index(resolved),
                self.contracting_axis(matmul, request.tensor, x.ndim),
                matmul == request.residual_gemm,
                request.signs_index(resolved),
            )
            for matmul, resolved in request.resolved.items()
        )
        multiplier = request.multiplier
        if multiplier is not None:
            multiplier = checked_multiplier(outputs[0].spec, x, None, multiplier)
        result = run_casts(
            x,
            outputs,
            request.arguments(multiplier),
            request.kernel,
            self.partitioning,
            self.flattened_sizes_of(next(iter(request.resolved)), request.tensor),
            amax=request.amax,
            column_sums=request.column_sums and self.out.endswith(self.features),
            row_length=request.row_length,
        )
        return CastOperands(dict(zip(request.resolved, result.arrays, strict=True)), result.amax, result.column_sums)

    def contracting_axis(self, matmul: str, tensor: str, ndim: int) -> int | None:
        """The contracting dim, if the cast kernel may choose the layout; None requires the logical layout."""
        return None

    def flattened_sizes_of(self, matmul: str, tensor: str) -> tuple[tuple[int, ...], ...] | None:
        """For each dim of a tensor, the sizes of the dims flattened to it; None if XLA partitions nothing."""
        return None

    def unquantised_operand(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return x

    def to_logical_layout(self, q) -> Any:
        return q

    def unclipped_mask(self, resolved: ResolvedCast, x: jax.Array, q, groups) -> jax.Array | None:
        return resolved.unclipped_mask(x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        axes = tuple(a for a, c in enumerate(self.out) if c not in self.features)
        features = [c for c in self.out if c in self.features]
        db = jnp.sum(g.astype(accumulation_dtype(g.dtype)), axis=axes)
        return db.transpose([features.index(c) for c in self.features])

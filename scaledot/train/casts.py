"""The quantised operands of a training matmul: which casts a pass needs, each made once.

A tensor that two matmuls take is cast for each of them, from full precision, and once where both casts give the same
codes. All casts of a tensor are one request, so that a kernel may make them in one read of it.
"""

import functools
import operator
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from scaledot import state as states
from scaledot.kernels.spec import View, accumulation_dtype
from scaledot.kernels.table import XLA_CAST, scalar_program
from scaledot.numerics.rounding import Key, Stream, raw_key
from scaledot.ops.cast_spec import checked_multiplier
from scaledot.ops.casts import make_casts
from scaledot.ops.quantize import amax
from scaledot.parallel.types import ONE_DEVICE, Partitioning
from scaledot.recipes import PRODUCTS, Cast, Gemm, Recipe
from scaledot.state import State
from scaledot.train.kind import CastOperands, CastRequest, Step
from scaledot.train.residuals import named
from scaledot.train.resolved_cast import ResolvedCast
from scaledot.train.weight_codes import WeightCodes


class Casts:
    """The casts of one pass, forward or backward."""

    def __init__(
        self,
        step: Step,
        groups: jax.Array | None,
        state: State,
        key: jax.Array | None,
        codes: WeightCodes | None = None,
    ):
        self.kind, self.recipe, self.options = step.kind, step.options.recipe, step.options
        self.groups, self.state, self.key = groups, state, key
        self.codes = {} if codes is None else {"w": codes}  # of tensors that were cast before

    def made(
        self, tensor: str, x: jax.Array, matmuls: tuple[str, ...], residual: str | None = None, sums: bool = False
    ) -> CastOperands:
        """x as each matmul takes it: cast, or as it is. That for `residual` is saved for the backward pass."""
        if tensor in self.codes:
            return self._cast_before(tensor, x, matmuls)
        casts = {m: cast for m in matmuls if (cast := cast_of(self.recipe, m, tensor)) is not None}
        plain = {m: self.kind.plain(m, tensor, x, self.groups) for m in matmuls if m not in casts}
        made = []
        for delayed in dict.fromkeys(cast.delayed for cast in casts.values()):  # one request has one factor
            same = {m: cast for m, cast in casts.items() if cast.delayed == delayed}
            request = self._request(tensor, same, residual, sums and not made)
            made.append(self.kind.cast(request, x, self.groups))
        operands = functools.reduce(operator.or_, (each.operands for each in made), plain)
        seen = next((each.amax for each in made if each.amax is not None), None)
        return CastOperands({m: operands[m] for m in matmuls}, seen, made[0].sums if made else None)

    def _cast_before(self, tensor: str, x: jax.Array, matmuls: tuple[str, ...]) -> CastOperands:
        """x as each matmul takes it, of codes that were made before."""

        def operand(matmul: str) -> Any:
            if cast_of(self.recipe, matmul, tensor) is None:
                return self.kind.plain(matmul, tensor, x, self.groups)
            return self.codes[tensor].operand(matmul)

        return CastOperands({m: operand(m) for m in matmuls})

    def _request(self, tensor: str, casts: dict[str, Cast], residual: str | None, sums: bool) -> CastRequest:
        resolved = {m: self.kind.resolve_cast(cast, m, tensor) for m, cast in casts.items()}
        keys = {resolved[m]: self._key(resolved[m], cast, tensor) for m, cast in casts.items()}
        multiplier = self._multiplier(next(iter(casts.values())), tensor)
        kernel = XLA_CAST.name if isinstance(self.options.kernel, str) else self.options.kernel  # that names a matmul
        return CastRequest(tensor, resolved, keys, residual, multiplier, tensor in self.state, sums, kernel)

    def cast_and_save(self, tensor: str, x: jax.Array, later: str) -> tuple[CastOperands, Any]:
        """x as forward takes it, and as a matmul of the backward pass does, named; straight-through they are one.

        Forward takes what carries the name where it is the same cast.
        """
        later = "fwd" if getattr(self.recipe, later) is None else later
        made = self.made(tensor, x, (later, "fwd"), later)
        kept = made.operands[later]
        if cast_of(self.recipe, later, tensor) is None:
            return made, kept
        if tensor in self.codes:  # under no name: they are inputs, which jax.checkpoint need not save
            return made, self.codes[tensor].bits(later)
        saved = named(kept, self.options.residual_name)
        return made._replace(operands={m: saved if q is kept else q for m, q in made.operands.items()}), saved

    def amax(self, tensor: str, x: jax.Array, made: CastOperands) -> jax.Array:
        return self.kind.amax(tensor, x, self.groups) if made.amax is None else made.amax

    def bias_gradient(self, g: jax.Array, made: CastOperands) -> jax.Array:
        return self.kind.bias_gradient(g, self.groups) if made.sums is None else made.sums

    def unclipped_mask(self, backward: str, tensor: str, x: jax.Array, q) -> jax.Array | None:
        """Where the gradient of a clipped tensor passes straight through; None for everywhere.

        backward: the matmul that makes that gradient. If it is quantised, codes of the backward pass take over.
        """
        cast = cast_of(self.recipe, "fwd", tensor)
        if cast is None or not cast.clips or getattr(self.recipe, backward) is not None:
            return None
        return self.kind.unclipped_mask(self.kind.resolve_cast(cast, "fwd", tensor), x, q)

    def _multiplier(self, cast: Cast, tensor: str) -> jax.Array | None:
        if cast.delayed is None:
            return None
        return states.multiplier_of(cast, self.state[tensor], scalar_program(self.kind.partitioning))

    def _key(self, resolved: Hashable, cast: Cast, tensor: str) -> Key | None:
        """Independent bits for each cast of a step; one that serves two matmuls has those of the first."""
        if cast.rounding != "stochastic":
            return None
        every = [(m, t) for m, tensors in PRODUCTS.items() for t in tensors]
        served = ((m, cast_of(self.recipe, m, t)) for m, t in every if t == tensor)
        first = next(m for m, c in served if c is not None and self.kind.resolve_cast(c, m, tensor) == resolved)
        check_key(self.recipe, self.key, (f"{tensor} of {first}",))
        assert self.key is not None
        return Stream(raw_key(self.key), every.index((first, tensor)))


def cast_of(recipe: Recipe, matmul: str, tensor: str) -> Cast | None:
    gemm: Gemm | None = getattr(recipe, matmul)
    return None if gemm is None else (gemm.lhs, gemm.rhs)[PRODUCTS[matmul].index(tensor)]


def check_key(recipe: Recipe, key, stochastic: tuple[str, ...]) -> None:
    if stochastic and key is None:
        words = f"{recipe.name} rounds {', '.join(stochastic)} by chance"
        raise ValueError(
            f"{words}; give a `key`, new in each step (in Flax a stream `sr_rng`: linen takes it in "
            "apply(..., rngs={'sr_rng': key}), NNX in with_recipe(..., rngs=nnx.Rngs(sr_rng=0)) or for each layer)"
        )


class Arrays:
    """What kinds of matmuls share that cast whole arrays.

    out: the labels of the result. features: those of a bias. partitioning: how XLA partitions the
    program.
    """

    out: str
    features: str
    partitioning: Partitioning = ONE_DEVICE

    def cast(self, request: CastRequest, x: jax.Array, groups) -> CastOperands:
        """All casts of a request, in one pass where a kernel makes them."""
        specs = {
            resolved: resolved.spec(x.shape, x.dtype, request.amax_axes.get(resolved, ()))
            for resolved in request.distinct
        }
        views = tuple(
            View(
                specs[resolved],
                request.key_index(resolved),
                self.contracted_axis(matmul, request.tensor, x.ndim),
                matmul == request.residual,
            )
            for matmul, resolved in request.resolved.items()
        )
        multiplier = (
            None if request.multiplier is None else checked_multiplier(views[0].spec, x, None, request.multiplier)
        )
        sums = request.sums and self.out.endswith(self.features)
        wanted = {"amax": request.amax, "column_sums": sums, "row_length": request.row_length}
        members = self.members_of(next(iter(request.resolved)), request.tensor)
        given = request.arguments(multiplier)
        made = make_casts(x, views, given, request.kernel, self.partitioning, members, **wanted)
        return CastOperands(dict(zip(request.resolved, made.arrays, strict=True)), made.amax, made.column_sums)

    def contracted_axis(self, matmul: str, tensor: str, ndim: int) -> int | None:
        """The axis of an operand that a matmul contracts, if kernels may choose its layout; None elsewhere."""
        return None

    def members_of(self, matmul: str, tensor: str) -> tuple[tuple[int, ...], ...] | None:
        """For each axis of a tensor the sizes of the axes that were flattened to it, in a partitioned program."""
        return None

    def plain(self, matmul: str, tensor: str, x: jax.Array, groups) -> jax.Array:
        return x

    def logical(self, q) -> Any:
        return q

    def unclipped_mask(self, resolved: ResolvedCast, x: jax.Array, q) -> jax.Array | None:
        return resolved.unclipped_mask(x, q)

    def amax(self, tensor: str, x: jax.Array, groups) -> jax.Array:
        return amax(x)

    def bias_gradient(self, g: jax.Array, groups) -> jax.Array:
        elsewhere = tuple(a for a, c in enumerate(self.out) if c not in self.features)
        kept = [c for c in self.out if c in self.features]
        return jnp.sum(g.astype(accumulation_dtype(g.dtype)), axis=elsewhere).transpose(
            [kept.index(c) for c in self.features]
        )

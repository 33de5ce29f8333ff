"""Contractions with a quantised parameter: codes are multiplied as they are stored, and a recipe casts activations.

With 16-bit activations and no recipe, the parameter is dequantised to its dtype for each matmul instead.

A recipe's casts have no derivative, so its contraction is a custom_vjp, as in training: fwd multiplies the cast of x by
w, and dgrad the cast of the gradient by w. w is a constant: there is no wgrad, and w is the only residual. Casts with a
rotation, which w would need as well, are left out, as are those that subtract a mean, whose term needs the unquantised
w; recipes with delayed scaling do not get here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels.table import choose
from scaledot.ops.dot import dot_general
from scaledot.ops.operands import constant, contract, make_problem
from scaledot.ops.quantize import dequantize
from scaledot.ops.ragged import ragged_dot
from scaledot.recipes import Cast, Gemm
from scaledot.train.resolved_cast import OperandDims, ResolvedCast
from scaledot.transform.analysis import Choice, bind


def contract_scaled(eqn: JaxprEqn, choice: Choice, values: Sequence[Any], key: Any, gradient_key: Any) -> jax.Array:
    """The contraction of `values`, at least one of which is a ScaledArray, under the recipe of the choice, if any.

    key, gradient_key: for stochastic rounding in fwd and in dgrad.
    """
    site, recipe = choice.site, choice.recipe
    if site.primitive == "conv_general_dilated":
        return bind(eqn, *(dequantize(v) if isinstance(v, ScaledArray) else v for v in values))[0]
    casts = [_activation_cast(gemm) for gemm in ((recipe.fwd, recipe.dgrad) if recipe else ())]
    if not any(casts) or site.operands != "weight":
        return _contracted(eqn, choice, *values)
    w, x = values[site.weight], values[1 - site.weight]
    return _under_recipe(eqn, choice, casts, x, constant(w), values[2:], (key, gradient_key))


def _activation_cast(gemm: Gemm | None) -> Cast | None:
    """The cast of x in fwd, or of the gradient in dgrad; None if w would have to share its rotation, or be plain."""
    cast = gemm and gemm.lhs
    return None if cast is None or cast.rotation or cast.subtract_mean else cast


def _contracted(eqn: JaxprEqn, choice: Choice, lhs: Any, rhs: Any, *rest: Any) -> jax.Array:
    dtype = choice.site.out.dtype
    if choice.site.primitive == "ragged_dot_general":
        return ragged_dot(lhs, rhs, *rest, preferred_element_type=dtype)
    if _is_dequantised_first(eqn, choice, lhs, rhs):
        return _dequantised_dot(eqn, lhs, rhs)
    return dot_general(lhs, rhs, eqn.params["dimension_numbers"], eqn.params["precision"], dtype)


def _is_dequantised_first(eqn: JaxprEqn, choice: Choice, lhs: Any, rhs: Any) -> bool:
    """Whether a weight is dequantised to its own dtype and multiplied by x, as the function says.

    That is so for 16-bit dtypes, unless a kernel decodes the weight on the fly. XLA's kernels multiply codes that are
    not exact in bfloat16 (nf4), and in their gradients all codes, in float32, which is slow on tensor cores.
    """
    plain = [value for value in (lhs, rhs) if not isinstance(value, ScaledArray)]
    dtypes = {choice.site.lhs.dtype, choice.site.rhs.dtype}
    if len(plain) != 1 or len(dtypes) > 1 or plain[0].dtype.itemsize != 2:
        return False
    contraction = from_dimension_numbers(eqn.params["dimension_numbers"], lhs.ndim, rhs.ndim)
    problem = make_problem("dot", contraction, lhs, rhs, precision=eqn.params["precision"])
    return choose(problem).name.startswith("xla_")


def _dequantised_dot(eqn: JaxprEqn, lhs: Any, rhs: Any) -> jax.Array:
    @jax.checkpoint  # saves codes as residuals, not dequantised values
    def dot(lhs: Any, rhs: Any) -> jax.Array:
        operands = (dequantize(constant(v)) if isinstance(v, ScaledArray) else v for v in (lhs, rhs))
        return bind(eqn, *operands)[0]

    return dot(lhs, rhs)


def _under_recipe(eqn: JaxprEqn, choice: Choice, casts: Any, x: Any, w: Any, rest: Any, keys: Any) -> jax.Array:
    """The contraction with x, and in its gradient g, cast as the recipe says."""
    fwd = _contraction(eqn, choice)
    dgrad = fwd.dgrad

    def forward(x: Any, w: Any, rest: Any, keys: Any) -> tuple[jax.Array, Any]:
        q, mask = _cast(casts[0], fwd, x, keys[0])
        operands = (q, w) if choice.site.weight == 1 else (w, q)
        return _contracted(eqn, choice, *operands, *rest), (w, rest, keys, mask)

    def backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, None, None, None]:
        w, rest, keys, mask = residuals
        q, _ = _cast(casts[1], dgrad, g, keys[1])
        if choice.site.primitive == "ragged_dot_general":
            dx = ragged_dot(q, w.mT, *rest, preferred_element_type=x.dtype)
        else:
            options = {"precision": eqn.params["precision"], "preferred_element_type": x.dtype}
            dx = contract(dgrad, q, w, **options)
        return dx if mask is None else jnp.where(mask, dx, jnp.zeros_like(dx)), None, None, None

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(x, w, rest, keys)


def _contraction(eqn: JaxprEqn, choice: Choice) -> Contraction:
    """The labels of x, of w and of the result; those of one group, for a ragged matmul."""
    if choice.site.primitive == "ragged_dot_general":
        return Contraction("mk", "kn", "mn")
    both = from_dimension_numbers(eqn.params["dimension_numbers"], choice.site.lhs.ndim, choice.site.rhs.ndim)
    return both if choice.site.weight == 1 else Contraction(both.rhs, both.lhs, both.out)


def _cast(cast: Cast | None, of: Contraction, x: jax.Array, key: Any) -> tuple[Any, jax.Array | None]:
    """x, the lhs of a contraction, quantised, and a mask of its unclipped elements; x itself without a cast."""
    if cast is None:
        return x, None
    resolved = ResolvedCast.on(cast, OperandDims(of.lhs, of.lhs_free, of.contracting))
    q = resolved.quantize(x, key=key)
    return q, resolved.unclipped_mask(x, q)

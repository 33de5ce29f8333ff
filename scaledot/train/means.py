"""Mean subtraction: casts of x and g with `subtract_mean` quantise differences to the mean over tokens.

Activations, and gradients, of a layer have a large mean over tokens, which takes up the range of every block. With
x = R_x + 1 μ_xᵀ and g = R_g + 1 μ_gᵀ, where μ is the mean over T tokens, one for each feature, and Q a cast:

| matmul | computes | if |
|---|---|---|
| fwd | y = Q(R_x) Q(w) + 1 (μ_xᵀ w) | x subtracts its mean |
| dgrad | dx = Q(R_g) Q(w)ᵀ + 1 (μ_gᵀ wᵀ) | g subtracts its mean |
| wgrad | dw = Q(R_x)ᵀ Q(R_g) + T μ_x μ_gᵀ | x or g does; with Q(x) for Q(R_x) if x does not, likewise for g |

The columns of R sum to zero, so Rᵀ 1 μᵀ vanishes: wgrad has one term of rank one, whichever of x and g subtracts its
mean. Terms are computed from the unquantised w, in float32, and added to the float32 accumulator before the result is
rounded. R is computed in float32 and quantised without being rounded to the dtype of x. Tokens are all dims that are
neither contracting in fwd (for g: in dgrad) nor batch dims; there is a mean for each batch index, and for each group of
a ragged matmul, whose rows of no group stay 0.

The mean is over all tokens of a call, later positions and padding included: the quantisation error of one token depends
on the others, and gradient accumulation subtracts other means than one large batch. In a call with one token x equals
its mean, and is not rounded at all.

Over mesh axes that shard tokens, by `specs` or explicitly, sums are all-reduced, so that the mean is that of all
tokens. Inside a shard_map without `specs` it is that of the tokens of a device: x and g are split alike there, and dw
is summed over devices. A mean depends on the order in which its sum is accumulated: unlike other casts, codes on
a mesh need not be bit-identical to those on one device. NaN or an infinity in one token makes its features NaN in all,
as does a sum over tokens that overflows float32.
"""

import jax
import jax.numpy as jnp
import numpy as np

from scaledot.contraction import Contraction
from scaledot.kernels.operands import Bias, LabeledArray, OuterProduct, align_to
from scaledot.kernels.spec import accumulation_dtype
from scaledot.numerics.bits import computed_once, divide
from scaledot.ops.operands import contract
from scaledot.recipes import Recipe
from scaledot.recipes.casts import GEMM_OPERANDS
from scaledot.train.train_op import MeanTerm, TokenMeans


def has_mean_term(recipe: Recipe, matmul: str) -> bool:
    """Whether means add a term to a matmul: whether one of its operands is cast after subtraction of its mean."""
    return any(name == matmul for name, _ in recipe.mean_subtracted)


def reads_mean(recipe: Recipe, matmul: str, tensor: str) -> bool:
    """Whether the term that means add to a matmul depends on the mean of a tensor, whether it is subtracted or not."""
    return tensor in GEMM_OPERANDS[matmul] and has_mean_term(recipe, matmul)


def token_means(sums: jax.Array, count: int | jax.Array) -> TokenMeans:
    """The means for float32 sums over `count` tokens, which broadcasts to them; zeros for no tokens."""
    means = divide(sums, jnp.maximum(jnp.asarray(count, jnp.float32), np.float32(1)))
    return TokenMeans(sums, computed_once(means))


def contract_means(contraction: Contraction, term: MeanTerm, dtype) -> jax.Array:
    """The term that means add to a matmul of result dtype `dtype`, in its accumulation dtype.

    contraction: that of the matmul. Dims of tokens have size 1 in the means, and so in the term of fwd and dgrad. In
    wgrad, which contracts them, the result is an outer product.
    """
    wide = accumulation_dtype(dtype)
    lhs, rhs = (array.astype(wide) for array in term)
    return contract(contraction, lhs, rhs, precision="highest", preferred_element_type=wide)


def bias_of_means(matmul: str, contraction: Contraction, term: MeanTerm, dtype, bias: jax.Array | None = None) -> Bias:
    """The term that means add to a matmul without batch dims, plus the bias of fwd, as a bias of that matmul.

    In fwd and dgrad it is a row that is equal for all tokens, in wgrad the outer product of the mean of x and the sums
    of g.
    """
    if matmul == "wgrad":
        assert bias is None
        rows = align_to(LabeledArray(term.lhs, contraction.lhs), contraction.lhs_free)
        return OuterProduct(rows, align_to(LabeledArray(term.rhs, contraction.rhs), contraction.rhs_free))
    row = align_to(LabeledArray(contract_means(contraction, term, dtype), contraction.out), contraction.rhs_free)
    return row if bias is None else row + bias.astype(row.dtype)

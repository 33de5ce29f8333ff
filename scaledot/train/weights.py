"""Quantises weights once per optimizer step, for all micro-batches of gradient accumulation.

Every micro-batch multiplies by the same weights, rematerialised layers twice. `cast_weights` quantises them before the
loop over micro-batches, and `CastWeights.attach` pairs the codes with the master weights inside the loss:

    cast = cast_weights(params, "mxfp8")
    def loss(params, batch):
        return loss_of(model.apply({"params": cast.attach(params)}, batch))

Codes are constants; gradients are those of the master weights. Codes are bit-identical to those that each matmul would
compute.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import GetAttrKey

from scaledot.kernels import table
from scaledot.ops.operands import float_operand
from scaledot.parallel.types import Partitioning, is_sharded, partitioning_of
from scaledot.path_patterns import PathPatterns, RecipesByPath, Rules
from scaledot.programs import run_as_program
from scaledot.recipes import Recipe
from scaledot.train.casts import OperandCaster, cast_of
from scaledot.train.dot import DotOp
from scaledot.train.flatten import flatten
from scaledot.train.options import Options
from scaledot.train.train_op import StaticArgs
from scaledot.train.weight_codes import CastWeight, WeightCodes, WeightSpec, described

KERNEL = "kernel"  # the name of weights in the layers of Flax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CastWeights:
    """The codes of the weights of a model, by path."""

    by_path: dict[str, WeightCodes]

    def attach(self, params: Any) -> Any:
        """`params` with a `CastWeight` in place of each leaf that was cast; call it inside the loss.

        `params` must have the structure, shapes and dtypes that were passed to `cast_weights`, and the same elements,
        which is not checked: cast again after each optimizer step. Leaves in a box, such as `nn.Partitioned`, are
        unboxed.
        """
        leaves, tree = keyed_leaves(params)
        missing = [path for path in self.by_path if path not in dict(leaves)]
        if missing:
            raise ValueError(f"`params` has no leaf {missing[0]!r}, which was cast; its leaves: {_some(leaves)}")
        return tree.unflatten([self._attached(path, leaf) for path, leaf in leaves])

    def _attached(self, path: str, leaf: Any) -> Any:
        if path not in self.by_path:
            return leaf
        master, codes = unboxed(leaf), lax.stop_gradient(self.by_path[path])
        aval = described(np.shape(master), master.dtype)
        cast_aval = described((*codes.stack, *codes.spec.shape), codes.spec.master_dtype)
        if aval != cast_aval:
            raise ValueError(f"`params` has {aval} at {path!r}, where {cast_aval} was cast; call cast_weights again")
        return CastWeight(master, codes)

    def __repr__(self) -> str:
        weights = (f"{path or 'array'}: {codes.spec.recipe.name}" for path, codes in self.by_path.items())
        return f"CastWeights({', '.join(weights)})"


def cast_weights(
    params: Any,
    recipe: Rules,
    *,
    dtype: Any = None,
    contracting: int | Sequence[int] | Mapping[str, int | Sequence[int]] = 1,
    stacked: int | Mapping[str, int] = 0,
    select: str | Sequence[str] | Mapping[str, bool] | None = None,
) -> CastWeights:
    """Quantises weights for fwd and dgrad, and returns their codes as a pytree.

    Call it once per optimizer step, inside or outside jit, and `attach` the result to the parameters in the loss:
    `train.dense`, `train.dot_general`, `train.einsum` and Flax layers under the same recipe then multiply by these
    codes instead of casting again, in every micro-batch and in what `jax.checkpoint` recomputes. Codes are
    bit-identical to those that the matmuls would compute; results are, too, unless XLA fuses the two programs
    differently.

    Codes of outdated weights are not detected: cast again after each optimizer step. They take 1 byte per element and
    operand in 8-bit formats, plus scales; on Hopper the fwd operands of MXFP8 and NVFP4 may be dequantised bfloat16
    values, 2 bytes.

    Path patterns are those of `linen.with_recipe`, matched against the path of a layer: "mlp/up" for the weight
    "mlp/up/kernel".

    Args:
      params: an array, or a pytree of parameters, such as linen's `params` or an `nnx.State` of Params.
      recipe: a Recipe, its name, or {path pattern: recipe or None}; the first match applies. Recipes with delayed
        scaling or stochastic rounding of w raise ValueError.
      dtype: the dtype in which weights are quantised, such as the `dtype` of nn.Dense; None for their own. Also
        {path pattern: dtype}.
      contracting: the number of leading contracting axes of a weight, or a sequence of contracting axes. Also
        {path pattern: axes}, such as {"*/out": 2} for the output projection of attention,
        `nn.DenseGeneral(axis=(-2, -1))`; 1 where no pattern matches.
      stacked: the number of leading axes over layers, as in the parameters of `nn.scan`; each layer is cast by itself.
        Also {path pattern: number}; 0 where no pattern matches.
      select: a pattern of the full paths of leaves to cast, a sequence of patterns, or {pattern: bool}. By default,
        leaves named "kernel" with at least 2 axes that are not stacked; a single array is always cast.

    >>> import jax, jax.numpy as jnp
    >>> from scaledot import train
    >>> w, xs = jnp.ones((32, 2)), jnp.ones((4, 8, 32))            # four micro-batches
    >>> cast = train.cast_weights(w, "mxfp8")
    >>> grads = [jax.grad(lambda w: train.dense(x, cast.attach(w), recipe="mxfp8").sum())(w) for x in xs]
    >>> sum(grads)[0]
    Array([32., 32.], dtype=float32)
    """
    leaves, _ = keyed_leaves(params)
    arguments = {"dtype": dtype, "contracting": contracting, "stacked": stacked}
    by_layer = [RecipesByPath(recipe), *(PathPatterns(value, name) for name, value in arguments.items())]
    selected = PathPatterns(_selection(select), "select")
    codes: dict[str, WeightCodes | None] = {}
    for path, leaf in leaves:
        w, layer = unboxed(leaf), _layer(path)
        layer_recipe, cast_dtype, axes, count = (patterns.value_for(layer) for patterns in by_layer)
        axes, count = 1 if axes is None else axes, count or 0
        if selected.value_for(path) if select is not None else _is_kernel(path, np.ndim(w) - count):
            codes[path] = None if layer_recipe is None else _codes_of(path, w, layer_recipe, cast_dtype, axes, count)
    if not codes and select is None:
        raise ValueError(f"`params` has no leaf named {KERNEL!r}; name leaves in `select`, from {_some(leaves)}")
    for patterns in by_layer:
        patterns.looked_up |= {path.rpartition("/")[0] for path, _ in leaves}  # a pattern of norms only is no error
    for patterns in (*by_layer, selected):
        patterns.check_all_matched()
    return CastWeights({path: weight_codes for path, weight_codes in codes.items() if weight_codes is not None})


def keyed_leaves(params: Any, kind: type | tuple[type, ...] = ()) -> tuple[list[tuple[str, Any]], Any]:
    """(path, leaf) pairs and the treedef; a box of Flax linen and an instance of `kind` are leaves."""
    keyed, tree = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda node: hasattr(node, "unbox") or isinstance(node, kind)
    )
    value = GetAttrKey("value")  # the array in an nnx.Variable
    names = (keys[:-1] if keys and keys[-1] == value else keys for keys, _ in keyed)
    paths = (jax.tree_util.keystr(keys, simple=True, separator="/") for keys in names)
    return [(path, leaf) for path, (_, leaf) in zip(paths, keyed, strict=True)], tree


def unboxed(leaf: Any) -> Any:
    """The array in a box of Flax linen, such as `nn.Partitioned`; other leaves are returned unchanged."""
    return leaf.unbox() if hasattr(leaf, "unbox") else leaf


def _some(leaves: list[tuple[str, Any]]) -> str:
    return ", ".join(repr(path) for path, _ in leaves[:8]) or "none"


def _layer(path: str) -> str:
    """The path of a weight's layer: without the last component if that is "kernel", else the path itself."""
    layer, _, name = path.rpartition("/")
    return layer if name == KERNEL else path


def _selection(select: Any) -> Mapping[str, bool] | None:
    patterns = [select] if isinstance(select, str) else select
    return patterns if patterns is None or isinstance(patterns, Mapping) else dict.fromkeys(patterns, True)


def _is_kernel(path: str, ndim: int) -> bool:
    return not path or (path.rpartition("/")[-1] == KERNEL and ndim >= 2)


def _codes_of(path: str, w: Any, recipe: Recipe, dtype: Any, contracting: Any, stacked: int) -> WeightCodes | None:
    """The codes of one leaf; None if the recipe does not quantise w."""
    if all(cast_of(recipe, matmul, "w") is None for matmul in ("fwd", "dgrad")):
        return None
    name = path or "params"
    w = lax.stop_gradient(float_operand(w, name))
    _check_recipe(name, recipe)
    if is_sharded(jax.typeof(w)):
        raise ValueError(
            f"`{name}` is sharded over explicit mesh axes, {jax.typeof(w).sharding.spec}; cast_weights takes arrays "
            "on one device or automatic mesh axes: leave it out with `select`"
        )
    shape, partitioning = tuple(w.shape[stacked:]), partitioning_of(w)
    contracting_axes = _checked_axes(name, contracting, w.shape, stacked)
    to_matrices = table.has_matrix_cast_kernels(partitioning) or recipe.has_blocks_or_rotation
    cast_dtype = np.dtype(w.dtype if dtype is None else dtype)
    if not jnp.issubdtype(cast_dtype, jnp.floating) or jnp.finfo(cast_dtype).bits < 16:
        raise TypeError(f"`dtype` of `{name}` must be a float dtype of at least 16 bits, not {cast_dtype}")
    spec = WeightSpec(recipe, shape, np.dtype(w.dtype), cast_dtype, contracting_axes, to_matrices)
    return run_as_program(_cast, table.tables(), spec, partitioning, stacked, arrays=(w,))


def _check_recipe(name: str, recipe: Recipe) -> None:
    """Raises ValueError for recipes whose codes of w differ between micro-batches."""
    reason = None
    if "w" in recipe.delayed:
        reason = "scales w by its amax history, which every differentiated matmul advances"
    elif stochastic := [cast for cast in recipe.stochastic if cast.startswith("w of")]:
        reason = f"draws random numbers for {' and '.join(stochastic)}, new ones in every micro-batch"
    if reason is not None:
        raise ValueError(
            f"{recipe.name} {reason}; it cannot be cast ahead: choose another recipe for `{name}`, or leave it out "
            "with `select`"
        )


def _checked_axes(name: str, contracting: Any, shape: tuple[int, ...], stacked: int) -> tuple[int, ...]:
    """The contracting axes of one weight in fwd, none of them negative."""
    if not isinstance(stacked, int) or not 0 <= stacked < len(shape):
        raise ValueError(
            f"`stacked` {stacked!r} must be a number of leading axes of `{name}` {shape}, at most {len(shape) - 1}"
        )
    ndim = len(shape) - stacked
    axes = tuple(range(contracting)) if isinstance(contracting, int) else tuple(contracting)
    axes = tuple(a + ndim if a < 0 else a for a in axes)
    if not axes or len(set(axes)) != len(axes) or not all(0 <= a < ndim for a in axes):
        raise ValueError(f"`contracting` {contracting!r} must name axes of `{name}`, which has {shape[stacked:]}")
    return axes


def _cast(tables, spec: WeightSpec, partitioning: Partitioning, stacked: int, w: jax.Array) -> WeightCodes:
    """The codes that a training matmul would compute of w; a stack is cast one weight at a time."""
    if stacked:
        return lax.map(functools.partial(_cast, tables, spec, partitioning, stacked - 1), w)
    flat, options = flatten(spec.contraction, spec.to_matrices), Options(spec.recipe, spec.dtype)
    sizes = dict.fromkeys(spec.contraction.lhs, 1) | dict(zip(spec.contraction.rhs, spec.shape, strict=True))
    caster = OperandCaster(StaticArgs(DotOp.of(flat, partitioning, sizes), options), None, {}, None)
    cast, _ = caster.cast_and_save("w", flat.w.flatten(w.astype(spec.dtype)), "dgrad")
    quantized = {m: q for m, q in cast.operands.items() if cast_of(spec.recipe, m, "w") is not None}
    return WeightCodes.of(spec, quantized)

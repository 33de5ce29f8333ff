"""Flax linen: layers that multiply by a kernel, their hooks, and models that run under method interceptors.

A layer's hook is its field `dot_general` or `conv_general_dilated`; nn.Einsum has none, so `einsum_layer` computes what
its `__call__` does. Interceptors set these fields for one call (`fields_set`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from scaledot.contraction import parse_einsum
from scaledot.train.weight_codes import promote_around

WITHOUT_HOOK = (nn.ConvTranspose, nn.ConvLocal, nn.OptimizedLSTMCell, nn.Embed)  # nn.Embed: its method `attend`
WITH_HOOK = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv)
NO_HOOK = "Flax has no hook for its contraction"
HOOKS = ("dot_general", "conv_general_dilated")


def multiplies(layer: nn.Module, method: str) -> bool:
    """Whether a method of a layer multiplies by a parameter."""
    if isinstance(layer, nn.Embed):
        return method == "attend"
    return isinstance(layer, WITH_HOOK + WITHOUT_HOOK) and method == "__call__"


def hook_of(layer: nn.Module) -> str:
    """The field of a layer with a hook, other than nn.Einsum, that has its matmul."""
    return HOOKS[isinstance(layer, nn.Conv)]


def own_matmul(layer: nn.Module, replaceable: type | None = None) -> str | None:
    """The hook, such as "dot_general", with which a layer was given a matmul of its own; None if it has none.

    replaceable: a class of matmuls that do not count.
    """
    for hook in HOOKS:
        for field in (hook, f"{hook}_cls"):
            matmul = getattr(layer, field, None)
            is_replaceable = replaceable is not None and _is_a(matmul, replaceable)
            if matmul is not None and not is_replaceable:
                return hook
    return None


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value is an instance or a subclass of `kind`."""
    return isinstance(value, kind) or (isinstance(value, type) and issubclass(value, kind))


@contextlib.contextmanager
def fields_set(layer: nn.Module, fields: Mapping[str, Any]):
    """A context manager that sets fields of a bound layer for one call.

    Linen would record a call of a `layer.clone` with these fields as one more call: `capture_intermediates` would
    return each output twice, and interceptors would run twice.
    """
    before = {name: getattr(layer, name) for name in fields}
    try:
        for name, value in fields.items():
            object.__setattr__(layer, name, value)  # bound modules are frozen
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(layer, name, value)


def promote_dtype(*args, dtype=None, inexact=True) -> list[Any]:
    """`flax.linen.dtypes.promote_dtype` that also accepts a `train.CastWeight` or a ScaledArray, and keeps its codes.

    For layers with a `dot_general_cls` whose parameters come from `train.CastWeights.attach`; `with_recipe` and
    `with_quantized_params` set it. Raises ValueError for a CastWeight that was quantised in another dtype than the
    layer computes in.

    >>> from scaledot import linen, train
    >>> layer = nn.Dense(8, dot_general_cls=linen.make_dot_general_cls("mxfp8"), promote_dtype=promote_dtype)
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 32)))["params"]
    >>> cast = train.cast_weights(params, "mxfp8")
    >>> layer.apply({"params": cast.attach(params)}, jnp.ones((2, 32))).shape
    (2, 8)
    """
    return promote_around(lambda arrays: dtypes.promote_dtype(*arrays, dtype=dtype, inexact=inexact), args)


def promotes_itself(layer: nn.Module) -> bool:
    """Whether a layer has a `promote_dtype` of its own, or none in this version of Flax."""
    return getattr(layer, "promote_dtype", None) not in (dtypes.promote_dtype, promote_dtype)


def einsum_layer(
    layer: nn.Einsum, einsum: Callable[..., jax.Array], inputs, einsum_str: str | None = None
) -> jax.Array:
    """`nn.Einsum.__call__` with another einsum function, for which nn.Einsum has no field."""
    text = nn.module.merge_param("einsum_str", layer.einsum_str, einsum_str)
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    (_, kernel_labels), out = parse_einsum(text, [jnp.ndim(inputs), kernel.ndim])
    sizes = dict(zip(kernel_labels, kernel.shape, strict=True))
    bias = None
    if layer.use_bias:
        shape = [sizes[c] for c in out if c in sizes]
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = einsum(text, inputs, kernel, precision=layer.precision, preferred_element_type=layer.preferred_element_type)
    return y if bias is None else y + bias.reshape([sizes.get(c, 1) for c in out])


def eval_shapes(function: Callable[..., Any], *args) -> None:
    """Traces `function(*args)` without computing; arrays and ShapeDtypeStructs are traced, other leaves are static."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def call(arrays: dict[int, Any]) -> None:
        function(*jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

    jax.eval_shape(call, arrays)


@dataclasses.dataclass(frozen=True)
class Run:
    """A method of an InterceptedModel. Equal for equal models, so that jax.jit shares their traces."""

    owner: "InterceptedModel"
    __name__: str

    def __call__(self, *args, **kwargs):
        return self.owner._run(self.__name__, *args, **kwargs)


class InterceptedModel:
    """A model whose `init`, `apply`, `lazy_init` and `tabulate` run under interceptors; other attributes are its own.

    Two of one class are equal if their models and settings are. A subclass has `_run` and `_explain`.
    """

    _RUNS = ("init", "init_with_output", "lazy_init", "apply", "tabulate")
    _LOST = "the interceptors; use apply or clone"  # by methods that return the model itself

    def __init__(self, model: nn.Module, *settings: Any, key: Any = None):
        """Stores a model and the further arguments of the constructor, of which `key` is a hashable form."""
        check_module(model)
        self.model, self._settings = model, settings
        self._key = _frozen((model, settings if key is None else key))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return type(self), (self.model, *self._settings)

    def clone(self, **changes):
        return type(self)(self.model.clone(**changes), *self._settings)

    def __getattr__(self, name: str):
        if name.startswith("_") or name == "model":
            raise AttributeError(name)
        if name in ("bind", "unbind", "copy"):
            raise AttributeError(f"{name!r} would lose {self._LOST}")
        if name not in self._RUNS:
            return getattr(self.model, name)
        self.__dict__[name] = Run(self, name)  # cached: jax.jit drops the traces of a function that is freed
        return self.__dict__[name]

    def _run(self, name: str, *args, **kwargs):
        """Calls a method of the model under interceptors."""
        raise NotImplementedError

    def _explain(self, *args, **kwargs) -> str:
        """See `scaledot.linen.explain`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = (self.model, *self._settings[:1])
        return f"{type(self).__name__}({', '.join(map(repr, settings))})"


def check_module(model: Any) -> None:
    """Raises TypeError unless `model` is a linen Module."""
    if not isinstance(model, nn.Module):
        unwrapped = "; pass its attribute `model`" if isinstance(model, InterceptedModel) else ""
        raise TypeError(f"`model` must be a flax.linen.Module, not a {type(model).__name__}{unwrapped}")


def _frozen(value: Any) -> Any:
    """A hashable key that is equal for equal models: containers by contents, unhashable values by identity."""
    if isinstance(value, nn.Module):
        fields = (field.name for field in dataclasses.fields(value) if field.name != "parent")
        return type(value), *(_frozen(getattr(value, name)) for name in fields)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_frozen, value)
    if isinstance(value, Mapping):
        return type(value), *((key, _frozen(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value

"""Flax models with quantised kernels: results against dequantised weights, bytes, chosen kernels, and refusals.

Structural tests (scan, vmap, boxes, split and merge) use small integers, which `mxfp8` represents exactly and whose
float32 sums are exact in any order, so results equal those of the plain model bit for bit.
"""

import copy
import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax import nnx, serialization
from hopper import lowered_for_hopper, needs_mosaic

import scaledot as sd

pytestmark = pytest.mark.jax_versions

BF16 = jnp.bfloat16
INT4_GROUPS = dataclasses.replace(sd.FORMATS["int4"], name="int4_g32", block=(32,))


def integers(tree):
    """The tree with small integers: kernels in -8..8, which mxfp8 represents exactly, other leaves in -2..2."""
    random = np.random.default_rng(0)

    def draw(x):
        bound = 8 if x.ndim > 1 else 2
        return jnp.asarray(random.integers(-bound, bound + 1, x.shape).astype(np.float32))

    return jax.tree.map(draw, jax.eval_shape(lambda: tree))


def is_scaled(node) -> bool:
    return isinstance(node, sd.ScaledArray)


def dequantized(tree, dtype=None):
    return jax.tree.map(lambda q: sd.dequantize(q, dtype) if is_scaled(q) else q, tree, is_leaf=is_scaled)


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


class Model(nn.Module):
    """Dense, DenseGeneral through attention, Einsum in both orders of its kernel, and Conv."""

    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="first", dtype=self.dtype, bias_init=nn.initializers.normal())(x)
        x = nn.MultiHeadDotProductAttention(2, name="attention", dtype=self.dtype)(x)
        x = nn.Einsum((64, 2, 16), "bsd,dhk->bshk", name="split", dtype=self.dtype)(x)
        x = nn.Einsum((64, 2, 16), "bshk,ehk->bse", name="merge", dtype=self.dtype)(x)
        x = nn.Conv(32, (3,), feature_group_count=2, name="conv", dtype=self.dtype)(x)
        return nn.Dense(5, name="head", dtype=self.dtype)(x)


RULES = {"head": None, "conv": "int8"}  # the others: a format
LAYERS = ["first", "attention/query", "attention/key", "attention/value", "attention/out", "split", "merge", "conv"]


def calls_of(model, variables, x):
    """(layer, input, output) for each call of a layer with a kernel."""
    calls = []

    def record(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if isinstance(context.module, (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv)):
            path = context.module.path
            calls.append((path, context.module.clone(parent=None, name=None, dtype=jnp.float32), args[0], y))
        return y

    with nn.intercept_methods(record):
        model.apply(variables, x)
    return calls


# Formats, and the dtype of the model.
CASES = [
    ("nvfp4", None),
    ("int4", BF16),
    pytest.param("mxfp8", None, marks=pytest.mark.exhaustive),
    ("fp8_e4m3", None),
    ("nf4", BF16),
    pytest.param(INT4_GROUPS, None, marks=pytest.mark.exhaustive),
    pytest.param("nvfp4", BF16, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("format", "dtype"), CASES)
def test_each_layer_computes_what_it_does_with_dequantised_weights(format, dtype):
    """Layer by layer, for the same inputs, against a float32 layer with the dequantised weights.

    With |x|, |w| and |b| in place of x, w and b, the layer bounds the magnitudes that are rounded. A float32 sum of K
    elements has K - 1 roundings of 2^-24 and each element at most 4: of the product, of two scales, and of w itself.
    Both layers have these and one of the bias. In bfloat16 the result is rounded by 2^-8, and once more with the bias.
    """
    model, x = Model(dtype), normal(0, (2, 5, 64), dtype or jnp.float32)
    params = jax.jit(Model().init)(jax.random.key(1), normal(0, (2, 5, 64)))["params"]
    quantized = sd.linen.quantize_params(model, params, {**RULES, "*": format}, x)
    paths = [path.split("/") for path in LAYERS]
    assert all(is_scaled(_at(quantized, path)["kernel"]) for path in paths)
    assert not is_scaled(quantized["head"]["kernel"])

    @jax.jit
    def compared(quantized):
        found = []
        for path, layer, inputs, y in calls_of(sd.linen.with_quantized_params(model), {"params": quantized}, x):
            exact = dequantized(_at(quantized, path), jnp.float32)
            inputs = inputs.astype(jnp.float32)
            magnitudes = layer.apply({"params": jax.tree.map(jnp.abs, exact)}, jnp.abs(inputs))
            found.append((y, layer.apply({"params": exact}, inputs), magnitudes))
        return found

    results = compared(quantized)
    assert len(results) == len(LAYERS) + 1
    for y, expected, magnitudes in results:
        assert y.dtype == (dtype or jnp.float32)
        largest_k = 96  # of conv; 64 in the others
        roundings = 2 * (largest_k + 4) * 2.0**-24 + (0 if dtype is None else 2 * 2.0**-8 * (1 + 2.0**-8))
        error = np.abs(np.asarray(y, np.float64) - np.asarray(expected, np.float64))
        assert (error <= roundings * np.asarray(magnitudes, np.float64)).all()


def _at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", INT4_GROUPS, "mxfp8"])
def test_bytes_are_those_of_the_format(format):
    model, x = nn.Dense(48), jax.ShapeDtypeStruct((1, 128), jnp.float32)
    params = {"kernel": normal(0, (128, 48)), "bias": jnp.zeros(48)}
    kernel = sd.linen.quantize_params(model, params, format, x)["kernel"]
    tensor_scale = 4 if kernel.format.two_level else 0
    assert kernel.nbytes == 128 * 48 * kernel.format.bits_per_element / 8 + tensor_scale
    text = sd.linen.explain(sd.linen.with_quantized_params(model), {"params": {**params, "kernel": kernel}}, x)
    assert f"Dense  {kernel.format.name}  blocks {kernel.block}  {4 * 128 * 48} -> {kernel.nbytes} bytes" in text


@needs_mosaic
@pytest.mark.optimized  # XLA's CPU emitters under `--compilation cheap` cannot bitcast 4-bit floats
def test_explain_has_the_weight_only_kernel_for_hopper(monkeypatch):
    """Also for kernels with several contracting dims; few bfloat16 rows of weights (K, N) are what it takes."""
    x = jax.ShapeDtypeStruct((1, 4, 64), BF16)
    layers = [nn.Dense(64, dtype=BF16), nn.DenseGeneral((4, 16), dtype=BF16), nn.DenseGeneral(64, (-2, -1), dtype=BF16)]
    model = nn.Sequential([*layers, nn.Einsum((8, 64), "bsk,nk->bsn", dtype=BF16)])
    params = integers(jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    params = sd.linen.quantize_params(model, params, {"layers_3": "int8", "*": "nvfp4"}, x)
    with lowered_for_hopper(monkeypatch):
        lines = sd.linen.explain(sd.linen.with_quantized_params(model), {"params": params}, x).splitlines()
    assert [line.split()[-1] for line in lines] == ["hopper_weight_only"] * 3 + ["xla_codes"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(32, name="mlp")(nn.relu(x)), None


def stacked(length=3, axis=0):
    return nn.scan(nn.remat(Block), variable_axes={"params": axis}, split_rngs={"params": True}, length=length)()


def test_scanned_and_rematerialised_layers_are_exact():
    model, x = stacked(), integers(jnp.zeros(32)).reshape(1, 32)
    params = integers(jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    params["mlp"]["kernel"] = jnp.sign(params["mlp"]["kernel"])  # so that three layers stay below 2^24
    quantized = sd.linen.quantize_params(model, params, "mxfp8", x)
    assert quantized["mlp"]["kernel"].shape == (3, 32, 32)
    y, _ = jax.jit(sd.linen.with_quantized_params(model).apply)({"params": quantized}, x)
    np.testing.assert_array_equal(y, model.apply({"params": params}, x)[0])
    text = sd.linen.explain(sd.linen.with_quantized_params(model), {"params": quantized}, x)
    assert text.startswith(f"mlp  Dense  mxfp8  blocks (32, 1)  {3 * 4096} -> {3 * 1056} bytes")


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3"])
def test_each_layer_of_a_stack_has_its_own_scales(format):
    params = {"mlp": {"kernel": normal(0, (3, 32, 32)) * jnp.array([1.0, 8.0, 64.0]).reshape(3, 1, 1)}}
    model = stacked()
    stack = sd.linen.quantize_params(model, params, format, jnp.zeros((1, 32)))["mlp"]["kernel"]
    for i in range(3):
        assert_same(stack[i], sd.quantize(params["mlp"]["kernel"][i], format, axis=0))


def test_vmap_over_examples_and_over_layers_is_exact():
    layers = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)(8)
    x = integers(jnp.zeros((2, 3, 32)))
    params = integers(jax.eval_shape(layers.init, jax.random.key(0), x)["params"])
    quantized = sd.linen.quantize_params(layers, params, "mxfp8", x)
    model = sd.linen.with_quantized_params(layers)
    expected = layers.apply({"params": params}, x)
    np.testing.assert_array_equal(model.apply({"params": quantized}, x), expected)
    examples = jax.vmap(lambda x: model.apply({"params": quantized}, x), in_axes=1, out_axes=1)(x)
    np.testing.assert_array_equal(examples, expected)


@pytest.mark.parametrize("boxed", [nn.with_partitioning, nn.with_logical_partitioning])
def test_boxed_kernels_are_unboxed_and_other_boxes_stay(boxed):
    layer = nn.Dense(
        8, kernel_init=boxed(nn.initializers.ones, ("x", "y")), bias_init=boxed(nn.initializers.ones, ("y",))
    )
    x = integers(jnp.zeros((2, 32)))
    params = layer.init(jax.random.key(0), x)["params"]
    quantized = sd.linen.quantize_params(layer, params, "mxfp8", x)
    assert is_scaled(quantized["kernel"])
    assert isinstance(quantized["bias"], nn.Partitioned)
    y = sd.linen.with_quantized_params(layer).apply({"params": quantized}, x)
    np.testing.assert_array_equal(y, layer.apply({"params": params}, x))


class WithStatistics(nn.Module):
    """A static argument, a collection other than "params", and dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_models_with_other_collections_and_static_arguments():
    model, x = WithStatistics(), integers(jnp.zeros((2, 32)))
    variables = model.init(jax.random.key(0), x, False)
    variables["params"]["Dense_0"] = integers(variables["params"]["Dense_0"])
    for arguments in [(x, False), (jax.ShapeDtypeStruct(x.shape, x.dtype), True)]:
        params = sd.linen.quantize_params(model, variables["params"], "mxfp8", *arguments)
    y = sd.linen.with_quantized_params(model).apply({**variables, "params": params}, x, False)
    np.testing.assert_array_equal(y, model.apply(variables, x, False))
    text = sd.linen.explain(sd.linen.with_quantized_params(model), {**variables, "params": params}, x, False)
    assert text.startswith("Dense_0  Dense  mxfp8")


def test_layers_trained_with_a_recipe_are_quantised():
    x = integers(jnp.zeros((2, 32)))
    plain = nn.Dense(8)
    params = integers(jax.eval_shape(plain.init, jax.random.key(0), x)["params"])
    for field in ({"dot_general_cls": sd.linen.make_dot_general_cls("fp8_delayed")}, {}):
        layer = nn.Dense(8, **field)
        quantized = sd.linen.quantize_params(layer, params, "mxfp8", x)
        y = sd.linen.with_quantized_params(layer).apply({"params": quantized}, x)
        np.testing.assert_array_equal(y, plain.apply({"params": params}, x))


def test_inputs_and_biases_have_gradients():
    layer, x = nn.Dense(8), integers(jnp.zeros((2, 32)))
    params = integers(jax.eval_shape(layer.init, jax.random.key(0), x)["params"])
    quantized = sd.linen.quantize_params(layer, params, "mxfp8", x)
    model = sd.linen.with_quantized_params(layer)

    def loss(x, bias):
        return model.apply({"params": {**quantized, "bias": bias}}, x).sum()

    dx, dbias = jax.grad(loss, (0, 1))(x, params["bias"])
    np.testing.assert_array_equal(dx, jnp.broadcast_to(params["kernel"].sum(1), x.shape))
    np.testing.assert_array_equal(dbias, jnp.full(8, 2.0))


SMALL = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)])
SMALL_X = jax.ShapeDtypeStruct((2, 32), jnp.float32)


def small_params():
    return integers(jax.eval_shape(SMALL.init, jax.random.key(0), SMALL_X)["params"])


@pytest.mark.parametrize("library", ["flax", "orbax"])
def test_quantised_params_are_saved_and_restored_into_an_abstract_target(library, tmp_path):
    rules = {"layers_0": "nf4", "layers_2": "nvfp4"}
    params = sd.linen.quantize_params(SMALL, small_params(), rules, SMALL_X)
    target = jax.eval_shape(lambda: sd.linen.quantize_params(SMALL, small_params(), rules, SMALL_X))
    if library == "flax":
        restored = serialization.from_bytes(target, serialization.to_bytes(params))
    else:
        ocp = pytest.importorskip("orbax.checkpoint")
        with warnings.catch_warnings(), ocp.StandardCheckpointer() as checkpointer:
            warnings.simplefilter("ignore")  # Orbax's own deprecations
            checkpointer.save(tmp_path / "saved", sd.orbax.to_saveable(params))
            checkpointer.wait_until_finished()
            saved = checkpointer.restore(tmp_path / "saved", jax.eval_shape(sd.orbax.to_saveable, target))
        restored = sd.orbax.from_saveable(saved)
    assert_same(restored, params)


BAD_RULES = [
    ("intt4", ValueError, "`format` 'intt4' is not in FORMATS; did you mean 'int4'"),
    ({}, ValueError, "`rules` must be a format, or a mapping of path patterns to formats, not empty"),
    (
        {"layers_O": "int4"},
        ValueError,
        "'layers_O' of `rules` matches no layer with a `kernel` parameter; near paths: layers_",
    ),
]


@pytest.mark.parametrize(("rules", "error", "words"), BAD_RULES)
def test_wrong_rules_are_explained(rules, error, words):
    with pytest.raises(error, match=words):
        sd.linen.quantize_params(SMALL, small_params(), rules, SMALL_X)
    with pytest.raises(error, match=words.replace("paths: layers_", "paths: layers/")):
        sd.nnx.quantize_params(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), rules)


def test_wrong_models_are_explained():
    recipe = sd.linen.with_recipe(SMALL, "mxfp8")
    for call in (
        lambda: sd.linen.quantize_params(recipe, small_params(), "int4", SMALL_X),
        lambda: sd.linen.with_quantized_params(recipe),
    ):
        with pytest.raises(TypeError, match="not a WithRecipe; pass its attribute `model`"):
            call()
    with pytest.raises(TypeError, match="must be one of `with_recipe` or `with_quantized_params`, not Sequential"):
        sd.linen.explain(SMALL, SMALL_X)
    params = sd.linen.quantize_params(SMALL, small_params(), "int4", SMALL_X)
    with pytest.raises(
        TypeError, match=r"takes quantised kernels through scaledot.linen.with_quantized_params\(model\)"
    ):
        SMALL.apply({"params": params}, jnp.ones((2, 32)))


class Unsupported(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.ConvTranspose(16, (3,), name="transposed")(x)
        x = nn.Conv(16, (3,), mask=jnp.ones((3, 16, 16)), name="masked")(x)
        x = nn.Conv(16, (3,), name="narrow")(x)
        x = nn.Dense(16, dot_general=jax.lax.dot_general, name="own")(x)
        x = nn.Dense(16, promote_dtype=lambda *args, dtype: args, name="promoting")(x)
        x = nn.Einsum((5, 16), "bsd,sd->bsd", use_bias=False, name="scaling")(x)
        return nn.Dense(16, name="supported")(x)

    @nn.compact
    def other(self, x):
        return nn.Dense(16, name="unreached")(x)


REASONS = {
    "transposed": "ConvTranspose: Flax has no hook for its contraction",
    "masked": "Conv: it has a mask",
    "narrow": r"Conv: blocks of \(32, 1\) do not fit its contracting dims of \(3, 16\)",
    "own": "Dense: it has a dot_general of its own",
    "promoting": "Dense: it has a promote_dtype of its own",
    "scaling": "Einsum: its einsum 'bsd,sd->bsd' has no contracting dim",
    "unreached": "layer: the example arguments do not reach it",
}


def test_layers_that_cannot_be_quantised_are_named_and_left_alone():
    model, x = Unsupported(), jnp.ones((2, 5, 16))
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    params |= jax.eval_shape(lambda: model.init(jax.random.key(0), x, method="other"))["params"]
    params = integers(params)
    with pytest.warns(UserWarning, match="layers in full precision although `rules` assigns them a format") as caught:
        quantized = sd.linen.quantize_params(model, params, "mxfp8", x)
    (message,) = {str(warning.message) for warning in caught}
    for path, reason in REASONS.items():
        assert re.search(rf"{path} \({reason}", message)
        assert_same(quantized[path], params[path])
    assert "supported (" not in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = {**dict.fromkeys(REASONS), "*": "mxfp8"}
        quantized = sd.linen.quantize_params(model, params, rules, x)
    lines = sd.linen.explain(sd.linen.with_quantized_params(model), {"params": quantized}, x).splitlines()
    assert [line.split()[0] for line in lines] == [*(path for path in REASONS if path != "unreached"), "supported"]
    assert "none: its kernel is float32[16,16]" in lines[3]


def test_stacks_along_other_axes_and_second_quantisations_are_refused():
    model, x = stacked(length=4, axis=1), jnp.ones((1, 32))
    params = integers(jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    with pytest.warns(
        UserWarning, match=r"shape \(32, 4, 32\) and in a call \(32, 32\); only kernels that are stacked"
    ):
        sd.linen.quantize_params(model, params, "mxfp8", x)
    params = sd.linen.quantize_params(SMALL, small_params(), "int4", SMALL_X)
    with pytest.warns(UserWarning, match=r"its kernel is quantised already: ScaledArray\(int4\[32,32\]"):
        assert sd.linen.quantize_params(SMALL, params, {"layers_0": "int8"}, SMALL_X)["layers_0"] is not None


def test_equal_models_are_equal_and_copies_keep_their_interceptors():
    model = sd.linen.with_quantized_params(SMALL)
    equal = sd.linen.with_quantized_params(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)]))
    assert (model, model.apply) == (equal, equal.apply)
    assert model != sd.linen.with_recipe(SMALL, "mxfp8")
    for other in (copy.deepcopy(model), model.clone(name="other")):
        assert isinstance(other, sd.linen.WithQuantizedParams)
    with pytest.raises(AttributeError, match="'bind' would lose the interceptors; use apply or clone"):
        model.bind  # noqa: B018


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.split = nnx.LinearGeneral(32, (2, 16), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 16), 32, axis=(-2, -1), rngs=rngs)
        self.einsum = nnx.Einsum("...d,de->...e", (32, 32), (32,), rngs=rngs)
        self.conv = nnx.Conv(32, 8, (3,), rngs=rngs)

    def __call__(self, x):
        return self.conv(self.einsum(self.merge(self.split(self.first(x)))))


def nnx_model(quantize=True):
    """A model with small integers as parameters, and an input."""
    model = NnxModel(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    small = jax.tree.map(jnp.sign, integers(state))
    model = nnx.merge(graphdef, small)
    return (sd.nnx.quantize_params(model, "mxfp8") if quantize else model), jnp.sign(integers(jnp.zeros((2, 5, 32))))


def test_nnx_models_split_merge_and_jit_exactly():
    model, x = nnx_model()
    expected = nnx_model(quantize=False)[0](x)
    assert jnp.abs(expected).max() > 0
    kernels = [layer.kernel for layer in (model.first, model.split, model.merge, model.einsum, model.conv)]
    assert all(type(kernel) is nnx.Param and is_scaled(kernel.get_value()) for kernel in kernels)
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x))(model, x), expected)
    graphdef, state = nnx.split(model)
    np.testing.assert_array_equal(jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x), expected)
    assert_same(nnx.state(nnx.clone(model)), state)
    target = nnx.eval_shape(lambda: sd.nnx.quantize_params(NnxModel(nnx.Rngs(1)), "mxfp8"))
    assert jax.tree.structure(nnx.split(target)[1]) == jax.tree.structure(state)
    lines = sd.nnx.explain(model, x).splitlines()
    assert len(lines) == 5
    assert all("mxfp8  blocks (" in line and line.split()[-1].startswith("xla_") for line in lines)
    assert "bytes\n" in sd.nnx.explain(model)  # without an input there are no kernels to name


def test_an_nnx_model_trained_with_a_recipe_is_quantised():
    model, x = nnx_model(quantize=False)
    expected = model(x)
    model = sd.nnx.quantize_params(sd.nnx.with_recipe(model, "fp8_delayed"), "mxfp8")
    np.testing.assert_array_equal(model(x), expected)
    assert not nnx.state(model, sd.nnx.ScalingState)


def test_stacked_nnx_layers_are_scanned_exactly():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Linear(32, 32, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return layer(x)

    graphdef, state = nnx.split(make(nnx.Rngs(0)))
    stack, x = nnx.merge(graphdef, jax.tree.map(jnp.sign, integers(state))), jnp.sign(integers(jnp.zeros((2, 32))))
    expected = forward(x, stack)
    stack = sd.nnx.quantize_params(stack, "mxfp8")
    assert stack.kernel.get_value().shape == (3, 32, 32)
    np.testing.assert_array_equal(forward(x, stack), expected)


def test_nnx_layers_that_cannot_be_quantised_are_named_and_left_alone():
    rngs = nnx.Rngs(0)
    layers = {
        "Flax has no hook": nnx.ConvTranspose(8, 8, (3,), rngs=rngs),
        "it has a dot_general of its own": nnx.Linear(8, 8, dot_general=lambda *a, **k: None, rngs=rngs),
        "has no contracting dim": nnx.Einsum("bsd,sd->bsd", (8, 8), rngs=rngs),
        "it has a mask": nnx.Conv(8, 8, (3,), mask=jnp.ones((3, 8, 8)), rngs=rngs),
        "its kernel is quantised already": sd.nnx.quantize_params(nnx.Linear(8, 8, rngs=rngs), "int8"),
    }
    model = nnx.List(list(layers.values()))
    for i, reason in enumerate(layers):
        with pytest.warns(UserWarning, match=f"{i} .*{reason}"):
            sd.nnx.quantize_params(model, {str(i): "int4"})

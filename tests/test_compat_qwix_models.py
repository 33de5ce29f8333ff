"""`compat.qwix`: rules for whole linen and NNX models."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal

from scaledot.compat import qwix
from scaledot.compat.qwix import PtqProvider, QtProvider, QtRule, QuantizationRule
from scaledot.compat.qwix.ptq import WithAux
from scaledot.transform.analysis import contractions_of
from scaledot.transform.jaxprs import type_of

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
X = normal(0, (8, 32))


class Block(nn.Module):
    """A Dense layer, an einsum that the module writes itself, and a matmul of two activations."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (32, 32))
        x = jnp.einsum("bk,kn->bn", nn.Dense(32, name="dense")(x), w)
        return x @ (x.T @ x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="head")(Block(name="block")(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.up, self.w = nnx.Linear(32, 64, rngs=rngs), nnx.Param(normal(1, (64, 16)))

    def __call__(self, x):
        return jnp.einsum("bk,kn->bn", self.up(x), self.w[...])


def quantised_paths(params):
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, WithAux))
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, leaf in leaves if isinstance(leaf, WithAux)}


def fake(w, qtype="int8", **options):
    return qwix.dequantize(qwix.quantize(w, qtype, **options))


def test_ptq_quantises_weights_of_layers_and_of_einsums_by_path():
    rules = [QuantizationRule(module_path="head"), QuantizationRule(weight_qtype="int8", tile_size=16)]
    quantized = qwix.quantize_model(Model(), PtqProvider(rules))
    params = Model().init(jax.random.key(0), X)["params"]
    abstract = jax.eval_shape(quantized.init, jax.random.key(0), X)["params"]
    assert quantised_paths(abstract) == {"block/dense/kernel", "block/w"}
    assert abstract["block"]["w"].array.scale.shape == (2, 32)
    q = qwix.quantize_params(params, abstract)
    for a, b in zip(*map(jax.tree.leaves, (q, quantized.init(jax.random.key(0), X)["params"])), strict=True):
        np.testing.assert_array_equal(a, b)
    block = params["block"]
    tiles = {"channelwise_axes": [1], "tiled_axes": {0: 16}}
    dense = {**block["dense"], "kernel": fake(block["dense"]["kernel"], **tiles)}
    dequantised = {**params, "block": {"w": fake(block["w"], **tiles), "dense": dense}}
    y = jax.jit(quantized.apply)({"params": q}, X)
    expected = Model().apply({"params": dequantised}, X)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4 * float(jnp.max(jnp.abs(expected))))


class Flat(nn.Module):
    """A layer that stores its weight as one axis, multiplies by it as a matrix, and returns its sum."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (32 * 5,))
        return jax.jit(lambda w: x @ w.reshape(32, 5))(w), jnp.sum(w)


def test_ptq_quantises_a_reshaped_weight_in_the_shape_that_is_multiplied():
    quantized = qwix.quantize_model(Flat(), PtqProvider([QuantizationRule(weight_qtype="int8")]))
    params = Flat().init(jax.random.key(0), X)["params"]
    abstract = jax.eval_shape(jax.jit(quantized.init), jax.random.key(0), X)["params"]
    q = qwix.quantize_params(params, abstract)
    assert q["w"].array.scale.shape == (1, 5)
    w = fake(params["w"].reshape(32, 5), channelwise_axes=[1])
    y, total = jax.jit(quantized.apply)({"params": q}, X)
    expected = Flat().apply({"params": {"w": w.ravel()}}, X)
    np.testing.assert_allclose(y, expected[0], rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(expected[0]))))
    np.testing.assert_allclose(total, expected[1], rtol=0, atol=1e-5 * float(jnp.sum(jnp.abs(w))))


def test_ptq_multiplies_by_the_codes_of_a_reshaped_weight():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    quantized = qwix.quantize_model(Flat(), PtqProvider([rule]))
    params = quantized.init(jax.random.key(0), X)
    eqns = contractions_of(jax.make_jaxpr(quantized.apply)(params, X).jaxpr)
    dtypes = {tuple(type_of(atom).dtype.name for atom in eqn.invars) for eqn in eqns}
    assert dtypes == {("int8", "int8"), ("bfloat16", "bfloat16")}  # the latter for this short K on CUDA


def test_a_ptq_model_is_exported_with_a_symbolic_batch():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=16)
    quantized = qwix.quantize_model(nn.Dense(5), PtqProvider([rule]))
    params = quantized.init(jax.random.key(0), X)
    (batch,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(quantized.apply))(params, jax.ShapeDtypeStruct((batch, 32), X.dtype))
    for rows in (1, 8):
        np.testing.assert_allclose(exported.call(params, X[:rows]), quantized.apply(params, X[:rows]), rtol=1e-6)


class NnxFlat(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(normal(1, (32 * 5,)))

    def __call__(self, x):
        return x @ self.w[...].reshape(32, 5)


def test_nnx_ptq_quantises_a_reshaped_weight_in_the_shape_that_is_multiplied():
    quantized = qwix.quantize_model(NnxFlat(), PtqProvider([QuantizationRule(weight_qtype="int8")]), X)
    assert quantized.w.array.scale.shape == (1, 5)
    w = fake(normal(1, (32 * 5,)).reshape(32, 5), channelwise_axes=[1])
    np.testing.assert_allclose(quantized(X), X @ w, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(X @ w))))
    params = nnx.to_pure_dict(nnx.state(NnxFlat(), nnx.Param))
    q = qwix.quantize_params(params, quantized)
    np.testing.assert_array_equal(q["w"]["array"]["qvalue"], quantized.w.array.qvalue[...])


def test_ptq_raises_for_a_parameter_that_is_not_quantised():
    quantized = qwix.quantize_model(nn.Dense(8), PtqProvider([QuantizationRule(weight_qtype="int8")]))
    params = nn.Dense(8).init(jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match="'kernel' of `params` is not quantised"):
        quantized.apply({"params": params}, X)
    abstract = jax.eval_shape(quantized.init, jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match="has no extra; allow_extra_params=True skips it"):
        qwix.quantize_params({**params, "extra": X}, abstract)
    assert "extra" not in qwix.quantize_params({**params, "extra": X}, abstract, allow_extra_params=True)
    with pytest.raises(ValueError, match="`quant_stats` is not supported"):
        qwix.quantize_params(params, abstract, {"dot_general0_lhs": {}})


def test_ptq_quantises_activations_of_a_rule_with_act_qtype():
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    quantized = qwix.quantize_model(nn.Dense(8, use_bias=False), PtqProvider([rule]))
    params = quantized.init(jax.random.key(0), X)["params"]
    expected = fake(X, channelwise_axes=[0]) @ qwix.dequantize(params["kernel"].array)
    np.testing.assert_allclose(quantized.apply({"params": params}, X), expected, rtol=1e-4, atol=1e-5)


def test_ptq_keeps_the_axis_names_of_boxes_and_stacks_of_scanned_layers():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(32, kernel_init=init, name="dense")(x), None

    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
    metadata = {"metadata_params": {nn.PARTITION_NAME: "layers"}}
    stack = nn.scan(Layer, **options, **metadata)()
    quantized = qwix.quantize_model(stack, PtqProvider([QuantizationRule(weight_qtype="int8")]))
    variables = quantized.init(jax.random.key(0), X, None)
    q = variables["params"]["dense"]["kernel"].array
    assert (q.qvalue.names, q.scale.names) == (("layers", "in", "out"), ("layers", None, "out"))
    assert q.scale.value.shape == (3, 1, 32)
    assert quantized.apply(variables, X, None)[0].shape == X.shape


def test_ptq_of_an_nnx_model_and_of_its_parameters_agree():
    rules = [QuantizationRule(weight_qtype="int4", tile_size=16)]
    model = NnxModel(nnx.Rngs(0))
    quantized = qwix.quantize_model(model, PtqProvider(rules), X)
    assert isinstance(quantized.up.kernel, WithAux)
    assert isinstance(quantized.w, WithAux)
    assert isinstance(model.w, nnx.Param)
    abstract = nnx.eval_shape(lambda: qwix.quantize_model(model, PtqProvider(rules), X))
    params = qwix.quantize_params(nnx.to_pure_dict(nnx.state(model, nnx.Param)), abstract)
    nnx.update(abstract, params)
    y = nnx.jit(lambda m, x: m(x))(quantized, X)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(abstract, X), y)
    tiles = {"channelwise_axes": [1], "tiled_axes": {0: 16}}
    hidden = X @ fake(model.up.kernel[...], "int4", **tiles) + model.up.bias[None]
    expected = hidden @ fake(model.w[...], "int4", **tiles)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize("bwd", [None, "int8"])
def test_training_quantises_every_contraction_of_the_rule(bwd):
    rule = QtRule(module_path="head", weight_qtype="int8", act_qtype="int8", bwd_qtype=bwd)
    quantized, variables = qwix.quantize_model(Model(), QtProvider([rule])), Model().init(jax.random.key(0), X)
    y, gradients = jax.value_and_grad(lambda v: jnp.sum(quantized.apply(v, X) ** 2))(variables)
    exact, expected = jax.value_and_grad(lambda v: jnp.sum(Model().apply(v, X) ** 2))(variables)
    assert y != exact
    np.testing.assert_allclose(y, exact, rtol=0.05)
    for a, b in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.05 * float(jnp.max(jnp.abs(b))))
    unchanged = qwix.quantize_model(Model(), QtProvider([QuantizationRule(module_path="tail", weight_qtype="int8")]))
    np.testing.assert_array_equal(unchanged.apply(variables, X), Model().apply(variables, X))
    assert len(unchanged.provider.get_unused_rules()) == 1


def test_op_names_tell_einsum_from_dot_general():
    variables = Model().init(jax.random.key(0), X)
    results = []
    for ops in (["einsum"], ["dot_general"], []):
        rules = [QuantizationRule(module_path="block.*", op_names=ops, weight_qtype="int4")]
        results.append(qwix.quantize_model(Model(), PtqProvider(rules)).init(jax.random.key(0), X)["params"])
    found = [quantised_paths(params) for params in results]
    assert found == [{"block/w"}, {"block/dense/kernel"}, {"block/w", "block/dense/kernel"}]
    assert jax.tree.structure(variables["params"]) != jax.tree.structure(results[0])


def test_an_nnx_model_trains_with_stochastic_rounding():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", bwd_stochastic_rounding="uniform")
    model = qwix.quantize_model(NnxModel(nnx.Rngs(0)), QtProvider([rule]), X, rngs=nnx.Rngs(1))

    @nnx.jit
    def gradient(model, x):
        return nnx.grad(lambda model, x: jnp.sum(model(x) ** 2))(model, x)["w"][...]

    first, second = gradient(model, X), gradient(model, X)
    expected = nnx.grad(lambda model, x: jnp.sum(model(x) ** 2))(NnxModel(nnx.Rngs(0)), X)["w"][...]
    assert not np.array_equal(first, second)  # the stream of keys advances
    np.testing.assert_allclose(first, expected, rtol=0, atol=0.05 * float(jnp.max(jnp.abs(expected))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"act_static_scale": True, "act_qtype": "int8"}, "`act_static_scale` is not supported"),
        ({"act_static_scale": False}, "`act_qtype` is None"),
        ({"op_names": ["matmul"]}, "`op_names` has 'matmul'"),
        ({"bwd_stochastic_rounding": "triangular"}, "'triangular' of stochastic rounding is not known"),
    ],
)
def test_rule_fields_that_are_not_supported_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        QtRule(weight_qtype="int8", **fields)


def test_a_convolution_with_quantised_activations_is_refused_by_name():
    rules = [QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    model, image = nn.Conv(8, (3,)), normal(0, (2, 8, 4))
    with pytest.raises(ValueError, match="convolution of 'kernel'; add a rule without it"):
        qwix.quantize_model(model, PtqProvider(rules)).init(jax.random.key(0), image)
    quantized = qwix.quantize_model(model, PtqProvider([QuantizationRule(weight_qtype="int8")]))
    variables = quantized.init(jax.random.key(0), image)
    assert variables["params"]["kernel"].array.scale.shape == (1, 1, 8)
    assert quantized.apply(variables, image).shape == (2, 8, 8)


def test_arguments_of_quantize_model_are_checked():
    provider = QtProvider([QuantizationRule(weight_qtype="int8")])
    with pytest.raises(ValueError, match="`model_inputs` are for NNX models"):
        qwix.quantize_model(Model(), provider, X)
    with pytest.raises(ValueError, match="needs `model_inputs`"):
        qwix.quantize_model(NnxModel(nnx.Rngs(0)), provider)
    with pytest.raises(TypeError, match="`model` must be"):
        qwix.quantize_model(lambda x: x, provider)
    with pytest.raises(TypeError, match="`provider` must be"):
        qwix.quantize_model(Model(), "int8")  # pyright: ignore[reportArgumentType]

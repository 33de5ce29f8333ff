"""`scaledot.lora` against formulas written by hand, and against the function with merged weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import CONFIG, KEY, RANK, ROWS, WIDTH, normal, quantized, randomised, with_adapters
from jax import lax
from jax.sharding import PartitionSpec as P
from training import assert_same, assert_same_bits

import scaledot as sd
from scaledot import lora, train, transform

FORMATS = [None, "nf4", "int4", "nvfp4", "mxfp8", "fp8_e4m3", "int8"]
EPS = float(np.finfo(np.float32).eps) / 2  # the relative error of one float32 rounding
dot = functools.partial(jnp.matmul, precision="highest")


def rounding_bound(elements: int, *terms) -> np.ndarray:
    """The largest error of a float32 sum of `elements` products whose magnitudes add up to the sum of `terms`."""
    return elements * EPS / (1 - elements * EPS) * sum(np.asarray(term, np.float64) for term in terms)


# Each construct multiplies x by the parameter "w", or by "stack", in another way.
CONSTRUCTS = {
    "plain": lambda p, x: dot(x, p["w"]),
    "weight first": lambda p, x: jnp.einsum("kn,mk->mn", p["w"], x, precision="highest"),
    "transposed": lambda p, x: dot(x, p["w"].T),
    "reshaped": lambda p, x: jnp.einsum("mk,khd->mhd", x, p["w"].reshape(WIDTH, 4, 8), precision="highest"),
    "two contracting dims": lambda p, x: jnp.einsum(
        "mhd,hdn->mn", x.reshape(-1, 4, 8), p["w"].reshape(4, 8, WIDTH), precision="highest"
    ),
    "batch dims": lambda p, x: jnp.einsum("bmk,bkn->mbn", jnp.stack([x] * 3), p["stack"], precision="highest"),
    "split": lambda p, x: functools.reduce(jnp.add, (dot(x, part) for part in jnp.split(p["w"], 2, axis=1))),
    "layers by index": lambda p, x: functools.reduce(lambda x, i: jnp.tanh(dot(x, p["stack"][i])), range(3), x),
    "scan": lambda p, x: lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), None), x, p["stack"])[0],
    "nested scan": lambda p, x: lax.scan(
        lambda x, _: lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), None), x, p["stack"]), x, None, length=2
    )[0],
    "shared in a scan": lambda p, x: lax.scan(lambda x, _: (jnp.tanh(dot(x, p["w"])), None), x, None, length=2)[0],
    "twice": lambda p, x: dot(jnp.tanh(dot(x, p["w"])), p["w"]),
    "jit": lambda p, x: jax.jit(dot)(jax.jit(dot)(x, p["w"]), p["stack"][0]),
    "checkpoint": lambda p, x: jax.checkpoint(lambda x, w: jnp.tanh(dot(x, w)))(x, p["w"]),
    "cond": lambda p, x: lax.cond(x.sum() > 0, lambda: dot(x, p["w"]), lambda: jnp.tanh(dot(x, p["w"]))),
    "while": lambda p, x: lax.fori_loop(0, jnp.int32(2), lambda _, x: jnp.tanh(dot(x, p["w"])), x),
    "vmap": lambda p, x: jax.vmap(lambda x: dot(x, p["w"]))(x),
    "ragged": lambda p, x: lax.ragged_dot(x, p["stack"], jnp.array([3, 0, 5], jnp.int32), precision="highest"),
}


def params():
    return {"w": normal(1, WIDTH, WIDTH), "stack": normal(2, 3, WIDTH, WIDTH)}


def inputs() -> jax.Array:
    return normal(3, ROWS, WIDTH)


def used_params(construct: str):
    """The parameters of a construct."""
    names = {"jit": ("w", "stack")}.get(construct) or [
        "stack" if construct in ("batch dims", "layers by index", "scan", "nested scan", "ragged") else "w"
    ]
    return {name: params()[name] for name in names}


@pytest.mark.jax_versions
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_new_adapters_do_not_change_results(construct, name):
    f, p, x = CONSTRUCTS[construct], quantized(used_params(construct), name), inputs()
    adapters = lora.init(f, CONFIG, key=KEY)(p, x)
    assert {path.partition("#")[0] for path in adapters} == set(p)
    base = jax.jit(transform.quantized(f, {"*": None}))(p, x)
    np.testing.assert_array_equal(jax.jit(lora.adapted(f, CONFIG))(adapters, p, x), base)


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_merged_weights_give_the_results_of_adapters(construct):
    f, p, x = CONSTRUCTS[construct], used_params(construct), inputs()
    adapters = with_adapters(f, p, x)
    found = jax.jit(lora.adapted(f, CONFIG))(adapters, p, x)
    expected, base = (jax.jit(f)(weights, x) for weights in (lora.merge(f, CONFIG)(adapters, p, x), p))
    assert float(jnp.max(jnp.abs(found - base))) > 0.1  # the adapters do something
    assert_same(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_merging_changes_results_by_roundings_only(name):
    f, p, x = CONSTRUCTS["plain"], quantized({"w": params()["w"]}, name), inputs()
    adapters = with_adapters(f, p, x)
    merged = lora.merge(f, CONFIG)(adapters, p, x)["w"]
    w = p["w"] if name is None else sd.dequantize(p["w"])
    a, b = (jnp.abs(adapters["w"][factor]) for factor in "ab")
    # Both sides add up WIDTH products for w and WIDTH x RANK for the adapter; codes are scaled in at most 4 roundings.
    bound = rounding_bound(
        2 * (WIDTH + RANK + 4), dot(jnp.abs(x), jnp.abs(w)), CONFIG.scaling * dot(jnp.abs(x), dot(a, b))
    )
    difference = np.abs(lora.adapted(f, CONFIG)(adapters, p, x) - dot(x, merged))
    assert merged.dtype == jnp.float32
    assert np.all(difference <= bound), np.max(difference / bound)


@pytest.mark.parametrize("name", FORMATS[1:])
@pytest.mark.parametrize("path", ["w", "stack"])
def test_a_merged_weight_is_requantised_on_request(name, path):
    f, p, x = CONSTRUCTS["scan" if path == "stack" else "plain"], quantized(params(), name), inputs()
    adapters = with_adapters(f, {path: p[path]}, x)
    plain = lora.merge(f, CONFIG, dtype=jnp.float32)(adapters, {path: p[path]}, x)[path]
    found = lora.merge(f, CONFIG, requantize=True)(adapters, {path: p[path]}, x)[path]
    assert jax.tree.structure(found) == jax.tree.structure(p[path])
    assert_same_bits(found, quantized(plain, name))


def test_merged_weights_have_the_requested_dtype():
    f, p, x = CONSTRUCTS["plain"], quantized({"w": params()["w"]}, "nf4"), inputs()
    assert lora.merge(f, CONFIG, dtype=jnp.bfloat16)(with_adapters(f, p, x), p, x)["w"].dtype == jnp.bfloat16


def test_a_rotated_weight_is_not_requantised():
    w = sd.quantize(normal(1, WIDTH, WIDTH), "int8", axis=0, rotation=sd.Hadamard(16))
    f = CONSTRUCTS["plain"]
    adapters = with_adapters(f, {"w": normal(1, WIDTH, WIDTH)}, inputs())
    with pytest.raises(ValueError, match="is rotated; merge to a plain array"):
        lora.merge(f, CONFIG, requantize=True)(adapters, {"w": w}, inputs())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_gradients_are_those_of_the_formula(name, rank_stabilized):
    config = lora.Config(RANK, 8, rank_stabilized=rank_stabilized)
    s = 8 / (RANK**0.5 if rank_stabilized else RANK)
    f, p, x, g = CONSTRUCTS["plain"], quantized({"w": params()["w"]}, name), inputs(), normal(4, ROWS, WIDTH)
    adapters = with_adapters(f, p, x, rules=config)
    _, pullback = jax.vjp(lambda adapters, x: lora.adapted(f, config)(adapters, p, x), adapters, x)
    found, dx = pullback(g)
    a, b = (np.asarray(adapters["w"][factor], np.float64) for factor in "ab")
    w = np.asarray(p["w"] if name is None else sd.dequantize(p["w"]), np.float64)
    x, g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    for value, formula, elements in (
        (found["w"]["a"], lambda x, g, w, a, b: s * x.T @ (g @ b.T), WIDTH + ROWS),
        (found["w"]["b"], lambda x, g, w, a, b: s * (x @ a).T @ g, WIDTH + ROWS),
        (dx, lambda x, g, w, a, b: g @ w.T + s * g @ b.T @ a.T, 2 * WIDTH + RANK),
    ):
        bound = rounding_bound(elements + 8, formula(*map(np.abs, (x, g, w, a, b))))
        assert np.all(np.abs(value - formula(x, g, w, a, b)) <= bound)


def test_the_base_has_neither_gradients_nor_other_residuals_than_codes():
    f, p, x = CONSTRUCTS["scan"], {"stack": params()["stack"]}, inputs()
    adapters = with_adapters(f, p, x)
    g = lora.adapted(f, CONFIG)
    loss = lambda adapters, p: jnp.sum(g(adapters, p, x) ** 2)  # noqa: E731
    assert not jax.grad(loss, argnums=1)(adapters, p)["stack"].any()
    q = quantized(p, "nf4")
    with pytest.raises(TypeError):
        jax.grad(loss, argnums=1, allow_int=True)(adapters, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), q))
    _, pullback = jax.vjp(lambda adapters: loss(adapters, q), adapters)
    saved = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[-2:] == (WIDTH, WIDTH)]
    assert {leaf.dtype for leaf in saved} == {q["stack"].data.dtype}
    # A weight gradient would be a matmul with a result in the shape of the weight.
    shapes = [eqn.outvars[0].aval.shape for eqn in matmuls(jax.make_jaxpr(jax.grad(loss))(adapters, q))]
    assert (WIDTH, RANK) in shapes
    assert (WIDTH, WIDTH) not in shapes


def matmuls(jaxpr):
    return list(transform.analysis.contractions_of(transform.jaxprs.closed(jaxpr).jaxpr))


@pytest.mark.parametrize("name", [None, "nf4"])
def test_stacked_layers_equal_separate_ones(name):
    p, x = quantized({"stack": params()["stack"]}, name), inputs()
    layers = {str(i): p["stack"][i] for i in range(3)}
    unrolled = lambda p, x: functools.reduce(lambda x, i: jnp.tanh(dot(x, p[str(i)])), range(3), x)  # noqa: E731
    scanned = CONSTRUCTS["scan"]
    adapters = with_adapters(scanned, p, x)
    separate = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], adapters["stack"]) for i in range(3)}

    def grad(f, adapters, p):
        return jax.jit(jax.grad(lambda adapters: jnp.sum(lora.adapted(f, CONFIG)(adapters, p, x) ** 2)))(adapters)

    found, expected = grad(scanned, adapters, p)["stack"], grad(unrolled, separate, layers)
    for factor in "ab":
        assert_same(found[factor], jnp.stack([expected[str(i)][factor] for i in range(3)]))


def test_dropout_is_unbiased_and_off_without_a_key():
    f, p, x = CONSTRUCTS["plain"], {"w": params()["w"]}, inputs()
    rules = lora.Config(RANK, 8, dropout=0.25)
    adapters = with_adapters(f, p, x)
    g, count = jax.jit(lora.adapted(f, rules)), 2048
    without = g(adapters, p, x)
    np.testing.assert_array_equal(without, jax.jit(lora.adapted(f, CONFIG))(adapters, p, x))
    runs = jax.vmap(lambda key: g(adapters, p, x, dropout_key=key))(jax.random.split(jax.random.key(5), count))
    change = CONFIG.scaling * adapters["w"]["a"] @ adapters["w"]["b"]
    deviation = jnp.sqrt(0.25 / 0.75 * (x**2) @ (change**2))  # of a sum of independent elements, each kept or not
    assert np.all(np.abs(jnp.mean(runs, 0) - without) <= 5 * deviation / count**0.5)  # 256 elements: p < 2e-4
    assert np.all(np.abs(jnp.std(runs, 0) / deviation - 1) <= 0.2)


def test_dropout_differs_between_matmuls_and_iterations():
    def f(p, x):
        ys = [dot(x, p["w"]), dot(x, p["v"]), *lax.scan(lambda x, w: (x, dot(x, w)), x, p["stack"])[1]]
        return jnp.stack(ys)

    w, x = jnp.zeros((WIDTH, WIDTH)), jnp.ones((1, WIDTH))
    p = {"w": w, "v": w, "stack": jnp.stack([w] * 2)}
    one = {"a": jnp.eye(WIDTH), "b": jnp.eye(WIDTH)}
    adapters = {"w": one, "v": one, "stack": jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), one)}
    rules = lora.Config(WIDTH, WIDTH, dropout=0.5)
    g = jax.jit(lora.adapted(f, rules))
    masks = np.asarray(g(adapters, p, x, dropout_key=KEY))[:, 0]
    assert set(np.unique(masks)) == {0, 2}
    assert len({tuple(mask) for mask in masks}) == 4
    np.testing.assert_array_equal(masks, g(adapters, p, x, dropout_key=KEY)[:, 0])


def mlp(p, x):
    with jax.named_scope("mlp"):
        return dot(jnp.tanh(dot(x, p["up"]["kernel"])), p["down"]["kernel"])


def mlp_params():
    return {"up": {"kernel": normal(1, WIDTH, 2 * WIDTH)}, "down": {"kernel": normal(2, 2 * WIDTH, WIDTH)}}


def test_rules_choose_matmuls_and_configs_by_path():
    rules = {"up": None, "*": lora.Config(2, 4, dtype=jnp.bfloat16)}
    adapters = lora.init(mlp, rules, key=KEY)(mlp_params(), inputs())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), adapters) == {
        "down/kernel": {"a": ((2 * WIDTH, 2), jnp.bfloat16), "b": ((2, WIDTH), jnp.bfloat16)}
    }
    assert set(lora.init(mlp, {"up/kernel": CONFIG}, key=KEY)(mlp_params(), inputs())) == {"up/kernel"}
    assert len(lora.init(mlp, {"mlp": CONFIG}, key=KEY)(mlp_params(), inputs())) == 2


def test_factors_depend_on_the_key_and_the_path_only():
    both = lora.init(mlp, CONFIG, key=KEY)(mlp_params(), inputs())
    one = lora.init(mlp, {"down": CONFIG}, key=KEY)(mlp_params(), inputs())
    assert_same_bits(one["down/kernel"], both["down/kernel"])
    limit = (2 * WIDTH) ** -0.5
    assert limit * 0.9 < float(jnp.max(jnp.abs(one["down/kernel"]["a"]))) <= limit


def tied(p, tokens):
    return dot(p["table"][tokens], p["table"].T)


def under_recipe(p, x):
    return train.dense(x, p["w"], recipe="mxfp8")


def in_shard_map(p, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(dot, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(x, p["w"])


def by_traced_index(p, x):
    return lax.fori_loop(0, 3, lambda i, x: dot(x, p["stack"][i]), x)


def both_in_a_scan_and_not(p, x):
    return CONSTRUCTS["scan"](p, dot(x, p["stack"].reshape(WIDTH, -1))[:, :WIDTH])


def of_two_scopes(p, x):
    with jax.named_scope("first"):
        x = dot(x, p["w"])
    return dot(x, p["w"])


IMAGE = np.ones((1, 8, 8, 3), np.float32)


@pytest.mark.parametrize(
    ("f", "p", "x", "rules", "message"),
    [
        (tied, {"table": jnp.ones((9, WIDTH))}, np.arange(3), CONFIG, "table: its parameter is an operand of gather"),
        (tied, {"table": jnp.ones((9, WIDTH))}, np.arange(3), {"table": CONFIG}, "the rule 'table' gives no matmul"),
        (
            lambda p, tokens: dot(p["table"][tokens], p["head"]),
            {"table": jnp.ones((9, WIDTH)), "head": jnp.ones((WIDTH, 9))},
            np.arange(3),
            {"table": CONFIG},
            "the rule 'table' matches no matmul; table is an operand of gather",
        ),
        (
            lambda p, x: lax.conv_general_dilated(
                x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            {"w": jnp.ones((3, 3, 3, 4))},
            IMAGE,
            CONFIG,
            "w: it is a convolution, which takes no adapter",
        ),
        (under_recipe, params(), inputs(), CONFIG, r"under the recipe mxfp8; adapt the function without recipes"),
        (in_shard_map, params(), inputs(), CONFIG, "an operand of shard_map"),
        (by_traced_index, params(), inputs(), CONFIG, "an operand of dynamic_slice"),
        (both_in_a_scan_and_not, params(), inputs(), CONFIG, "sliced by a scan in one place and not in another"),
        (lambda p, x: dot(x, p["w"] / 2), params(), inputs(), CONFIG, "an operand of div"),
        (lambda p, x: dot(x, jnp.concatenate([p["w"]] * 2)[:WIDTH]), params(), inputs(), CONFIG, "of concatenate"),
        (lambda p, x: dot(x, x.T), params(), inputs(), CONFIG, "no operand is a parameter"),
        (lambda p, x: x, params(), inputs(), CONFIG, "it has no matmul"),
        (mlp, mlp_params(), inputs(), {"upp": CONFIG}, "the rule 'upp' matches no contraction.*near paths: up"),
        (of_two_scopes, params(), inputs(), {"first": CONFIG}, "different configs for the matmuls of 'w'"),
        (
            lambda p, x: dot(x, p["w"]) + dot(x, p["params"]["w"]),
            {"w": params()["w"], "params": {"w": params()["w"]}},
            inputs(),
            CONFIG,
            "two parameters have the path 'w'",
        ),
    ],
)
def test_what_cannot_have_an_adapter_is_an_error_with_its_reason(f, p, x, rules, message):
    with pytest.raises(ValueError, match=message):
        lora.init(f, rules, key=KEY)(p, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda adapters: {}, "the function has an adapter 'up/kernel' and `adapters` has not"),
        (lambda adapters: {**adapters, "head": {}}, "`adapters` has an adapter 'head' and the function has not"),
        (lambda adapters: jax.tree.map(lambda leaf: leaf[:, :2], adapters), r"needs? \{'a': \(32, 4\)"),
    ],
)
def test_adapters_of_another_function_are_an_error(change, message):
    adapters = change(lora.init(mlp, CONFIG, key=KEY)(mlp_params(), inputs()))
    for verb in (lora.adapted, lora.merge):
        with pytest.raises(ValueError, match=message):
            verb(mlp, CONFIG)(adapters, mlp_params(), inputs())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lora.Config(0, 1), ValueError, "`rank` must be a positive integer, not 0"),
        (lambda: lora.Config(1, float("nan")), ValueError, "`alpha`"),
        (lambda: lora.Config(1, 1, dropout=1.0), ValueError, r"`dropout` must be a probability in \[0, 1\), not 1.0"),
        (lambda: lora.Config(1, 1, dtype=jnp.int32), ValueError, "`dtype` must be a float dtype"),
        (lambda: lora.adapted(mlp, "mxfp8"), TypeError, "`rules` must be a lora.Config"),
        (lambda: lora.adapted(mlp, {}), ValueError, "`rules` must not be empty"),
        (lambda: lora.adapted(mlp, CONFIG, params=None), TypeError, "`params`"),
        (lambda: lora.adapted(3, CONFIG), TypeError, "`fn` must be a function, not 3"),
        (lambda: lora.adapted(mlp, CONFIG)(None, mlp_params(), inputs()), TypeError, "`adapters` must be the dict"),
    ],
)
def test_wrong_arguments_are_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_report_lists_every_matmul():
    def f(p, tokens):
        x = p["table"][tokens]
        return dot(dot(x, x.T) @ dot(x, p["w"]), p["head"])

    p = {"table": jnp.ones((9, WIDTH)), "w": jnp.ones((WIDTH, WIDTH)), "head": jnp.ones((WIDTH, 9))}
    report = lora.report(f, {"head": None, "*": CONFIG})(p, jnp.arange(3))
    assert [(row.path, row.config) for row in report.rows if row.config] == [("w", CONFIG)]
    assert {row.path: row.reason for row in report.rows if not row.config} == {
        "dot_general": "no operand is a parameter",
        "head": "its rule is None",
        "table": "its parameter is an operand of gather, which takes no adapter",
    }
    assert report.trainable == 2 * RANK * WIDTH


def test_parameters_may_be_in_several_arguments():
    f = lambda x, first, second: dot(dot(x, first["w"]), second["v"])  # noqa: E731
    args = inputs(), {"w": params()["w"]}, {"v": params()["stack"][0]}
    adapters = randomised(lora.init(f, CONFIG, key=KEY, params=(1, -1))(*args))
    assert set(adapters) == {"w", "v"}
    first, second = lora.merge(f, CONFIG, params=(1, -1))(adapters, *args)
    assert_same(lora.adapted(f, CONFIG, params=(1, -1))(adapters, *args), f(args[0], first, second))


def test_a_batch_of_adapters_equals_a_loop():
    x, p = inputs(), quantized(mlp_params(), "nf4")
    adapters = [with_adapters(mlp, p, x), jax.tree.map(lambda leaf: -leaf, with_adapters(mlp, p, x))]
    g = jax.jit(lora.adapted(mlp, CONFIG))
    found = jax.vmap(g, (0, None, None))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters), p, x)
    for y, one in zip(found, adapters, strict=True):
        assert_same(y, g(one, p, x))


def of_x_and_g(recipe: str) -> sd.Recipe:
    """The recipe without casts of w."""
    casts = sd.RECIPES[recipe]
    return sd.Recipe("of x and g", sd.Gemm(casts.fwd.lhs, None), sd.Gemm(casts.dgrad.lhs, None))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@pytest.mark.parametrize("construct", ["plain", "weight first", "two contracting dims", "batch dims", "scan", "ragged"])
def test_recipes_cast_activations_and_gradients_of_quantised_parameters(construct, recipe):
    f, p, x = CONSTRUCTS[construct], quantized(used_params(construct), "int8"), inputs()

    def grad(recipe, p):
        return jax.jit(jax.grad(lambda x: jnp.sum(transform.quantized(f, recipe)(p, x) ** 2)))(x)

    expected = grad(of_x_and_g(recipe), jax.tree.map(sd.dequantize, p, is_leaf=lambda q: isinstance(q, sd.ScaledArray)))
    assert_same(grad(recipe, p), expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
@pytest.mark.parametrize("name", [None, "nf4"])
def test_recipes_quantise_the_base_of_an_adapted_function(recipe, name):
    """The same program written by hand: casts of x and of gradients, and the adapter in full precision."""
    p, x = quantized(mlp_params(), name), inputs()
    adapters = with_adapters(mlp, p, x)
    g = transform.quantized(lora.adapted(mlp, CONFIG), recipe, params=1)

    def by_hand(adapters, x):
        for layer in ("up", "down"):
            kernel, factors = p[layer]["kernel"], adapters[f"{layer}/kernel"]
            w, used = (kernel, recipe) if name is None else (sd.dequantize(kernel), of_x_and_g(recipe))
            y = train.dense(x, w, recipe=used) + CONFIG.scaling * dot(dot(x, factors["a"]), factors["b"])
            x = jnp.tanh(y) if layer == "up" else y
        return jnp.sum(x**2)

    found = jax.jit(jax.grad(lambda adapters: jnp.sum(g(adapters, p, x) ** 2)))(adapters)
    expected = jax.jit(jax.grad(by_hand))(adapters, x)
    jax.tree.map(assert_same, found, expected)


def test_a_sharded_base_gives_the_gradients_of_one_device():
    x, p = normal(3, 16, WIDTH), quantized(mlp_params(), "nf4")
    adapters = with_adapters(mlp, p, x)
    step = jax.jit(jax.grad(lambda adapters, p, x: jnp.sum(lora.adapted(mlp, CONFIG)(adapters, p, x) ** 2)))
    expected = step(adapters, p, x)
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    specs = {"up": {"kernel": P(None, "model")}, "down": {"kernel": P("model", None)}}
    sharded = sd.sharding.shard(p, specs, mesh=mesh)
    assert not sharded["up"]["kernel"].data.sharding.is_fully_replicated
    found = step(adapters, sharded, jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data"))))
    jax.tree.map(assert_same, found, expected)

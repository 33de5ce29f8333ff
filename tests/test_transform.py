"""`transform.quantized` against the same program written with `scaledot.train`, and what `report` says of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from reference import equations
from training import assert_same_bits

import scaledot as sd
from scaledot import train, transform
from scaledot.recipes import UNQUANTISED, Cast, Gemm, Recipe
from scaledot.transform import rewrite

pytestmark = pytest.mark.jax_versions

NUMBERS = (((1,), (0,)), ((), ()))
WIDTH = 32


def params(seed: int = 0) -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) / 6  # noqa: E731
    return {name: matrix(WIDTH, WIDTH) for name in ("up", "down", "out")} | {"stack": matrix(3, WIDTH, WIDTH)}


def inputs(rows: int = 16) -> jax.Array:
    return jax.random.normal(jax.random.key(9), (rows, WIDTH))


def plain(x, w):
    return lax.dot_general(x, w, NUMBERS)


def under(recipe) -> Any:
    return lambda x, w: train.dot_general(x, w, NUMBERS, recipe=recipe)


def ring_mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


# One construct each, around a matmul `dot(x, w)`.
CONSTRUCTS = {
    "plain": lambda dot, p, x: dot(x, p["up"]),
    "swapped": lambda dot, p, x: (
        jnp.einsum("kn,mk->mn", p["up"], x) if dot is plain else dot(x, p["up"])  # einsum has the weight as lhs
    ),
    "converted": lambda dot, p, x: dot(x, (p["up"].T.astype(jnp.float32)).T.reshape(WIDTH, WIDTH)),
    "jit": lambda dot, p, x: jax.jit(dot)(jax.jit(dot)(x, p["up"]), p["down"]),
    "checkpoint": lambda dot, p, x: jax.checkpoint(lambda x, w: jnp.tanh(dot(x, w)))(x, p["up"]),
    "scan": lambda dot, p, x: lax.scan(lambda x, w: (jnp.tanh(dot(x, w)), None), x, p["stack"])[0],
    "slice": lambda dot, p, x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(dot(x, p["stack"][i])), x),
    "cond": lambda dot, p, x: lax.cond(x.sum() > -1e9, lambda x: dot(x, p["up"]), lambda x: dot(x, p["down"]), x),
    "vmap": lambda dot, p, x: dot(x, p["up"]) + jax.vmap(jnp.tanh)(x),
    "named_scope": lambda dot, p, x: jax.named_scope("layer")(dot)(x, p["up"]),
    "shard_map": lambda dot, p, x: jax.shard_map(
        dot, mesh=ring_mesh(), in_specs=(P("d"), P()), out_specs=P("d"), check_vma=False
    )(x, p["up"]),
}


def loss(construct: str, dot, p, x):
    return jnp.sum(CONSTRUCTS[construct](dot, p, x) ** 2)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "int8_qat"])
@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_a_transformed_function_equals_one_written_by_hand(construct, recipe):
    transformed = transform.quantized(functools.partial(loss, construct, plain), recipe)
    by_hand = functools.partial(loss, construct, under(recipe))
    found, expected = (jax.jit(jax.value_and_grad(f))(params(), inputs()) for f in (transformed, by_hand))
    assert_same_bits(found, expected)
    original = jax.jit(functools.partial(loss, construct, plain))(params(), inputs())
    assert found[0] != original


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_every_matmul_of_a_construct_is_found(construct):
    report = transform.report(functools.partial(loss, construct, plain), "mxfp8")(params(), inputs())
    assert [row.recipe for row in report.rows] == ["mxfp8"] * (2 if construct in ("jit", "cond") else 1)
    assert report.quantized_share == pytest.approx(1)
    lengths = {"scan": 3, "slice": 3}
    assert report.rows[0].executions == lengths.get(construct, 1)
    assert ("stack" if construct in lengths else "up") in {row.path for row in report.rows}


@jax.custom_vjp
def dot_with_vjp(x, w):
    return x @ w


dot_with_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_jvp
def dot_with_jvp(x, w):
    return x @ w


@dot_with_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@pytest.mark.parametrize("function", [dot_with_vjp, dot_with_jvp])
def test_custom_derivative_rules_keep_their_derivative(function):
    x, w = inputs(), params()["up"]

    def weighted(w, x):
        return jnp.sum(function(x, w) * jnp.cos(x))

    quantized = transform.quantized(weighted, "mxfp8")
    value, gradient = jax.jit(jax.value_and_grad(quantized))(w, x)
    terms = under("mxfp8")(x, w) * jnp.cos(x)
    np.testing.assert_allclose(value, jnp.sum(terms), atol=terms.size * 2**-24 * jnp.sum(jnp.abs(terms)), rtol=0)
    bound = len(x) * 2**-23 * (jnp.abs(x).T @ jnp.abs(jnp.cos(x)))  # float32 additions over the rows of x
    assert (jnp.abs(gradient - x.T @ jnp.cos(x)) <= bound).all()  # the rule's own, unquantised


def test_contractions_of_backward_rules_are_listed():
    report = transform.report(lambda w, x: dot_with_vjp(x, w), "mxfp8")(params()["up"], inputs())
    assert [row.recipe for row in report.rows] == ["mxfp8", "", ""]
    assert {row.reason for row in report.rows[1:]} == {"in the backward rule of a custom_vjp, which is not rewritten"}


def test_a_while_loop_is_rewritten_and_has_no_count():
    def iterate(w, x):
        return lax.while_loop(lambda loop: jnp.sum(jnp.abs(loop @ w)) > 1, lambda loop: jnp.tanh(loop @ w) / 2, x)

    def by_hand(w, x):
        dot = lambda x: under("fp8_current")(x, w)  # noqa: E731
        return lax.while_loop(lambda loop: jnp.sum(jnp.abs(dot(loop))) > 1, lambda loop: jnp.tanh(dot(loop)) / 2, x)

    w, x = params()["up"], inputs()
    assert_same_bits(jax.jit(transform.quantized(iterate, "fp8_current"))(w, x), jax.jit(by_hand)(w, x))
    report = transform.report(iterate, "fp8_current")(w, x)
    assert [row.executions for row in report.rows] == [0, 0]
    assert "in a while loop" in str(report)


def attention(p, x):
    with jax.named_scope("attention"):
        q, k = x @ p["up"], x @ p["down"]
        return jnp.sum(jax.nn.softmax(q @ k.T) @ (x @ p["out"]))


def test_matmuls_of_activations_need_a_rule_that_names_them():
    report = transform.report(attention, "mxfp8")(params(), inputs())
    assert [row.recipe for row in report.rows] == ["mxfp8", "mxfp8", "", "mxfp8", ""]
    rules = [transform.Rule("mxfp8", path="attention", operands="activations"), transform.Rule(None)]
    report = transform.report(attention, rules)(params(), inputs())
    assert [row.recipe for row in report.rows] == ["", "", "mxfp8", "", "mxfp8"]
    assert report.rows[0].reason == "its rule has no recipe"
    assert report.records()[2]["scope"] == "attention"
    assert jnp.isfinite(transform.quantized(attention, rules)(params(), inputs()))


def test_rules_choose_by_path_primitive_and_shape():
    rules = {"d*": "fp8_current", "up": None, "*": "mxfp8"}
    recipes = [row.recipe for row in transform.report(attention, rules)(params(), inputs()).rows]
    assert recipes == ["", "fp8_current", "", "mxfp8", ""]
    wide = transform.Rule("mxfp8", where=lambda site: site.rhs.shape[-1] > WIDTH)
    with pytest.raises(ValueError, match=r"the rule '\*' <lambda> matches no contraction of the function"):
        transform.report(attention, [wide])(params(), inputs())
    with pytest.raises(ValueError, match=r"the rule 'upp' matches no contraction of the function; near paths: up"):
        transform.quantized(attention, {"upp": "mxfp8"})(params(), inputs())


def test_a_lookup_in_a_table_is_data_and_a_tied_head_is_a_weight():
    def logits(p, tokens):
        return p["embedding"][tokens] @ p["embedding"].T

    report = transform.report(logits, "mxfp8")({"embedding": jnp.ones((64, WIDTH))}, jnp.arange(4))
    assert [(row.path, row.recipe) for row in report.rows] == [("embedding", "mxfp8")]


def test_contractions_that_do_not_fit_say_why():
    def f(p, x):
        adapter = p["up"] @ p["down"]
        return x @ adapter, jnp.einsum("i,j->ij", x[0], p["out"][0]), (x > 0).astype(jnp.int32) @ (p["ints"])

    weights = params() | {"ints": jnp.ones((WIDTH, 4), jnp.int32)}
    report = transform.report(f, "mxfp8")(weights, inputs())
    assert [(row.recipe, row.reason) for row in report.rows] == [
        ("", "no operand depends on data"),
        ("mxfp8", ""),
        ("", "it has no contracting dim"),
        ("", "it has dtype int32"),
    ]


def test_constants_are_parameters_if_no_argument_is():
    weights = params()
    report = transform.report(lambda x: x @ weights["up"], "mxfp8", params=None)(inputs())
    assert [row.recipe for row in report.rows] == ["mxfp8"]
    report = transform.report(lambda x: x @ weights["up"], "mxfp8")(inputs())
    assert [row.recipe for row in report.rows] == [""]


def test_a_backward_pass_inside_the_function_raises():
    with pytest.raises(ValueError, match=r"jax\.grad\(transform\.quantized\(loss, rules\)\)"):
        transform.quantized(jax.grad(attention), "mxfp8")(params(), inputs())


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (3, TypeError, "`rules` must be a recipe"),
        ({}, ValueError, "`rules` must not be empty"),
        ("fp8_curent", ValueError, "fp8_current"),
        ([{"path": "*"}], TypeError, "a list of transform.Rule"),
    ],
)
def test_rules_of_another_type_are_refused(rules, error, message):
    with pytest.raises(error, match=message):
        transform.quantized(attention, rules)


CAST = Cast(sd.FORMATS["fp8_e5m2"], rounding="stochastic")
STOCHASTIC = Recipe("stochastic", Gemm(CAST, CAST), Gemm(CAST, CAST), Gemm(CAST, CAST))


def test_sites_and_iterations_have_keys_of_their_own():
    def scanned(w, x):
        first, second = x @ w, x @ w
        return first, second, lax.scan(lambda c, _: (c, x @ w), 0, length=2)[1]

    q = transform.quantized(scanned, STOCHASTIC)
    w, x = params()["up"], inputs()
    first, second, (third, fourth) = q(w, x, sr_key=jax.random.key(0))
    results = [first, second, third, fourth]
    assert all((a != b).any() for i, a in enumerate(results) for b in results[:i])
    assert_same_bits(q(w, x, sr_key=jax.random.key(0))[0], first)
    assert (q(w, x, sr_key=jax.random.key(1))[0] != first).any()
    with pytest.raises(ValueError, match=r"with transform\.quantized, `sr_key`"):
        q(w, x)


def test_the_state_of_delayed_scaling_advances_as_by_hand():
    def f(p, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ p["up"], p["stack"])[0])

    def by_hand(p, states, x):
        dot = lambda x, w, state: train.dot_general(x, w, NUMBERS, recipe="fp8_delayed", state=state)[0]  # noqa: E731
        step = lambda x, layer: (jnp.tanh(dot(x, *layer)), None)  # noqa: E731
        return jnp.sum(lax.scan(step, dot(x, p["up"], states["up"]), (p["stack"], states["stack"]))[0])

    p, x = params(), inputs()
    state = transform.init_state(f, "fp8_delayed")(p, x)
    assert state["stack"]["x"].history.shape == (3, 1024)
    q = transform.quantized(f, "fp8_delayed")
    for _ in range(2):
        gradients = jax.jit(jax.grad(lambda p, state: q(p, x, scaling_state=state)[0], argnums=(0, 1)))(p, state)
        assert_same_bits(gradients, jax.jit(jax.grad(by_hand, argnums=(0, 1)))(p, state, x))
        state = gradients[1]
    assert (state["stack"]["g"].multiplier != 1).all()
    with pytest.raises(ValueError, match="uses delayed scaling and needs `scaling_state`"):
        q(p, x)
    with pytest.raises(ValueError, match="`scaling_state` has no entry for 'up'"):
        q(p, x, scaling_state={"stack": state["stack"]})
    with pytest.raises(ValueError, match="`scaling_state` is passed, but no contraction has delayed scaling"):
        transform.quantized(f, "mxfp8")(p, x, scaling_state=state)


def test_delayed_scaling_in_a_branch_is_refused_by_name():
    branch = functools.partial(loss, "cond", plain)
    rows = transform.report(branch, "fp8_delayed")(params(), inputs()).rows
    assert {row.reason for row in rows} == {"fp8_delayed has a state, which cannot pass through a cond"}


@pytest.mark.parametrize("construct", ["plain", "jit", "checkpoint", "scan", "slice", "converted", "swapped"])
def test_parameters_may_be_quantised_arrays(monkeypatch, construct):
    formats = {"up": "int8", "down": "nf4", "out": "nvfp4", "stack": "mxfp8"}
    quantised = {name: sd.quantize(w, formats[name], axis=-2, pad=True) for name, w in params().items()}
    dequantised = {name: sd.dequantize(w) for name, w in quantised.items()}
    f = functools.partial(loss, construct, plain)
    expected = jax.jit(f)(dequantised, inputs())
    monkeypatch.setattr(rewrite, "dequantize", lambda q: pytest.fail(f"{q} was dequantised before its matmul"))
    found = jax.jit(transform.quantized(f, UNQUANTISED))(quantised, inputs())
    # Up to three layers of WIDTH float32 additions each; |x| |w| bounds a result, whose square is added up.
    magnitudes = jnp.abs(inputs()) @ jnp.max(jnp.abs(jnp.stack([*dequantised["stack"], dequantised["up"]])), axis=0)
    np.testing.assert_allclose(found, expected, atol=3 * 2 * WIDTH * 2**-24 * jnp.sum(magnitudes**2), rtol=0)


def test_activations_of_quantised_parameters_are_cast_by_the_recipe():
    w, x = params()["up"], inputs()
    q = sd.quantize(w, "mxfp8", axis=0)
    found = transform.quantized(lambda w, x: x @ w, "mxfp8")(q, x)
    assert_same_bits(found, sd.matmul(sd.quantize(x, "mxfp8"), q))


@pytest.mark.parametrize(
    ("format", "dtype", "multiplied"),
    [("nf4", "bfloat16", "bfloat16"), ("nf4", "float32", "float32"), ("int8", "bfloat16", "bfloat16")],
)
def test_quantised_weights_are_multiplied_in_the_dtype_of_the_function(format, dtype, multiplied):
    """In the backward pass too, in which `sd.matmul` would multiply them in float32. The residuals are codes."""
    w, x = params()["up"].astype(dtype), inputs().astype(dtype)
    q = sd.quantize(w, format, axis=0, pad=True)

    def run(x):
        y, vjp = jax.vjp(lambda x: transform.quantized(lambda w, x: x @ w, UNQUANTISED)(q, x), x)
        return y, vjp(x)[0], vjp

    dots = [e for e in equations(jax.make_jaxpr(run)(x).jaxpr) if e.primitive.name == "dot_general"]
    assert {operand.aval.dtype.name for dot in dots for operand in dot.invars} == {multiplied}
    y, dx, vjp = jax.jit(run)(x)
    assert not any(leaf.shape == w.shape and leaf.dtype == w.dtype for leaf in jax.tree.leaves(vjp))
    # Roundings of weights, of the result and, for dx, of float32 sums: three of half a unit in the last place each.
    values, bound = sd.dequantize(q, jnp.float32), 3 * float(jnp.finfo(dtype).eps) / 2
    for found, matrix in ((y, values), (dx, values.T)):
        exact = x.astype(jnp.float32) @ matrix
        magnitude = jnp.abs(x).astype(jnp.float32) @ jnp.abs(matrix)
        assert jnp.all(jnp.abs(found.astype(jnp.float32) - exact) <= (bound + WIDTH * 2**-24) * magnitude)


def test_a_weight_computed_from_a_quantised_parameter_is_dequantised():
    def f(p, x):
        return (x @ (2 * p["up"])) @ p["down"]

    p, x = params(), inputs()
    quantised = p | {"up": sd.quantize(p["up"], "int8", axis=0)}
    found = transform.quantized(f, {"down": "mxfp8"})(quantised, x)
    dequantised = p | {"up": sd.dequantize(quantised["up"])}
    assert_same_bits(found, transform.quantized(f, {"down": "mxfp8"})(dequantised, x))


def test_delayed_scaling_of_a_quantised_parameter_is_refused_by_name():
    def f(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    p, x = params(), inputs()
    quantised = p | {"up": sd.quantize(p["up"], "int8", axis=0)}
    state = transform.init_state(f, "fp8_delayed")(quantised, x)
    assert list(state) == ["down"]
    y, returned = transform.quantized(f, "fp8_delayed")(quantised, x, scaling_state=state)
    hidden = jnp.tanh(sd.matmul(x, quantised["up"]))
    expected, _ = train.dense(hidden, p["down"], recipe="fp8_delayed", state=state["down"])
    assert_same_bits(y, expected)
    assert list(returned) == ["down"]
    reasons = {row.path: row.reason for row in transform.report(f, "fp8_delayed")(quantised, x).rows}
    assert reasons == {
        "up": "fp8_delayed has delayed scaling, and a quantised parameter has no amax history",
        "down": "",
    }


def test_convolutions_and_ragged_dots_by_hand_are_reported():
    def f(p, x, image, sizes):
        y = train.conv_general_dilated(image, p["window"], (1,), "SAME", recipe="fp8_current")
        return y, train.ragged_dot(x, p["stack"], sizes, recipe="mxfp8")

    weights = params() | {"window": jnp.ones((8, 4, 3))}
    rows = transform.report(f)(weights, inputs(), jnp.ones((2, 4, 16)), jnp.array([4, 4, 8])).rows
    found = [(row.path, row.primitive, row.recipe, row.flops) for row in rows]
    assert found == [
        ("window", "conv_general_dilated", "fp8_current", 2 * (2 * 8 * 16) * (4 * 3)),
        ("stack", "ragged_dot_general", "mxfp8", 2 * (16 * WIDTH) * WIDTH),
    ]


def test_contractions_in_kernels_and_callbacks_are_left_and_listed():
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    def f(w, x):
        inside = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)
        outside = io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ w)
        return inside + outside

    w, x = params()["up"], inputs()
    rows = transform.report(f, "mxfp8")(w, x).rows
    assert [(row.recipe, row.reason) for row in rows] == [
        ("", "inside pallas_call, which is not rewritten"),
        ("mxfp8", ""),
    ]
    expected = jax.jit(lambda w, x: under("mxfp8")(x, w) + x @ w)(w, x)
    error = jnp.abs(jax.jit(transform.quantized(f, "mxfp8"))(w, x) - expected)
    assert (error <= 2 * (WIDTH + 1) * 2**-24 * 2 * (jnp.abs(x) @ jnp.abs(w))).all()  # two orders of float32 additions


def test_donated_arguments_are_donated():
    quantized = transform.quantized(lambda w, x: jnp.sum(x @ w), "mxfp8")
    step = jax.jit(lambda w, x: w - jax.grad(quantized)(w, x), donate_argnums=0)
    assert "tf.aliasing_output" in step.lower(params()["up"], inputs()).as_text()


def test_effects_weak_types_and_other_results_survive():
    calls = []

    def f(w, x):
        jax.debug.callback(lambda total: calls.append(float(total)), jnp.sum(x))
        return {"y": x @ w, "two": jnp.sin(2.0), "name": "f", "none": None}

    found = transform.quantized(f, "mxfp8")(params()["up"], inputs())
    jax.effects_barrier()
    assert calls == [float(jnp.sum(inputs()))]
    assert (found["name"], found["none"]) == ("f", None)
    assert found["two"].weak_type


def test_equal_jitted_layers_are_traced_once():
    traced = []

    @jax.jit
    def layer(x, w):
        traced.append(1)
        return jnp.tanh(x @ w)

    def f(p, x):
        for w in p:
            x = layer(x, w)
        return x

    program = jax.make_jaxpr(transform.quantized(f, "mxfp8"))([params()["up"]] * 4, inputs())
    calls = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.params.get("name") == "layer"]
    assert len(traced) == 1
    assert len(calls) == 4
    assert len(set(map(id, calls))) == 1


def test_a_transform_per_example_has_a_scale_per_example():
    w, x = params()["up"], inputs() * jnp.arange(1.0, 17)[:, None]
    dot = lambda w, x: x @ w  # noqa: E731
    together = transform.quantized(jax.vmap(dot, (None, 0)), "fp8_current")(w, x)
    apart = jax.vmap(transform.quantized(dot, "fp8_current"), (None, 0))(w, x)
    assert_same_bits(together, under("fp8_current")(x, w))
    assert (apart != together).any()


@st.composite
def programs(draw):
    """A random composition of the constructs, as a function of parameters and x."""
    names = draw(st.lists(st.sampled_from(sorted(set(CONSTRUCTS) - {"shard_map", "swapped"})), min_size=1, max_size=3))
    return lambda dot, p, x: functools.reduce(lambda x, name: jnp.tanh(CONSTRUCTS[name](dot, p, x)), names, x)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(programs())
def test_without_casts_programs_keep_their_bits(program):
    compose = program
    f = lambda p, x: jnp.sum(compose(plain, p, x) ** 2)  # noqa: E731
    found, expected = (
        jax.jit(jax.value_and_grad(g))(params(), inputs(4)) for g in (transform.quantized(f, UNQUANTISED), f)
    )
    assert_same_bits(found, expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(programs(), st.data())
def test_a_report_accounts_for_all_flops(program, data):
    f = functools.partial(program, plain)
    flops = {}
    for row in transform.report(f)(params(), inputs(4)).rows:
        flops[row.path] = flops.get(row.path, 0) + row.flops
    rules = {path: data.draw(st.sampled_from(["mxfp8", "fp8_current", None])) for path in flops}
    report = transform.report(f, rules)(params(), inputs(4))
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    assert sum(row.flops for row in report.rows) == sum(flops.values())
    quantised = sum(flops[path] for path, recipe in rules.items() if recipe)
    assert report.quantized_share == pytest.approx(quantised / sum(flops.values()))


def test_recipes_are_replaced_by_value():
    renamed = dataclasses.replace(sd.find_recipe("mxfp8"), name="mine")
    row, *_ = transform.report(lambda w, x: x @ w, renamed)(params()["up"], inputs()).rows
    assert row.recipe == "mine"

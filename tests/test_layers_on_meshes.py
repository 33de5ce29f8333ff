"""Flax layers under recipes on meshes of CPU devices: their metadata, their specs, and their collectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.plan.hlo import collectives

WIDTH, HIDDEN = 256, 512
SPECS = {
    "up": train.Specs(P("dp", "tp"), P(None, "tp"), P("dp", None, "tp")),
    "down": train.Specs(P("dp", None, "tp"), P("tp"), P("dp", "tp")),
}
RECIPES = ("fp8_block", "fp8_delayed", "nvfp4")  # without state, with state, with stochastic rounding


def mesh_of(kind: AxisType):
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)


class Block(nn.Module):
    """Kernels have logical axis names, as in any sharded linen model."""

    @nn.compact
    def __call__(self, x):
        for name, features, axes in (("up", HIDDEN, ("embed", "mlp")), ("down", WIDTH, ("mlp", "embed"))):
            kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
            x = nn.Dense(features, use_bias=False, kernel_init=kernel_init, dtype=jnp.bfloat16, name=name)(x)
            x = nn.silu(x) if name == "up" else x
        return x


def gradients(model, key):
    def run(variables, x):
        def loss(variables, x):
            y = model.apply(variables, x, rngs={"sr_rng": key})
            return jnp.sum(jnp.square(y.astype(jnp.float32))), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(variables, x)
        return y, grads

    return run


def require_close(found, expected):
    """Up to another order of float32 accumulation, which may change the rounding of elements of the hidden layer."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)


def require_same_histories(found, expected):
    """Amax histories and scales of the first layer, whose operands have the same bits on one device and on eight."""
    layers = [tree["_overwrite_with_gradient"]["up"]["DotGeneral_0"] for tree in (found, expected)]
    for name in ("x_amax_history", "x_scale", "kernel_amax_history", "kernel_scale"):
        np.testing.assert_array_equal(layers[0][name], layers[1][name])


@pytest.mark.optimized
@pytest.mark.parametrize("recipe", params_of(RECIPES, ("fp8_block", "nvfp4")))
def test_a_linen_model_follows_its_specs(recipe, standard_promotion):
    x, key = normal(0, (4, 512, WIDTH), jnp.bfloat16), jax.random.key(1)
    plain = sd.linen.with_recipe(Block(), recipe)
    variables = plain.init({"params": jax.random.key(0), "sr_rng": key}, x[:1, :8])
    expected = jax.jit(gradients(plain, key))(nn.unbox(variables), x)

    mesh = mesh_of(AxisType.Auto)
    logical = nn.get_partition_spec(variables)
    named = nn.logical_to_mesh_sharding(logical, mesh, [("embed", None), ("mlp", "tp")])
    assert named["params"]["up"]["kernel"].spec == P(None, "tp")
    sharded = jax.device_put(nn.unbox(variables), named)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
        for overlap in ((), "tp"):
            model = sd.linen.with_recipe(Block(), recipe, specs=SPECS, overlap=overlap)
            program = jax.jit(gradients(model, key)).lower(sharded, tokens).compile()
            y, grads = program(sharded, tokens)
            require_close((y, grads), expected)
            if recipe == "fp8_delayed":
                require_same_histories(grads, expected[1])
            assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), y.ndim)
            kernel = grads["params"]["down"]["kernel"]
            assert kernel.sharding.is_equivalent_to(named["params"]["down"]["kernel"], 2)
            transfers = collectives(program.as_text(), dict(mesh.shape))
            large = [one for one in transfers if one.axes == ("tp",) and one.bytes >= 2**14]
            kinds = {"collective-permute"} if overlap else {"all-gather", "reduce-scatter"}
            assert {one.kind for one in large} == kinds
            assert not [one for one in large if one.kind == "all-gather" and one.dtype != "u8"]


def test_a_pattern_of_specs_that_matches_nothing_is_named():
    model = sd.linen.with_recipe(Block(), "mxfp8", specs={"upp": SPECS["up"]})
    with pytest.raises(ValueError, match=r"'upp' of `specs` matches no layer .*near paths: up"):
        model.init(jax.random.key(0), jnp.ones((1, 8, WIDTH)))


class NnxBlock(nnx.Module):
    """On explicit axes: kernels are initialised sharded, and `out_shardings` are those of the two results."""

    def __init__(self, rngs: nnx.Rngs):
        for name, sizes, axes in (("up", (WIDTH, HIDDEN), (None, "tp")), ("down", (HIDDEN, WIDTH), ("tp", None))):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            options = {"kernel_init": init, "use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
            setattr(self, name, nnx.Linear(*sizes, **options))

    def __call__(self, x, out_shardings=(None, None)):
        h = nnx.silu(self.up(x, out_sharding=out_shardings[0]))
        return self.down(h, out_sharding=out_shardings[1])


def nnx_gradients(model, x, out_shardings=(None, None)):
    def loss(model, x):
        y = model(x, out_shardings)
        return jnp.sum(jnp.square(y.astype(jnp.float32))), y

    (_, y), grads = nnx.value_and_grad(loss, has_aux=True, argnums=nnx.DiffState(0, sd.nnx.TRAINED))(model, x)
    return y, nnx.to_pure_dict(grads)


@pytest.mark.parametrize("recipe", params_of(RECIPES, ("nvfp4", "fp8_delayed")))
def test_an_nnx_model_follows_types_and_specs(recipe, standard_promotion):
    x = normal(0, (4, 512, WIDTH), jnp.bfloat16)
    one_device = jax.make_mesh((1, 1), ("dp", "tp"), devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(one_device):
        model = sd.nnx.with_recipe(NnxBlock(nnx.Rngs(0)), recipe, rngs=nnx.Rngs(sr_rng=3))
        expected = jax.tree.map(np.asarray, nnx.jit(nnx_gradients)(model, x))
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        model = sd.nnx.with_recipe(NnxBlock(nnx.Rngs(0)), recipe, rngs=nnx.Rngs(sr_rng=3))
        tokens = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
        out_shardings = P("dp", None, "tp"), P("dp", "tp")
        y, grads = nnx.jit(nnx_gradients, static_argnums=2)(model, tokens, out_shardings)
        require_close((y, grads), expected)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), y.ndim)
        assert tuple(grads["up"]["kernel"].sharding.spec) == (None, "tp")
    auto = mesh_of(AxisType.Auto)
    with jax.set_mesh(auto):
        model = sd.nnx.with_recipe(NnxBlock(nnx.Rngs(0)), recipe, rngs=nnx.Rngs(sr_rng=3), specs=SPECS, overlap="tp")
        y, grads = nnx.jit(nnx_gradients)(model, jax.device_put(x, NamedSharding(auto, P("dp", "tp"))))
        require_close((y, grads), expected)
        assert y.sharding.is_equivalent_to(NamedSharding(auto, P("dp", "tp")), y.ndim)

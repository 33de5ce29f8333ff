"""`train.forward_weights` returns the codes and scales that training multiplied by, and checkpoints keep them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import params_of

import scaledot as sd
from scaledot import checkpoint, train
from scaledot.recipes import RECIPES
from scaledot.train import vjp

# The layouts that store the weights of a recipe's forward pass. int8_block rotates its weights.
LAYOUTS = {
    "fp8_current": ("compressed-tensors", "modelopt", "hf-fp8"),
    "fp8_delayed": ("compressed-tensors", "modelopt", "hf-fp8"),
    "fp8_block": ("compressed-tensors", "hf-fp8"),
    "mxfp8": ("compressed-tensors", "modelopt"),
    "nvfp4": ("compressed-tensors", "modelopt"),
    "nvfp4_four_over_six": ("compressed-tensors", "modelopt"),
    "int8": ("compressed-tensors",),
    "int8_qat": ("compressed-tensors",),
    "fp8_qat": ("compressed-tensors", "modelopt", "hf-fp8"),
    "w8a16_qat": ("compressed-tensors",),
    "w4a16_qat": ("compressed-tensors",),
    "w4a8_qat": ("compressed-tensors",),
}
SAME_WEIGHTS = ("fp8_qat", "int8_qat", "w8a16_qat", "w4a8_qat", "nvfp4_four_over_six")  # as another recipe has
CASES = [
    pytest.param(recipe, layout, marks=pytest.mark.exhaustive if recipe in SAME_WEIGHTS else ())
    for recipe, layouts in LAYOUTS.items()
    for layout in (*layouts, "scaledot")
]


def numbers(q) -> dict[str, np.ndarray]:
    """The leaves of a ScaledArray as float32, which holds every code and every scale exactly, and the sign of zero."""
    leaves = {"data": q.data, "scale": q.scale, "tensor_scale": q.tensor_scale, "zero": q.zero}
    return {name: np.asarray(leaf.astype(jnp.float32)) for name, leaf in leaves.items() if leaf is not None}


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert {name: (x.shape, x.tobytes()) for name, x in a.items()} == {
        name: (x.shape, x.tobytes()) for name, x in b.items()
    }


@functools.cache
def trained(recipe: str):
    """A layer after a step of training: its parameters and states, and the operand w of its next forward pass."""
    model = nn.Dense(256, dtype=jnp.bfloat16, dot_general_cls=sd.linen.make_dot_general_cls(recipe))
    x = jax.random.normal(jax.random.key(1), (64, 128), jnp.bfloat16)
    rngs = {"params": jax.random.key(0), "sr_rng": jax.random.key(2)}
    variables = model.init(rngs, x)
    gradients = jax.jit(jax.grad(lambda v: model.apply(v, x, rngs=rngs).astype(jnp.float32).sum()))(variables)
    step = jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), variables["params"], gradients["params"])
    states = gradients.get("_overwrite_with_gradient", {})
    used = []
    multiply = vjp._fwd_matmul

    def observed(static, operands, x, w, means):
        leaves = {"data": w.data, "scale": w.scale, "tensor_scale": w.tensor_scale, "zero": w.zero}
        exact = {name: leaf.astype(jnp.float32) for name, leaf in leaves.items() if leaf is not None}
        jax.debug.callback(lambda **leaves: used.append({n: np.asarray(leaf) for n, leaf in leaves.items()}), **exact)
        return multiply(static, operands, x, w, means)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vjp, "_fwd_matmul", observed)
        after_step = {"params": step, "_overwrite_with_gradient": states}
        jax.block_until_ready(jax.jit(lambda v: model.apply(v, x, rngs=rngs))(after_step))
    jax.effects_barrier()
    return step, states, used[-1]


@pytest.mark.parametrize("recipe", params_of(RECIPES, (*SAME_WEIGHTS, "quartet_ii", "averis", "ufp4", "if4")))
def test_forward_weights_are_the_operands_of_the_forward_pass(recipe, standard_promotion):
    params, states, used = trained(recipe)
    exported = train.forward_weights(params, recipe, dtype=jnp.bfloat16, states=states)
    assert_equal(numbers(exported["kernel"]), used)
    assert exported["bias"] is params["bias"]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_a_checkpoint_has_the_codes_and_scales_of_training(recipe, layout, tmp_path, standard_promotion):
    params, states, used = trained(recipe)
    exported = train.forward_weights({"up": params}, recipe, dtype=jnp.bfloat16, states={"up": states})
    names = {"{}.weight": "{}/kernel.T", "{}.bias": "{}/bias"}
    options = {"activations": "dynamic"} if layout == "modelopt" else {}
    checkpoint.save(exported, tmp_path / "model", layout, rename=names, config={"dtype": "bfloat16"}, **options)
    loaded = checkpoint.load(tmp_path / "model", rename=names)["up"]["kernel"]
    found = numbers(loaded)
    expected = dict(used)
    # 16 x 16 blocks are stored as rows of 16; dynamic FP8 of ModelOpt has a scale per output channel.
    rows = found["scale"].shape[1] // used["scale"].shape[1] if found["scale"].ndim == 2 else 1
    expected["scale"] = np.repeat(used["scale"], rows, axis=1)
    if layout == "compressed-tensors" and "tensor_scale" in used:  # stored as its reciprocal
        ulps = np.abs(found["tensor_scale"].view(np.int32) - used["tensor_scale"].view(np.int32))
        assert ulps <= 1
        expected["tensor_scale"] = found["tensor_scale"]
    assert_equal({name: found[name].reshape(expected[name].shape) for name in found}, expected)


def test_delayed_scaling_needs_the_state():
    with pytest.raises(ValueError, match="`states` has none for `up/kernel`"):
        train.forward_weights({"up": {"kernel": jnp.ones((16, 16))}}, "fp8_delayed")

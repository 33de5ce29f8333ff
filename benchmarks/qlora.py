"""Memory of one training step: full fine-tuning, LoRA and QLoRA of one transformer, as XLA allocates it.

Every step computes in bfloat16 with Adam, scans over stacked blocks and recomputes each block in its backward pass.
Trained arrays, their gradients and moments are float32; frozen weights are bfloat16 (LoRA) or nf4 (QLoRA). Buffers of
trained arrays and of the optimiser are donated. Bytes are those of the compiled program: arguments, results that do not
reuse an argument, and temporaries, which hold activations and gradients. Nothing is run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import scaledot as sd
from benchmarks import record
from scaledot import lora

SIZE = 1024  # width of the model
BLOCKS, TOKENS, BATCH, RANK, VOCABULARY = 8, 256, 1, 8, 4096
RULES = {"head": None, "blocks/*": lora.Config(RANK, 2 * RANK)}
OPTIMIZER = optax.adam(1e-4)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """The cross-entropy of a causal transformer with SwiGLU blocks."""
    x = params["embedding"][tokens[:, :-1]].astype(jnp.bfloat16)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))

    @jax.checkpoint
    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
        q, k, v = (jnp.einsum("btd,dhc->bthc", _normed(x), w[name].reshape(x.shape[-1], -1, 64)) for name in "qkv")
        scores = jnp.einsum("bthc,bshc->bhts", q, k, preferred_element_type=jnp.float32) / 8
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
        x = x + jnp.einsum("bhts,bshc->bthc", scores, v).reshape(x.shape) @ w["out"]
        y = _normed(x)
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    x = lax.scan(block, x, params["blocks"])[0]
    logits = (_normed(x) @ params["head"].astype(x.dtype)).astype(jnp.float32)
    return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def _normed(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def init(width: int, dtype: Any) -> Any:
    """Zeros in the shapes of the parameters; the blocks are stacked."""
    shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    shapes |= {"gate": (width, 4 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = {name: jnp.zeros((BLOCKS, *shape), dtype) for name, shape in shapes.items()}
    table = (VOCABULARY, width)
    return {"embedding": jnp.zeros(table, dtype), "blocks": blocks, "head": jnp.zeros(table[::-1], dtype)}


def with_nf4_blocks(params: Any) -> Any:
    cast = functools.partial(sd.quantize, format="nf4", axis=0)
    return params | {"blocks": jax.tree.map(jax.vmap(cast), params["blocks"])}


def full_step(params: Any, state: Any, tokens: jax.Array) -> Any:
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(params, updates), state, value


def adapter_step(adapters: Any, state: Any, base: Any, tokens: jax.Array) -> Any:
    value, grads = jax.value_and_grad(lora.adapted(loss, RULES))(adapters, base, tokens)
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(adapters, updates), state, value


def step_bytes(step: Any, trained: Any, *rest: Any) -> dict[str, int]:
    """Bytes of a step that the compiler reports, and the number of trained elements."""
    state = jax.eval_shape(OPTIMIZER.init, trained)
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(trained, state, *rest).compile().memory_analysis()
    assert memory is not None, "the compiler reports no sizes on this platform"
    new_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "trained_elements": sum(leaf.size for leaf in jax.tree.leaves(trained)),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes + new_results,
    }


def run(size: int, repeats: int) -> dict:
    """The record of the three steps; `repeats` has no effect, because sizes do not vary."""
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS + 1), jnp.int32)
    float32, bfloat16 = (jax.eval_shape(lambda dtype=dtype: init(size, dtype)) for dtype in (jnp.float32, jnp.bfloat16))
    nf4 = jax.eval_shape(with_nf4_blocks, bfloat16)
    steps = {"full fine-tuning": step_bytes(full_step, float32, tokens)}
    for name, base in {"LoRA, bfloat16 base": bfloat16, "QLoRA, nf4 base": nf4}.items():
        adapters = jax.eval_shape(lora.init(loss, RULES, key=jax.random.key(0)), base, tokens)
        steps[name] = step_bytes(adapter_step, adapters, base, tokens)
    for name, sizes in steps.items():
        print(f"{name}: {sizes['trained_elements']} trained elements, {sizes['total_bytes'] / 2**20:.0f} MiB")
    model = {"width": size, "blocks": BLOCKS, "tokens": TOKENS, "batch": BATCH, "rank": RANK, "vocabulary": VOCABULARY}
    model["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(float32))
    device = jax.devices()[0]
    return {
        "environment": record.environment() | {"device": device.device_kind, "platform": device.platform},
        "model": model,
        "steps": steps,
    }

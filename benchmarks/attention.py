"""Causal attention with rotary position embeddings."""

import jax
import jax.numpy as jnp


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with rotary position embeddings of q, k, v (batch, tokens, heads, size)."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation=implementation)


def rotated(x: jax.Array) -> jax.Array:
    """Applies rotary position embeddings to x (batch, tokens, heads, size)."""
    size = x.shape[-1]
    frequencies = 10000.0 ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    even, odd = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], axis=-1)

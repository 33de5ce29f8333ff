"""A small Llama-style model in linen whose parameters have the paths of `checkpoint.LLAMA`."""

import flax.linen as nn
import jax
import jax.numpy as jnp

WIDTH, HEADS, HIDDEN, VOCABULARY, LAYERS = 128, 4, 256, 64, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary position embeddings of x (batch, tokens, heads, head dim), with halves as Hugging Face pairs them."""
    tokens, dim = x.shape[1], x.shape[-1]
    frequencies = 10000.0 ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = (jnp.concatenate([f(angles)] * 2, axis=-1)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            nn.Dense(width, use_bias=False, name=f"{name}_proj")(x).reshape(batch, tokens, HEADS, -1) for name in "qkv"
        )
        y = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return nn.Dense(width, use_bias=False, name="o_proj")(y.reshape(x.shape))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = (nn.Dense(HIDDEN, use_bias=False, name=f"{name}_proj")(x) for name in ("gate", "up"))
        return nn.Dense(WIDTH, use_bias=False, name="down_proj")(nn.silu(gate) * up)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention(name="self_attn")(nn.RMSNorm(name="input_layernorm")(x))
        return x + Mlp(name="mlp")(nn.RMSNorm(name="post_attention_layernorm")(x))


class Llama(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed_tokens")(tokens)
        for index in range(LAYERS):
            x = Layer(name=f"layers_{index}")(x)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(nn.RMSNorm(name="norm")(x))


def example() -> tuple[Llama, dict, jax.Array]:
    """The model, its parameters and a batch of tokens."""
    model = Llama()
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, VOCABULARY)
    return model, model.init(jax.random.key(0), tokens)["params"], tokens

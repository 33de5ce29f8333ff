"""Sequences whose entropy is known: what a language model loses above it is its own fault.

An order-2 Markov chain over 16 symbols with Dirichlet(0.3) transitions; nothing is downloaded.
"""

import jax
import jax.numpy as jnp
import numpy as np


class Source:
    def __init__(self, symbols: int = 16, concentration: float = 0.3, seed: int = 0):
        draw = np.random.default_rng(seed)
        self.symbols = symbols
        self.transitions = draw.dirichlet(np.full(symbols, concentration), size=(symbols, symbols))

    @property
    def entropy(self) -> float:
        """Nats per symbol in the long run."""
        pairs = np.full((self.symbols, self.symbols), self.symbols**-2.0)
        for _ in range(1000):  # the chain's stationary distribution over pairs of symbols
            pairs = np.einsum("ab,abc->bc", pairs, self.transitions)
        surprise = -np.log(np.maximum(self.transitions, 1e-300))
        return float(np.einsum("ab,abc,abc->", pairs, self.transitions, surprise))

    def batch(self, key: jax.Array, size: int, length: int) -> jax.Array:
        """`size` sequences of `length` symbols."""
        logits = jnp.log(jnp.asarray(self.transitions, jnp.float32) + 1e-30)

        def step(pair, key):
            symbol = jax.random.categorical(key, logits[pair[0], pair[1]])
            return (pair[1], symbol), symbol

        start_key, *_ = keys = jax.random.split(key, length + 20)
        start = jax.random.randint(start_key, (2, size), 0, self.symbols)
        _, symbols = jax.lax.scan(step, (start[0], start[1]), keys)
        return symbols[-length:].T

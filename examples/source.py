"""Synthetic sequences of known entropy, the lower bound of a language model's loss.

An order-2 Markov chain over 16 symbols with Dirichlet(0.3) transitions; nothing is downloaded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


class Source:
    def __init__(self, vocab: int = 16, concentration: float = 0.3, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.transitions = rng.dirichlet(np.full(vocab, concentration), size=(vocab, vocab))

    @property
    def entropy(self) -> float:
        """The entropy rate in nats per symbol."""
        pairs = np.full((self.vocab, self.vocab), self.vocab**-2.0)
        for _ in range(1000):  # the chain's stationary distribution over pairs of symbols
            pairs = np.einsum("ab,abc->bc", pairs, self.transitions)
        return float(np.einsum("ab,abc,abc->", pairs, self.transitions, -self._log))

    @property
    def _log(self) -> np.ndarray:
        return np.log(np.maximum(self.transitions, 1e-30)).astype(np.float32)

    def surprise(self, tokens: jax.Array) -> jax.Array:
        """-log p of every symbol after the first two under the true transitions, the loss of a perfect model."""
        return -jnp.asarray(self._log)[tokens[..., :-2], tokens[..., 1:-1], tokens[..., 2:]]

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def draw(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Draws sequences along the last axis of an array of this shape."""
        *size, length = shape
        log = jnp.asarray(self._log)

        def step(pair, key):
            symbol = jax.random.categorical(key, log[pair[0], pair[1]])
            return (pair[1], symbol), symbol

        start_key, *_ = keys = jax.random.split(key, length + 20)  # 20 burn-in steps
        start = jax.random.randint(start_key, (2, *size), 0, self.vocab)
        _, symbols = jax.lax.scan(step, (start[0], start[1]), keys)
        return jnp.moveaxis(symbols[-length:], 0, -1)

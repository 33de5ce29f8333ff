"""Trains a row: compiled once, then run for each seed.

The corpus is on the device, and batches are gathered from it inside the compiled program, at offsets drawn from the
seed. Seeds are paired: every row of a seed starts from the same state, after some steps in bf16, and then trains on the
same batches.
"""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.convergence.code_gpt import model
from benchmarks.convergence.code_gpt.config import AVERAGED, FRACTIONS, Config
from benchmarks.convergence.code_gpt.corpus import Corpus
from benchmarks.convergence.code_gpt.rows import Recipes, Row
from benchmarks.convergence.code_gpt.schedule import Deadline

INIT, BATCHES, ROUNDING = range(3)  # uses of a seed's key
# No CUDA graphs: their capture fails if the compilation of the next row, in another thread, loads a module meanwhile.
_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
# Autotuning may choose other kernels in each process, whose sums are rounded differently; cuBLAS has a default, Triton
# needs autotuning.
_REPRODUCIBLE = {
    **_OPTIONS,
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}
WARM = 0.1  # of a row's own steps, after which its speed is known: the first chunk also loads kernels


@dataclasses.dataclass(frozen=True)
class Outcome:
    """held_out: the loss in nats by fraction of the run; curve: the mean training loss of each chunk.

    held_out_bf16: the losses of the same parameters in bf16, where they count for the final loss.
    start: hash of the parameters after the shared steps. seconds: of the steps after these.
    """

    held_out: dict[str, float]
    held_out_bf16: dict[str, float]
    curve: list[float]
    start: str
    seconds: float


class Start(NamedTuple):
    """The state of a seed after the shared steps, its hash, and the mean training loss of each chunk until then."""

    state: Any
    digest: str
    curve: list[float]


class SharedStart:
    """Trains the first steps of each seed in bf16, once for all rows, with the same bits in each process.

    Rows that differ from the first step on end with gaps to bf16 that vary between seeds as much as recipes differ: the
    loss falls steeply while attention heads form, each row does so some steps earlier or later, and it keeps that
    difference until the end. Rows that start after that phase have paired gaps that vary much less.
    """

    def __init__(self, config: Config, corpus: Corpus):
        self.config, self.train = config, jnp.asarray(corpus.train)
        self.held_out = jnp.asarray(held_out_batches(corpus.held_out, config))
        self._starts: dict[int, Start] = {}

    def of(self, seed: int) -> Start:
        """Returns the start of a seed; the caller may not donate its state."""
        if seed not in self._starts:
            self._starts[seed] = self._trained(seed)
        return self._starts[seed]

    def _trained(self, seed: int) -> Start:
        state, curve = init_state(self.config, np.uint32(seed)), []
        for first in range(0, self.config.shared_steps, self.config.chunk):
            state, loss = self._advance(state, self.train, np.uint32(seed), np.int32(first))
            curve.append(round(float(loss), 5))
        return Start(state, _digest(state[0]), curve)

    @functools.cached_property
    def evaluate(self) -> Callable[..., Any]:
        """The compiled `held_out_loss` of a model in bf16."""
        return compiled_evaluate(self.config, (None,) * self.config.blocks, self.held_out)

    @functools.cached_property
    def _advance(self) -> Callable[..., Any]:
        recipes = (None,) * self.config.blocks
        return compiled_advance(self.config, recipes, self.train, _REPRODUCIBLE)


def _digest(params: model.Params) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of the parameters."""
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in jax.tree.leaves(params))).hexdigest()[:16]


class Programs:
    """The compiled programs of a row.

    compile_s: seconds that tracing and compilation took, possibly while another row trained.
    """

    def __init__(self, row: Row, config: Config, shared: SharedStart):
        self.config, self.shared, self.train, self.held_out = config, shared, shared.train, shared.held_out
        start = time.perf_counter()
        self._phases = [(end, *self._compile(recipes)) for end, recipes in row.phases(config)]
        self.compile_s = time.perf_counter() - start

    def _compile(self, recipes: Recipes) -> tuple[Callable[..., Any], Callable[..., Any]]:
        advance = compiled_advance(self.config, recipes, self.train, _OPTIONS)
        return advance, compiled_evaluate(self.config, recipes, self.held_out)

    def run(self, seed: int, progress, deadline: Deadline) -> Outcome | None:
        """Trains one model; returns None as soon as it would end after the deadline, at the speed so far.

        progress: a bar, updated by the steps of each chunk.
        """
        config, shared = self.config, self.shared.of(seed)
        held_out, held_out_bf16 = {}, {}
        state, curve, done = jax.tree.map(jnp.copy, shared.state), list(shared.curve), config.shared_steps
        progress.update(done)
        start = time.perf_counter()
        for end, advance, evaluate in self._phases:
            while done < end:
                state, loss = advance(state, self.train, np.uint32(seed), np.int32(done))
                done += config.chunk
                curve.append(round(float(loss), 5))
                progress.update(config.chunk)
                progress.set_postfix(loss=f"{curve[-1]:.4f}", refresh=False)
                fraction, own = done / config.steps, (done - config.shared_steps) / (config.steps - config.shared_steps)
                if fraction in FRACTIONS or fraction >= AVERAGED:
                    held_out[f"{fraction:.4g}"] = float(evaluate(state[0], self.held_out))
                if fraction >= AVERAGED:
                    held_out_bf16[f"{fraction:.4g}"] = float(self.shared.evaluate(state[0], self.held_out))
                remaining_s = (time.perf_counter() - start) * (1 - own) / own
                if own >= WARM and not deadline.allows(remaining_s):
                    return None
        return Outcome(held_out, held_out_bf16, curve, shared.digest, time.perf_counter() - start)


def compiled_advance(config: Config, recipes: Recipes, train: jax.Array, options: Any) -> Callable[..., Any]:
    """Returns the compiled `advance_chunk` of a model, which donates its state."""
    advance = jax.jit(functools.partial(advance_chunk, config, recipes), donate_argnums=0)
    return advance.lower(abstract_state(config), train, np.uint32(0), np.int32(0)).compile(options)


def compiled_evaluate(config: Config, recipes: Recipes, held_out: jax.Array) -> Callable[..., Any]:
    """Returns the compiled `held_out_loss` of a model."""
    params, _ = abstract_state(config)
    return jax.jit(functools.partial(held_out_loss, config, recipes)).lower(params, held_out).compile(_OPTIONS)


def abstract_state(config: Config) -> Any:
    """Returns the shapes and dtypes of `init_state`."""
    return jax.eval_shape(functools.partial(init_state, config), np.uint32(0))


def held_out_batches(data: np.ndarray, config: Config) -> np.ndarray:
    """Returns windows (batches, batch, tokens + 1) of the held-out bytes, evenly spaced and without overlap."""
    available = (data.size - 1) // config.tokens
    batches = min(config.held_out_windows, available) // config.batch
    if batches < 1:
        raise ValueError(
            f"a batch of {config.batch} windows of {config.tokens} tokens needs a held-out split of more than "
            f"{config.batch * config.tokens} bytes, not {data.size}; raise the size limit of the corpus"
        )
    starts = np.linspace(0, data.size - 1 - config.tokens, batches * config.batch).astype(np.int64)
    return data[starts.reshape(batches, config.batch, 1) + np.arange(config.tokens + 1)]


def optimiser(config: Config) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine decay; weight decay on matrices only; gradients clipped to a norm of 1."""
    peak = config.learning_rate
    end = config.final_learning_rate * peak
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, config.steps, end)
    adamw = optax.adamw(schedule, 0.9, 0.95, weight_decay=config.weight_decay, mask=_are_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def _are_matrices(params: model.Params) -> Any:
    return jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)


@functools.partial(jax.jit, static_argnums=0)  # compiled once for all rows
def init_state(config: Config, seed: jax.typing.ArrayLike) -> tuple[model.Params, Any]:
    """Returns (parameters, state of the optimiser) of a seed, which is data of the compiled program."""
    params = model.init(_key(seed, INIT), config)
    return params, optimiser(config).init(params)


def _key(seed: jax.typing.ArrayLike, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), use)


def advance_chunk(config: Config, recipes: Recipes, state, train: jax.Array, seed: jax.Array, first: jax.Array):
    """Trains a chunk of steps from step `first` on; returns (state, mean training loss)."""
    update = optimiser(config).update

    def step(state, index):
        params, optimiser_state = state
        windows = batch(config, train, jax.random.fold_in(_key(seed, BATCHES), index))
        key = jax.random.fold_in(_key(seed, ROUNDING), index)
        value, gradients = jax.value_and_grad(model.loss)(params, windows, key, recipes, config)
        updates, optimiser_state = update(gradients, optimiser_state, params)
        return (optax.apply_updates(params, updates), optimiser_state), value

    state, losses = jax.lax.scan(step, state, first + jnp.arange(config.chunk, dtype=jnp.int32))
    return state, jnp.mean(losses)


def batch(config: Config, train: jax.Array, key: jax.Array) -> jax.Array:
    """Returns windows (batch, tokens + 1) of the training bytes at random offsets."""
    offsets = jax.random.randint(key, (config.batch, 1), 0, train.size - config.tokens)
    return train[offsets + jnp.arange(config.tokens + 1)[None]]


def held_out_loss(config: Config, recipes: Recipes, params: model.Params, held_out: jax.Array) -> jax.Array:
    """Returns the mean loss of held-out windows (batches, batch, tokens + 1), with the quantised forward pass."""

    def loss(index_and_windows):
        index, windows = index_and_windows
        key = jax.random.fold_in(jax.random.key(0), index)  # the same for all seeds
        return model.loss(params, windows, key, recipes, config)

    return jnp.mean(jax.lax.map(loss, (jnp.arange(held_out.shape[0]), held_out)))

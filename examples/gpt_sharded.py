"""The tiny GPT of `gpt_linen` on a mesh of two axes, with checkpoints of which each process writes its part.

The axes are automatic: a table lays parameters out, batches are split over `data`, and XLA splits the rest. A step is a
function of the state alone, because data and random numbers follow from the number of the step. So a run that was
interrupted goes on as the same run, on however many processes hold the devices of the mesh.
"""

import dataclasses
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import scaledot as sd
from examples import gpt_linen
from examples.gpt_training import BATCH, LENGTH, SOURCE

AXES = {"data": 2, "tensor": 2}
COLUMNS, ROWS = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)
SPECS = {"*/qkv/kernel": COLUMNS, "*/up/kernel": COLUMNS, "*/out/kernel": ROWS, "*/down/kernel": ROWS}
KEPT = 2  # checkpoints


@dataclasses.dataclass(frozen=True)
class Run:
    """What decides every number of a run; recipe: one of `sd.RECIPES`, or float32."""

    recipe: str
    steps: int
    blocks: int = 2
    seed: int = 0

    @property
    def keys(self) -> jax.Array:
        """For parameters, data and rounding."""
        return jax.random.split(jax.random.key(self.seed), 3)

    def model(self) -> Any:
        plain = gpt_linen.Gpt(blocks=self.blocks)
        return plain if self.recipe == "float32" else sd.linen.with_recipe(plain, {"block_*": self.recipe})


def make_mesh() -> Mesh:
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def shardings_of(state: TrainState, mesh: Mesh) -> Any:
    """By `SPECS`, for parameters and for what the optimizer keeps of them; everything else is whole on each device."""

    def sharding(path, _) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in SPECS.items() if fnmatch(name, pattern)), PartitionSpec())
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch(run: Run, step: int, mesh: Mesh) -> jax.Array:
    """The sequences of a step, of which each process draws those of its devices; each sequence has its own key."""
    step_key = jax.random.fold_in(run.keys[1], step)

    def draw(index: Any) -> np.ndarray:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, np.arange(BATCH)[index[0]])
        return np.asarray(jax.vmap(lambda key: SOURCE.draw(key, (LENGTH + 1,)))(keys))

    return jax.make_array_from_callback((BATCH, LENGTH + 1), NamedSharding(mesh, PartitionSpec("data")), draw)


class Program(NamedTuple):
    """What a run compiles: the first state, and (state, batch) -> (next state, excess loss), with how a state lies."""

    start: jax.stages.Compiled
    step: jax.stages.Compiled
    state: TrainState


def compile_run(run: Run, mesh: Mesh) -> Program:
    """All that the devices will do, before they have to meet: who still compiles is not taken for dead."""
    model = run.model()

    def laid_out(state: TrainState) -> TrainState:
        return jax.lax.with_sharding_constraint(state, shardings_of(state, mesh))

    def start() -> TrainState:
        return laid_out(gpt_linen.start(model, run.keys[0], run.steps))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        state, excess = gpt_linen.train_step(state, tokens, jax.random.fold_in(run.keys[2], state.step))
        return laid_out(state), excess

    lowered = jax.jit(start).lower()
    state = jax.tree.map(_described, lowered.out_info, shardings_of(lowered.out_info, mesh))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return Program(lowered.compile(), jax.jit(step, donate_argnums=0).lower(state, tokens).compile(), state)


def _described(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def open_checkpoints(directory: Path) -> ocp.CheckpointManager:
    """A step is written beside the others under another name and gets its own when all processes have written."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(directory.resolve(), options=options)


def last_checkpoint(directory: Path) -> int | None:
    """The last step that is whole."""
    return max(ocp.utils.checkpoint_steps(directory), default=None) if directory.exists() else None


def save(checkpoints: ocp.CheckpointManager, run: Run, step: int, state: TrainState) -> None:
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        run=ocp.args.JsonSave(dataclasses.asdict(run)),
    )
    checkpoints.save(step, args=items)


def restore(checkpoints: ocp.CheckpointManager, run: Run, step: int, like: TrainState) -> TrainState:
    """The state of that step, laid out as `like` is, whoever wrote it."""
    saved = checkpoints.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
    if saved != dataclasses.asdict(run):
        raise ValueError(f"{checkpoints.directory} holds another run: {Run(**saved)}, and this one is {run}")
    return checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]


class Report(NamedTuple):
    """After a step: its number, the loss above the entropy of the source before it, and whether it was saved."""

    step: int
    excess: float
    saved: bool


def fit(run: Run, mesh: Mesh, program: Program, directory: Path, every: int) -> Iterator[Report]:
    """Train to the end from the last whole checkpoint, or from the start, with a checkpoint after `every` steps."""
    with open_checkpoints(directory) as checkpoints:
        done = checkpoints.latest_step()
        state = program.start() if done is None else restore(checkpoints, run, done, program.state)
        for step in range(done or 0, run.steps):
            state, excess = program.step(state, batch(run, step, mesh))
            saved = (step + 1) % every == 0 or step + 1 == run.steps
            if saved:
                save(checkpoints, run, step + 1, state)
            yield Report(step + 1, float(excess), saved)

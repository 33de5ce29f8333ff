"""The tiny GPT of `gpt_linen` on a 2D mesh, with checkpoints of which each process writes its shards.

The mesh axes are automatic: parameters are sharded by SPECS, batches over `data`, and XLA partitions the rest. A step
depends on the state alone, because data and random keys are derived from the step's number. An interrupted run
therefore resumes exactly, on any number of processes that share the devices of the mesh.
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
COLUMN_PARALLEL, ROW_PARALLEL = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)
SPECS = {
    "*/qkv/kernel": COLUMN_PARALLEL,
    "*/up/kernel": COLUMN_PARALLEL,
    "*/out/kernel": ROW_PARALLEL,
    "*/down/kernel": ROW_PARALLEL,
}
MAX_CHECKPOINTS = 2


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings that determine a run. recipe: one of `sd.RECIPES`, or float32."""

    recipe: str
    steps: int
    blocks: int = 2
    seed: int = 0

    @property
    def keys(self) -> jax.Array:
        """The keys of parameters, data and stochastic rounding."""
        return jax.random.split(jax.random.key(self.seed), 3)

    def model(self) -> Any:
        model = gpt_linen.Gpt(blocks=self.blocks)
        return model if self.recipe == "float32" else sd.linen.with_recipe(model, {"block_*": self.recipe})


def make_mesh() -> Mesh:
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def shardings_of(state: TrainState, mesh: Mesh) -> Any:
    """Returns the shardings of a state: parameters and their moments by SPECS, everything else replicated."""

    def sharding(path, _) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in SPECS.items() if fnmatch(name, pattern)), PartitionSpec())
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch(run: Run, step: int, mesh: Mesh) -> jax.Array:
    """Draws the batch of a step. Each sequence has its own key, so each process draws only those of its devices."""
    step_key = jax.random.fold_in(run.keys[1], step)

    def draw(index: Any) -> np.ndarray:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, np.arange(BATCH)[index[0]])
        return np.asarray(jax.vmap(lambda key: SOURCE.draw(key, (LENGTH + 1,)))(keys))

    return jax.make_array_from_callback((BATCH, LENGTH + 1), NamedSharding(mesh, PartitionSpec("data")), draw)


class Program(NamedTuple):
    """Compiled functions: init() -> state, step(state, batch) -> (state, excess loss); `state` has its shardings."""

    init: jax.stages.Compiled
    step: jax.stages.Compiled
    state: TrainState


def compile_run(run: Run, mesh: Mesh) -> Program:
    """Compiles everything before the first collective, so that a compiling process does not exceed its timeout."""
    model = run.model()

    def constrained(state: TrainState) -> TrainState:
        return jax.lax.with_sharding_constraint(state, shardings_of(state, mesh))

    def init() -> TrainState:
        return constrained(gpt_linen.init_train_state(model, run.keys[0], run.steps))

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        state, excess = gpt_linen.train_step(state, tokens, jax.random.fold_in(run.keys[2], state.step))
        return constrained(state), excess

    lowered = jax.jit(init).lower()
    state = jax.tree.map(_shape_dtype_struct, lowered.out_info, shardings_of(lowered.out_info, mesh))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return Program(lowered.compile(), jax.jit(step, donate_argnums=0).lower(state, tokens).compile(), state)


def _shape_dtype_struct(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def open_checkpoints(directory: Path) -> ocp.CheckpointManager:
    """Opens the checkpoints; one is written to a temporary directory and renamed when all processes have written."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=MAX_CHECKPOINTS, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(directory.resolve(), options=options)


def last_checkpoint(directory: Path) -> int | None:
    """Returns the step of the last complete checkpoint, or None."""
    return max(ocp.utils.checkpoint_steps(directory), default=None) if directory.exists() else None


def save(checkpoints: ocp.CheckpointManager, run: Run, step: int, state: TrainState) -> None:
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        run=ocp.args.JsonSave(dataclasses.asdict(run)),
    )
    checkpoints.save(step, args=items)


def restore(checkpoints: ocp.CheckpointManager, run: Run, step: int, like: TrainState) -> TrainState:
    """Restores the state of a step with the shardings of `like`, whatever the number of processes that wrote it."""
    saved = checkpoints.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
    if saved != dataclasses.asdict(run):
        raise ValueError(f"{checkpoints.directory} holds another run: {Run(**saved)}, and this one is {run}")
    return checkpoints.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]


class Report(NamedTuple):
    """The report of a step: its number, its excess loss, and whether a checkpoint was written."""

    step: int
    excess: float
    saved: bool


def fit(run: Run, mesh: Mesh, program: Program, directory: Path, every: int) -> Iterator[Report]:
    """Trains from the last complete checkpoint, or from the start, with a checkpoint after `every` steps."""
    with open_checkpoints(directory) as checkpoints:
        latest = checkpoints.latest_step()
        state = program.init() if latest is None else restore(checkpoints, run, latest, program.state)
        for step in range(latest or 0, run.steps):
            state, excess = program.step(state, batch(run, step, mesh))
            saved = (step + 1) % every == 0 or step + 1 == run.steps
            if saved:
                save(checkpoints, run, step + 1, state)
            yield Report(step + 1, float(excess), saved)

"""Runs MaxText's training loop on a tiny model in this process."""

import importlib.resources
import json
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
from flax import nnx
from maxtext.trainers.pre_train import train  # pyright: ignore[reportMissingImports]

from scaledot.compat import maxtext, transformer_engine

BASE = str(importlib.resources.files("maxtext") / "configs" / "base.yml")
STEPS = 10
TINY = {
    "hardware": "cpu",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 2,
    "vocab_size": 256,
    "max_target_length": 64,
    "per_device_batch_size": 1,
    "steps": STEPS,
    "learning_rate": 2e-3,
}

transformer_engine.install()


class Trained(NamedTuple):
    """Metrics of each step, and the state after the last step, by path."""

    metrics: list[dict[str, float]]
    state: dict[tuple[Any, ...], jax.Array]

    @property
    def last_loss(self) -> float:
        return self.metrics[-1]["learning/loss"]

    def values(self, *names: str) -> list[float]:
        """The values of these metrics in all steps."""
        return [step[f"learning/{name}"] for step in self.metrics for name in names]

    def histories(self) -> dict[str, jax.Array]:
        """The amax histories, by path."""
        return {"/".join(map(str, p)): v for p, v in self.state.items() if str(p[-1]).endswith("amax_history")}


def trained(rules: Any = None, **options: Any) -> Trained:
    """Trains with MaxText's options. rules: those of `compat.maxtext.install`; None leaves MaxText as it is."""
    if rules is not None:
        maxtext.install(rules)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _trained(pathlib.Path(folder), options)
    finally:
        maxtext.uninstall()


def _trained(folder: pathlib.Path, options: dict[str, Any]) -> Trained:
    metrics = folder / "metrics.jsonl"
    settings = {"run_name": "tiny", "base_output_directory": folder, "metrics_file": metrics, **TINY, **options}
    config, recorder = train.initialize(["train", BASE, *(f"{k}={v}" for k, v in settings.items())])
    state = nnx.state(train.train_loop(config, recorder))
    values = {path: leaf[...] for path, leaf in nnx.to_flat_state(state) if hasattr(leaf, "shape")}
    return Trained([json.loads(line) for line in metrics.read_text().splitlines()], values)

"""Sizes, data and optimiser of a run of the code GPT."""

import dataclasses
import hashlib
import json

FRACTIONS = (0.5, 0.75)  # of a run, after which the held-out loss is computed
AVERAGED = 0.9  # of a run, from which on it is computed after each chunk, and averaged to the final loss
VOCABULARY = 256  # bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """What all rows of a comparison share.

    shared_steps: steps in bf16 that all rows have in common, see `training.SharedStart`.
    chunk: steps per call of the compiled program, whose mean training loss is a point of the curve.
    final_learning_rate: as a fraction of `learning_rate`.
    held_out_windows: sequences of the held-out loss, fewer if the held-out split is shorter.
    version: to be raised when the model, the order of batches, the optimiser or the final loss change: earlier runs
        are kept apart.
    """

    width: int = 512
    blocks: int = 6
    heads: int = 8
    hidden: int = 1536
    tokens: int = 512
    batch: int = 64
    steps: int = 1500
    shared_steps: int = 375
    chunk: int = 25
    warmup: int = 100
    learning_rate: float = 2e-3
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    held_out_windows: int = 2048
    version: int = 2

    def __post_init__(self):
        if self.steps < 1 or any((fraction * self.steps) % self.chunk for fraction in FRACTIONS):
            raise ValueError(f"`steps` must be a multiple of {4 * self.chunk}, not {self.steps}")
        first_evaluated = min(FRACTIONS) * self.steps
        if self.shared_steps % self.chunk or not 0 <= self.shared_steps < first_evaluated:
            raise ValueError(
                f"`shared_steps` must be a multiple of {self.chunk} and below {first_evaluated:g}, the first step "
                f"with a held-out loss, not {self.shared_steps}"
            )
        if self.warmup >= self.steps:
            raise ValueError(f"`warmup` of {self.warmup} steps must be shorter than the run of {self.steps}")

    @property
    def tokens_per_run(self) -> int:
        return self.batch * self.tokens * self.steps

    @property
    def own_tokens(self) -> int:
        """The number of tokens that a row trains on under its own recipe."""
        return self.batch * self.tokens * (self.steps - self.shared_steps)

    @property
    def block_parameters(self) -> int:
        """The number of weights in the linear layers of all blocks."""
        return self.blocks * (4 * self.width**2 + 3 * self.width * self.hidden)

    def digest(self) -> str:
        return digest(dataclasses.asdict(self))


TINY = Config(
    width=32,
    blocks=2,
    heads=2,
    hidden=32,
    tokens=32,
    batch=2,
    steps=8,
    shared_steps=2,
    chunk=1,
    warmup=1,
    held_out_windows=4,
)


def digest(value: object) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

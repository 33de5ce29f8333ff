"""Sizes of the stacks that whole-model rows train, and the tiny ones of a dry run."""

import dataclasses
from collections.abc import Callable
from typing import Any

BATCH, TOKENS = 4, 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a stack. scanned: one block under nn.scan. policy: of jax.checkpoint for each block, None keeps all."""

    blocks: int = 4
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    vocabulary: int = 32000
    scanned: bool = False
    policy: Callable[..., Any] | None = None


# A dry run: the same program in seconds on a CPU. Tokens, width and hidden features are whole blocks of 128.
TINY_BATCH, TINY_TOKENS = 2, 64
TINY = {"blocks": 2, "width": 128, "hidden": 256, "heads": 4, "groups": 2, "vocabulary": 256}

"""Sizes of the whole-model benchmarks, and tiny ones for a dry run."""

import dataclasses
from collections.abc import Callable
from typing import Any

BATCH, TOKENS = 4, 2048


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    scanned: decoder blocks run in nn.scan.
    policy: the jax.checkpoint policy of decoder blocks; None saves all residuals.
    """

    blocks: int = 4
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    scanned: bool = False
    policy: Callable[..., Any] | None = None


# A dry run, which takes seconds on a CPU. Width, hidden features and batch × tokens are multiples of 128.
TINY_BATCH, TINY_TOKENS = 2, 64
TINY = {"blocks": 2, "width": 128, "hidden": 256, "heads": 4, "kv_heads": 2, "vocabulary": 256}

"""A progress line on stderr, if that is a terminal and the work takes longer than a moment."""

import sys
import time
from typing import Self

_DELAY = 1.0  # seconds before the first line
_INTERVAL = 0.2


class Progress:
    """Counts bytes of a job of `total` bytes and shows them, with the rate and the current item."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done = label, total, 0
        self._is_shown = sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start + _DELAY
        self._has_line = False

    def add(self, nbytes: int, item: str) -> None:
        self.done += nbytes
        now = time.monotonic()
        if self._is_shown and now >= self._next:
            self._next, self._has_line = now + _INTERVAL, True
            share = self.done / max(self.total, 1)
            rate = self.done / (now - self._start) / 1e9
            line = f"{self.label}: {share:4.0%} of {self.total / 1e9:.1f} GB, {rate:.2f} GB/s, {item}"
            print(f"\r\033[K{line[:160]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        if self._has_line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

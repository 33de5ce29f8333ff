"""The time of `import scaledot` beyond `import jax`.

Measured in fresh interpreters, alternately. Each times its own imports, so that Python's start is not counted; the
access of `scaledot.quantize` imports the modules that the first call would import.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator

TIMES_EACH = 9
_JAX = "import jax"
_BOTH = "import jax; import scaledot; scaledot.quantize"


def pairs() -> Iterator[tuple[float, float]]:
    """Yields seconds of (`import jax`, `import jax` and scaledot), after one warm-up of each for the disk cache."""
    for statement in (_JAX, _BOTH):
        _seconds(statement)
    for _ in range(TIMES_EACH):
        yield _seconds(_JAX), _seconds(_BOTH)


def summary(seconds: list[tuple[float, float]]) -> dict[str, float]:
    jax, both = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "jax_s": jax,
        "jax_and_scaledot_s": both,
        "scaledot_s": statistics.median(b - j for j, b in seconds),
    }


def _seconds(statement: str) -> float:
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)

"""What `import scaledot` costs on top of `import jax`.

Fresh interpreters, in turns. Each times its own imports, so that starting Python is not counted; touching
`scaledot.quantize` loads the rooms that the first call would load.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator

TIMES_EACH = 9
_JAX = "import jax"
_BOTH = "import jax; import scaledot; scaledot.quantize"


def pairs() -> Iterator[tuple[float, float]]:
    """Seconds of `import jax`, and of it with scaledot, after one of each that fills the disk's cache."""
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

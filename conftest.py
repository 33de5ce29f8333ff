"""Settings of all tests and doctests: strict promotion, eight CPU devices, selection of cases, cheap compilation."""

import ctypes
import gc
import os
import resource

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import pytest

from tests.selection import selected

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # also of programs that modules compile when imported
jax.config.update("jax_traceback_in_locations_limit", 0)  # no Python stack traces in HLO metadata: they slow tracing

# No deadline, because the first example compiles; derandomised, so that runs are reproducible.
hypothesis.settings.register_profile("scaledot", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("scaledot")

# XLA:CPU's legacy fusion emitters and a single LLVM module per program compile faster than the defaults.
CHEAP_CODEGEN = (
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)
LIBC = ctypes.CDLL(None)
# Resident bytes of a worker above which it clears JAX's caches of compiled programs between two test modules.
MAX_RESIDENT_BYTES = 1792 * 2**20


# Modules that import MaxText, which has an environment of its own (make test-maxtext).
collect_ignore = [f"scaledot/compat/maxtext/{name}.py" for name in ("experts", "model")]


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cases of parametrised tests, not a covering array; see tests/selection.py",
    )
    parser.addoption("--examples", action="store_true", help="also run tests marked `end_to_end`, as --all does")
    parser.addoption(
        "--compilation",
        choices=("cheap", "optimized"),
        help="cheap: tests that are not marked `optimized`, with XLA flags for cheap compilation, which hold for the "
        "whole process; optimized: tests that are. Without this option all tests run in one process, which is slower",
    )


def pytest_configure(config):
    if config.getoption("--compilation") == "cheap":
        os.environ["XLA_FLAGS"] += CHEAP_CODEGEN  # read when the first program is compiled


def pytest_collection_finish():
    """Exempts loaded modules from garbage collection and collects less often: most objects live until the end."""
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_collection_modifyitems(config, items):
    chosen = items if config.getoption("--all") else selected(items, config.getoption("--examples"))
    if compilation := config.getoption("--compilation"):
        chosen = [item for item in chosen if _is_optimized(item) == (compilation == "optimized")]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = chosen
    # Keep the order of modules; within each, run `optimized` tests last, because switching clears JAX's caches.
    modules = {path: index for index, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (modules[item.path], _is_optimized(item)))


def _is_optimized(item) -> bool:
    return item.get_closest_marker("optimized") is not None


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile too
def pytest_runtest_setup(item):
    """Turns on XLA's optimization passes only for tests marked `optimized`: of compiled programs and of exact bits."""
    disable = not _is_optimized(item)
    if jax.config.read("jax_disable_most_optimizations") != disable:
        jax.clear_caches()  # the key of JAX's caches does not include this setting
        jax.config.update("jax_disable_most_optimizations", disable)


@pytest.fixture(autouse=True, scope="module")
def clear_caches():
    yield
    if _resident_bytes() > MAX_RESIDENT_BYTES:
        jax.clear_caches()
        gc.collect()
        if hasattr(LIBC, "malloc_trim"):  # glibc does not return freed memory to the system by itself
            LIBC.malloc_trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * resource.getpagesize()

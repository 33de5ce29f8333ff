"""Settings of every test and example: strict promotion, eight CPU devices, warnings as errors, cheap compilation."""

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
jax.config.update("jax_traceback_in_locations_limit", 0)  # no Python stack traces in HLO metadata: they slow tracing

# Compilation makes first examples slow; derandomised so that a run can be repeated.
hypothesis.settings.register_profile("scaledot", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("scaledot")

# XLA:CPU's legacy fusion emitters and a single LLVM module per program compile faster than the defaults.
CHEAP_CODEGEN = (
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)
LIBC = ctypes.CDLL(None)
# Resident bytes of a worker above which it drops JAX's caches of compiled programs between two test modules.
MOST_RESIDENT = 1792 * 2**20


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every row of every table; see tests/selection.py")
    parser.addoption(
        "--compilation",
        choices=("cheap", "optimized"),
        help="cheap: only tests not marked `optimized`, with XLA flags for quick compilation, which hold for a whole "
        "process; optimized: only the others. Without it all tests run in one process, and more slowly",
    )


def pytest_configure(config):
    if config.getoption("--compilation") == "cheap":
        os.environ["XLA_FLAGS"] += CHEAP_CODEGEN  # read when the first program is compiled


def pytest_collection_finish():
    """Garbage collection skips loaded modules and runs less often: most objects, cached jaxprs too, live to the end."""
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_collection_modifyitems(config, items):
    kept = items if config.getoption("--all") else selected(items)
    if compilation := config.getoption("--compilation"):
        kept = [item for item in kept if _is_optimized(item) == (compilation == "optimized")]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept
    # Stable: by module, with those last for which programs are compiled anew.
    modules = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (modules[item.path], _is_optimized(item)))


def _is_optimized(item) -> bool:
    return item.get_closest_marker("optimized") is not None


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile too
def pytest_runtest_setup(item):
    """XLA's optimization passes run only for tests marked `optimized`: those of compiled programs and of exact bits."""
    disable = not _is_optimized(item)
    if jax.config.read("jax_disable_most_optimizations") != disable:
        jax.clear_caches()  # a cache does not know how its programs were compiled
        jax.config.update("jax_disable_most_optimizations", disable)


@pytest.fixture(autouse=True, scope="module")
def memory():
    yield
    if _resident_bytes() > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        if hasattr(LIBC, "malloc_trim"):  # glibc keeps what is free unless it is told
            LIBC.malloc_trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * resource.getpagesize()

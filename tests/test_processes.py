"""examples/processes.py: results do not depend on the number of processes, and a run resumes after a process dies.

Runs on 2 and 4 processes are bit-identical to a run in this process: the program is the same, and every all-reduce has
two operands, so that its order does not matter.
"""

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from examples import gpt_sharded, processes

pytestmark = pytest.mark.usefixtures("standard_promotion")

RUN = gpt_sharded.Run("fp8_delayed", steps=12, blocks=1)
EVERY = 4
WORDS = [f"--recipe={RUN.recipe}", f"--steps={RUN.steps}", f"--blocks={RUN.blocks}", f"--every={EVERY}"]
SECONDS = 240  # timeout of a run, which takes a tenth of that
# XLA_FLAGS of this process without its number of devices: only equal programs have bit-identical losses.
FLAGS = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ["XLA_FLAGS"])
ENVIRONMENT = os.environ | {"XLA_FLAGS": FLAGS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@contextlib.contextmanager
def started(words):
    """Starts a command in a session of its own, and kills the whole process group on exit."""
    cwd, pipe = Path(processes.__file__).parent.parent, subprocess.PIPE
    process = subprocess.Popen(
        words, cwd=cwd, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def example(*words):
    return [sys.executable, "-m", processes.PROGRAM, *words]


def curve_of(printed):
    return {int(step): np.float32(excess) for step, excess in re.findall(r"^step +(\d+)  excess (\S+)", printed, re.M)}


@pytest.fixture(scope="module")
def mesh():
    return gpt_sharded.make_mesh()


@pytest.fixture(scope="module")
def program(mesh):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return gpt_sharded.compile_run(RUN, mesh)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def curve(mesh, program, directory):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        reports = [*gpt_sharded.fit(RUN, mesh, program, directory, EVERY)]
    assert [report.step for report in reports if report.saved] == [4, 8, 12]
    return {report.step: np.float32(report.excess) for report in reports}


@pytest.mark.exhaustive
def test_two_processes_match_one(curve, tmp_path):
    with started(example("--processes=2", f"--directory={tmp_path}", *WORDS)) as launcher:
        printed, errors = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, errors
    assert curve_of(printed) == curve
    assert curve[RUN.steps] < curve[1] - 0.2


@pytest.mark.end_to_end
@pytest.mark.parametrize(("count", "then"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.exhaustive)])
def test_fewer_processes_resume_after_one_was_killed_while_saving(curve, tmp_path, count, then):
    checkpoints = tmp_path / "checkpoints"
    with started(example(f"--processes={count}", f"--directory={tmp_path}", *WORDS)) as launcher:
        numbers = re.findall(r"\d+", launcher.stdout.readline().partition("(")[2].partition(")")[0])
        unfinished = kill_while_saving(launcher, int(numbers[-1]), checkpoints)
        printed, errors = launcher.communicate(timeout=processes.GRACE + 20)
    assert launcher.returncode == 1
    ended = f"process {count - 1} of {count} was killed by SIGKILL after step "
    found = re.search(rf"{ended}(\d+), and the others were stopped", errors)
    assert found, errors
    assert int(found[1]) == unfinished - 1
    last = unfinished - EVERY
    assert f"the last complete checkpoint is {checkpoints / str(last)};" in errors
    assert curve_of(printed) == {step: curve[step] for step in range(1, unfinished)}

    resume = shlex.split(errors.splitlines()[-1])
    with started([*resume, f"--processes={then}"]) as launcher:
        printed, errors = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, errors
    assert curve_of(printed) == {step: curve[step] for step in range(last + 1, RUN.steps + 1)}
    assert {path.name for path in checkpoints.iterdir()} == {"8", "12"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_killed_process_is_the_cause_whichever_end_is_noticed_first(order):
    popens = types.SimpleNamespace(returncode=1), types.SimpleNamespace(returncode=-signal.SIGKILL)
    ended = [types.SimpleNamespace(index=index, popen=popen) for index, popen in enumerate(popens)]
    events = queue.Queue()
    for index in order:
        events.put((ended[index], None))
    assert processes.watch(ended, events) is ended[1]


def kill_while_saving(launcher, pid, checkpoints):
    """Kill a process during a save that cannot complete without it, after a first complete one; returns its step."""
    deadline = time.monotonic() + SECONDS
    while launcher.poll() is None and time.monotonic() < deadline:
        if (checkpoints / str(EVERY)).exists() and unfinished_in(checkpoints):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            if unfinished := unfinished_in(checkpoints):
                os.kill(pid, signal.SIGKILL)
                return int(unfinished[0].name.partition(".")[0])
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(f"no unfinished save was observed before the run ended, or within {SECONDS} s")


def unfinished_in(checkpoints):
    return [path for path in checkpoints.iterdir() if not path.name.isdigit()]


def leaves_of(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_states_are_sharded_by_the_table(program):
    layers = {"qkv": P(None, "tensor"), "up": P(None, "tensor"), "out": P("tensor", None), "down": P("tensor", None)}
    trees = "params/params", "opt_state/0/mu", "opt_state/0/nu"
    sharded = {f"{tree}/block_0/{layer}/kernel": spec for tree in trees for layer, spec in layers.items()}
    expected = leaves_of(program.state)
    assert {name: leaf.sharding.spec for name, leaf in expected.items() if leaf.sharding.spec != P()} == sharded
    assert "params/_overwrite_with_gradient/block_0/qkv/DotGeneral_0/kernel_scale" in expected
    for state in (program.init.output_shardings, program.step.output_shardings[0]):
        found = leaves_of(state)
        assert found.keys() == expected.keys()
        assert all(found[name].is_equivalent_to(leaf.sharding, leaf.ndim) for name, leaf in expected.items())


@pytest.mark.optimized
def test_each_device_multiplies_its_shard_of_each_kernel(mesh):
    """dgrad is (tokens, k) and wgrad is (k, n), where a device has half of the tokens and a (k, n) shard of w."""
    pattern = r"= f32\[(\d+),(\d+)\]\S* dot\(.*/transpose\(jvp\(Gpt\)\)/block_0/(\w+)/DotGeneral"
    found = {}
    for *shape, layer in re.findall(pattern, gpt_sharded.compile_run(RUN, mesh).step.as_text()):
        found.setdefault(layer, set()).add(tuple(map(int, shape)))
    tokens = gpt_sharded.BATCH // 2 * gpt_sharded.LENGTH
    shards = {"qkv": (64, 192 // 2), "out": (64 // 2, 64), "up": (64, 256 // 2), "down": (128 // 2, 64)}
    assert found == {layer: {(tokens, k), (k, n)} for layer, (k, n) in shards.items()}


def test_a_batch_is_the_same_on_any_mesh(mesh):
    one = jax.make_mesh((1, 1), tuple(gpt_sharded.AXES), devices=jax.devices()[:1])
    steps = (3, mesh), (3, one), (4, mesh)
    first, again, second = (np.asarray(gpt_sharded.batch(RUN, *step)) for step in steps)
    np.testing.assert_array_equal(first, again)
    assert np.mean(first == second) < 0.3
    assert len(np.unique(first, axis=0)) == len(first)


def test_a_checkpoint_of_another_run_raises(curve, mesh, program, directory):
    other = gpt_sharded.Run(RUN.recipe, steps=30, blocks=1)
    with pytest.raises(ValueError, match=r"holds another run: Run\(.*steps=12.* and this one is Run\(.*steps=30"):
        next(gpt_sharded.fit(other, mesh, program, directory, EVERY))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--processes=3"], r"--processes is 3, which does not divide 4 devices; use one of \[1, 2, 4\]"),
        (["--every=0"], "--every is 0; it must be at least 1"),
        (["--worker=2"], "--worker is 2; with --processes 2 it must be 0 to 1"),
        (["--worker=1"], "--worker needs --coordinator and --directory"),
    ],
)
def test_wrong_arguments_raise_errors_that_name_them(words, error, capsys):
    with pytest.raises(SystemExit):
        processes.main(words)
    assert re.search(error, capsys.readouterr().err)


def test_processes_with_different_counts_exit_with_an_error(tmp_path):
    common = [f"--directory={tmp_path}", f"--coordinator=127.0.0.1:{processes.free_port()}", *WORDS]
    with (
        started(example("--worker=0", "--processes=2", *common)) as first,
        started(example("--worker=1", "--processes=4", *common)) as second,
    ):
        for process, told in (
            (first, "0 expects 2 processes with 2"),
            (second, "1 expects 4 processes with 1"),
        ):
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 1
            assert f"process {told} of 4 devices each, but there are 2 processes with 3 devices in total" in errors


@pytest.mark.end_to_end
def test_a_process_without_peers_times_out(tmp_path):
    words = ["--worker=0", "--processes=4", f"--directory={tmp_path}", "--patience=2", *WORDS]
    with started(example(f"--coordinator=127.0.0.1:{processes.free_port()}", *words)) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGABRT
    assert "process 0 expects 4 processes with 1 of 4 devices each, with coordinator 127.0.0.1:" in errors
    assert "DEADLINE_EXCEEDED" in errors

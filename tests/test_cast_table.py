"""The table of cast kernels: a kernel for another device is one more row, and all callers use it."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal

import scaledot as sd
from scaledot import train
from scaledot.kernels import table, xla_casts
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult
from scaledot.kernels.table import Kernel

NOT_ALONG = "blocks must run along the last dim"


class FakeKernel:
    """A cast kernel for blocks along the last dim, which records its problems; `is_joint`: for several outputs."""

    def __init__(self, is_joint: bool):
        self.is_joint, self.problems = is_joint, []
        self.row = Kernel("fake_cast", self.problem_reason, lambda problem: "as the reference does", self.run)

    def problem_reason(self, problem: CastProblem) -> str | None:
        if not self.is_joint and len(problem.outputs) > 1:
            return "it computes one output at a time"
        return None if all(output.spec.block[:-1] == () for output in problem.outputs) else NOT_ALONG

    def run(self, problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
        self.problems.append(problem)
        return xla_casts.run(problem, x, arguments)


@pytest.fixture(params=[True, False], ids=["several outputs at a time", "one output at a time"])
def fake(monkeypatch, request):
    kernel = FakeKernel(request.param)
    monkeypatch.setattr(table, "CASTS", (kernel.row, *table.CASTS))
    return kernel


def test_quantize_functions_use_a_kernel_that_is_added_to_the_table(fake):
    sd.quantize(normal(0, (64, 32)), "mxfp8")  # a different shape for each call: equal casts are traced once
    sd.quantize_dbias(normal(0, (64, 96)), "mxfp8")
    x = normal(0, (64, 64))
    rows, columns = sd.quantize_both(x, "mxfp8")
    expected = [sd.quantize(x, "mxfp8", axis=axis, kernel="xla_cast") for axis in (1, 0)]
    for q, reference in zip((rows, columns), expected, strict=True):
        np.testing.assert_array_equal(q.data, reference.data)
    requested = [[output.spec.block for output in problem.outputs] for problem in fake.problems]
    assert requested == [[(32,)], [(32,)], [(32,)]], "it casts rows also if it does not support the cast of columns"
    sd.quantize_grouped(x, jnp.array([20, 40]), "mxfp8")
    assert fake.problems[-1].groups == 2


def test_training_uses_a_kernel_that_is_added_to_the_table(fake):
    x, w = normal(0, (64, 128)), normal(1, (128, 64))
    jax.make_jaxpr(jax.grad(lambda w: train.dense(x, w, recipe="mxfp8").sum()))(w)
    contracted = [output.contracted for problem in fake.problems for output in problem.outputs]
    assert contracted == [1, 1, 1], "x of fwd, w and g of dgrad have blocks along their last axis"


def test_x_is_passed_through_few_files_before_the_kernel_is_called(fake):
    """Counts the files of the library with a function that has x among its arguments."""
    x, w, root = jnp.ones((3, 5, 64)), jnp.ones((64, 32)), Path(sd.__file__).parent
    files: list[str] = []

    def record(frame, event, _):
        path, names = Path(frame.f_code.co_filename), frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if event != "call" or fake.problems or root not in path.parents:
            return
        arguments = [frame.f_locals.get(name) for name in names]
        arguments += [each for argument in arguments if isinstance(argument, tuple) for each in argument]
        if any(isinstance(each, jax.Array) and each.size == x.size for each in arguments):
            files.append(str(path.relative_to(root)))

    def run(x):
        previous = sys.getprofile()
        sys.setprofile(record)
        try:
            return train.dense(x, w, recipe="mxfp8")
        finally:
            sys.setprofile(previous)

    jax.eval_shape(run, x)
    assert fake.problems, "the kernel was not called"
    assert len(set(files)) <= 8, f"files before that of the kernel: {list(dict.fromkeys(files))}"


def test_explain_lists_cast_kernels_with_reasons(fake):
    text = sd.explain(sd.quantize, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), "mxfp8", axis=0)
    assert text.startswith("cast bfloat16[64,64] -> mxfp8 in blocks of (32, 1)\n")
    assert f"fake_cast                unsupported: {NOT_ALONG}" in text
    step = sd.explain(train.dense, jnp.ones((64, 128)), jnp.ones((128, 64)), recipe="mxfp8")
    assert step.count("selected: as the reference does") >= 3
    assert [line.split()[0] for line in step.splitlines() if line[0] != " "].count("dot") == 3
    step = sd.explain(train.dense, jnp.ones((64, 128)), jnp.ones((128, 64)), recipe="nvfp4")
    assert "with stochastic rounding" in step


def test_callers_can_name_the_kernel():
    x = normal(0, (8, 64))
    with pytest.raises(NotImplementedError, match=r"'hopper_cast_8bit' cannot compute cast float32\[8,64\] -> mxfp8"):
        sd.quantize(x, "mxfp8", kernel="hopper_cast_8bit")
    with pytest.raises(ValueError, match="is not one of cast's; did you mean xla_cast"):
        sd.quantize(x, "mxfp8", kernel="xla_cats")
    chosen = []
    sd.quantize(x, "mxfp8", kernel=lambda problem: chosen.append(str(problem)))
    assert chosen == ["cast float32[8,64] -> mxfp8 in blocks of (32,)"]

"""The kernel tables: which kernel is chosen and why, that all kernels agree, and what XLA compiles them to."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal_by_axis
from jax import lax
from reference import equations
from test_dot import CASES, EACH_CAST, SIDES, numbers_of, operands

import scaledot as sd
from scaledot.contraction import Contraction, from_dimension_numbers
from scaledot.kernels import formulations, table
from scaledot.kernels.formulations import codes_formulation
from scaledot.kernels.hopper import dot as hopper_dot
from scaledot.kernels.operands import OuterProduct
from scaledot.kernels.spec import Problem, operand_of
from scaledot.ops.operands import contract, make_problem, run_problem

BLOCK_SCALED = "xla_block_scaled"


def rows():
    return [row for row in table.DOT if row.name not in ("xla_plain", BLOCK_SCALED)]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("cast", EACH_CAST)
def test_every_kernel_that_supports_a_problem_agrees_with_the_reference(cast, sides):
    text, sizes = CASES["matrix"]
    lhs, rhs = operands(text, sizes, cast, SIDES[sides])
    contraction = from_dimension_numbers(numbers_of(text)[0], lhs.ndim, rhs.ndim)
    problem = make_problem("dot", contraction, lhs, rhs)
    reference = run_problem(problem, "xla_dequantize", lhs, rhs)
    scale = float(jnp.max(jnp.abs(reference)))
    supporting = [row.name for row in rows() if row.unsupported_reason(problem) is None]
    for name in supporting:
        np.testing.assert_allclose(run_problem(problem, name, lhs, rhs), reference, rtol=1e-5, atol=2e-5 * scale)
    assert table.choose(problem).name == supporting[0]


@pytest.mark.parametrize(
    ("cast", "sides", "dtype", "expected"),
    [
        ("int8", "both", jnp.float32, "xla_integer"),
        ("int8 tiles", "both", jnp.float32, "xla_integer"),
        ("int8 tiles zeros", "both", jnp.float32, "xla_integer"),
        ("int8", "rhs", jnp.bfloat16, "xla_codes"),
        ("int8 tiles", "rhs", jnp.bfloat16, "xla_codes"),
        ("int8 tiles", "rhs", jnp.float32, "xla_dequantize"),
        ("fp8_e4m3", "both", jnp.float32, "xla_codes"),
        ("fp8 1x128", "both", jnp.float32, "xla_codes"),
        ("mxfp8", "both", jnp.float32, "xla_upcast"),
        ("mxfp4", "rhs", jnp.bfloat16, "xla_upcast"),
        ("nvfp4", "both", jnp.float32, "xla_upcast"),
        ("mxfp8", "rhs", jnp.float32, "xla_dequantize"),
        ("int4 groups zeros", "rhs", jnp.bfloat16, "xla_dequantize"),
        ("nf4", "both", jnp.float32, "xla_dequantize"),
    ],
)
def test_the_kernel_that_is_chosen_for_each_format(cast, sides, dtype, expected):
    lhs, rhs = operands("mk,kn->mn", {"m": 8, "k": 256, "n": 8}, cast, SIDES[sides], dtype)
    lines = sd.explain(sd.matmul, lhs, rhs).splitlines()
    selected = [line.split()[0] for line in lines if "selected" in line]
    assert selected == [expected]
    assert [line.split()[0] for line in lines[1:]] == [row.name for row in table.DOT]


def test_a_named_kernel_is_used_or_raises_its_reason():
    x, w = sd.quantize(jnp.ones((4, 256)), "mxfp8"), sd.quantize(jnp.ones((256, 4)), "mxfp8", axis=0)
    np.testing.assert_array_equal(sd.matmul(x, w, kernel="xla_dequantize"), sd.matmul(x, w))
    with pytest.raises(NotImplementedError, match=r"'xla_integer' cannot compute dot mk,kn->mn.*mxfp8.*not integer"):
        sd.matmul(x, w, kernel="xla_integer")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="needs a Blackwell GPU; the default backend is cpu"):
            sd.matmul(x, w, kernel=BLOCK_SCALED)


def test_a_function_may_choose_the_kernel():
    problems = []

    def choice(problem: Problem) -> str:
        problems.append(problem)
        return "xla_dequantize"

    w = sd.quantize(jnp.ones((64, 4)), "int8", axis=0)
    sd.matmul(jnp.ones((2, 64)), w, kernel=choice)
    assert [p.op for p in problems] == ["dot"]
    assert hash(problems[0]) == hash(problems[0])


def test_explain_needs_no_data():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 4096), (4096, 512)))
    w = jax.eval_shape(lambda w: sd.quantize(w, "int4", block=128, axis=0), w)
    assert "32 tiles of 128 along 'k'" in sd.explain(sd.matmul, x, w)


@pytest.mark.parametrize(("zero", "folds"), [(False, True), (True, False)])
def test_codes_and_scales_of_eight_significant_bits_fold_into_bfloat16(zero, folds):
    """E4M3 codes and E4M3 scales have 4 significant bits each; the difference from a zero point has one more."""
    format = dataclasses.replace(sd.FORMATS["nvfp4"], element="float8_e4m3fn")
    assert formulations.folds_exactly(format, has_zero=zero) == folds


def test_explain_raises_for_functions_without_a_kernel_argument():
    with pytest.raises(TypeError, match=r"must take `kernel`, as scaledot.matmul and scaledot.quantize do"):
        sd.explain(sd.amax, jnp.ones((2, 2)))


# -------------------------------------------------------------------------------------------- compiled programs


def compiled(f, *operands):
    return jax.jit(f).lower(*operands).compile()


def shapes_in(text: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b(?:f32|s32|bf16)\[([\d,]+)\]", text)}


@pytest.mark.optimized
@pytest.mark.parametrize("cast", ["int8 tiles", "int8 tiles zeros", "fp8 1x128"])
def test_results_of_tiles_are_never_all_in_memory(cast):
    sizes = {"m": 48, "k": 1024, "n": 40}
    lhs, rhs = operands("mk,kn->mn", sizes, cast, (True, True))
    shapes = shapes_in(compiled(sd.matmul, lhs, rhs).as_text())
    assert (48, 40) in shapes
    assert not [shape for shape in shapes if np.prod(shape) >= 2 * 48 * 40 and {48, 40} <= set(shape)]


@pytest.mark.optimized
def test_a_large_tiled_matmul_needs_little_memory():
    def quantized(shape, axis):
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        return jax.eval_shape(lambda x: sd.quantize(x, "int8", block=128, axis=axis), x)

    memory = compiled(sd.matmul, quantized((2048, 4096), 1), quantized((4096, 2048), 0)).memory_analysis()
    assert memory.temp_size_in_bytes <= 64 * 2**20


def test_integer_codes_are_multiplied_as_int8_and_zero_points_need_no_second_matmul():
    lhs, rhs = operands("mk,kn->mn", {"m": 64, "k": 256, "n": 64}, "int8 zeros", (True, True))
    dots = [e for e in equations(jax.make_jaxpr(sd.matmul)(lhs, rhs).jaxpr) if e.primitive.name == "dot_general"]
    assert [(e.invars[0].aval.dtype, e.outvars[0].aval.dtype) for e in dots] == [(jnp.int8, jnp.int32)]


def test_exact_upcasts_multiply_in_bfloat16_and_accumulate_in_float32():
    lhs, rhs = operands("mk,kn->mn", {"m": 64, "k": 256, "n": 64}, "nvfp4", (True, True))
    dots = [e for e in equations(jax.make_jaxpr(sd.matmul)(lhs, rhs).jaxpr) if e.primitive.name == "dot_general"]
    assert {(e.invars[0].aval.dtype.name, e.outvars[0].aval.dtype.name) for e in dots} == {("bfloat16", "float32")}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="on a GPU the kernel is chosen by its compute capability")
@pytest.mark.parametrize("cast", ["mxfp8", "nvfp4"])
def test_programs_exported_for_a_gpu_contain_the_block_scaled_matmul(cast):
    lhs, rhs = operands("bmk,bkn->bmn", {"b": 2, "m": 8, "k": 64, "n": 8}, cast, (True, True))
    names = {e.primitive.name for e in equations(jax.make_jaxpr(sd.matmul)(lhs, rhs).jaxpr)}
    assert "scaled_matmul_wrapper" in names


def test_float32_matmuls_have_highest_precision_by_default():
    x, w = normal_by_axis(0, (4, 64)), sd.quantize(normal_by_axis(1, (64, 4)), "nf4", axis=0)

    def precision(**options):
        jaxpr = jax.make_jaxpr(lambda x: sd.matmul(x, w, **options))(x).jaxpr
        return next(e.params["precision"] for e in equations(jaxpr) if e.primitive.name == "dot_general")

    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    assert precision() == (highest, highest)
    assert precision(precision="default") == (default, default)
    assert precision(preferred_element_type=jnp.bfloat16) == (highest, highest)
    with jax.default_matmul_precision("default"):
        assert precision() != (highest, highest)


def test_a_bias_is_added_before_the_one_rounding():
    """257 is not a bfloat16: rounded before the addition it is 256, and 256 + 1 also rounds to 256."""
    x = jnp.zeros((1, 32), jnp.bfloat16).at[0, :2].set(jnp.array([256, 1], jnp.bfloat16))
    w = sd.quantize(jnp.ones((32, 2)), "mxfp8", axis=0)
    y = contract(Contraction("mk", "kn", "mn"), x, w, bias=jnp.ones(2), preferred_element_type=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert y.tolist() == [[258, 258]]


@pytest.mark.parametrize("out", ["mn", "nm"])
def test_an_outer_product_is_added_before_the_one_rounding(out):
    x = jnp.zeros((3, 32), jnp.bfloat16).at[:, :2].set(jnp.array([256, 1], jnp.bfloat16))
    w = sd.quantize(jnp.ones((32, 2)), "mxfp8", axis=0)
    bias = OuterProduct(jnp.array([1.0, 3, 0]), jnp.array([1.0, -1]))
    y = contract(Contraction("mk", "kn", out), x, w, bias=bias, preferred_element_type=jnp.bfloat16)
    expected = jnp.array([[258, 256], [260, 254], [256, 256]], jnp.bfloat16)  # 257 is rounded to 256
    np.testing.assert_array_equal(y, expected if out == "mn" else expected.T)


PRECISIONS = [None, "default", "fastest", "bfloat16", "high", "highest", lax.Precision.DEFAULT, lax.Precision.HIGHEST]
PAIRS = [("default", "default"), ["default", "bfloat16"], ("default", "highest")]


@pytest.mark.parametrize("precision", PRECISIONS + PAIRS)
def test_kernels_interpret_precision_as_jax_does(precision):
    x = jnp.ones((8, 8))
    (dot,) = jax.make_jaxpr(lambda x: lax.dot(x, x, precision=precision))(x).eqns
    is_default = dot.params["precision"] in (None, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
    q = operand_of(sd.quantize(x, "fp8_e4m3"), "mk"), operand_of(sd.quantize(x, "fp8_e4m3"), "kn")
    problem = Problem("dot", Contraction("mk", "kn", "mn"), *q, precision=precision)
    formulation = codes_formulation(problem)
    assert not isinstance(formulation, str)
    assert formulation.float8_on_cuda == is_default
    assert hopper_dot.FLOAT8.promotes(problem) != is_default

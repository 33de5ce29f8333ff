"""Hopper's grouped matmuls and casts of row groups, in Pallas interpret mode.

They are compared with NumPy loops over groups and with XLA's kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, quantize, values
from jax import lax
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.kernels.hopper import cast_8bit, support
from scaledot.kernels.layouts import logical
from scaledot.kernels.spec import CastProblem
from scaledot.train.ragged import RaggedDotOp
from scaledot.train.train_op import CastRequest

pytestmark = pytest.mark.jax_versions

WITHIN_GROUPS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
# Rows and group sizes: empty groups, groups that start and end inside a tile, all rows in one, rows in no group.
SIZES = {
    "uneven": (180, [5, 0, 100, 60, 15]),
    "empty": (64, [0, 0, 0]),
    "all rows in one group": (150, [0, 150, 0]),
    "more groups than rows": (3, [1, 0, 1, 0, 1, 0, 0]),
    "rows in no group": (300, [130, 3]),
}


def group_slices(sizes) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def expected_rows(x: np.ndarray, w: np.ndarray, sizes) -> np.ndarray:
    expected = np.zeros((x.shape[0], w.shape[2]))
    for rows, matrix in zip(group_slices(sizes), w, strict=True):
        expected[rows] = x[rows] @ matrix
    return expected


def assert_close(found, expected: np.ndarray, k: int) -> None:
    """Asserts an error of at most k float32 rounding errors of the largest result."""
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=k * 2.0**-24 * _magnitude(expected)
    )


def _magnitude(x: np.ndarray) -> float:
    return max(float(np.abs(x).max(initial=0)), 1.0)


OPERANDS = {  # format, blocks of x (rows, k) and of w (groups, k, n)
    "fp8 per tensor": ("fp8_e4m3", (0, 0), (1, 0, 0)),
    "fp8 per row and column": ("fp8_e4m3", (1, 0), (1, 0, 1)),
    "fp8 1x128 and 128x128": ("fp8_e4m3", (1, 128), (1, 128, 128)),
    "fp8 1x128 and 1x128": ("fp8_e4m3", (1, 128), (1, 128, 1)),
    "fp8 1x128, one scale for all matrices": ("fp8_e4m3", (1, 128), (0, 0, 0)),
    "int8 per row and column": ("int8", (1, 0), (1, 0, 1)),
    "int8 1x128 and 128x128": ("int8", (1, 128), (1, 128, 128)),
}


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("operands", ["fp8 per tensor", "fp8 1x128 and 128x128"])
def test_each_group_is_multiplied_by_its_matrix(hopper, operands, sizes):
    _check_rows(operands, *SIZES[sizes])


@needs_mosaic
@pytest.mark.parametrize(
    "operands", [name for name in OPERANDS if name not in ("fp8 per tensor", "fp8 1x128 and 128x128")]
)
def test_scales_per_row_column_and_block_are_applied(hopper, operands):
    _check_rows(operands, *SIZES["uneven"])


def _check_rows(operands: str, rows: int, sizes: list[int]) -> None:
    format, x_block, w_block = OPERANDS[operands]
    x = quantize(normal(0, (rows, 200)), format, axis=(0, 1), block=x_block, pad=True)
    w = quantize(normal(1, (len(sizes), 200, 72)), format, axis=(0, 1, 2), block=w_block, pad=True)
    found = jax.jit(lambda g: sd.ragged_dot(x, w, g, kernel="hopper_grouped"))(jnp.array(sizes))
    assert_close(found, expected_rows(values(x), values(w), sizes), 200)
    assert not np.any(found[sum(sizes) :]), "rows in no group must be zeros"


@needs_mosaic
def test_rows_in_no_group_are_zeros_also_with_nan_scales(hopper):
    x = quantize(normal(0, (40, 128)).at[30:].set(jnp.nan), "fp8_e4m3", axis=(0, 1), block=(1, 0))
    w = quantize(normal(1, (2, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    found = sd.ragged_dot(x, w, jnp.array([10, 20]), kernel="hopper_grouped")
    assert_close(found[:30], expected_rows(values(x[:30]), values(w), [10, 20]), 128)
    assert not np.any(found[30:])


@needs_mosaic
@pytest.mark.parametrize("operand", ["x", "w"])
def test_nan_scales_change_only_their_group(hopper, operand):
    x = quantize(normal(0, (40, 128)), "fp8_e4m3")
    w = quantize(normal(1, (2, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    x, w = (
        dataclasses.replace(q, scale=q.scale.at[-1].set(jnp.nan)) if name == operand else q
        for name, q in (("x", x), ("w", w))
    )
    found = sd.ragged_dot(x, w, jnp.array([10, 20]), kernel="hopper_grouped")
    assert not np.any(found[30:])
    assert np.all(np.isnan(found[10:30]))


@needs_mosaic
@pytest.mark.parametrize(("sizes", "clipped"), [([20, 90, 40], [20, 80, 0]), ([-5, 60, 70], [0, 60, 40])])
def test_group_sizes_beyond_the_rows_are_clipped(hopper, sizes, clipped):
    """Concrete sizes raise; traced ones cannot, and no row out of bounds may be read or written."""
    x = quantize(normal(0, (100, 128)), "fp8_e4m3")
    w = quantize(normal(1, (3, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    found = jax.jit(lambda g: sd.ragged_dot(x, w, g, kernel="hopper_grouped"))(jnp.array(sizes))
    assert_close(found, expected_rows(values(x), values(w), clipped), 128)
    with pytest.raises(ValueError, match="group_sizes"):
        sd.ragged_dot(x, w, sizes)


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
def test_contracting_rows_gives_a_result_for_each_group(hopper, sizes):
    rows, sizes = SIZES[sizes]
    x, g = (quantize(normal(i, (rows, n)), "fp8_e4m3", axis=(0, 1), block=(0, 1)) for i, n in ((0, 72), (1, 48)))
    found = jax.jit(lambda s: sd.ragged_dot_general(x, g, s, WITHIN_GROUPS, kernel="hopper_grouped"))(jnp.array(sizes))
    expected = np.stack([values(x)[rows].T @ values(g)[rows] for rows in group_slices(sizes)])
    assert_close(found, expected, rows)


def request(resolved, kernel: str) -> CastRequest:
    return CastRequest("x", resolved, dict.fromkeys(resolved.values()), kernel=kernel)


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
def test_casts_of_row_groups_are_bit_identical_to_the_reference(hopper, sizes):
    """Casts write the layouts that fwd and wgrad read, and are compared in the logical layout.

    Input rows in no group are NaN and must not change any code or scale.
    """
    rows, sizes = SIZES[sizes]
    op, cast, groups = RaggedDotOp(128), sd.Cast("fp8_e4m3", (1, 128)), jnp.array(sizes)
    resolved = {matmul: op.resolve_cast(cast, matmul, "x") for matmul in ("fwd", "wgrad")}
    x = normal(0, (rows, 208), jnp.bfloat16).at[sum(sizes) :].set(jnp.nan)
    results = [op.cast(request(resolved, kernel), x, groups).operands for kernel in ("hopper_cast_8bit", "xla_cast")]
    for matmul in resolved:
        ours, theirs = (logical(operands[matmul]) for operands in results)
        assert (ours.block, ours.shape) == (theirs.block, theirs.shape)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@needs_mosaic
@pytest.mark.parametrize(("rows", "sizes"), [SIZES["uneven"], (1, [0, 1])])
def test_group_scales_are_those_of_the_reference(hopper, rows, sizes):
    op, groups = RaggedDotOp(128), jnp.array(sizes)
    resolved = {matmul: op.resolve_cast(sd.Cast("fp8_e4m3"), matmul, "x") for matmul in ("fwd", "wgrad")}
    x = normal(0, (rows, 208), jnp.bfloat16)
    results = [op.cast(request(resolved, kernel), x, groups).operands for kernel in ("hopper_cast_8bit", "xla_cast")]
    for matmul in resolved:
        ours, theirs = (operands[matmul] for operands in results)
        np.testing.assert_array_equal(ours.scale[groups > 0], theirs.scale[groups > 0])
        np.testing.assert_array_equal(logical(ours.codes).scale, theirs.codes.scale)


def test_unsupported_casts_of_row_groups_have_reasons(monkeypatch):
    from benchmarks.gpu.cast import MatrixCast

    monkeypatch.setattr(support, "mesh_reason", lambda: None)

    def reason(format: str, tile, rotation=None, rows: int = 300) -> str | None:
        output = MatrixCast(sd.FORMATS[format], tile, 1, rotation=rotation).output(jnp.bfloat16, 0)
        return cast_8bit.problem_reason(CastProblem((rows, 72), (output,), groups=4))

    assert reason("fp8_e4m3", (1, 128)) is None
    assert "is not an 8-bit float or integer with float32 scales" in str(reason("mxfp8", (1, 32)))
    assert "one float32 scale, or one per 1x128 block" in str(reason("fp8_e4m3", (128, 128)))
    assert "72 is not a multiple of the rotation size 16" in str(reason("int8", (1, 128), sd.Hadamard()))
    assert "at most" in str(reason("fp8_e4m3", (1, 128), rows=2**20))


# The casts and matmuls of the others are compared above, in test_hopper_casts and in test_hopper_kernels.
@needs_mosaic
@pytest.mark.parametrize(
    "recipe",
    params_of(["fp8_current", "fp8_block", "fp8_delayed", "int8", "int8_block"], ["fp8_current", "int8_block"]),
)
def test_a_training_step_agrees_with_the_reference(hopper, monkeypatch, recipe):
    matmuls, casts = [], []
    from scaledot.kernels.hopper import matmul

    run, run_cast = matmul.matmul, cast_8bit.run
    monkeypatch.setattr(
        matmul, "matmul", lambda *a, **options: matmuls.append(options["groups"].axis) or run(*a, **options)
    )
    monkeypatch.setattr(cast_8bit, "run", lambda *a: casts.append(a) or run_cast(*a))
    jax.clear_caches()  # so that the step is traced again
    rows, sizes = SIZES["uneven"]
    x, w, dy = (
        normal(0, (rows, 208), jnp.bfloat16),
        normal(1, (len(sizes), 208, 72)),
        normal(2, (rows, 72), jnp.bfloat16),
    )

    def step():
        def layer(x, w, state):
            options = {"recipe": recipe, "state": state or None, "key": jax.random.key(3)}
            y = train.ragged_dot(x, w, jnp.array(sizes), preferred_element_type=jnp.bfloat16, **options)
            return y[0] if state else y

        y, backward = jax.vjp(layer, x, w, sd.init_state(recipe))
        return y, *backward(dy)[:2]

    found = step()
    assert matmuls == ["rows", "rows", "k"], "XLA computed a matmul"
    assert len(casts) == (0 if recipe == "int8" else 4), "XLA cast rows"  # it casts those with a scale per row
    with monkeypatch.context() as without_kernels:
        without_kernels.setattr(support, "mesh_reason", lambda: "not here")
        expected = step()
    assert len(matmuls) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # Codes are equal; float32 accumulation in another order may change a bfloat16 result by one ulp.
        np.testing.assert_allclose(
            np.asarray(one, np.float32),
            np.asarray(other, np.float32),
            rtol=2.0**-7,
            atol=1e-5 * _magnitude(np.asarray(other)),
        )


@needs_mosaic
def test_programs_on_a_gpu_machine_also_have_the_xla_kernels(monkeypatch):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 132)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def gradients(x, w, sizes):
        def total(x, w):
            return train.ragged_dot(x, w, sizes, recipe="fp8_current").astype(jnp.float32).sum()

        return jax.grad(total, (0, 1))(x, w)

    jaxpr = str(jax.make_jaxpr(gradients)(jnp.ones((64, 32)), jnp.ones((2, 32, 16)), jnp.array([30, 20])))
    assert "mpmd_map" in jaxpr
    assert "platform_index" in jaxpr


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (("mxfp8", None), ("mxfp8", None), "both operands must be 8-bit floats"),
        (("fp8_e4m3", (1, 32)), ("fp8_e4m3", (1, 0, 0)), "changes along the contracting dim, but not in blocks of 128"),
        (("int8", (1, 0)), ("fp8_e4m3", (1, 0, 0)), "both operands must be 8-bit floats"),
    ],
)
def test_unsupported_grouped_matmuls_have_reasons(monkeypatch, x, w, reason):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    x = quantize(normal(0, (64, 64)), x[0], **({} if x[1] is None else {"axis": (0, 1), "block": x[1]}))
    w = quantize(normal(1, (2, 64, 32)), w[0], **({"axis": 1} if w[1] is None else {"axis": (0, 1, 2), "block": w[1]}))
    assert reason in sd.explain(sd.ragged_dot, x, w, jnp.array([30, 34]))
    with pytest.raises(NotImplementedError, match=reason):
        sd.ragged_dot(x, w, jnp.array([30, 34]), kernel="hopper_grouped")


def test_blocks_down_rows_need_group_sizes_that_are_multiples_of_a_block(monkeypatch):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    x, g = (quantize(normal(i, (256, 32)), "fp8_e4m3", axis=(0, 1), block=(128, 1)) for i in range(2))
    with pytest.raises(NotImplementedError, match="group sizes must be multiples of 128"):
        sd.ragged_dot_general(x, g, jnp.array([100, 156]), WITHIN_GROUPS, kernel="hopper_grouped")

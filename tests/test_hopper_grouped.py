"""Products of groups on Hopper: held to loops over groups, by JAX's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, quantize, values
from jax import lax

import scaledot as sd
from scaledot import train
from scaledot.kernels.hopper import cast_8bit, support
from scaledot.kernels.layouts import logical
from scaledot.kernels.spec import CastProblem
from scaledot.train.ragged import RaggedDotOp
from scaledot.train.train_op import CastRequest

pytestmark = pytest.mark.jax_versions

SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
# Rows, and how they fall into groups: empty ones, ones that start and end inside a tile, all in one, rows left over.
SIZES = {
    "uneven": (180, [5, 0, 100, 60, 15]),
    "empty": (64, [0, 0, 0]),
    "one has all": (150, [0, 150, 0]),
    "more groups than rows": (3, [1, 0, 1, 0, 1, 0, 0]),
    "left over": (300, [130, 3]),
}


def parts(sizes) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def by_rows(x: np.ndarray, w: np.ndarray, sizes) -> np.ndarray:
    expected = np.zeros((x.shape[0], w.shape[2]))
    for part, matrix in zip(parts(sizes), w, strict=True):
        expected[part] = x[part] @ matrix
    return expected


def close(found, expected: np.ndarray, k: int) -> None:
    """Off by no more than k roundings of float32 of the largest result."""
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=k * 2.0**-24 * _largest(expected))


def _largest(x: np.ndarray) -> float:
    return max(float(np.abs(x).max(initial=0)), 1.0)


OPERANDS = {  # format, blocks of x (rows, k) and of w (groups, k, n)
    "fp8 per tensor": ("fp8_e4m3", (0, 0), (1, 0, 0)),
    "fp8 per row and column": ("fp8_e4m3", (1, 0), (1, 0, 1)),
    "fp8 lines and squares": ("fp8_e4m3", (1, 128), (1, 128, 128)),
    "fp8 lines and lines": ("fp8_e4m3", (1, 128), (1, 128, 1)),
    "fp8 lines, one scale for all matrices": ("fp8_e4m3", (1, 128), (0, 0, 0)),
    "int8 per row and column": ("int8", (1, 0), (1, 0, 1)),
    "int8 lines and squares": ("int8", (1, 128), (1, 128, 128)),
}


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("operands", ["fp8 per tensor", "fp8 lines and squares"])
def test_each_group_is_multiplied_by_its_matrix(hopper, operands, sizes):
    _check_rows(operands, *SIZES[sizes])


@needs_mosaic
@pytest.mark.parametrize(
    "operands", [name for name in OPERANDS if name not in ("fp8 per tensor", "fp8 lines and squares")]
)
def test_scales_may_be_of_rows_columns_and_lines(hopper, operands):
    _check_rows(operands, *SIZES["uneven"])


def _check_rows(operands: str, rows: int, sizes: list[int]) -> None:
    format, x_block, w_block = OPERANDS[operands]
    x = quantize(normal(0, (rows, 200)), format, axis=(0, 1), block=x_block, pad=True)
    w = quantize(normal(1, (len(sizes), 200, 72)), format, axis=(0, 1, 2), block=w_block, pad=True)
    found = jax.jit(lambda g: sd.ragged_dot(x, w, g, kernel="hopper_grouped"))(jnp.array(sizes))
    close(found, by_rows(values(x), values(w), sizes), 200)
    assert not np.any(found[sum(sizes) :]), "rows of no group must be zeros"


@needs_mosaic
def test_rows_of_no_group_are_zeros_whatever_their_scales(hopper):
    x = quantize(normal(0, (40, 128)).at[30:].set(jnp.nan), "fp8_e4m3", axis=(0, 1), block=(1, 0))
    w = quantize(normal(1, (2, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    found = sd.ragged_dot(x, w, jnp.array([10, 20]), kernel="hopper_grouped")
    close(found[:30], by_rows(values(x[:30]), values(w), [10, 20]), 128)
    assert not np.any(found[30:])


@needs_mosaic
@pytest.mark.parametrize("bad", ["x", "w"])
def test_scales_that_are_no_numbers_stay_with_their_group(hopper, bad):
    x = quantize(normal(0, (40, 128)), "fp8_e4m3")
    w = quantize(normal(1, (2, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    x, w = (
        dataclasses.replace(q, scale=q.scale.at[-1].set(jnp.nan)) if n == bad else q for n, q in (("x", x), ("w", w))
    )
    found = sd.ragged_dot(x, w, jnp.array([10, 20]), kernel="hopper_grouped")
    assert not np.any(found[30:])
    assert np.all(np.isnan(found[10:30]))


@needs_mosaic
@pytest.mark.parametrize(("asked", "meant"), [([20, 90, 40], [20, 80, 0]), ([-5, 60, 70], [0, 60, 40])])
def test_sizes_that_do_not_fit_end_with_the_rows(hopper, asked, meant):
    """Known ones are refused; those that are data cannot be, and no row is read or written that is not there."""
    x = quantize(normal(0, (100, 128)), "fp8_e4m3")
    w = quantize(normal(1, (3, 128, 64)), "fp8_e4m3", axis=(0, 1, 2), block=(1, 0, 0))
    found = jax.jit(lambda g: sd.ragged_dot(x, w, g, kernel="hopper_grouped"))(jnp.array(asked))
    close(found, by_rows(values(x), values(w), meant), 128)
    with pytest.raises(ValueError, match="group_sizes"):
        sd.ragged_dot(x, w, asked)


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
def test_sums_over_groups_have_a_result_each(hopper, sizes):
    rows, sizes = SIZES[sizes]
    x, g = (quantize(normal(i, (rows, n)), "fp8_e4m3", axis=(0, 1), block=(0, 1)) for i, n in ((0, 72), (1, 48)))
    found = jax.jit(lambda s: sd.ragged_dot_general(x, g, s, SUMMED, kernel="hopper_grouped"))(jnp.array(sizes))
    expected = np.stack([values(x)[part].T @ values(g)[part] for part in parts(sizes)])
    close(found, expected, rows)


def request(laid, kernel: str) -> CastRequest:
    return CastRequest("x", laid, dict.fromkeys(laid.values()), kernel=kernel)


@needs_mosaic
@pytest.mark.parametrize("sizes", SIZES)
def test_casts_of_rows_have_the_bytes_of_the_reference(hopper, sizes):
    """As the products take them; whatever is in rows of no group."""
    rows, sizes = SIZES[sizes]
    kind, cast, groups = RaggedDotOp(128), sd.Cast("fp8_e4m3", (1, 128)), jnp.array(sizes)
    laid = {product: kind.resolve_cast(cast, product, "x") for product in ("fwd", "wgrad")}
    x = normal(0, (rows, 208), jnp.bfloat16).at[sum(sizes) :].set(jnp.nan)
    made = [kind.cast(request(laid, kernel), x, groups).operands for kernel in ("hopper_cast_8bit", "xla_cast")]
    for product in laid:
        ours, theirs = (logical(operands[product]) for operands in made)
        assert (ours.block, ours.shape) == (theirs.block, theirs.shape)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@needs_mosaic
@pytest.mark.parametrize(("rows", "sizes"), [SIZES["uneven"], (1, [0, 1])])
def test_groups_have_the_scales_of_the_reference(hopper, rows, sizes):
    kind, groups = RaggedDotOp(128), jnp.array(sizes)
    laid = {product: kind.resolve_cast(sd.Cast("fp8_e4m3"), product, "x") for product in ("fwd", "wgrad")}
    x = normal(0, (rows, 208), jnp.bfloat16)
    made = [kind.cast(request(laid, kernel), x, groups).operands for kernel in ("hopper_cast_8bit", "xla_cast")]
    for product in laid:
        ours, theirs = (operands[product] for operands in made)
        np.testing.assert_array_equal(ours.scale[groups > 0], theirs.scale[groups > 0])
        np.testing.assert_array_equal(logical(ours.codes).scale, theirs.codes.scale)


def test_casts_of_rows_that_no_kernel_makes_have_reasons(monkeypatch):
    from benchmarks.gpu.cast import MatrixCast

    monkeypatch.setattr(support, "device_reason", lambda: None)

    def reason(format: str, tile, rotation=None, rows: int = 300) -> str | None:
        output = MatrixCast(sd.FORMATS[format], tile, 1, rotation=rotation).output(jnp.bfloat16, 0)
        return cast_8bit.problem_reason(CastProblem((rows, 72), (output,), groups=4))

    assert reason("fp8_e4m3", (1, 128)) is None
    assert "is not an 8-bit float or integer with float32 scales" in str(reason("mxfp8", (1, 32)))
    assert "one float32 scale, or one per 1x128 block" in str(reason("fp8_e4m3", (128, 128)))
    assert "72 is not a multiple of the rotation size 16" in str(reason("int8", (1, 128), sd.Hadamard()))
    assert "at most" in str(reason("fp8_e4m3", (1, 128), rows=2**20))


@needs_mosaic
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "fp8_delayed", "int8", "int8_block"])
def test_a_step_of_training_is_the_reference_s(hopper, monkeypatch, recipe):
    taken, cast = [], []
    from scaledot.kernels.hopper import matmul

    run, run_cast = matmul.matmul, cast_8bit.run
    monkeypatch.setattr(matmul, "matmul", lambda *a, **how: taken.append(how["groups"].axis) or run(*a, **how))
    monkeypatch.setattr(cast_8bit, "run", lambda *a: cast.append(a) or run_cast(*a))
    jax.clear_caches()  # what was traced before is not traced again
    rows, sizes = SIZES["uneven"]
    x, w, dy = (
        normal(0, (rows, 208), jnp.bfloat16),
        normal(1, (len(sizes), 208, 72)),
        normal(2, (rows, 72), jnp.bfloat16),
    )

    def step():
        def layer(x, w, state):
            how = {"recipe": recipe, "state": state or None, "key": jax.random.key(3)}
            y = train.ragged_dot(x, w, jnp.array(sizes), preferred_element_type=jnp.bfloat16, **how)
            return y[0] if state else y

        y, backward = jax.vjp(layer, x, w, sd.init_state(recipe))
        return y, *backward(dy)[:2]

    found = step()
    assert taken == ["rows", "rows", "k"], "a product was left to XLA"
    assert len(cast) == (0 if recipe == "int8" else 4), "rows were cast by XLA"  # scales of whole rows and columns are
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(support, "device_reason", lambda: "not here")
        expected = step()
    assert len(taken) == 3
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # Codes are equal; float32 sums in another order may round a bfloat16 result to its neighbour.
        np.testing.assert_allclose(
            np.asarray(one, np.float32),
            np.asarray(other, np.float32),
            rtol=2.0**-7,
            atol=1e-5 * _largest(np.asarray(other)),
        )


@needs_mosaic
def test_a_program_for_a_gpu_traces_what_xla_would_do_beside_it(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
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
        (("mxfp8", None), ("mxfp8", None), "both sides must be 8-bit floats"),
        (("fp8_e4m3", (1, 32)), ("fp8_e4m3", (1, 0, 0)), "changes along the contracting dim, but not in blocks of 128"),
        (("int8", (1, 0)), ("fp8_e4m3", (1, 0, 0)), "both sides must be 8-bit floats"),
    ],
)
def test_what_is_left_to_xla_has_reasons(monkeypatch, x, w, reason):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    x = quantize(normal(0, (64, 64)), x[0], **({} if x[1] is None else {"axis": (0, 1), "block": x[1]}))
    w = quantize(normal(1, (2, 64, 32)), w[0], **({"axis": 1} if w[1] is None else {"axis": (0, 1, 2), "block": w[1]}))
    assert reason in sd.explain(sd.ragged_dot, x, w, jnp.array([30, 34]))
    with pytest.raises(NotImplementedError, match=reason):
        sd.ragged_dot(x, w, jnp.array([30, 34]), kernel="hopper_grouped")


def test_blocks_down_rows_need_groups_of_whole_blocks(monkeypatch):
    monkeypatch.setattr(support, "device_reason", lambda: None)
    x, g = (quantize(normal(i, (256, 32)), "fp8_e4m3", axis=(0, 1), block=(128, 1)) for i in range(2))
    with pytest.raises(NotImplementedError, match="group sizes must be multiples of 128"):
        sd.ragged_dot_general(x, g, jnp.array([100, 156]), SUMMED, kernel="hopper_grouped")

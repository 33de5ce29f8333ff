"""Hopper matmul kernels, compared with float64 in JAX's interpreter, and why a kernel is not chosen."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data import normal
from hopper import needs_mosaic, output_of, quantize, relative, selected_row, values
from tables import params_of

import scaledot as sd
from scaledot import train
from scaledot.kernels.hopper import (
    support,
    tile_configs,
)
from scaledot.kernels.spec import CastProblem
from scaledot.kernels.table import CASTS
from scaledot.parallel import types

pytestmark = pytest.mark.jax_versions

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16


def exact(x: sd.ScaledArray, w: sd.ScaledArray) -> np.ndarray:
    return values(x) @ values(w)


MATMULS = [  # (M, N, K), dtypes, fields of the config, promote, k_first of either operand
    ((128, 256, 512), (E4M3, E4M3), {}, False, (False, False)),
    ((384, 256, 640), (E4M3, E5M2), {}, False, (False, False)),
    ((72, 48, 128), (E5M2, E5M2), {}, True, (False, False)),
    ((384, 512, 256), (E4M3, E4M3), {"cluster_along": "rows"}, False, (False, False)),
    ((128, 512, 384), (E4M3, E4M3), {"cluster_along": "columns"}, True, (False, False)),
    ((256, 256, 256), (E4M3, E4M3), {"wg_n": 128, "stages": 6, "n_splits": 1}, True, (False, False)),
    ((128, 256, 256), (E4M3, E4M3), {"wg_m": 64, "wg_n": 128, "wg_along": "columns"}, False, (False, False)),
    ((192, 256, 192), (BF16, BF16), {}, False, (True, False)),
    ((192, 256, 192), (BF16, BF16), {"cluster_along": "rows"}, False, (False, True)),
    ((192, 320, 128), (BF16, BF16), {}, False, (True, True)),
]


@needs_mosaic
@pytest.mark.parametrize(("sizes", "dtypes", "fields", "promote", "k_first"), MATMULS)
def test_matmuls_agree_with_float64(hopper, sizes, dtypes, fields, promote, k_first):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import Config

    m, n, k = sizes
    a, b = normal(0, (m, k), jnp.float32).astype(dtypes[0]), normal(1, (n, k), jnp.float32).astype(dtypes[1])
    scale = jnp.array([3.0], jnp.float32), jnp.array([0.25], jnp.float32)
    found = matmul(
        a.T if k_first[0] else a,
        b.T if k_first[1] else b,
        *scale,
        None,
        out_dtype=jnp.float32,
        config=dataclasses.replace(Config(), **fields),
        promote=promote,
        ctas=4,
        mn_major=k_first,
    )
    expected = 0.75 * np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    # The bound of float32 accumulation over k elements: k rounding errors of 2^-24.
    assert relative(found, expected) < k * 2.0**-24


@needs_mosaic
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_outer_product", [False, True])
def test_scales_per_row_and_column_and_a_bias_are_applied(hopper, is_outer_product, out):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import Config

    a, b = normal(0, (256, 128)).astype(E4M3), normal(1, (256, 128)).astype(E4M3)
    rows, columns, bias, bias_rows = (jnp.exp(normal(i, (256,))) for i in range(2, 6))
    term = np.outer(bias_rows if is_outer_product else np.ones(256), bias)
    bias_rows = bias_rows if is_outer_product else None
    found = matmul(a, b, rows, columns, bias, bias_rows, out_dtype=out, config=Config(), promote=False, ctas=2)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    expected = expected * np.asarray(rows)[:, None] * np.asarray(columns)[None] + term
    assert relative(found, expected) < {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-6}[out]


@needs_mosaic
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize(
    ("shapes", "blocks"), [(((50, 200), (200, 70)), (None, (0,))), (((2, 3, 40), (40, 5)), ((0,), None))]
)
def test_the_fp8_kernel_is_chosen_for_all_sizes(hopper, precision, shapes, blocks):
    x = quantize(normal(0, shapes[0]), "fp8_e4m3", block=blocks[0])
    w = quantize(normal(1, shapes[1]), "fp8_e5m2", axis=0, block=blocks[1])
    assert selected_row(sd.explain(sd.matmul, x, w, precision=precision)).startswith("hopper_fp8")
    found = sd.matmul(x, w, precision=precision)
    assert found.dtype == jnp.float32
    assert relative(found, exact(x, w)) < 1e-6


@needs_mosaic
@pytest.mark.parametrize(
    ("x_block", "w_block"),
    [((1, 128), (128, 128)), ((1, 128), (128, 1)), ((128, 128), (128, 128)), ((128, 128), (0, 0)), ((1, 0), (128, 1))],
)
@pytest.mark.parametrize(("format", "kernel"), [("fp8_e4m3", "hopper_fp8"), ("int8", "hopper_int8")])
def test_blockwise_scales_are_applied_to_partial_accumulators(hopper, format, kernel, x_block, w_block):
    x = quantize(normal(0, (150, 700)), format, axis=(0, 1), block=x_block, pad=True)
    w = quantize(normal(1, (700, 300)), format, axis=(0, 1), block=w_block, pad=True)
    row = selected_row(sd.explain(sd.matmul, x, w))
    assert row.startswith(kernel)
    assert "float32 partial accumulators every 128 elements of K" in row
    assert relative(sd.matmul(x, w), exact(x, w)) < 1e-6


@needs_mosaic
@pytest.mark.parametrize(("x_format", "w_format"), [("int8", "int8"), ("int8", "int4")])
def test_integer_codes_accumulate_exactly(hopper, x_format, w_format):
    """int32 accumulation is exact; the product with each of two scales and the result are rounded."""
    x = quantize(normal(0, (50, 700)), x_format, axis=(0, 1), block=(1, 0))
    w = quantize(normal(1, (700, 70)), w_format, axis=(0, 1), block=(0, 1))
    assert selected_row(sd.explain(sd.matmul, x, w)).startswith("hopper_int8")
    left, right, by_row, by_column = (np.asarray(leaf, np.float64) for leaf in (x.data, w.data, x.scale, w.scale))
    np.testing.assert_allclose(sd.matmul(x, w), left @ right * by_row * by_column, rtol=3 * 2.0**-24)


@needs_mosaic
def test_microscaled_operands_are_multiplied_in_bfloat16(hopper):
    for format in ("mxfp8", "nvfp4"):
        x, w = quantize(normal(0, (96, 256)), format), quantize(normal(1, (256, 64)), format, axis=0)
        assert "hopper_bf16" in sd.explain(sd.matmul, x, w)
        assert relative(sd.matmul(x, w, kernel="hopper_bf16"), exact(x, w)) < 1e-6


@needs_mosaic
def test_vmap_agrees_with_a_loop(hopper):
    x = quantize(normal(0, (2, 64, 128)), "fp8_e4m3", axis=(1, 2), block=(0, 0))
    w = quantize(normal(1, (128, 32)), "fp8_e4m3")
    found = jax.vmap(lambda x: sd.matmul(x, w))(x)
    for i in range(2):
        assert relative(found[i], exact(x[i], w)) < 1e-6


@needs_mosaic
def test_delayed_and_current_scaling_of_one_tensor_are_not_fused(hopper):
    """x has delayed scaling in fwd and current scaling in wgrad."""
    current = sd.Cast("fp8_e4m3")
    delayed = sd.Cast("fp8_e4m3", delayed=sd.Delayed(4))
    recipe = sd.Recipe("mixed", sd.Gemm(delayed, current), sd.Gemm(current, current), sd.Gemm(current, current))
    x, w = 300 * normal(0, (8, 32), jnp.bfloat16), normal(1, (32, 16))  # overflows with the initial multiplier of 1

    def result(kernel):
        options = {"recipe": recipe, "kernel": kernel}
        return jax.vjp(lambda w, state: train.dense(x, w, state=state, **options)[0], w, sd.init_state(recipe))[0]

    assert relative(result(None), result("xla_codes")) < 2.0**-8


@needs_mosaic
@pytest.mark.parametrize("recipe", params_of(["fp8_block", "fp8_current"], ["fp8_current"]))
def test_gradients_under_vmap_and_in_a_shard_map_agree_with_the_reference(hopper, recipe):
    x, w, dy = normal(0, (2, 32, 64), jnp.bfloat16), normal(1, (64, 48)), normal(2, (2, 32, 48), jnp.bfloat16)

    def gradients(x, w, dy, kernel=None):
        return jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, kernel=kernel), x, w)[1](dy)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded_spec, replicated = jax.P("d"), jax.P()
    sharded = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(sharded_spec, replicated, sharded_spec),
        out_specs=(sharded_spec, replicated),
        check_vma=True,
    )
    mapped = jax.vmap(gradients, in_axes=(0, None, 0))
    for found, expected in (
        (jax.jit(sharded)(x, w, dy), gradients(x, w, dy, "xla_codes")),
        (jax.jit(mapped)(x, w, dy), jax.vmap(lambda x, dy: gradients(x, w, dy, "xla_codes"))(x, dy)),
    ):
        for a, b in zip(found, expected, strict=True):
            assert relative(a, b) < 2.0**-8


SCALED = [  # format, blocks of x and w, kernel
    ("fp8_e4m3", (1, 128), (128, 128), "hopper_fp8"),
    ("int8", (1, 0), (0, 1), "hopper_int8"),
    ("mxfp8", (1, 32), (32, 1), "hopper_bf16"),
]


@needs_mosaic
@pytest.mark.parametrize(("format", "x_block", "w_block", "kernel"), SCALED)
def test_nan_scales_give_nan_results(hopper, format, x_block, w_block, kernel):
    """Also if the codes are zeros, as those of integers with a NaN scale are."""
    x = quantize(normal(0, (16, 256)).at[3].set(0), format, axis=(0, 1), block=x_block)
    w = quantize(normal(1, (256, 16)), format, axis=(0, 1), block=w_block, pad=True)
    x = dataclasses.replace(x, scale=x.scale.at[3, -1].set(np.array(np.nan, x.scale.dtype)))
    found = np.asarray(sd.matmul(x, w, kernel=kernel))
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()


def test_a_kernel_that_cannot_run_here_returns_a_reason():
    q = quantize(normal(0, (32, 32)), "fp8_e4m3")
    reason = "needs jax 0.11.2" if jax.__version_info__ < support.OLDEST_JAX else "needs a Hopper GPU"
    with pytest.raises(NotImplementedError, match=reason):
        sd.matmul(q, q, kernel="hopper_fp8")
    assert re.search(f"hopper_fp8 +unsupported: {reason}", sd.explain(sd.matmul, q, q))


@pytest.mark.parametrize(
    ("x", "w", "options", "reason"),
    [
        (("int8", None), ("fp8_e4m3", None), {}, "both operands must be 8-bit floats"),
        (("fp8_e4m3", (16,)), ("fp8_e4m3", None), {}, "the scale of lhs changes along the contracting dim"),
        (("fp8_e4m3", None), ("fp8_e4m3", None), {"preferred_element_type": jnp.float64}, "not float64"),
    ],
)
def test_unsupported_matmuls_have_reasons(monkeypatch, x, w, options, reason):
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    x, w = (quantize(normal(0, (32, 32)), format, block=block) for format, block in (x, w))
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=reason):
        sd.matmul(x, w, kernel="hopper_fp8", **options)


def test_kernels_need_a_hopper_gpu_and_automatic_partitioning(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    class Device:
        compute_capability, device_kind = "9.0", "NVIDIA H200"

    with jax.default_device(jax.devices("cpu")[0]):
        assert "jax.default_device is" in str(support.mesh_reason())
    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    assert support.mesh_reason() is None
    assert "over 2 devices" in str(types.partition_reason(types.Partitioning(2, is_automatic=False)))
    with jax.enable_x64(True):
        assert "jax_enable_x64" in str(support.mesh_reason())
    monkeypatch.setattr(Device, "compute_capability", "10.0")
    assert "compute capability 9" in str(support.mesh_reason())


@needs_mosaic
def test_the_heuristic_uses_clusters_for_large_matmuls_only():
    wide = tile_configs.heuristic(tile_configs.GemmKey(16384, 32768, 8192, "float8", 2))
    assert (wide.wg_n, wide.cluster_along) == (256, "rows")
    assert (
        tile_configs.heuristic(tile_configs.GemmKey(128, 16384, 4096, "float8", 2)).cluster_along is None
    )  # one row of tiles cannot form clusters


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_kernels_run_on_one_of_several_devices_if_nothing_is_partitioned(monkeypatch, kind):
    """Inside jit the type of an array has its mesh, with and without a mesh in the context."""
    monkeypatch.setattr(support, "device_reason", lambda: None)
    monkeypatch.setattr(support, "sm_count", lambda: 2)
    axis_types = (jax.sharding.AxisType[kind],)
    several, one = (jax.make_mesh((n,), ("d",), axis_types=axis_types, devices=jax.devices()[:n]) for n in (8, 1))
    x = jnp.ones((128, 128))
    rows = jax.device_put(x, jax.NamedSharding(several, jax.P("d")))

    def kernels_of(*arrays, within=lambda f: f) -> set[str]:
        """Returns the kernel of the forward matmul, and "cast" if a Hopper kernel casts an operand."""
        found = set()

        def f(x, w):
            q = [quantize(a, "fp8_e4m3") for a in (x, w)]
            found.add(selected_row(sd.explain(sd.matmul, *q)).split(":")[0].split()[0])
            output = output_of(sd.FORMATS["fp8_e4m3"], (0, 0), 1, None, x.dtype)
            problems = (CastProblem(a.shape, (output,), partitioning=types.partitioning_of(a)) for a in (x, w))
            found.update("cast" for problem in problems if CASTS[0].unsupported_reason(problem) is None)
            return x

        jax.eval_shape(jax.jit(within(f)), *arrays)
        return found

    kernels = {"hopper_fp8", "cast"}
    assert jax.device_count() == 8
    assert kernels_of(x, jax.device_put(x, jax.devices()[1])) == kernels
    on_several = kernels if kind == "Auto" else {"xla_codes"}
    assert kernels_of(rows, rows) == on_several
    assert kernels_of(x, rows) == on_several | {"cast"}
    with jax.set_mesh(several):
        assert kernels_of(x, x) == on_several
        replicated = jax.P()
        assert (
            kernels_of(x, x, within=jax.shard_map(in_specs=(replicated, replicated), out_specs=replicated)) == kernels
        )
    with jax.set_mesh(one):
        assert kernels_of(x, x) == kernels
    assert types.partitioning_of(rows) == types.Partitioning(8, is_automatic=kind == "Auto")
    assert types.partitioning_of(x) == types.ONE_DEVICE

"""Compiles the kernels for an H200 on a machine without a GPU: `make test-gpu-compile`.

No kernel may spill registers; Mosaic itself rejects kernels that need more SMEM than the chip has. The casts, which use
no Hopper-only instructions, are also compiled for a B200, in a process of its own because Mosaic caches the target chip
(test_compile_blackwell).
"""

import dataclasses
import re

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

import scaledot as sd
from benchmarks.gpu import cast
from scaledot import train
from scaledot.kernels.hopper import autotune, cast_8bit, support, tile_configs

if not gpu_compile.is_possible():
    pytest.skip(gpu_compile.MISSING, allow_module_level=True)

pytestmark = needs_mosaic
E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16


@pytest.fixture
def ptxas_folder(monkeypatch, tmp_path):
    return gpu_compile.ptxas_reports(monkeypatch, tmp_path)


def shapes(*pairs) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs]


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster_along": "rows"},
        {"cluster_along": "columns"},
        {"wg_n": 128, "stages": 6, "n_splits": 1},
        {"wg_n": 128, "n_splits": 1, "consumer_warpgroups": 3, "epilogue_columns": 32},
    ],
)
@pytest.mark.parametrize(("dtypes", "out"), [((E4M3, E4M3), BF16), ((E4M3, E5M2), jnp.float32), ((BF16, BF16), BF16)])
def test_matmuls_do_not_spill(ptxas_folder, dtypes, out, changes, promote):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import Config

    config = dataclasses.replace(Config(), **changes)

    def run(a, b, rows, columns):
        return matmul(a, b, rows, columns, None, out_dtype=out, config=config, promote=promote, ctas=132)

    one = ((1,), jnp.float32)
    gpu_compile.compiled_for("H200", run, *shapes(*(((2048, 2048), d) for d in dtypes), one, one))
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize("columns", [16, 2048])
@pytest.mark.parametrize("out", [BF16, jnp.float32])
def test_blockwise_matmuls_do_not_spill(ptxas_folder, out, columns):
    """With scales for 128×128 blocks of b, and for its 1×128 blocks."""
    from scaledot.kernels.hopper.matmul import matmul

    accumulation = tile_configs.accumulation_mode(promote=True, has_k_block_scales=True, square_blocks=columns < 2048)
    config = tile_configs.heuristic(
        tile_configs.GemmKey(2048, 2048, 2048, "float8", jnp.dtype(out).itemsize, accumulation)
    )

    def run(a, b, rows, columns):
        options = {"out_dtype": out, "config": config, "promote": True, "has_k_block_scales": True, "ctas": 132}
        return matmul(a, b, rows, columns, None, **options)

    codes, scales = ((2048, 2048), E4M3), [((16, 2048), jnp.float32), ((16, columns), jnp.float32)]
    gpu_compile.compiled_for("H200", run, *shapes(codes, codes, *scales))
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize("blockwise", [False, True])
def test_int8_matmuls_do_not_spill(ptxas_folder, blockwise):
    from scaledot.kernels.hopper.matmul import matmul

    accumulation = tile_configs.accumulation_mode(blockwise, blockwise, square_blocks=blockwise)
    config = tile_configs.heuristic(tile_configs.GemmKey(2048, 2048, 2048, "int8", 2, accumulation))

    def run(a, b, rows, columns):
        options = {
            "out_dtype": BF16,
            "config": config,
            "promote": blockwise,
            "has_k_block_scales": blockwise,
            "ctas": 132,
        }
        return matmul(a, b, rows, columns, None, **options)

    scales = [((16, 2112), jnp.float32), ((16, 16), jnp.float32)] if blockwise else [((1,), jnp.float32)] * 2
    gpu_compile.compiled_for("H200", run, *shapes(*[((2048, 2048), jnp.int8)] * 2, *scales))
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize(("axis", "out"), [("rows", BF16), ("rows", jnp.float32), ("k", jnp.float32)])
def test_grouped_matmuls_do_not_spill(ptxas_folder, axis, out, blockwise):
    from scaledot.kernels.hopper.matmul import matmul
    from scaledot.kernels.hopper.tiles import groups_of_k, groups_of_rows

    size, count = 2048, 8
    rows = axis == "rows"
    accumulation = tile_configs.accumulation_mode(blockwise, blockwise, square_blocks=rows)
    groups = {"row_groups" if rows else "k_groups": count}
    config = tile_configs.heuristic(
        tile_configs.GemmKey(size, size, size, "float8", jnp.dtype(out).itemsize, accumulation, **groups)
    )

    def run(a, b, rows_of, columns, sizes):
        groups = groups_of_rows(sizes, size, config) if rows else groups_of_k(sizes)
        options = {
            "out_dtype": out,
            "config": config,
            "promote": blockwise,
            "has_k_block_scales": blockwise,
            "ctas": 132,
        }
        return matmul(a, b, rows_of, columns, None, **options, groups=groups)

    steps, padded = size // 128, -(-size // config.cta_m) * config.cta_m + config.cta_m
    if blockwise:
        scales = [(steps, padded), (count, steps, steps) if rows else (steps, size)]
    else:
        scales = [(padded,), (count, 1)] if rows else [(count, 1)] * 2
    operands = ((size, size), E4M3), ((count, size, size) if rows else (size, size), E4M3)
    gpu_compile.compiled_for(
        "H200", run, *shapes(*operands, *((shape, jnp.float32) for shape in scales), ((count,), jnp.int32))
    )
    assert gpu_compile.spills(ptxas_folder) == [0]


@pytest.mark.parametrize(
    "shape",
    autotune.gemm_keys([kind for kind in autotune.KINDS if kind != "dense"], [(2048, 2048, 2048)]),
    ids=lambda shape: "-".join(map(str, dataclasses.astuple(shape)[3:])),
)
def test_autotuned_configs_do_not_spill(ptxas_folder, shape):
    """All kinds but dense matmuls, whose configs `test_matmuls_do_not_spill` compiles."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: autotune.operands(shape)))
    for config in (tile_configs.heuristic(shape), *autotune.variants(shape)):
        with tile_configs.config_override(shape, config):
            gpu_compile.compiled_for("H200", lambda *leaves: autotune.run(shape, *tree.unflatten(leaves)), *leaves)
    spills = gpu_compile.spills(ptxas_folder)
    assert spills, "ptxas wrote no listing"
    assert not any(spills)


@pytest.mark.parametrize("case", cast.CASES, ids=lambda case: case.name)
def test_casts_do_not_spill(ptxas_folder, case):
    assert not any(gpu_compile.spills_of_cast("H200", case, ptxas_folder))
    if case.name.startswith(("nvfp4_plus ", "if4 ", "quartet_ii ")):
        # 3 CTAs of 256 threads on an SM, with 65536 registers in units of 8.
        assert max(gpu_compile.registers(ptxas_folder)) <= 80


def test_casts_with_column_sums_do_not_spill(ptxas_folder):
    case = cast.Case(
        "", BF16, tuple(cast.MatrixCast(sd.FORMATS["fp8_e5m2"], (0, 0), axis) for axis in (1, 0)), None, True
    )

    def run(x):
        (problem,) = case.problems(x)
        problem = dataclasses.replace(problem, column_sums=True)
        return cast_8bit.run(problem, x, case.arguments(x, jax.random.key(0)))

    gpu_compile.compiled_for("H200", run, *shapes(((1024, 1024), BF16)))
    assert gpu_compile.spills(ptxas_folder) == [0]


def compiled_step(monkeypatch, recipe: str) -> str:
    """The instructions of a training step on one GPU."""
    monkeypatch.setattr(support, "mesh_reason", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    key = jax.random.key(0) if sd.RECIPES[recipe].stochastic else None

    def step(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: train.dense(x, w, recipe=recipe, key=key), x, w)
        return y, vjp(dy)

    sizes = shapes(((4, 1024, 1024), BF16), ((1024, 2048), jnp.float32), ((4, 1024, 2048), BF16))
    text = gpu_compile.compiled_for("H200", step, *sizes)
    return text[text.index("ENTRY") :]


def test_an_fp8_training_step_is_six_kernels_and_reductions(ptxas_folder, monkeypatch):
    """Casts of three tensors and three matmuls; XLA reduces amaxes, and does not transpose, copy or convert."""
    entry = compiled_step(monkeypatch, "fp8_current")
    assert len(re.findall(r'custom_call_target="mosaic_gpu', entry)) == 6
    fusions = re.findall(r"= (.*) fusion\(", entry)
    assert set(re.findall(r"(\w+)\[", " ".join(fusions))) == {"u32"}, fusions
    assert not re.search(r" (transpose|copy|convert)\(", entry)


def test_means_cost_one_pass_over_x(ptxas_folder, monkeypatch):
    """x is read for its mean, and for the amax of differences to it; w for its amax and its product with that mean.

    Amax and sums of g are computed in one pass, and the matmul adds the term of dw.
    """
    entry = compiled_step(monkeypatch, "nvfp4_plus")
    reads = {name: len(re.findall(rf" fusion\([^)]*%{name}\b", entry)) for name in ("x", "w", "dy")}
    assert reads == {"x": 2, "w": 1, "dy": 1}
    assert not re.search(r"f32\[1024,2048\]\S* fusion\(", entry)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8"])
def test_xla_casts_are_of_rounded_values(format, dtype):
    """XLA:GPU removes a rounding to 16 bits and a conversion back to float32, unless it is of another form."""

    def rounded_and_cast(x):
        return sd.quantize(jnp.sin(x).astype(dtype), format, kernel="xla_cast")

    text = gpu_compile.compiled_for("H200", rounded_and_cast, *shapes(((256, 512), jnp.float32)))
    rounding = r"= bf16\[.* convert\(" if dtype == "bfloat16" else r"reduce-precision\(.*mantissa_bits=10"
    assert re.search(rounding, text)

"""Autotuning of the Hopper matmuls: which shapes are tuned, and which configs are used."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

from scaledot import train
from scaledot.cli import main
from scaledot.kernels.hopper import (
    autotune,
    tile_configs,
)

pytestmark = pytest.mark.jax_versions

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
DIMENSIONS = (((1,), (0,)), ((), ()))


TUNED = [  # one of each kind of shape
    tile_configs.GemmKey(128, 256, 128, "float8", 2),
    tile_configs.GemmKey(128, 128, 128, "float8", 2, "promoted"),
    tile_configs.GemmKey(128, 128, 256, "int8", 2, "blocks_128x128"),
    tile_configs.GemmKey(128, 128, 128, "float8", 2, row_groups=3),
    tile_configs.GemmKey(128, 128, 512, "float8", 4, "blocks_1x128", k_groups=3),
]


@pytest.fixture
def table(monkeypatch, tmp_path):
    """The file of tuned configs of a device that has none yet."""
    monkeypatch.setattr(tile_configs, "_path", lambda kind: tmp_path / "table.json")
    tile_configs._table.cache_clear()
    yield tmp_path / "table.json"
    tile_configs._table.cache_clear()


def tune(monkeypatch, shapes, table, seconds: list[float]) -> None:
    """Tunes with these times of the heuristic's config and of the only candidate."""
    times = itertools.cycle(seconds)
    monkeypatch.setattr(autotune, "_seconds", lambda program, arguments: next(times))
    autotune.tune(shapes, table)


@needs_mosaic
@pytest.mark.parametrize("shape", TUNED, ids=lambda s: f"{s.accumulation} {s.row_groups} {s.k_groups}")
def test_tuned_configs_are_used_for_their_shapes_only(hopper, monkeypatch, table, shape):
    faster = autotune.variants(shape)[0]
    monkeypatch.setattr(autotune, "variants", lambda shape: [faster])
    tune(monkeypatch, [shape], table, [2.0, 1.0])
    assert tile_configs.config_for(shape) == faster
    other = dataclasses.replace(shape, m=256)
    assert tile_configs.config_for(other) == tile_configs.heuristic(other)


@needs_mosaic
def test_tuning_another_shape_keeps_earlier_configs(hopper, monkeypatch, table):
    shape = TUNED[0]
    tuned = dataclasses.replace(tile_configs.heuristic(shape), grid_tile_width=2)
    other = dataclasses.replace(shape, n=512)
    monkeypatch.setattr(autotune, "best", lambda of: (tuned if of == shape else tile_configs.heuristic(of), 0.0))
    autotune.tune([shape], table)
    autotune.tune([other], table)
    assert tile_configs.config_for(shape) == tuned
    assert tile_configs.config_for(other) == tile_configs.heuristic(other)


@needs_mosaic
def test_tuning_raises_for_configs_with_wrong_results(hopper, monkeypatch, table):
    run = autotune._compile

    def compile_wrong(shape, config, arguments):
        program = run(shape, config, arguments)
        # One element of the last tile is wrong, if the config is not the heuristic's.
        is_wrong = config != tile_configs.heuristic(shape)
        return lambda *arrays: program(*arrays).at[-1, -1].multiply(2 if is_wrong else 1)

    monkeypatch.setattr(autotune, "_compile", compile_wrong)
    with pytest.raises(AssertionError, match="differs from"):
        tune(monkeypatch, TUNED[:1], table, [2.0, 1.0])
    assert not table.exists()


@needs_mosaic
def test_candidates_are_distinct_and_row_groups_have_no_clusters():
    for shape in autotune.gemm_keys(autotune.KINDS):
        variants = autotune.variants(shape)
        assert len(variants) > 1
        assert len({tile_configs.heuristic(shape), *variants}) == len(variants) + 1
        assert not shape.row_groups or all(config.cluster_along is None for config in variants)


TRAINED = [  # recipe, whether rows are grouped, and the kind of matmuls whose shapes are tuned for it
    ("fp8_current", False, "dense"),
    ("mxfp8", False, "dense"),
    ("fp8_block", False, "blocks"),
    ("int8_block", False, "blocks"),
    ("int8", False, "integers"),
    ("fp8_current", True, "groups"),
    ("fp8_block", True, "groups"),
]


@needs_mosaic
@pytest.mark.parametrize(("recipe", "is_grouped", "kind"), TRAINED)
def test_tuned_shapes_include_those_of_training(hopper, monkeypatch, recipe, is_grouped, kind):
    tokens, inputs, outputs, groups = layer = 200, 256, 384, 3
    requested, choose = [], tile_configs.config_for
    monkeypatch.setattr(tile_configs, "config_for", lambda shape: requested.append(shape) or choose(shape))

    def step(x, w, dy):
        options = {"recipe": recipe, "key": jax.random.key(0), "preferred_element_type": BF16}
        if is_grouped:
            y, backward = jax.vjp(lambda x, w: train.ragged_dot(x, w, jnp.array([90, 0, 100]), **options), x, w)
        else:
            y, backward = jax.vjp(lambda x, w: train.dot_general(x, w, DIMENSIONS, **options), x, w)
        return y, backward(dy)

    kernel = (groups, inputs, outputs) if is_grouped else (inputs, outputs)
    sizes = ((tokens, inputs), BF16), (kernel, jnp.float32), ((tokens, outputs), BF16)
    jax.eval_shape(step, *(jax.ShapeDtypeStruct(*each) for each in sizes))
    assert len(requested) == 3
    assert set(requested) <= set(autotune.gemm_keys([kind], [layer[:3]], groups))


@needs_mosaic
@pytest.mark.parametrize("kind", autotune.KINDS)
def test_tuning_runs_each_shape_through_its_kernel(hopper, monkeypatch, kind):
    requested: list[tile_configs.GemmKey] = []
    choose = tile_configs.config_for
    monkeypatch.setattr(tile_configs, "config_for", lambda shape: requested.append(shape) or choose(shape))
    shapes = autotune.gemm_keys([kind], [(200, 256, 384)], 3)
    for shape in shapes:
        result = jax.eval_shape(lambda shape=shape: autotune.run(shape, *autotune.operands(shape)))
        assert result.dtype.itemsize == shape.out_itemsize
    assert requested == shapes


@needs_mosaic
def test_the_configs_of_an_h200_are_of_tuned_shapes():
    from scaledot.kernels.hopper.tiles import Config

    rows = {tile_configs.GemmKey(**row["gemm"]): Config(**row["config"]) for row in tile_configs._table("NVIDIA H200")}
    assert rows.keys() <= set(autotune.gemm_keys(autotune.KINDS))
    assert len(rows) == len(tile_configs._table("NVIDIA H200"))


def test_the_command_line_chooses_kinds_and_layers(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(autotune, "tune", lambda shapes, path, log: called.append((shapes, path)))
    path = tmp_path / "table.json"
    layers = ["--layer", "256", "128", "384", "--layer", "512", "128", "384"]
    assert main(["tune", "--kind", "groups", "integers", *layers, "--groups", "4", "--output", str(path)]) == 0
    assert called == [(autotune.gemm_keys(["groups", "integers"], [(256, 128, 384), (512, 128, 384)], 4), path)]
    assert {shape.row_groups for shape in called[0][0]} == {0, 4}
    with pytest.raises(SystemExit):
        main(["tune", "--kind", "unheard"])

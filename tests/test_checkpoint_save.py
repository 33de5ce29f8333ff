"""Saving: round trips are byte-stable, folders are replaced atomically, and what cannot be stored is refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from data import normal

import scaledot as sd
from scaledot import checkpoint
from scaledot.checkpoint import safetensors, source
from scaledot.checkpoint.writers import WRITERS
from scaledot.formats import FORMATS

GOLDEN = Path(__file__).parent / "golden" / "hf"
READ_ONLY = ("awq", "bnb", "deepseek", "gptoss", "gptq", "torchao")
SAVED = {"ct": "compressed-tensors", "modelopt": "modelopt", "hf": "hf-fp8"}


def stored(folder: Path) -> dict[str, tuple]:
    """The dtype, shape and bytes of every tensor of a checkpoint."""
    opened = source.open_source(folder)
    found = {}
    for name, tensor in opened.tensors.items():
        data = tensor.path.read_bytes()[tensor.start : tensor.stop]
        found[name] = (tensor.dtype, tensor.shape, data)
    return found


def x(shape=(64, 256), seed=0, dtype=jnp.bfloat16):
    return normal(seed, shape, dtype)


def assert_same(a, b):
    leaves, tree = jax.tree.flatten(a)
    others, other_tree = jax.tree.flatten(b)
    assert tree == other_tree
    for left, right in zip(leaves, others, strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir() if not p.name.startswith(READ_ONLY)))
def test_a_published_checkpoint_is_saved_with_the_same_bytes(name, tmp_path):
    folder, layout = GOLDEN / name, SAVED[name.split("_")[0]]
    config = json.loads((folder / "config.json").read_text())
    sections = config["quantization_config"].get("config_groups", {}).values()
    is_int_quantized = any(section.get("format") == "int-quantized" for section in sections)
    activations = "dynamic" if is_int_quantized else None
    checkpoint.save(checkpoint.load(folder), tmp_path / name, layout, config=config, activations=activations)
    assert stored(tmp_path / name) == stored(folder)
    assert_same(checkpoint.load(tmp_path / name), checkpoint.load(folder))


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
def test_the_own_layout_stores_every_published_checkpoint(name, tmp_path):
    loaded = checkpoint.load(GOLDEN / name)
    checkpoint.save(loaded, tmp_path / "model")
    assert_same(checkpoint.load(tmp_path / "model"), loaded)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [256, 255])
def test_the_own_layout_stores_every_format(format, columns, tmp_path):
    q = sd.quantize(x((6, columns)), format, pad=True)
    checkpoint.save({"w": q, "norm": x((8,))}, tmp_path / "model")
    assert_same(checkpoint.load(tmp_path / "model"), {"w": q, "norm": x((8,))})


@pytest.mark.parametrize(
    "quantised",
    [
        lambda: sd.quantize(x(), "int4", block=(64,), calibration="minmax"),
        lambda: sd.quantize(x(), "nvfp4", rotation=sd.Hadamard(16)),
        lambda: sd.quantize(x((3, 4, 64)), "mxfp8"),
        lambda: checkpoint.Permuted(sd.quantize(x(), "int4", block=(64,)), jnp.arange(256, dtype=jnp.int32)[::-1]),
        lambda: checkpoint.Flat(sd.quantize(x((640,)), "nf4"), (10, 64)),
        lambda: checkpoint.Offset(sd.quantize(x(), "int4", block=(32,)), jnp.ones((64, 8), jnp.float32)),
    ],
    ids=["zero points", "rotation", "three axes", "Permuted", "Flat", "Offset"],
)
def test_the_own_layout_stores(quantised, tmp_path):
    q = quantised()
    checkpoint.save({"a.weight": q}, tmp_path / "model")
    assert_same(checkpoint.load(tmp_path / "model"), {"a.weight": q})


@pytest.mark.parametrize("layout", WRITERS)
def test_shards_have_an_index_and_load_as_one(layout, tmp_path):
    tree = {f"layers.{i}.weight": sd.quantize(x(seed=i), "fp8_e4m3") for i in range(4)} | {"norm.weight": x((8,))}
    activations = "dynamic" if layout == "modelopt" else None
    checkpoint.save(tree, tmp_path / "model", layout, max_shard_bytes=40_000, activations=activations)
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    loaded = checkpoint.load(tmp_path / "model")
    assert [np.asarray(q.data).tobytes() for q in loaded.values() if isinstance(q, sd.ScaledArray)] == [
        np.asarray(q.data).tobytes() for q in tree.values() if isinstance(q, sd.ScaledArray)
    ]


def test_files_that_are_not_part_of_the_checkpoint_are_kept(tmp_path):
    folder = tmp_path / "model"
    checkpoint.save({f"w{i}": x() for i in range(3)}, folder, max_shard_bytes=40_000, config={"model_type": "llama"})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("1")
    checkpoint.save({"w": x()}, folder)
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert found == ["model.safetensors", "original/params.json", "tokenizer.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


def test_an_error_leaves_the_old_checkpoint(tmp_path):
    checkpoint.save({"w": x()}, tmp_path / "model")
    before = stored(tmp_path / "model")
    with pytest.raises(ValueError, match="compressed-tensors stores"):
        checkpoint.save({"w.weight": sd.quantize(x(), "nf4")}, tmp_path / "model", "compressed-tensors")
    with pytest.raises(TypeError, match="of type str"):
        checkpoint.save({"w": "text"}, tmp_path / "model")
    assert stored(tmp_path / "model") == before


@pytest.mark.parametrize(
    ("layout", "quantised", "reason"),
    [
        ("hf-fp8", lambda: sd.quantize(x(), "mxfp4"), "is mxfp4 with block"),
        ("hf-fp8", lambda: sd.quantize(x(), "fp8_e4m3", block=(0,)), "or per 2-D block"),
        ("modelopt", lambda: sd.quantize(x(), "int8"), "modelopt stores"),
        ("modelopt", lambda: sd.quantize(x((2, 32, 64)), "nvfp4"), "has 3 axes"),
        ("compressed-tensors", lambda: sd.quantize(x(), "nvfp4", rotation=sd.Hadamard(16)), "is rotated"),
        ("compressed-tensors", lambda: sd.quantize(x(), "mxfp6_e3m2"), "mxfp6_e2m3"),
        ("compresed-tensors", lambda: sd.quantize(x(), "int8"), "did you mean 'compressed-tensors'"),
    ],
)
def test_what_a_layout_cannot_store_is_refused(layout, quantised, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        checkpoint.save({"a.weight": quantised()}, tmp_path / "model", layout)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("dtype", [jnp.float4_e2m1fn, ml_dtypes.float6_e2m3fn, jnp.int4], ids=["F4", "F6", "int4"])
def test_arrays_of_less_than_a_byte_per_element_are_refused_by_name(dtype, tmp_path):
    with pytest.raises(TypeError, match=f"'a.b' has dtype {np.dtype(dtype).name}"):
        checkpoint.save({"a": {"b": np.zeros((2, 8), dtype)}}, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_two_block_sizes_are_refused_by_name(tmp_path):
    tree = {f"w{b}.weight": sd.quantize(x(), "fp8_e4m3", block=(b, b)) for b in (32, 64)}
    with pytest.raises(
        ValueError,
        match=r"'w32.weight' has blocks of \(32, 32\) and float32 scales and 'w64.weight' has blocks of \(64, 64\)",
    ):
        checkpoint.save(tree, tmp_path / "model", "hf-fp8")


def test_formats_of_a_mixed_checkpoint_are_groups_of_modules(tmp_path):
    tree = {"a.weight": sd.quantize(x(), "nvfp4"), "b.weight": sd.quantize(x(), "mxfp8"), "lm_head.weight": x()}
    checkpoint.save(tree, tmp_path / "model", "compressed-tensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a"], ["b"]]
    assert config["ignore"] == ["lm_head"]
    loaded = checkpoint.load(tmp_path / "model")
    assert [loaded[name].format.element for name in ("a.weight", "b.weight")] == ["float4_e2m1fn", "float8_e4m3fn"]


@pytest.mark.parametrize(
    ("format", "block", "has_input_scale", "algorithm"),
    [
        ("fp8_e4m3", None, True, "FP8"),
        ("fp8_e4m3", None, False, "FP8_PER_CHANNEL_PER_TOKEN"),
        ("fp8_e4m3", (0,), True, "FP8_PER_CHANNEL_PER_TOKEN"),
        ("nvfp4", None, True, "NVFP4"),
        ("nvfp4", None, False, "W4A16_NVFP4"),
        ("mxfp8", None, False, "MXFP8"),
    ],
)
def test_the_algorithm_of_modelopt_follows_from_weights_and_activations(
    format, block, has_input_scale, algorithm, tmp_path
):
    tree = {"a.weight": sd.quantize(x(), format, block=block)}
    tree |= {"a.input_scale": jnp.float32(0.5)} if has_input_scale else {}
    checkpoint.save(tree, tmp_path / "model", "modelopt", activations="dynamic")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == algorithm
    assert ("config_groups" in config) == (algorithm in ("FP8", "NVFP4"))
    loaded = checkpoint.load(tmp_path / "model", dequantize=jnp.float32)["a.weight"]
    np.testing.assert_allclose(loaded, sd.dequantize(tree["a.weight"], jnp.float32), rtol=2.0**-22)  # order of scales


def test_fp8_of_modelopt_without_scales_of_activations_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"pass activations='dynamic', or add a static `X\.input_scale`"):
        checkpoint.save({"a.weight": sd.quantize(x(), "fp8_e4m3")}, tmp_path / "model", "modelopt")


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float8_e5m2, jnp.bool_])
def test_arrays_of_every_dtype_are_loaded_from_the_own_layout(dtype, tmp_path):
    tree = {"step": jnp.arange(2).astype(dtype), "w": x()}
    checkpoint.save(tree, tmp_path / "model")
    assert_same(checkpoint.load(tmp_path / "model"), tree)


def test_a_written_file_is_aligned_and_has_a_standard_header(tmp_path):
    checkpoint.save({"w": x((3, 5)), "v": x((2, 2), dtype=jnp.float32)}, tmp_path / "model")
    header = safetensors.read_header(tmp_path / "model" / "model.safetensors")
    assert header.metadata == {"format": "pt", "scaledot": "1"}
    assert header.tensors["w"].start % 8 == 0


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"a": {"b": x()}, "a.b": x()}, r"two arrays would be saved as 'a\.b'"),
        ({"__metadata__": x()}, "is reserved"),
        ({"a": [x()]}, "'a' is of type list"),
        ({"a": None}, "'a' is of type NoneType"),
        ((x(),), "`tree` must be a dict"),
        ({"a": sd.quantize(x(), "int8"), "a.scale": x()}, r"'a\.scale' is the name of an array and of a part"),
    ],
    ids=["duplicate", "metadata", "list", "None", "tuple", "name of a part"],
)
def test_trees_that_would_lose_arrays_are_refused(tree, error, tmp_path):
    with pytest.raises((ValueError, TypeError), match=error):
        checkpoint.save(tree, tmp_path / "model")


def test_saving_through_a_link_replaces_the_folder_that_it_leads_to(tmp_path):
    checkpoint.save({"old": x()}, tmp_path / "step1")
    (tmp_path / "latest").symlink_to("step1")
    for name in ("first", "second"):
        checkpoint.save({name: x()}, tmp_path / "latest")
        assert list(checkpoint.load(tmp_path / "step1")) == [name]
    assert (tmp_path / "latest").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step1"]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_an_error(tmp_path):
    checkpoint.save({"w": x(seed=1)}, tmp_path / "model")
    opened = source.open_source(tmp_path / "model")
    checkpoint.save({"w": x(seed=2)}, tmp_path / "model")
    with pytest.raises(checkpoint.CheckpointError, match="was changed or replaced after the checkpoint was opened"):
        opened.tensors["w"].array(opened.reader).numpy()


def test_a_global_scale_is_stored_verbatim_only_with_its_own_weight(tmp_path):
    """1 / (1 / 3.1) is not 3.1 in float32, so that `load` returns the stored number beside the weight."""
    stored = next(g for g in np.linspace(3, 4, 999, dtype=np.float32) if np.float32(1) / (np.float32(1) / g) != g)
    q = dataclasses.replace(sd.quantize(x(), "nvfp4"), tensor_scale=jnp.float32(np.float32(1) / stored))
    tree = {"a.weight": q, "a.weight_global_scale": np.array([stored])}
    checkpoint.save(tree, tmp_path / "a", "compressed-tensors")
    loaded = checkpoint.load(tmp_path / "a")
    assert float(loaded["a.weight_global_scale"][0]) == float(stored)
    checkpoint.save(loaded | {"a.weight": sd.quantize(x() * 100, "nvfp4")}, tmp_path / "b", "compressed-tensors")
    found = checkpoint.load(tmp_path / "b", dequantize=jnp.float32)["a.weight"]
    np.testing.assert_allclose(found, sd.dequantize(sd.quantize(x() * 100, "nvfp4"), jnp.float32), rtol=2.0**-21)
    checkpoint.save(loaded, tmp_path / "c", "modelopt")
    assert list(checkpoint.load(tmp_path / "c")) == ["a.weight"]


@pytest.mark.parametrize(
    ("format", "tree", "activations", "section"),
    [
        ("int4", {}, "dynamic", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        ("int8", {}, "dynamic", {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        ("fp8_e4m3", {}, "dynamic", {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
        ("fp8_e4m3", {"a.input_scale": 1}, None, {"num_bits": 8, "strategy": "tensor", "dynamic": False}),
        ("mxfp8", {}, "dynamic", {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True}),
        ("nvfp4", {"a.input_global_scale": 1}, None, {"num_bits": 4, "strategy": "tensor_group", "dynamic": "local"}),
        ("nvfp4", {}, None, None),
    ],
)
def test_the_configuration_describes_activations(format, tree, activations, section, tmp_path):
    tree = {"a.weight": sd.quantize(x(), format)} | {name: jnp.ones(1, jnp.float32) for name in tree}
    checkpoint.save(tree, tmp_path / "model", "compressed-tensors", activations=activations)
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    found = config["config_groups"]["group_0"]["input_activations"]
    assert found is None if section is None else section.items() <= found.items()


@pytest.mark.parametrize(("layout", "format"), [("compressed-tensors", "nvfp4"), ("hf-fp8", "fp8_e4m3")])
def test_static_activations_need_their_scales(layout, format, tmp_path):
    with pytest.raises(ValueError, match=r"activations='static' needs the scale 'a\."):
        checkpoint.save({"a.weight": sd.quantize(x(), format)}, tmp_path / "model", layout, activations="static")


KILL_SAVES = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from scaledot.checkpoint import save
from scaledot.checkpoint.layouts import entries
from scaledot.checkpoint.source import open_source

folder, random = Path(sys.argv[1]), np.random.default_rng(7)
def save_step(step):
    save({f"w{i}": np.full((64, 1024), step, np.float32) for i in range(8)}, folder, max_shard_bytes=600_000)
start = time.monotonic()
save_step(0)
seconds = time.monotonic() - start
for kill in range(20):
    reader, writer = os.pipe()
    child = os.fork()  # no JAX backend runs in this process
    if child == 0:
        for step in range(1000 * kill + 1, 1000 * kill + 1000):
            save_step(step)
            os.write(writer, b".")
    os.read(reader, 1)  # the first save is complete
    time.sleep(random.uniform(0, 3 * seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    arrays = {name: array.numpy() for name, array in entries(open_source(folder)).items()}
    values = {float(x) for array in arrays.values() for x in (array.min(), array.max())}
    assert len(arrays) == 8 and len(values) == 1, (sorted(arrays), values)
    assert values.pop() // 1000 == kill, values
print("complete")
"""


def test_kill_9_at_20_random_moments_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    command = [sys.executable, "-W", "ignore:.*fork.*", "-c", KILL_SAVES, tmp_path / "model"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "complete\n"), result.stderr

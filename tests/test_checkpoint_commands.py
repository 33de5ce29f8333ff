"""`inspect`, `convert` and `diff` of checkpoints, as functions and on the command line; and maps of names."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from data import normal

import scaledot as sd
from scaledot import checkpoint
from scaledot.checkpoint import conversion, saving
from scaledot.checkpoint.writers import WRITERS
from scaledot.cli import convert as convert_command
from scaledot.cli import main

UP, DOWN, EMBED, NORM = (
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
)
TREE = {
    UP: normal(0, (256, 128), jnp.bfloat16),
    DOWN: normal(1, (128, 256), jnp.bfloat16),
    EMBED: normal(2, (64, 128), jnp.bfloat16),
    NORM: jnp.ones(128, jnp.bfloat16),
}


@pytest.fixture
def model(tmp_path):
    checkpoint.save(TREE, tmp_path / "model", config={"model_type": "llama", "dtype": "bfloat16"})
    return tmp_path / "model"


def printed(capsys, *words, code=0) -> str:
    assert main([str(word) for word in words]) == code
    return capsys.readouterr().out


def test_inspect_lists_tensors_and_their_sizes(model, capsys):
    lines = printed(capsys, "inspect", model).splitlines()
    assert lines[0] == f"{model}: layout scaledot, 4 tensors, {2 * (2 * 256 * 128 + 64 * 128 + 128):,} bytes"
    assert lines[2].split() == [UP, "bfloat16", "256×128", "65,536"]


def test_inspect_prints_the_snr_against_a_reference(model, capsys):
    quantized = model.parent / "fp8"
    printed(capsys, "convert", model, quantized, "--layout", "hf-fp8", "--format", "fp8_e4m3", "--block", "128x128")
    record = json.loads(printed(capsys, "inspect", quantized, "--reference", model, "--json"))
    rows = {row["name"]: row for row in record["tensors"]}
    assert record["layout"] == "hf-fp8"
    assert (rows[UP]["format"], rows[UP]["block"], rows[UP]["nbytes"]) == ("fp8_e4m3", [128, 128], 256 * 128 + 8)
    assert rows[NORM]["snr_db"] == "inf"
    x = np.asarray(TREE[UP], np.float64)
    noise = x - np.asarray(sd.dequantize(sd.quantize(TREE[UP], "fp8_e4m3", block=(128, 128)), jnp.float32), np.float64)
    assert rows[UP]["snr_db"] == pytest.approx(10 * np.log10(np.sum(x**2) / np.sum(noise**2)), abs=1e-3)


@pytest.mark.parametrize("layout", WRITERS)
def test_convert_quantises_matrices_and_copies_the_rest(model, layout, tmp_path):
    activations = "dynamic" if layout == "modelopt" else None
    checkpoint.convert(model, tmp_path / "out", layout, format="fp8_e4m3", activations=activations)
    loaded = checkpoint.load(tmp_path / "out")
    expected = sd.quantize(TREE[UP], "fp8_e4m3")
    assert np.asarray(loaded[UP].data).tobytes() == np.asarray(expected.data).tobytes()
    assert float(loaded[UP].scale[0, 0]) == float(expected.scale[0, 0])
    assert np.asarray(loaded[EMBED]).tobytes() == np.asarray(TREE[EMBED]).tobytes()
    assert list(loaded[UP].shape) == [256, 128]


@pytest.mark.parametrize("format", ["nvfp4", "compressed_tensors.nvfp4", "int4", "mxfp6_e2m3"])
def test_convert_writes_what_save_writes(model, format, tmp_path):
    row = conversion.named_format(format)
    checkpoint.convert(model, tmp_path / "a", "compressed-tensors", format=format)
    tree = {name: sd.quantize(x, row) if name in (UP, DOWN) else x for name, x in TREE.items()}
    config = {"model_type": "llama", "dtype": "bfloat16"}
    checkpoint.save(tree, tmp_path / "b", "compressed-tensors", config=config)
    assert [(p.name, p.read_bytes()) for p in sorted((tmp_path / "a").iterdir())] == [
        (p.name, p.read_bytes()) for p in sorted((tmp_path / "b").iterdir())
    ]


def test_convert_between_layouts_keeps_codes_and_scales(model, tmp_path):
    checkpoint.convert(model, tmp_path / "a", "compressed-tensors", format="nvfp4")
    checkpoint.convert(tmp_path / "a", tmp_path / "b", "modelopt")
    a, b = (checkpoint.load(tmp_path / name)[UP] for name in "ab")
    for x, y in ((a.data, b.data), (a.scale, b.scale), (a.tensor_scale, b.tensor_scale)):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_convert_to_a_dtype_dequantises(model, tmp_path):
    checkpoint.convert(model, tmp_path / "a", "modelopt", format="mxfp8")
    checkpoint.convert(tmp_path / "a", tmp_path / "b", format="bfloat16")
    expected = checkpoint.load(tmp_path / "a", dequantize=jnp.bfloat16)
    found = checkpoint.load(tmp_path / "b")
    assert {name: x.dtype for name, x in found.items()} == dict.fromkeys(TREE, jnp.bfloat16)
    assert all(np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in TREE)
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())


def test_an_interrupted_conversion_continues_with_the_files_that_are_missing(model, tmp_path, monkeypatch):
    target, written = tmp_path / "out", []
    write_shard = saving._write_shard

    def interrupted_after_one(folder, shard, *rest):
        if written:
            raise KeyboardInterrupt
        written.append(shard.file)
        write_shard(folder, shard, *rest)

    arguments = {"format": "mxfp8", "max_shard_bytes": 20_000}
    monkeypatch.setattr(saving, "_write_shard", interrupted_after_one)
    for number in (1, 2):
        written.clear()
        with pytest.raises(KeyboardInterrupt):
            checkpoint.convert(model, target, **arguments)
        assert written == [f"model-0000{number}-of-00003.safetensors"]
        assert not target.exists()
    written.clear()
    checkpoint.convert(model, target, **arguments)
    assert written == ["model-00003-of-00003.safetensors"]
    assert sorted(checkpoint.load(target)) == sorted(TREE)
    assert sorted(p.suffix for p in target.iterdir()) == [".json", ".json", *[".safetensors"] * 3]


def test_an_interrupted_conversion_with_other_arguments_starts_again(model, tmp_path, monkeypatch):
    write_shard, files = saving._write_shard, []

    def once(folder, shard, *rest):
        files.append(shard.file)
        write_shard(folder, shard, *rest)
        if len(files) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_write_shard", once)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(model, tmp_path / "out", format="mxfp8", max_shard_bytes=20_000)
    checkpoint.convert(model, tmp_path / "out", format="mxfp4", max_shard_bytes=20_000)
    assert checkpoint.load(tmp_path / "out")[UP].format.name == "mxfp4"


def test_diff_of_equal_checkpoints_is_empty(model, capsys):
    assert printed(capsys, "diff", model, model) == "equal\n"


def test_diff_names_what_differs(model, tmp_path, capsys):
    other = {**TREE, UP: TREE[UP].at[0, 0].add(1), "extra": jnp.ones(2)}
    del other[NORM]
    other[DOWN] = jnp.ones((3, 3), jnp.bfloat16)
    checkpoint.save(other, tmp_path / "other")
    rows = json.loads(printed(capsys, "diff", model, tmp_path / "other", "--json", code=1))["differences"]
    assert {row["name"]: (row["kind"], row["detail"]) for row in rows} == {
        UP: ("values", f"1 of {256 * 128} elements"),
        DOWN: ("shape", "[128, 256] and [3, 3]"),
        NORM: ("only in A", ""),
        "extra": ("only in B", ""),
    }


def test_diff_compares_codes_of_equal_formats_and_values_of_others(model, tmp_path):
    for name, format in (("a", "mxfp8"), ("b", "mxfp4")):
        checkpoint.convert(model, tmp_path / name, format=format)
    q = checkpoint.load(tmp_path / "a")
    q[UP] = sd.quantize(2 * TREE[UP], "mxfp8")
    checkpoint.save(q, tmp_path / "c")
    (changed,) = checkpoint.diff(tmp_path / "a", tmp_path / "c")
    assert (changed.name, changed.detail) == (UP, f"{256 * 4} of {256 * 4} scale")
    (first, _) = checkpoint.diff(tmp_path / "a", tmp_path / "b")
    assert first.detail.startswith("mxfp8 and mxfp4, SNR ")


def test_the_command_has_the_layouts_and_exclusions_of_the_library():
    assert tuple(convert_command.LAYOUTS) == tuple(WRITERS)


def test_convert_copies_tokenizers_and_sets_the_dtype(model, tmp_path):
    (model / "tokenizer.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    checkpoint.convert(model, tmp_path / "out", format="float32")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert {x.dtype for x in checkpoint.load(tmp_path / "out").values()} == {np.dtype(np.float32)}


def test_static_scales_of_nvfp4_activations_are_converted_between_layouts(model, tmp_path):
    checkpoint.convert(model, tmp_path / "a", "compressed-tensors", format="nvfp4")
    tree = checkpoint.load(tmp_path / "a") | {f"{UP.removesuffix('.weight')}.input_global_scale": jnp.full(1, 8.0)}
    tree |= {f"{DOWN.removesuffix('.weight')}.input_global_scale": jnp.full(1, 4.0)}
    checkpoint.save(tree, tmp_path / "b", "compressed-tensors")
    checkpoint.convert(tmp_path / "b", tmp_path / "c", "modelopt")
    found = checkpoint.load(tmp_path / "c")
    assert float(found[f"{UP.removesuffix('.weight')}.input_scale"]) == 0.125
    checkpoint.convert(tmp_path / "c", tmp_path / "d", "compressed-tensors")
    assert checkpoint.diff(tmp_path / "b", tmp_path / "d") == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "nvfp4", "include": "*.wieght"}, "selects no tensor"),
        ({"block": (128, 128)}, "`block` needs a `format`"),
    ],
)
def test_conversions_that_would_do_nothing_are_refused(options, error, model, tmp_path):
    with pytest.raises(ValueError, match=error):
        checkpoint.convert(model, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"include": "nothing*"}, "matches no tensor"),
        ({"sharding": {"nothing*": None}}, "'nothing\\*' of `sharding` matches no tensor"),
        ({"sharding": "tp"}, "`sharding` must be a Sharding"),
        ({"sharding": {"*": "tp"}}, "has 'tp' for"),
        ({"rename": "LLAMA"}, "`rename` must be a NameMap"),
        ({"rename": {"{}.{}.weight": "{}/{}.T", "model.{}.{}.{}.{}.weight": "{}/{}/{}/{}"}}, "cannot be transposed"),
        ({"dequantize": jnp.float8_e4m3fn}, "float dtype of at least 16 bits"),
    ],
)
def test_arguments_of_load_are_checked(options, error, model):
    with pytest.raises((ValueError, TypeError), match=error):
        checkpoint.load(model, **options)


def test_added_templates_apply_first():
    names = checkpoint.LLAMA | {"model.layers.{}.mlp.up_proj.weight": "up_{}"}
    assert names.to_path("model.layers.3.mlp.up_proj.weight") == ("up_3", False)
    assert names.to_path("model.layers.3.mlp.down_proj.weight").name == "layers_3/mlp/down_proj/kernel"
    with pytest.raises(ValueError, match="two templates have the same path"):
        checkpoint.NameMap({"a": "x", "b": "x"})


def test_a_missing_checkpoint_is_an_error(capsys):
    assert main(["inspect", "missing"]) == 1
    assert capsys.readouterr().err == "scaledot: error: missing: no such file or folder\n"


def test_an_unknown_format_is_an_error_that_lists_variants(model):
    with pytest.raises(ValueError, match=r"is not in scaledot\.format_variants"):
        checkpoint.convert(model, model.parent / "out", format="compressed_tensors.nvfp5")


NAMES = {
    checkpoint.LLAMA: [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.k_scale",
        "mlp.up_proj.bias",
        "input_layernorm.weight",
    ],
    checkpoint.QWEN: ["self_attn.q_norm.weight", "mlp.gate.weight", "mlp.experts.7.down_proj.weight"],
    checkpoint.MIXTRAL: ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.3.w1.weight"],
    checkpoint.GPT_OSS: [
        "self_attn.sinks",
        "mlp.router.bias",
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj_bias",
    ],
}


@pytest.mark.parametrize(("names", "name"), [(names, name) for names, some in NAMES.items() for name in some])
def test_names_are_restored_from_paths(names, name):
    full = f"model.layers.12.{name}"
    location = names.to_path(full)
    assert location.name.startswith("layers_12/")
    assert names.to_name(location.name) == (full, location.is_transposed)


def test_a_name_without_a_template_is_an_error(model):
    with pytest.raises(
        ValueError, match=r"no template of the name map matches the tensor 'model\.embed_tokens\.weight'"
    ):
        checkpoint.load(model, rename={"model.layers.{}.mlp.{}.weight": "{}/{}/kernel"}, include=[UP, EMBED])
    with pytest.raises(ValueError, match=r"the same number of \{\}"):
        checkpoint.NameMap({"a.{}": "b"})
    with pytest.raises(ValueError, match="two tensors to the path 'x'"):
        checkpoint.load(model, rename=lambda name: "x")

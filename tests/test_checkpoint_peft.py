"""Adapters in the layout of Hugging Face PEFT: bits, names, scaling, and what is refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from scaledot import lora
from scaledot.checkpoint import CheckpointError, safetensors
from scaledot.checkpoint.peft import CONFIG, MODEL, load_adapters, save_adapters
from scaledot.checkpoint.reader import Reader

RULES = {"*/up": lora.Config(4, 8), "*": lora.Config(2, 3)}


def model(params, x):
    for layer in ("0", "1"):
        x = x + jnp.tanh(x @ params[layer]["up"]) @ params[layer]["down"]
    return x


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


@pytest.fixture
def params():
    return {layer: {"up": normal(int(layer), 8, 16), "down": normal(2, 16, 8)} for layer in ("0", "1")}


def trained(adapters):
    """Adapters whose B is not zero any more."""
    return {path: {"a": f["a"], "b": jnp.ones_like(f["b"]) / 3} for path, f in adapters.items()}


def module_of(path):
    layer, name = path.split("/")
    return f"model.layers.{layer}.{name}_proj"


def path_of(module):
    _, _, layer, name = module.split(".")
    return f"{layer}/{name.removesuffix('_proj')}"


def assert_same(a, b):
    assert a.keys() == b.keys()
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(dict(b)), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.fixture
def saved(tmp_path, params):
    adapters = trained(lora.init(model, RULES, key=jax.random.key(0))(params, normal(3, 2, 8)))
    save_adapters(tmp_path / "saved", adapters, RULES, names=module_of, base_model="org/base")
    return tmp_path / "saved", adapters


def test_adapters_are_restored_bit_for_bit_with_rules_that_give_the_same_merged_model(saved, params):
    path, adapters = saved
    loaded, rules = load_adapters(path, names=path_of)
    assert_same(loaded, adapters)
    assert rules == {name: RULES["*/up" if name.endswith("up") else "*"] for name in adapters}
    x = normal(3, 2, 8)
    merged, again = lora.merge(model, RULES)(adapters, params, x), lora.merge(model, rules)(loaded, params, x)
    assert_same(again, merged)
    np.testing.assert_array_equal(
        lora.adapted(model, rules)(loaded, params, x), lora.adapted(model, RULES)(adapters, params, x)
    )


def test_files_are_those_of_peft(saved):
    path, adapters = saved
    config = json.loads((path / CONFIG).read_text())
    assert (config["peft_type"], config["bias"], config["use_rslora"]) == ("LORA", "none", False)
    assert (config["base_model_name_or_path"], config["task_type"]) == ("org/base", "CAUSAL_LM")
    assert config["target_modules"] == sorted(map(module_of, adapters))
    tensors = safetensors.read_header(path / MODEL).tensors
    assert set(tensors) == {f"base_model.model.{module_of(p)}.lora_{f}.weight" for p in adapters for f in "AB"}
    stored = {name: tensor.array(Reader()).numpy() for name, tensor in tensors.items()}
    for name, factors in adapters.items():
        prefix = f"base_model.model.{module_of(name)}"
        np.testing.assert_array_equal(stored[f"{prefix}.lora_A.weight"], factors["a"].T)
        np.testing.assert_array_equal(stored[f"{prefix}.lora_B.weight"], factors["b"].T)
    ranks = {
        name: config["rank_pattern"].get("^" + module_of(name).replace(".", r"\."), config["r"]) for name in adapters
    }
    assert ranks == {name: factors["a"].shape[1] for name, factors in adapters.items()}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("stabilized", [False, True])
def test_dtype_scaling_and_dropout_are_restored(tmp_path, dtype, stabilized):
    config = lora.Config(2, 2.5, dropout=0.25, rank_stabilized=stabilized, dtype=dtype)
    adapters = {"w": {"a": normal(0, 8, 2, dtype=dtype), "b": normal(1, 2, 4, dtype=dtype)}}
    save_adapters(tmp_path, adapters, config, names=str)
    loaded, rules = load_adapters(tmp_path)
    assert_same(loaded, adapters)
    assert rules == {"w": config}
    assert rules["w"].scaling == config.scaling


def test_stacked_layers_are_one_module_each(tmp_path):
    adapters = {"blocks/w": {"a": normal(0, 3, 2, 8, 4), "b": normal(1, 3, 2, 4, 5)}}
    save_adapters(
        tmp_path, adapters, lora.Config(4, 4), names=lambda path, layer, expert: f"layers.{layer}.e{expert}.w"
    )
    assert len(safetensors.read_header(tmp_path / MODEL).tensors) == 12

    def location(module):
        _, layer, expert, _ = module.split(".")
        return "blocks/w", int(layer), int(expert[1:])

    loaded, rules = load_adapters(tmp_path, names=location)
    assert_same(loaded, adapters)
    assert rules == {"blocks/w": lora.Config(4, 4)}
    with pytest.raises(ValueError, match="one for each layer"):
        load_adapters(
            tmp_path, names=lambda module: (location(module)[0], location(module)[1] + 1, location(module)[2])
        )
    with pytest.raises(ValueError, match="another one"):
        load_adapters(tmp_path, names=lambda module: "blocks/w")


@pytest.mark.parametrize(
    "key", ["up_proj", "layers.0.up_proj", "^model.layers.0.up_proj", r"^model\.layers\.0\.up_proj$"]
)
def test_patterns_are_ends_of_names_of_modules(saved, key):
    path, _ = saved
    config = json.loads((path / CONFIG).read_text())
    config |= {"alpha_pattern": {key: 64}, "lora_alpha": 7}
    (path / CONFIG).write_text(json.dumps(config))
    _, rules = load_adapters(path)
    alphas = {name: config.alpha for name, config in rules.items()}
    expected = {name: 64 if name.endswith("0.up_proj") or key == name.split(".")[-1] else 7 for name in alphas}
    assert alphas == expected


REFUSED = {
    "peft_type": "IA3",
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "fan_in_fan_out": True,
    "lora_bias": True,
    "layer_replication": [[0, 1]],
    "target_parameters": ["experts.w"],
    "alora_invocation_tokens": [1],
    "a_later_variant": {"on": 1},
    "init_lora_weights": "pissa",
    "use_rslora": "yes",
    "rank_pattern": {"(a+)+": 4},
    "alpha_pattern": ["q"],
    "lora_alpha": "8",
    "lora_dropout": 1.5,
    "r": 10**400,
}


@pytest.mark.parametrize("field", list(REFUSED))
def test_what_is_not_applied_is_refused_by_name(saved, field):
    path, _ = saved
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"rank_pattern": {}, "alpha_pattern": {}, field: REFUSED[field]}))
    named = {"lora_alpha": "'8'", "lora_dropout": "dropout", "r": "rank"}.get(field, field)
    with pytest.raises(CheckpointError, match=rf"{CONFIG}.*{named}|rank is 1000"):
        load_adapters(path)


TENSORS = {
    "embedding": ({"x.lora_embedding_A": (2, 3)}, "lora_embedding_A"),
    "magnitude": ({"x.lora_magnitude_vector": (3,)}, "lora_magnitude_vector"),
    "bias": ({"x.lora_A.weight": (2, 3), "x.lora_B.weight": (4, 2), "x.lora_B.bias": (4,)}, "lora_B.bias"),
    "without B": ({"x.lora_A.weight": (2, 3)}, "lora_B.weight of its module is missing"),
    "another rank": ({"x.lora_A.weight": (3, 3), "x.lora_B.weight": (4, 3)}, r"\[3, 3\].*rank is 2"),
    "no matrix": ({"x.lora_A.weight": (2, 3, 1), "x.lora_B.weight": (4, 2)}, "expected a matrix"),
}


@pytest.mark.parametrize(("shapes", "reason"), TENSORS.values(), ids=list(TENSORS))
def test_tensors_that_are_not_factors_are_refused_by_name(tmp_path, shapes, reason):
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    pending = [
        safetensors.Pending(f"base_model.model.{n}", "F32", s, [np.zeros(s, np.float32)]) for n, s in shapes.items()
    ]
    with (tmp_path / MODEL).open("wb") as file:
        safetensors.write(file, pending, {})
    with pytest.raises(CheckpointError, match=rf"{MODEL}.*tensor '.*{reason}"):
        load_adapters(tmp_path)


def test_arguments_that_cannot_be_saved_are_refused(tmp_path):
    adapters = {path: {"a": jnp.ones((8, 2)), "b": jnp.ones((2, 4))} for path in ("u", "v")}
    with pytest.raises(ValueError, match="'u' and 'v' to the same module"):
        save_adapters(tmp_path, adapters, lora.Config(2, 4), names=lambda path: "w")
    with pytest.raises(ValueError, match="no config of `rules` matches the path of the adapter 'v'"):
        save_adapters(tmp_path, adapters, {"u": lora.Config(2, 4), "v": None, "*": lora.Config(2, 4)}, names=str)
    with pytest.raises(ValueError, match="one `dropout`"):
        save_adapters(tmp_path, adapters, {"u": lora.Config(2, 4), "*": lora.Config(2, 4, dropout=0.5)}, names=str)
    with pytest.raises(ValueError, match="whose rank is 3"):
        save_adapters(tmp_path, adapters, lora.Config(3, 4), names=str)
    with pytest.raises(ValueError, match="empty"):
        save_adapters(tmp_path, {}, lora.Config(3, 4), names=str)
    assert not list(tmp_path.iterdir())

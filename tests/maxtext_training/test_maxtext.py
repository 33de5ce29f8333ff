"""Unmodified MaxText trains through TransformerEngine's import alias and through `scaledot.compat.maxtext.install`."""

import functools
import pathlib
import re
import subprocess
import sys

import pytest
from training import BASE, STEPS, TINY, Trained, trained

from scaledot.compat import maxtext

# MaxText's names of TransformerEngine's recipes, with scaledot's names of the same recipes.
CHOICES = {
    "te_fp8_delayedscaling": "fp8_delayed",
    "te_fp8_currentscaling": "fp8_current",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_block": "mixtral", "base_moe_mlp_dim": 256}
MESH = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
BY_LAYERS = [
    pytest.param(True, id="scanned", marks=pytest.mark.xdist_group("scanned")),
    pytest.param(False, id="unrolled", marks=pytest.mark.xdist_group("unrolled")),
]
NORMS = ("loss", "grad_norm", "param_norm")


@functools.cache
def through_the_alias(choice: str, **options) -> Trained:
    return trained(quantization=choice, **options)


def assert_close_to_unquantised(found: Trained, recipe: str, **options) -> None:
    """Compares the last losses. Without te_no_quant, MaxText draws other initial parameters."""
    expected = through_the_alias("te_no_quant", **options).last_loss
    tolerance = 0.35 if "nvfp4" in recipe else 0.05
    assert abs(found.last_loss - expected) <= tolerance * expected
    assert found.values("loss") != through_the_alias("te_no_quant", **options).values("loss")


@pytest.mark.parametrize("scan_layers", BY_LAYERS)
@pytest.mark.parametrize("choice", [*CHOICES, "te_nvfp4_no_rht"])
def test_training_through_the_alias(choice, scan_layers):
    assert_close_to_unquantised(through_the_alias(choice, scan_layers=scan_layers), choice, scan_layers=scan_layers)


@pytest.mark.parametrize("scan_layers", BY_LAYERS)
@pytest.mark.parametrize("choice", CHOICES)
def test_recipes_train_as_through_the_alias(choice, scan_layers):
    """Bit for bit, with one exception: if layers are scanned, `install` gives nvfp4 a new key in each step."""
    found = trained(CHOICES[choice], scan_layers=scan_layers)
    if choice == "te_nvfp4" and scan_layers:
        assert_close_to_unquantised(found, "nvfp4", scan_layers=scan_layers)
        return
    expected = through_the_alias(choice, scan_layers=scan_layers)
    assert found.values(*NORMS) == expected.values(*NORMS)
    histories = [sorted(v.tolist() for v in run.histories().values()) for run in (found, expected)]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("scan_layers", BY_LAYERS)
def test_delayed_scaling_has_one_entry_per_step_and_layer(scan_layers):
    histories = through_the_alias("te_fp8_delayedscaling", scan_layers=scan_layers).histories()
    assert len(histories) == 7 * 3 * (1 if scan_layers else 2)  # matmuls of a layer, tensors, layers
    for path, history in histories.items():
        entries = (history != 0).reshape(-1, history.shape[-1]).sum(axis=-1)
        assert entries.tolist() == [STEPS] * (2 if scan_layers else 1), path


@pytest.mark.xdist_group("scanned")
def test_remat_saves_residuals_under_the_name_of_maxtext():
    """Saved or recomputed, the values are the same."""
    found = trained("fp8_current", remat_policy="minimal_with_quantization")
    assert found.values(*NORMS) == trained("fp8_current", remat_policy="minimal").values(*NORMS)
    assert_close_to_unquantised(found, "fp8_current", scan_layers=True)


@pytest.mark.xdist_group("unrolled")
@pytest.mark.parametrize("choice", ["te_fp8_delayedscaling", "te_mxfp8"])
def test_training_with_fsdp_and_tensor_parallelism(choice):
    found = through_the_alias(choice, **MESH)
    assert_close_to_unquantised(found, choice, **MESH)
    assert trained(CHOICES[choice], **MESH).values(*NORMS) == found.values(*NORMS)


@pytest.mark.xdist_group("unrolled")
def test_explicit_sharding():
    found = trained("fp8_current", shard_mode="explicit", **MESH)
    assert_close_to_unquantised(found, "fp8_current", **MESH)


@pytest.mark.xdist_group("scanned")
def test_gradient_accumulation():
    options = {"gradient_accumulation_steps": 2}
    assert_close_to_unquantised(trained("fp8_current", **options), "fp8_current", **options)
    with pytest.raises(ValueError, match=r"fp8_delayed has delayed scaling, .* with gradient_accumulation_steps=2"):
        trained("fp8_delayed", **options)


@functools.cache
def unquantised_experts(**options) -> Trained:
    """te_no_quant cannot compute dense experts."""
    return trained({"*": None}, **EXPERTS, **options)


@pytest.mark.parametrize(
    ("recipe", "sparse"),
    [
        *(pytest.param(r, False, marks=pytest.mark.xdist_group("unrolled")) for r in ("fp8_delayed", "nvfp4")),
        *(pytest.param(r, True, marks=pytest.mark.xdist_group("scanned")) for r in ("mxfp8", "nvfp4")),
    ],
)
def test_experts(recipe, sparse):
    rules = {"*/gate": None, "*": recipe}
    found, expected = trained(rules, sparse_matmul=sparse, **EXPERTS), unquantised_experts(sparse_matmul=sparse)
    assert abs(found.last_loss - expected.last_loss) <= (0.35 if recipe == "nvfp4" else 0.05) * expected.last_loss
    for path, history in found.histories().items():
        assert (history != 0).sum() == 2 * STEPS, path  # of two layers


@pytest.mark.xdist_group("scanned")
def test_sparse_experts_are_quantised_by_their_rule():
    """Losses differ from those without the rule of experts, and the layer that the rule names is logged."""
    experts, others = ({"*/MoeBlock_0/w*": recipe, "*": None} for recipe in ("fp8_current", None))
    found, expected = (trained(rules, **EXPERTS) for rules in (experts, others))
    assert found.values("loss") != expected.values("loss")
    assert expected.values(*NORMS) == unquantised_experts(sparse_matmul=True).values(*NORMS)


@pytest.mark.xdist_group("scanned")
@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ("fp8_delayed", {}, "shard_map, which cannot return amax histories"),
        ("mxfp8", {"megablox": False}, "megablox=false"),
    ],
)
def test_experts_that_cannot_be_quantised_are_named(rules, options, message):
    with pytest.warns(UserWarning, match=rf"decoder/layers/MoeBlock_0/wi_0 \(RoutedMoE: .*{message}"):
        trained({"*/MoeBlock_0/w*": rules, "*": None}, **EXPERTS, **options, steps=1)


@pytest.mark.xdist_group("unrolled")
def test_rules_by_path():
    rules = {"decoder/layers_0/*": None, "*/self_attention/*": "fp8_current", "*/mlp/*": "fp8_delayed"}
    found = trained(rules, scan_layers=False)
    layers = {path.rsplit("/", 2)[0] for path in found.histories()}
    assert layers == {f"model/decoder/layers_1/mlp/{name}" for name in ("wi_0", "wi_1", "wo")}
    with pytest.raises(ValueError, match=r"'decoder/layers_9/.' of `rules` matches no layer"):
        trained({"decoder/layers_9/*": None, "*": "mxfp8"}, scan_layers=False)


def test_other_quantisation_is_refused():
    with pytest.raises(ValueError, match=r"`quantization` of MaxText is 'fp8', but .*; leave `quantization` empty"):
        trained("mxfp8", quantization="fp8")
    with pytest.raises(ValueError, match="`recipe` 'mxfp9' is not in RECIPES"):
        maxtext.install("mxfp9")
    with pytest.raises(ValueError, match=re.escape("fp8_delayed")):
        maxtext.install({"*": "fp8_delay"})


@pytest.mark.xdist_group("unrolled")
def test_the_program_of_the_documentation(tmp_path):
    page = pathlib.Path(__file__).parents[2] / "docs" / "howto" / "maxtext.md"
    (program,) = re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL)
    metrics = tmp_path / "metrics.jsonl"
    settings = {**TINY, "run_name": "page", "base_output_directory": tmp_path, "metrics_file": metrics, "steps": 1}
    (tmp_path / "program.py").write_text(program)
    arguments = [sys.executable, tmp_path / "program.py", BASE, *(f"{k}={v}" for k, v in settings.items())]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(program.splitlines()) <= 10
    assert re.search(r"decoder/layers/mlp/wi_0 +DenseGeneral  mxfp8", done.stderr)
    assert len(metrics.read_text().splitlines()) == 1

"""gpt-oss checkpoints: MXFP4 experts under Hugging Face's and OpenAI's names, and bad input."""

import numpy as np
import pytest
from checkpoint_files import (
    BF16,
    E8M0,
    GOLDEN,
    assert_dequantizes_to,
    assert_same_bits,
    assert_slices_agree,
    lazy_leaves,
    nibbles,
    random_codes,
    random_scales,
    write,
)

from scaledot import checkpoint
from scaledot.checkpoint import CheckpointError

pytestmark = pytest.mark.optimized  # compares exact bits

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
GPT_OSS = GOLDEN / "gptoss_mxfp4"
EXPECTED = np.load(GPT_OSS / "expected.npz")
ORIGINAL = "block.0.mlp.mlp1_weight"


def experts(name: str, separator: str = "_", **replaced) -> dict[str, np.ndarray]:
    """Two experts with 6 outputs and 96 inputs."""
    arrays = {"blocks": random_codes((2, 6, 3, 16), np.uint8), "scales": random_scales((2, 6, 3), np.uint8)}
    return {f"{name}{separator}{part}": array for part, array in (arrays | replaced).items() if array is not None}


def values(tensors: dict[str, np.ndarray]) -> np.ndarray:
    packed, exponents = tensors.values()
    return (nibbles(packed) * np.exp2(exponents.astype(np.float32) - 127)[..., None]).reshape(*packed.shape[:2], -1)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_experts_have_the_values_that_transformers_decodes_transposed(name):
    assert_same_bits(checkpoint.load(GPT_OSS, dequantize=BF16)[name], EXPECTED[name].swapaxes(-1, -2), BF16)


@pytest.mark.parametrize("separator", ["_", "."])
@pytest.mark.parametrize("config", [MXFP4, None], ids=["config", "no config"])
def test_both_names_give_weights_of_experts_by_outputs_by_inputs(separator, config, tmp_path):
    tensors = experts(ORIGINAL, separator)
    bias = np.ones((2, 6), BF16)
    write(tmp_path, {**tensors, "block.0.mlp.mlp1_bias": bias}, config)
    loaded = checkpoint.load(tmp_path)
    assert sorted(loaded) == ["block.0.mlp.mlp1_bias", ORIGINAL]
    assert loaded[ORIGINAL].shape == (2, 6, 96)
    assert_dequantizes_to(tmp_path, ORIGINAL, values(tensors))


def test_scales_may_have_the_dtype_e8m0(tmp_path):
    tensors = experts("x")
    write(tmp_path, tensors | {"x_scales": tensors["x_scales"].view(E8M0)}, MXFP4)
    assert_dequantizes_to(tmp_path, "x", values(tensors))


def test_codes_are_transferred_as_the_bytes_of_the_file(tmp_path):
    tensors = experts("x")
    codes = lazy_leaves(write(tmp_path, tensors, MXFP4))["['x'].data"]
    np.testing.assert_array_equal(codes.packed.numpy(), tensors["x_blocks"].reshape(2, 6, 48))


def test_slices_of_every_leaf_agree_with_the_whole_array():
    assert_slices_agree(GPT_OSS, seed=0)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"scales": None}, "tensor 'x_blocks': 'x_scales', which belongs to it, is missing"),
        ({"blocks": None}, "tensor 'x_scales': no weight uses this tensor"),
        (
            {"scales": np.zeros((2, 6, 4), np.uint8)},
            r"tensor 'x_scales': the shape is \[2, 6, 4\]; expected \[2, 6, 3\]",
        ),
        ({"blocks": np.zeros((2, 6, 3, 8), np.uint8)}, r"tensor 'x_blocks': the shape is \[2, 6, 3, 8\]"),
        ({"blocks": np.zeros(16, np.uint8)}, r"tensor 'x_blocks': the shape is \[16\]"),
        ({"blocks": np.zeros((2, 6, 3, 16), np.int8)}, "tensor 'x_blocks': the dtype is I8; expected U8"),
    ],
    ids=["no scales", "no blocks", "scale shape", "bytes of a block", "axes", "dtype"],
)
def test_wrong_experts_are_an_error_that_names_the_tensor(replaced, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}"):
        checkpoint.load(write(tmp_path, experts("x", **replaced), MXFP4))

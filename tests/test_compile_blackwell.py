"""What the compiler makes of contractions for a B200, without one: `make test-gpu-compile`."""

import re

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from hopper import needs_mosaic

import scaledot as sd
from benchmarks.gpu import cast

if not gpu_compile.is_possible():
    pytest.skip(gpu_compile.MISSING, allow_module_level=True)


def compiled_for(device: str, f, *shapes) -> str:
    return gpu_compile.compiled_for(device, f, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def calls(text: str) -> set[str]:
    return set(re.findall(r'custom_call_target="([^"]+)"', text))


@pytest.mark.parametrize(("lhs", "rhs"), [("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4")])
def test_block_scaled_formats_become_the_hardware_call(lhs, rhs):
    def product(x, w):
        return sd.matmul(sd.quantize(x, lhs), sd.quantize(w, rhs, axis=0))

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (256, 512), (512, 384)))
    assert "__cudnn$blockScaledDot" not in calls(compiled_for("H200", product, (256, 512), (512, 384)))


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_the_names_of_jax_nn_do_too(mode):
    configs = [sd.compat.jax_nn.get_scaled_dot_general_config(mode)] * 3

    def product(x, w):
        return sd.compat.jax_nn.scaled_dot_general(x, w, (((2,), (1,)), ((0,), (0,))), configs=configs)

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (2, 128, 256), (2, 256, 128)))


def test_square_blocks_of_a_weight_reach_it():
    def product(x, w):
        return sd.matmul(sd.quantize(x, "nvfp4"), sd.quantize(w, "nvfp4", block=(16, 16)))

    assert "__cudnn$blockScaledDot" in calls(compiled_for("B200", product, (256, 512), (512, 384)))


@pytest.mark.parametrize("device", gpu_compile.DEVICES)
def test_eight_bit_floats_and_integers_are_multiplied_as_they_are(device):
    for format, element in (("fp8_e4m3", "f8e4m3fn"), ("int8", "s8")):

        def product(x, w, format=format):
            return sd.matmul(sd.quantize(x, format), sd.quantize(w, format, axis=0))

        text = compiled_for(device, product, (256, 512), (512, 384))
        fused = [line for line in text.splitlines() if re.search(r" dot\(|gemm|cublas", line)]
        assert any(element in line for line in text.splitlines())
        assert fused
        assert not any(re.search(r"bf16\[256,512\]", line) for line in text.splitlines())


@needs_mosaic
@pytest.mark.parametrize("case", cast.CASES, ids=lambda case: case.name)
def test_the_fused_casts_would_spill_nothing_there_either(monkeypatch, tmp_path, case):
    assert not any(gpu_compile.spills_of_cast("B200", case, gpu_compile.listings(monkeypatch, tmp_path)))

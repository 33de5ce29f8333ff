"""Programs compiled for a B200 on a machine without one: `make test-gpu-compile`."""

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


def custom_calls(text: str) -> set[str]:
    return set(re.findall(r'custom_call_target="([^"]+)"', text))


@pytest.mark.parametrize(("lhs", "rhs"), [("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4")])
def test_block_scaled_formats_compile_to_cudnn_block_scaled_dots(lhs, rhs):
    def matmul(x, w):
        return sd.matmul(sd.quantize(x, lhs), sd.quantize(w, rhs, axis=0))

    assert "__cudnn$blockScaledDot" in custom_calls(compiled_for("B200", matmul, (256, 512), (512, 384)))
    assert "__cudnn$blockScaledDot" not in custom_calls(compiled_for("H200", matmul, (256, 512), (512, 384)))


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4"])
def test_compat_jax_nn_compiles_to_cudnn_block_scaled_dots(mode):
    configs = [sd.compat.jax_nn.get_scaled_dot_general_config(mode)] * 3

    def matmul(x, w):
        return sd.compat.jax_nn.scaled_dot_general(x, w, (((2,), (1,)), ((0,), (0,))), configs=configs)

    assert "__cudnn$blockScaledDot" in custom_calls(compiled_for("B200", matmul, (2, 128, 256), (2, 256, 128)))


def test_16x16_blocks_of_a_weight_compile_to_cudnn_block_scaled_dots():
    def matmul(x, w):
        return sd.matmul(sd.quantize(x, "nvfp4"), sd.quantize(w, "nvfp4", block=(16, 16)))

    assert "__cudnn$blockScaledDot" in custom_calls(compiled_for("B200", matmul, (256, 512), (512, 384)))


@pytest.mark.parametrize("device", gpu_compile.DEVICES)
def test_fp8_and_int8_codes_are_multiplied_without_upcast(device):
    for format, element in (("fp8_e4m3", "f8e4m3fn"), ("int8", "s8")):

        def matmul(x, w, format=format):
            return sd.matmul(sd.quantize(x, format), sd.quantize(w, format, axis=0))

        text = compiled_for(device, matmul, (256, 512), (512, 384))
        matmuls = [line for line in text.splitlines() if re.search(r" dot\(|gemm|cublas", line)]
        assert any(element in line for line in text.splitlines())
        assert matmuls
        assert not any(re.search(r"bf16\[256,512\]", line) for line in text.splitlines())


@needs_mosaic
@pytest.mark.parametrize("case", cast.CASES, ids=lambda case: case.name)
def test_hopper_casts_compiled_for_blackwell_spill_no_registers(monkeypatch, tmp_path, case):
    assert not any(gpu_compile.spills_of_cast("B200", case, gpu_compile.ptxas_reports(monkeypatch, tmp_path)))

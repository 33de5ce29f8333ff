"""Implementations of the dense step by other libraries, through their public APIs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.implementations import Implementation, jax_implementation, torch_implementation


def linen_implementations(bfloat16_name: str, fp8_name: str, outputs: int, x, w, dy) -> Iterator[Implementation]:
    """Flax's nn.Dense in bfloat16 and, as in TransformerEngine's tutorial, with scaledot's fp8 dot_general."""

    def implementation(name: str, make_dot_general_cls: Callable[[], Any], is_ours: bool) -> Implementation:
        def build():
            from benchmarks.gpu.flax_layers import dense_step

            step, variables = dense_step(outputs, make_dot_general_cls(), w)
            return jax_implementation(name, step, variables, x, dy).build()

        return Implementation(name, build, ("flax",), is_ours)

    def fp8_current():
        from scaledot.compat.transformer_engine import flax as te_flax
        from scaledot.compat.transformer_engine.recipe import Float8CurrentScaling

        return te_flax.make_dot_general_cls(Float8CurrentScaling())

    yield implementation(bfloat16_name, lambda: None, False)
    yield implementation(fp8_name, fp8_current, True)


def jax_implementations(step_of: Callable[..., Any], outputs: int, x, w, dy) -> Iterator[Implementation]:
    yield _flax_op("flax Fp8DirectDotGeneralOp, nn.Dense", "Fp8DirectDotGeneralOp", outputs, x, w, dy)
    yield _flax_op("flax Fp8DotGeneralOp, nn.Dense", "Fp8DotGeneralOp", outputs, x, w, dy)
    yield jax_implementation("jax.nn.scaled_dot_general mxfp8", step_of(_jax_nn("mxfp8")), x, w, dy)
    yield jax_implementation("jax.nn.scaled_dot_general nvfp4", step_of(_jax_nn("nvfp4")), x, w, dy)
    yield Implementation("qwix fp8", lambda: jax_implementation("qwix", step_of(_qwix()), x, w, dy).build(), ("qwix",))


def _flax_op(name: str, op: str, outputs: int, x, w, dy) -> Implementation:
    def build():
        from flax.linen import fp8_ops

        from benchmarks.gpu.flax_layers import dense_step

        step, variables = dense_step(outputs, getattr(fp8_ops, op), w)
        return jax_implementation(name, step, variables, x, dy).build()

    return Implementation(name, build, ("flax",))


def _jax_nn(mode: Any) -> Callable[..., Any]:
    def layer(x, w):
        config = jax.nn.get_scaled_dot_general_config(mode)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        w = w.astype(jnp.bfloat16)
        return jax.nn.scaled_dot_general(x, w, dims, preferred_element_type=jnp.bfloat16, configs=[config] * 3)

    return layer


def _qwix() -> Callable[..., Any]:
    """Qwix quantises models, not single matmuls, so the layer is a Flax model of one nn.Dense."""
    import qwix  # pyright: ignore[reportMissingImports]  (an optional library)
    from flax import linen as nn

    def layer(x, w):
        model = nn.Dense(w.shape[1], use_bias=False, dtype=jnp.bfloat16)
        rule = qwix.QtRule(
            weight_qtype="float8_e4m3fn",
            act_qtype="float8_e4m3fn",
            bwd_qtype="float8_e5m2",
        )
        quantized = qwix.quantize_model(model, qwix.QtProvider([rule]))
        return quantized.apply({"params": {"kernel": w}}, x)

    return layer


def torch_implementations(case) -> Iterator[Implementation]:
    def make(prepare: Callable[[Any], Any]) -> Callable[[], Callable[[], Any]]:
        def build():
            import torch  # pyright: ignore[reportMissingImports]

            torch.manual_seed(0)
            layer = torch.nn.Linear(case.inputs, case.outputs, bias=False, device="cuda", dtype=torch.float32)
            torch.nn.init.normal_(layer.weight)
            model = torch.compile(prepare(torch.nn.Sequential(layer)))
            shape = case.batch, case.sequence
            x = torch.randn(*shape, case.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn(*shape, case.outputs, device="cuda", dtype=torch.bfloat16)

            def step():
                x.grad = layer.weight.grad = None
                with torch.autocast("cuda", torch.bfloat16):
                    y = model(x)
                (y * dy).sum().backward()
                return x.grad

            return step

        return build

    def float8(model):
        from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

        return convert_to_float8_training(model)

    yield torch_implementation("torch.compile bfloat16", make(lambda model: model))
    yield torch_implementation("torchao float8 tensorwise", make(float8), ("torch", "torchao"))

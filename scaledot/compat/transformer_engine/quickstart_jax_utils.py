"""The helper functions of TransformerEngine's JAX tutorial, under its module name."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def speedometer(
    model_apply_fn: Callable,
    variables: Any,
    input: jax.Array,
    output_grad: jax.Array,
    model_init_fn: Callable | None = None,
    forward_kwargs: dict[str, Any] | None = None,
    autocast_kwargs: dict[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
    rngs: dict[str, jax.Array] | None = None,
) -> float:
    """Prints and returns the mean time in ms of a forward and backward pass.

    Unlike TransformerEngine's, it blocks on the last result before it stops the clock.

    >>> ms = speedometer(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)), jnp.ones((2, 4)), timing_iters=2)
    Mean time: ... ms
    """
    step = create_train_step_fn(model_apply_fn, autocast_kwargs, forward_kwargs)

    def run(first: int, count: int) -> float:
        start, result = time.perf_counter(), None
        for i in range(first, first + count):
            result = step(variables, input, output_grad, _rngs_of_step(rngs or {}, i))
            if jax.default_backend() == "cpu":  # collectives of concurrent executions can deadlock on the CPU backend
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(0, warmup_iters)
    mean = 1000 * run(warmup_iters, timing_iters) / timing_iters
    print(f"Mean time: {mean} ms")
    return mean


def create_train_step_fn(
    model_apply_fn: Callable,
    autocast_kwargs: dict[str, Any] | None = None,
    forward_kwargs: dict[str, Any] | None = None,
) -> Callable:
    """Returns a jitted function that computes sum(model output * output_grad) and its gradients.

    Its arguments are (variables, input, output_grad, rngs), its gradients those of (variables, input).

    >>> step = create_train_step_fn(lambda w, x: x @ w)
    >>> loss, (dw, dx) = step(jnp.ones((4, 2)), jnp.ones((3, 4)), jnp.ones((3, 2)), {})
    >>> float(loss), dw.shape, dx.shape
    (24.0, (4, 2), (3, 4))
    """
    if autocast_kwargs is not None and autocast_kwargs.get("enabled", True):
        raise ValueError("`autocast_kwargs` must be None: a recipe is an argument of a layer here")

    def loss(variables, input, output_grad, rngs):
        options = {**(forward_kwargs or {}), **({"rngs": rngs} if rngs else {})}
        y = model_apply_fn(variables, input, **options)
        # Not jnp.vdot, whose ravel raises for arrays that are sharded along explicit mesh axes.
        elementwise = y.astype(jnp.float32) * output_grad.astype(jnp.float32)
        return jnp.sum(elementwise).astype(jnp.result_type(y, output_grad))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def _rngs_of_step(rngs: dict[str, jax.Array], step: int) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, step) for name, key in rngs.items()}


def compare_fwd_bwd(
    ref_apply_fn: Callable,
    ref_variables: Any,
    test_apply_fn: Callable,
    test_variables: Any,
    *,
    input: jax.Array,
    output_grad: jax.Array,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    rtol_dW: float | None = None,  # noqa: N803
    atol_dW: float | None = None,  # noqa: N803
    rngs: dict[str, jax.Array] | None = None,
) -> None:
    """Raises AssertionError unless two models have equal outputs and gradients, within the tolerances.

    >>> model = lambda variables, x: x @ variables["params"]
    >>> w, x = {"params": jnp.ones((4, 2))}, jnp.ones((3, 4))
    >>> compare_fwd_bwd(model, w, model, w, input=x, output_grad=jnp.ones((3, 2)))
    """
    options = {"rngs": rngs} if rngs else {}
    reference = _forward_and_backward(ref_apply_fn, ref_variables, input, output_grad, {})
    actual_results = _forward_and_backward(test_apply_fn, test_variables, input, output_grad, options)
    parameter_tolerance = (rtol if rtol_dW is None else rtol_dW, atol if atol_dW is None else atol_dW)
    for name, expected_tree in reference.items():
        tolerance = parameter_tolerance if name == "gradient of parameters" else (rtol, atol)
        for actual, expected in zip(jax.tree.leaves(actual_results[name]), jax.tree.leaves(expected_tree), strict=True):
            actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
            np.testing.assert_allclose(actual, expected, *tolerance, err_msg=f"{name} differs")


def _forward_and_backward(apply_fn, variables, input, output_grad, options) -> dict[str, Any]:
    @jax.jit
    def run(variables, input, output_grad):
        y, vjp = jax.vjp(lambda variables, input: apply_fn(variables, input, **options), variables, input)
        return y, *vjp(output_grad.astype(y.dtype))

    y, d_variables, d_input = run(variables, input, output_grad)
    return {"result": y, "gradient of input": d_input, "gradient of parameters": d_variables["params"]}

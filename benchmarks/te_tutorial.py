"""TransformerEngine's Dense tutorial with scaledot's implementation: its calls, sizes and accuracy test.

    python -m benchmarks.te_tutorial                          # at the tutorial's size
    python -m benchmarks.te_tutorial --size 4 64 256 128      # for CPUs

For each recipe it records the largest errors of output and gradients relative to the tutorial's tolerances, and the
time of a step compared with bfloat16. Results are written to results/ after every recipe.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks import record
from scaledot.compat.transformer_engine import flax as te_flax
from scaledot.compat.transformer_engine import quickstart_jax_utils as utils
from scaledot.compat.transformer_engine.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = (DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(), Float8BlockScaling())


class Dense(nn.Module):
    """A linear layer with a replaceable dot_general."""

    features: int
    dot_general_cls: Any = lambda: None

    @nn.compact
    def __call__(self, x):
        dot_general = self.dot_general_cls()
        return nn.Dense(self.features, use_bias=False, dtype=jnp.bfloat16, dot_general=dot_general)(x)


@dataclasses.dataclass(frozen=True)
class Size:
    batch: int
    seq: int
    hidden: int
    out: int


CPU, TUTORIAL = Size(4, 64, 256, 128), Size(8, 2048, 8192, 32768)


class Layer:
    """The layer with and without a recipe, its input and its output gradient."""

    def __init__(self, recipe: Any, size: Size):
        self.size = size
        init_key, x_key, dy_key = jax.random.split(jax.random.key(0), 3)
        tokens = (size.batch, size.seq)
        self.x = jax.random.normal(x_key, (*tokens, size.hidden), jnp.bfloat16)
        self.dy = jax.random.normal(dy_key, (*tokens, size.out), jnp.bfloat16)
        self.plain = Dense(size.out)
        self.quantised = Dense(size.out, te_flax.make_dot_general_cls(recipe))
        self.variables = self.quantised.init(init_key, self.x[:1, :1])
        self.plain_variables = {"params": self.variables["params"]}

    @property
    def rngs(self) -> dict[str, jax.Array]:
        return {"sr_rng": jax.random.key(1)}

    @property
    def tolerances(self) -> dict[str, float]:
        """The tutorial's tolerances: eps of e4m3 relative, 10 eps absolute, and 10 eps sqrt(tokens) for dW."""
        eps = float(jnp.finfo(jnp.float8_e4m3fn).eps)
        tokens = self.size.batch * self.size.seq
        return {"rtol": eps, "atol": 10 * eps, "atol_dW": 10 * eps * tokens**0.5}

    def compare(self) -> None:
        """Runs the tutorial's accuracy test; raises AssertionError if it fails."""
        models = (self.plain.apply, self.plain_variables, self.quantised.apply, self.variables)
        utils.compare_fwd_bwd(*models, input=self.x, output_grad=self.dy, **self.tolerances, rngs=self.rngs)

    def errors_over_tolerance(self) -> dict[str, float]:
        """Returns the largest errors relative to their tolerances; the test passes if all are at most 1."""

        @functools.partial(jax.jit, static_argnums=0)
        def run(apply, variables, x, dy):
            y, vjp = jax.vjp(apply, variables, x)
            d_variables, dx = vjp(dy)
            return {"y": y, "dx": dx, "dW": d_variables["params"]["Dense_0"]["kernel"]}

        rtol, atol, atol_dw = self.tolerances.values()
        expected = run(self.plain.apply, self.plain_variables, self.x, self.dy)
        actual = run(functools.partial(self.quantised.apply, rngs=self.rngs), self.variables, self.x, self.dy)
        absolute = {"y": atol, "dx": atol, "dW": atol_dw}
        return {name: float(_over_tolerance(actual[name], expected[name], rtol, absolute[name])) for name in absolute}

    def time(self, iterations: int) -> dict[str, float]:
        options = {"input": self.x, "output_grad": self.dy, "timing_iters": iterations, "warmup_iters": iterations}
        return {
            "bfloat16_ms": utils.speedometer(self.plain.apply, self.plain_variables, **options),
            "quantised_ms": utils.speedometer(self.quantised.apply, self.variables, **options, rngs=self.rngs),
        }


@jax.jit
def _over_tolerance(actual: jax.Array, expected: jax.Array, rtol: float, atol: float) -> jax.Array:
    actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.max(jnp.abs(actual - expected) / (atol + rtol * jnp.abs(expected)))


def measure(recipe: Any, size: Size, iterations: int) -> dict[str, Any]:
    layer = Layer(recipe, size)
    errors = layer.errors_over_tolerance()
    return {
        "recipe": type(recipe).__name__,
        "errors_over_tolerance": errors,
        "within": max(errors.values()) <= 1,
    } | layer.time(iterations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, nargs=4, default=dataclasses.astuple(TUTORIAL), help="batch seq hidden out")
    parser.add_argument("--iterations", type=int, default=50)
    args = parser.parse_args()
    size, device = Size(*args.size), jax.devices()[0].device_kind
    name = f"te-tutorial-{'x'.join(map(str, args.size))}-{device.lower().replace(' ', '-')}"
    environment = record.environment() | {"device": device}
    rows, path = [], None
    print(f"{device}, {size}")
    for recipe in RECIPES:
        rows.append(measure(recipe, size, args.iterations))
        errors = ", ".join(f"{name} {ratio:.2f}" for name, ratio in rows[-1]["errors_over_tolerance"].items())
        verdict = "within the tutorial's tolerances" if rows[-1]["within"] else "NOT within the tutorial's tolerances"
        print(f"{rows[-1]['recipe']}: {verdict}; largest errors relative to them: {errors}\n", flush=True)
        settings = {"suite": "te_tutorial", "size": dataclasses.asdict(size), "iterations": args.iterations}
        path = record.write(name, {**settings, "environment": environment, "rows": rows})
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

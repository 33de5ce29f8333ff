"""TransformerEngine's Dense tutorial in our words, of a size for CPUs: the calls and the accuracy test are its own.

`python tests/te_tutorial.py` runs the accuracy test and the speedometer at the tutorial's own size.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

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
    """One linear layer whose product can be swapped."""

    features: int
    dot_general_cls: Any = lambda: None

    @nn.compact
    def __call__(self, x):
        product = self.dot_general_cls()
        return nn.Dense(self.features, use_bias=False, dtype=jnp.bfloat16, dot_general=product)(x)


@dataclasses.dataclass(frozen=True)
class Size:
    batch: int
    seq: int
    hidden: int
    out: int


CPU, TUTORIAL = Size(4, 64, 256, 128), Size(8, 2048, 8192, 32768)


class Layer:
    """The layer with and without a recipe, its input and its output's gradient."""

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

    def compare(self) -> None:
        """The tutorial's tolerances: the spacing of e4m3, ten of it absolutely, and for dW that times sqrt(tokens)."""
        noise = float(jnp.finfo(jnp.float8_e4m3fn).eps)
        tokens = self.size.batch * self.size.seq
        utils.compare_fwd_bwd(
            self.plain.apply,
            self.plain_variables,
            self.quantised.apply,
            self.variables,
            input=self.x,
            output_grad=self.dy,
            rtol=noise,
            atol=10 * noise,
            atol_dW=10 * noise * tokens**0.5,
            rngs=self.rngs,
        )

    def time(self, iterations: int) -> dict[str, float]:
        how = {"input": self.x, "output_grad": self.dy, "timing_iters": iterations, "warmup_iters": iterations}
        return {
            "bfloat16": utils.speedometer(self.plain.apply, self.plain_variables, **how),
            "quantised": utils.speedometer(self.quantised.apply, self.variables, **how, rngs=self.rngs),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs=4, default=dataclasses.astuple(TUTORIAL), help="batch seq hidden out")
    parser.add_argument("--iterations", type=int, default=50)
    args = parser.parse_args()
    print(jax.devices()[0].device_kind, Size(*args.size))
    for recipe in RECIPES:
        layer = Layer(recipe, Size(*args.size))
        print(f"{type(recipe).__name__}:", flush=True)
        try:
            layer.compare()
            print("within the tutorial's tolerances")
        except AssertionError as error:
            print(error)
        layer.time(args.iterations)


if __name__ == "__main__":
    main()

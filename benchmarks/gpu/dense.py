"""The dense step: forward and backward pass of one linear layer, as in TransformerEngine's Dense tutorial.

loss = vdot(x w, dy), with gradients of x and of the float32 weight w. Ratios are speedups over bfloat16 in JAX;
implementations that use Flax's nn.Dense are compared with nn.Dense in bfloat16.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import scaledot as sd
from benchmarks.gpu import dense_libraries, report
from benchmarks.gpu.implementations import Implementation, Timed, jax_implementation, measure
from scaledot import train


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a layer, with minimum speedups of scaledot's implementations: `targets`, and higher ones, `stretch`.

    recipes: of scaledot, by name. peers: whether Flax's layers and other libraries are timed too.
    """

    name: str
    batch: int
    sequence: int
    inputs: int
    outputs: int
    targets: dict[str, float] = dataclasses.field(default_factory=dict)
    stretch: dict[str, float] = dataclasses.field(default_factory=dict)
    recipes: tuple[str, ...] = ("fp8_current", "fp8_delayed", "mxfp8", "nvfp4")
    peers: bool = True

    @property
    def flop(self) -> float:
        return 6.0 * self.batch * self.sequence * self.inputs * self.outputs


LINEN = "scaledot fp8_current, nn.Dense"
FOUR_BIT = ("nvfp4", "nvfp4_plus", "if4", "quartet_ii")
CASES = (
    Case(
        "8192 -> 32768",
        8,
        2048,
        8192,
        32768,
        {"scaledot fp8_current": 1.88, LINEN: 1.80, "scaledot fp8_delayed": 1.92}
        | {"scaledot mxfp8": 0.95, "scaledot nvfp4": 0.93},
        {"scaledot fp8_current": 1.95, LINEN: 1.88, "scaledot fp8_delayed": 2.0}
        | {"scaledot mxfp8": 1.0, "scaledot nvfp4": 1.0},
    ),
    Case(
        "4096 -> 14336",
        4,
        2048,
        4096,
        14336,
        {"scaledot fp8_current": 1.68, "scaledot mxfp8": 0.92, "scaledot nvfp4": 0.89},
        {"scaledot fp8_current": 1.75, "scaledot mxfp8": 1.0, "scaledot nvfp4": 1.0},
    ),
    Case("2048 -> 2048", 4, 1024, 2048, 2048, {f"scaledot {recipe}": 0.9 for recipe in ("fp8_current", "fp8_delayed")}),
    *(
        Case(f"{inputs} -> {outputs}, four bits", batch, 2048, inputs, outputs, targets, recipes=FOUR_BIT, peers=False)
        for batch, inputs, outputs, targets in (
            (8, 8192, 32768, {"scaledot nvfp4": 0.93, "scaledot nvfp4_plus": 0.90, "scaledot if4": 0.90}),
            (4, 4096, 14336, {"scaledot nvfp4": 0.89, "scaledot nvfp4_plus": 0.82, "scaledot if4": 0.82}),
        )
    ),
)
FIRST_STEP_S = 10  # target of scaledot's first step, with compilation
BASE, FLAX_BASE = "JAX bfloat16", "flax nn.Dense bfloat16"
# The XLA kernel whose results a step's are compared with.
REFERENCE = {
    "fp8_current": "xla_codes",
    "fp8_delayed": "xla_codes",
    "fp8_block": "xla_codes",
    "mxfp8": "xla_upcast",
    "nvfp4": "xla_upcast",
    "nvfp4_plus": "xla_upcast",
    "if4": "xla_upcast",
    "quartet_ii": "xla_upcast",
}
# Relative errors. Accumulation in another order may flip the rounding to bfloat16, an ulp of at most 2^-7; FP8
# matmuls add the error of the tensor cores' reduced-precision accumulator, a few thousandths.
MAX_ERROR = {"fp8_current": 5e-3, "fp8_delayed": 5e-3, "fp8_block": 4e-3, "mxfp8": 4e-3, "nvfp4": 4e-3}
MAX_ERROR |= {"nvfp4_plus": 4e-3, "if4": 4e-3, "quartet_ii": 4e-3}


class Data(NamedTuple):
    x: jax.Array
    w: jax.Array
    dy: jax.Array


def data_of(case: Case, seed: int = 0) -> Data:
    x, w, dy = jax.random.split(jax.random.key(seed), 3)
    tokens = case.batch, case.sequence
    return Data(
        jax.random.normal(x, (*tokens, case.inputs), jnp.bfloat16),
        jax.random.normal(w, (case.inputs, case.outputs), jnp.float32),
        jax.random.normal(dy, (*tokens, case.outputs), jnp.bfloat16),
    )


def step_of(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that computes the loss and the gradients of x, w and state for layer(x, w, *state)."""

    def step(x, w, dy, *state):
        def loss(x, w, *state):
            return jnp.vdot(layer(x, w, *state), dy)

        return jax.value_and_grad(loss, argnums=(0, 1, *range(2, 2 + len(state))))(x, w, *state)

    return step


def plain_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w.astype(jnp.bfloat16))


def scaledot_layer(recipe: str, kernel: str | None = None) -> Callable[..., Any]:
    key = jax.random.key(1) if sd.RECIPES[recipe].stochastic else None

    def layer(x, w, *state):
        y = train.dense(x, w, recipe=recipe, state=state[0] if state else None, key=key, kernel=kernel)
        return y[0] if state else y

    return layer


def state_of(recipe: str) -> tuple:
    state = sd.init_state(recipe)
    return (state,) if state else ()


def implementations_of(case: Case) -> Iterator[Implementation]:
    data = data_of(case)
    yield jax_implementation(BASE, step_of(plain_layer), *data)
    for recipe in case.recipes:
        yield jax_implementation(
            f"scaledot {recipe}", step_of(scaledot_layer(recipe)), *data, *state_of(recipe), ours=True
        )
    if not case.peers:
        return
    yield from dense_libraries.linen_implementations(FLAX_BASE, LINEN, case.outputs, *data)
    yield from dense_libraries.jax_implementations(step_of, case.outputs, *data)
    yield from dense_libraries.torch_implementations(case)


def check(recipe: str) -> dict[str, float]:
    """Compares the gradients of a small step with those of XLA's kernels; returns the relative errors.

    Raises AssertionError if one exceeds MAX_ERROR.
    """
    rotations_of_128 = "nvfp4_plus", "if4", "quartet_ii"
    sizes = (3, 128, 640, 384) if recipe in rotations_of_128 else (3, 200, 712, 528)
    case = Case("check", *sizes)  # where possible, no size is a multiple of a tile
    data, errors = data_of(case, seed=7), {}
    actual = jax.jit(step_of(scaledot_layer(recipe)))(*data, *state_of(recipe))[1]
    expected = jax.jit(step_of(scaledot_layer(recipe, REFERENCE[recipe])))(*data, *state_of(recipe))[1]
    for name, a, b in zip(("dx", "dw"), actual, expected, strict=False):
        errors[name] = relative_error(a, b)
        if not errors[name] <= MAX_ERROR[recipe]:
            raise AssertionError(f"{recipe}: relative error {errors[name]:.1e} of {name} exceeds {MAX_ERROR[recipe]}")
    return errors


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    expected = expected.astype(jnp.float32)
    return float(jnp.linalg.norm((actual.astype(jnp.float32) - expected).ravel()) / jnp.linalg.norm(expected.ravel()))


def run(cases: tuple[str, ...], rounds: int, skipped: frozenset[str]) -> None:
    selected, rows = [case for case in CASES if not cases or case.name in cases], []
    recipes = dict.fromkeys(recipe for case in selected for recipe in case.recipes)
    checks = {recipe: check(recipe) for recipe in recipes if f"scaledot {recipe}" not in skipped}
    print(f"relative errors of gradients against XLA's: {checks}")
    for case in selected:
        print(f"{case.name}: {case.batch} x {case.sequence} tokens")
        skipped_here = frozenset(name.removeprefix(f"{case.name}/") for name in skipped)
        rows.append(row_of("dense", case, *measure(implementations_of(case), rounds, skipped_here), case.targets))
        print(f"wrote {report.write('dense', rows, checks=checks)}", flush=True)


def row_of(
    suite: str, case: Case, timed: dict[str, Timed], not_run: dict[str, str], targets: dict[str, float]
) -> dict[str, Any]:
    """Prints the results of a case and returns its JSON entry."""
    results = {}
    for name, times in timed.items():
        base = FLAX_BASE if "nn.Dense" in name and FLAX_BASE in timed else BASE
        ratio = timed[base].median / times.median
        target = targets.get(name)
        results[name] = {**times.as_dict(), "ratio": ratio, "baseline": base, "target": target}
        results[name] |= {"stretch": case.stretch.get(name), "tflops": case.flop / times.median / 1e12}
        print(report.result_line(name, times, f"{ratio:.3f} x", target, ratio), flush=True)
        report.print_remark(suite, case.name, name, target, ratio)
    for name, reason in not_run.items():
        print(f"  {name:<44} {reason}")
    sizes = {name: getattr(case, name) for name in ("batch", "sequence", "inputs", "outputs")}
    return {
        "case": case.name,
        **sizes,
        "implementations": results,
        "not_run": not_run,
        "first_step_target_s": FIRST_STEP_S,
    }

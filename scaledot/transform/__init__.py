"""Quantises any JAX function: traces it, replaces its contractions by those of recipes, patches nothing.

    from scaledot import transform
    loss = transform.quantized(loss, {"*/head": None, "*": "fp8_current"})     # ordered rules, by path
    grads = jax.jit(jax.grad(loss))(params, batch)

| module | holds |
|---|---|
| `rules` | `Rule`: which contraction gets which recipe |
| `jaxprs` | what differs between jax releases |
| `site` | `Site`: a contraction |
| `views` | how the operand of a contraction is read from a parameter |
| `origins` | which parameters a value depends on |
| `analysis` | data flow; which equations change: `Plan` |
| `custom_weight` | `CustomWeight`: a parameter that computes its own contractions |
| `reshaped_weight` | `ReshapedWeight`: a quantised parameter stored in another shape than its operand |
| `scaled` | contractions with quantised parameters |
| `rewrite` | the evaluation of a plan |
| `program` | `quantized`, `init_state` |
| `report` | `report`: what was quantised, and what was not |

What composition means: `jax.grad(quantized(f))` quantises the backward pass, too, as the recipe says;
`quantized(jax.grad(f))` raises. `jax.vmap(quantized(f))` has one scale per example for per-tensor scaling,
`quantized(jax.vmap(f))` one for the batch.
"""

from scaledot.transform.program import init_state, quantized
from scaledot.transform.report import Report, report
from scaledot.transform.rules import Rule
from scaledot.transform.site import Site

__all__ = ["Report", "Rule", "Site", "init_state", "quantized", "report"]

"""LoRA and QLoRA: trains low-rank adapters of the matmuls of any JAX function, whose own weights are frozen.

    from scaledot import lora
    rules = {"head": None, "*": lora.Config(rank=8, alpha=16)}
    adapters = lora.init(loss, rules, key=key)(params, batch)      # {path: {"a": (inputs, rank), "b": (rank, outputs)}}
    grads = jax.grad(lora.adapted(loss, rules))(adapters, params, batch)
    params = lora.merge(loss, rules)(adapters, params, batch)

A matmul x w of an adapted parameter becomes x w + scaling · (x A) B. B starts as zeros, so training starts at the base
model. w may be a ScaledArray of any format: its codes are the only residual, and are decoded for each matmul. As A B is
a change of the parameter itself, the adapted function computes, up to rounding, what the function computes with
merged weights; a parameter for which that cannot hold, because it is also an embedding table, for example, has no
adapter, and `report` says why.

| module | holds |
|---|---|
| `config` | `Config`, and the rules that choose one for each matmul |
| `uses` | `Use`: how a matmul reads a parameter, and the shapes of A and B |
| `weight` | the frozen weight with its factors, and its matmuls |
| `program` | which parameters of a traced function have adapters |
| `functions` | `init`, `adapted` |
| `merging` | `merge` |
| `report` | `report`: the matmuls with an adapter, and the reasons of the others |
"""

from scaledot.lora.config import Config
from scaledot.lora.functions import adapted, init
from scaledot.lora.merging import merge
from scaledot.lora.report import Report, report

__all__ = ["Config", "Report", "adapted", "init", "merge", "report"]

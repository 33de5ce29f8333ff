"""One decoder layer on a mesh, and the head, forward and backward, compiled from shapes alone.

Forward and backward are two programs, as in a step of many layers: what is gathered in one is not there in the other.
Norms, activations and attention are elementwise stand-ins that keep their operands; heads are whole on a device, so
that true attention moves nothing either. The bfloat16 program differs from the others in its recipe only, which casts
nothing; sums are float32 in all of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from scaledot import train
from scaledot.plan import hlo
from scaledot.plan.gemm_kinds import find_recipe
from scaledot.plan.mesh import BATCH
from scaledot.plan.setup import Setup
from scaledot.state import init_state

QUICKLY = {"xla_backend_optimization_level": 0}  # nothing is run


@dataclasses.dataclass(frozen=True)
class Job:
    """What is compiled. part: a "layer", or the "head"."""

    part: str
    recipe: str
    setup: Setup


class Compiled(NamedTuple):
    """Collectives of both passes, and bytes that a device keeps from one for the other."""

    forward: list[hlo.Collective]
    backward: list[hlo.Collective]
    kept: int


class Traced(NamedTuple):
    """A part of the step on a mesh: what runs forward, on what, what comes of it, and what takes gradients back."""

    mesh: jax.sharding.Mesh
    run: Any
    given: tuple[Any, ...]
    result: Any
    pull: Any

    def forward(self) -> Any:
        """Lowered, and so is `backward`."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self.run).lower(*self.given)

    def backward(self) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(lambda pull, g: pull(g)).lower(self.pull, self.result)

    @property
    def kept(self) -> int:
        return sum(map(_local_bytes, jax.tree.leaves(self.pull)))


def traced(job: Job) -> Traced:
    sizes = job.setup.mesh.sizes
    devices = np.array(jax.devices()[: job.setup.mesh.devices]).reshape(tuple(sizes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    run = functools.partial(_both, _layer if job.part == "layer" else _head, job)
    given = arguments(job, mesh)
    with jax.set_mesh(mesh):
        return Traced(mesh, run, given, *jax.eval_shape(run, *given))


def collectives(program: Any, job: Job) -> list[hlo.Collective]:
    """Of a lowered program."""
    return hlo.collectives(program.compile(compiler_options=QUICKLY).as_text(), job.setup.mesh.sizes)


def compiled(job: Job) -> Compiled:
    of = traced(job)
    return Compiled(collectives(of.forward(), job), collectives(of.backward(), job), of.kept)


def arguments(job: Job, mesh: jax.sharding.Mesh) -> tuple[dict[str, Any], Any, dict[str, Any], Any]:
    """Weights, tokens, states and a key, as shapes on the mesh."""
    setup, model, recipe = job.setup, job.setup.model, find_recipe(job.recipe)

    def shape(sizes: tuple[int, ...], dtype, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    group = model.heads // model.kv_heads
    matrices = {
        "qkv": ((model.width, model.kv_heads, (group + 2) * model.head_size), P("fsdp", "tp")),
        "out": ((model.kv_heads, group * model.head_size, model.width), P("tp", None, "fsdp")),
        "up": ((model.width, 2 if model.gated else 1, model.hidden), P("fsdp", None, "tp")),
        "down": ((model.hidden, model.width), P("tp", "fsdp")),
    }
    if job.part == "head":
        matrices = {"head": ((model.width, model.vocabulary), P("fsdp", "tp"))}
    weights = {name: shape(sizes, jnp.float32, spec) for name, (sizes, spec) in matrices.items()}
    x = shape((setup.batch * setup.mesh.along(BATCH), setup.sequence, model.width), jnp.bfloat16, _tokens(job))
    state = jax.eval_shape(lambda: {name: init_state(recipe) for name in matrices})
    state = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, P()), state)
    key = shape((), jax.eval_shape(lambda: jax.random.key(0)).dtype, P())
    return weights, x, state, key


def _both(run, job: Job, weights, x, state, key):
    """What comes of tokens, and the function that takes a gradient of it back."""
    return jax.vjp(lambda weights, x, state: run(job, weights, x, state, key), weights, x, state)


def _tokens(job: Job) -> P:
    """How tokens lie between products."""
    return P(BATCH, "tp" if job.setup.sequence_parallel else None, None)


def _layer(job: Job, weights, x, state, key):
    multiply = functools.partial(_product, job, weights, state, key)
    heads = multiply("qkv", "bsd,dkh->bskh", _normed(x), P(BATCH, None, "tp", None))
    x = x + multiply("out", "bskh,khd->bsd", _attended(heads, job.setup.model.head_size), _tokens(job))
    ways = multiply("up", "bsd,dch->bsch", _normed(x), P(BATCH, None, None, "tp"))
    return x + multiply("down", "bsh,hd->bsd", _activated(ways), _tokens(job))


def _head(job: Job, weights, x, state, key):
    return _product(job, weights, state, key, "head", "bsd,dv->bsv", _normed(x), P(BATCH, None, "tp"))


def _product(job: Job, weights, state, key, name: str, subscripts: str, x, out: P):
    recipe, w = find_recipe(job.recipe), weights[name]
    w = w.astype(x.dtype) if recipe.fwd.rhs is None else w
    given = {"state": state[name]} if recipe.delayed else {}
    if recipe.stochastic:
        given["key"] = jax.random.fold_in(key, list(weights).index(name))
    y = train.einsum(subscripts, x, w, recipe=recipe, preferred_element_type=x.dtype, out_sharding=out, **given)
    return y[0] if recipe.delayed else y


@jax.checkpoint
def _normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=1)
def _attended(x: jax.Array, head_size: int) -> jax.Array:
    """Something of queries, keys and values in the place of attention."""
    x = x.reshape(*x.shape[:3], -1, head_size)
    queries, keys, values = x[..., :-2, :], x[..., -2:-1, :], x[..., -1:, :]
    y = queries * keys + values
    return y.reshape(*y.shape[:3], -1)


@jax.checkpoint
def _activated(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x[:, :, 0]) * x[:, :, -1]


def _local_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0  # the step's, not the layer's
    bits = (jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo)(leaf.dtype).bits
    sizes = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return -(-int(np.prod(sizes)) * bits // 8)

"""Compiles one decoder block, or the output head, on a mesh from shapes alone: a forward and a backward program.

Forward and backward are two programs, as in a step of many blocks: weights that the forward pass gathers are freed
before the backward pass and gathered again. Norms, activations and attention are elementwise stand-ins that save their
operands; heads are not split over devices, so real attention has no collectives either. The bfloat16 program differs
from the others in its recipe only, which has no casts; all of them accumulate in float32.
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
from scaledot.plan.mesh import BATCH_AXES
from scaledot.plan.setup import Setup
from scaledot.state import init_state

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}  # programs are read, never run: compile quickly


@dataclasses.dataclass(frozen=True)
class Job:
    """One module to compile.

    module: "block" (a decoder block) or "head" (the output head).
    """

    module: str
    recipe: str
    setup: Setup


class CompiledModule(NamedTuple):
    """Collectives of the forward and the backward program of a module, and bytes of residuals on a device."""

    forward: list[hlo.Collective]
    backward: list[hlo.Collective]
    residual_bytes: int


class TracedModule(NamedTuple):
    """A module traced on a mesh.

    run: returns the result and its VJP function.
    arguments: of `run`, as ShapeDtypeStructs.
    result, vjp: what `run` returns, as ShapeDtypeStructs; the leaves of `vjp` are the residuals.
    """

    mesh: jax.sharding.Mesh
    run: Any
    arguments: tuple[Any, ...]
    result: Any
    vjp: Any

    def lower_forward(self) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(self.run).lower(*self.arguments)

    def lower_backward(self) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(lambda vjp, g: vjp(g)).lower(self.vjp, self.result)

    @property
    def residual_bytes(self) -> int:
        return sum(map(_local_bytes, jax.tree.leaves(self.vjp)))


def trace_module(job: Job) -> TracedModule:
    """Traces the module of a job on its mesh of CPU devices."""
    sizes = job.setup.mesh.sizes
    devices = np.array(jax.devices()[: job.setup.mesh.devices]).reshape(tuple(sizes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    run = functools.partial(_result_and_vjp, _block if job.module == "block" else _head, job)
    arguments = _arguments(job, mesh)
    with jax.set_mesh(mesh):
        return TracedModule(mesh, run, arguments, *jax.eval_shape(run, *arguments))


def compile_collectives(lowered: Any, job: Job) -> list[hlo.Collective]:
    """Compiles a lowered program and returns its collectives."""
    return hlo.collectives(lowered.compile(compiler_options=COMPILER_OPTIONS).as_text(), job.setup.mesh.sizes)


def compile_module(job: Job) -> CompiledModule:
    """Compiles both programs of a module and returns their collectives and the bytes of residuals."""
    traced = trace_module(job)
    return CompiledModule(
        compile_collectives(traced.lower_forward(), job),
        compile_collectives(traced.lower_backward(), job),
        traced.residual_bytes,
    )


def _arguments(job: Job, mesh: jax.sharding.Mesh) -> tuple[dict[str, Any], Any, dict[str, Any], Any]:
    """Returns weights, activations, states of delayed scaling and a key, as sharded ShapeDtypeStructs."""
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
    if job.module == "head":
        matrices = {"head": ((model.width, model.vocabulary), P("fsdp", "tp"))}
    weights = {name: shape(sizes, jnp.float32, spec) for name, (sizes, spec) in matrices.items()}
    sequences = setup.batch * setup.mesh.size_along(BATCH_AXES)
    x = shape((sequences, setup.sequence, model.width), jnp.bfloat16, _stream_spec(job))
    state = jax.eval_shape(lambda: {name: init_state(recipe) for name in matrices})
    state = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, P()), state)
    key = shape((), jax.eval_shape(lambda: jax.random.key(0)).dtype, P())
    return weights, x, state, key


def _result_and_vjp(module, job: Job, weights, x, state, key):
    return jax.vjp(lambda weights, x, state: module(job, weights, x, state, key), weights, x, state)


def _stream_spec(job: Job) -> P:
    """Returns the sharding of the residual stream, (sequences, tokens, width)."""
    return P(BATCH_AXES, "tp" if job.setup.sequence_parallel else None, None)


def _block(job: Job, weights, x, state, key):
    linear = functools.partial(_linear, job, weights, state, key)
    qkv = linear("qkv", "bsd,dkh->bskh", _norm(x), P(BATCH_AXES, None, "tp", None))
    x = x + linear("out", "bskh,khd->bsd", _attention_stand_in(qkv, job.setup.model.head_size), _stream_spec(job))
    up_and_gate = linear("up", "bsd,dch->bsch", _norm(x), P(BATCH_AXES, None, None, "tp"))
    return x + linear("down", "bsh,hd->bsd", _activation(up_and_gate), _stream_spec(job))


def _head(job: Job, weights, x, state, key):
    return _linear(job, weights, state, key, "head", "bsd,dv->bsv", _norm(x), P(BATCH_AXES, None, "tp"))


def _linear(job: Job, weights, state, key, name: str, subscripts: str, x, out: P):
    recipe, w = find_recipe(job.recipe), weights[name]
    w = w.astype(x.dtype) if recipe.fwd.rhs is None else w
    options = {"state": state[name]} if recipe.delayed else {}
    if recipe.stochastic:
        options["key"] = jax.random.fold_in(key, list(weights).index(name))
    y = train.einsum(subscripts, x, w, recipe=recipe, preferred_element_type=x.dtype, out_sharding=out, **options)
    return y[0] if recipe.delayed else y


@jax.checkpoint
def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


@functools.partial(jax.checkpoint, static_argnums=1)
def _attention_stand_in(x: jax.Array, head_size: int) -> jax.Array:
    """Returns an elementwise function of queries, keys and values with the result shape of attention."""
    x = x.reshape(*x.shape[:3], -1, head_size)
    queries, keys, values = x[..., :-2, :], x[..., -2:-1, :], x[..., -1:, :]
    y = queries * keys + values
    return y.reshape(*y.shape[:3], -1)


@jax.checkpoint
def _activation(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x[:, :, 0]) * x[:, :, -1]


def _local_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0  # one key for the whole step, not a residual of each block
    bits = (jnp.finfo if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo)(leaf.dtype).bits
    sizes = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return -(-int(np.prod(sizes)) * bits // 8)

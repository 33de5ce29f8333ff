"""Compiles a Llama-like stack for H200s on a machine without a GPU: `make test-gpu-compile`.

A transformer block has seven matmuls, which have four different inputs: q, k and v read one tensor, gate and up
another. Under fp8_current a tensor needs one kernel for its casts, after XLA computed its amax, and a layer three
matmuls.
"""

import math
import re

import gpu_compile
import jax
import jax.numpy as jnp
import pytest
from hopper import lowered_for_hopper, needs_mosaic
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import scaledot as sd

if not gpu_compile.is_possible():
    pytest.skip(gpu_compile.MISSING, allow_module_level=True)

from benchmarks.gpu import llama
from benchmarks.gpu.sizes import Shape

pytestmark = [needs_mosaic, pytest.mark.usefixtures("standard_promotion")]

RECIPE = "fp8_current"
LAYERS, INPUTS = 7, 4
CASTS, MATMULS = INPUTS + 2 * LAYERS, 3 * LAYERS  # of inputs, weights and gradients of outputs
KERNELS = CASTS + MATMULS  # of a transformer block
BATCH, TOKENS = 8, 1024


@pytest.fixture
def hopper(monkeypatch):
    with lowered_for_hopper(monkeypatch):
        yield


def stack(**shape) -> llama.Stack:
    sizes = {"width": 1024, "hidden": 2048, "heads": 8, "kv_heads": 4, "vocabulary": 1024, **shape}
    return llama.Stack(Shape(**sizes), sd.linen.make_dot_general_cls(RECIPE))


def lowered(model: llama.Stack, mesh, spec=lambda leaf: P()):
    """Lowers the training step, with leaves of the state sharded by spec(leaf) and the batch over "fsdp"."""
    init, step, data = llama.training(model, BATCH, TOKENS)
    state = jax.eval_shape(init, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))

    def placed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(lambda leaf: placed(leaf, spec(leaf)), state)
    batch = placed(data, P("fsdp" if "fsdp" in mesh.shape else None))
    return jax.jit(step, donate_argnums=0).lower(state, batch, placed(key, P()))


def computations(text: str) -> dict[str, str]:
    """The computations of an HLO module, by name."""
    parts = re.split(r"\n(?=(?:ENTRY )?%\S+ \()", text)
    return {part.split(" (")[0]: part for part in parts}


def kernels(text: str) -> int:
    return text.count('custom_call_target="mosaic_gpu')


def amaxes(text: str) -> int:
    """The number of fusions that compute the amaxes of a tensor, the second reduction of `partial_amaxes`."""
    return len(re.findall(r"= u32\[128\]\S* fusion\(", text))


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_every_tensor_is_cast_once_and_nothing_is_computed_twice(hopper, scanned):
    blocks = 2
    mesh = topologies.make_mesh(gpu_compile.devices_of("H200", 1), (1,), ("x",))
    text = lowered(stack(blocks=blocks, scanned=scanned), mesh).compile().as_text()
    copies = 1 if scanned else blocks
    assert kernels(text) == KERNELS * copies
    assert amaxes(text) == CASTS * copies


def test_weights_are_cast_before_the_loop_over_micro_batches(hopper):
    model = stack(blocks=1)
    layers = sd.linen.with_recipe(llama.Stack(model.shape), {"head": None, "*": RECIPE})
    init, _, data = llama.training(model, BATCH, TOKENS)
    params = jax.eval_shape(init, jax.random.key(0)).params["params"]

    def gradients(params, batches):
        cast = sd.train.cast_weights(params, {"head": None, "*": RECIPE}, dtype=jnp.bfloat16)

        def loss(params, tokens):
            logits = layers.apply({"params": cast.attach(params)}, tokens)
            return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))

        def add(total, tokens):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, tokens)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

    mesh = topologies.make_mesh(gpu_compile.devices_of("H200", 1), (1,), ("x",))
    here = NamedSharding(mesh, P())
    shapes = [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), params)]
    shapes += [jax.ShapeDtypeStruct((4, 2, TOKENS), data.dtype, sharding=here)]
    parts = computations(jax.jit(gradients).lower(*shapes).compile().as_text())
    entry = next(part for name, part in parts.items() if name.startswith("ENTRY"))
    assert kernels(entry) == LAYERS
    assert sum(map(kernels, parts.values())) == KERNELS


def test_each_of_eight_devices_runs_kernels_on_its_shards_and_gathers_codes(hopper):
    """FSDP and tensor parallelism over automatic mesh axes, requested by the shardings of the arguments alone."""
    mesh = topologies.make_mesh(gpu_compile.devices_of("H200", 8), (4, 2), ("fsdp", "tp"))

    def spec(leaf) -> P:
        return P("fsdp", "tp") if leaf.ndim == 2 else P()

    text = lowered(stack(blocks=1), mesh, spec).compile().as_text()
    # XLA does not merge all-reduces: layers that read one tensor share the amax of a shard, but not the cast after it.
    assert kernels(text) == KERNELS + LAYERS - INPUTS
    gathered = re.findall(r"(\w+)\[([\d,]*)\]\S*\)? all-gather(?:-start)?\(", text)
    codes = [math.prod(map(int, shape.split(","))) for dtype, shape in gathered if dtype.startswith("f8")]
    weights = 2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 2048
    assert sum(codes) >= weights // 2  # each device gathers, over fsdp, its tp half of the weights as codes
    assert len([dtype for dtype, _ in gathered if dtype == "bf16"]) <= 2, gathered  # embedding and head
    assert not [shape for dtype, shape in gathered if dtype not in ("bf16", "f8e4m3fn", "f8e5m2")], gathered

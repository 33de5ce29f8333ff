"""Operations with custom partitioning along automatic mesh axes.

XLA cannot partition a Pallas kernel: it would all-gather the operands and run the whole kernel on every device. An
`Operation` here is a `custom_partitioning`: Shardy propagates shardings through it by a rule, and from the propagated
shardings the operation chooses the computation of each device. XLA inserts the collectives that reshard its operands,
which are codes and scales.

For y (m, n) = x (m, k) @ w (k, n) with x sharded as (fsdp, -) and w as (fsdp, tp), two casts and a matmul:

* Each device casts its shard. The amax of a tensor is all-reduced, over fsdp for x and over both axes for w.
* The matmul requests w as (-, tp). XLA all-gathers its codes, and a device multiplies (m / fsdp, k) by (k, n / tp).

`custom_partitioning` has two limits. It has no batching rule, so `jax.vmap` replaces an Operation by a `Batched` one,
whose arrays have a leading batch dim. And it embeds a pointer in the program, so that JAX's persistent compilation
cache misses in the next process unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from scaledot.parallel.transfer_plan import AxesByLabel
from scaledot.parallel.transfers import Axes
from scaledot.programs import for_types

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The shape of one array of an operation and a label for each axis; None for an axis that is never sharded.

    Axes with equal labels are sharded alike: a scale (m / 128, 1) of codes (m, k) has the labels ("m", None).
    """

    shape: tuple[int, ...]
    labels: tuple[str | None, ...]

    def axes_by_label(self, mesh: Any, sharding: jax.sharding.Sharding | None) -> AxesByLabel:
        """The mesh axes of each label that is sharded if the array has this sharding."""
        axes = () if sharding is None else axes_of(sharding, self.shape, mesh)
        return {label: names for label, names in zip(self.labels, axes, strict=False) if label is not None and names}

    def named_sharding(self, mesh: Any, sharding: AxesByLabel) -> NamedSharding:
        entries = [None if label is None else sharding.get(label) or None for label in self.labels]
        return NamedSharding(mesh, PartitionSpec(*entries))


class Shards(NamedTuple):
    """The computation of each device: the required shardings of operands, those of the results, and `run` on shards."""

    operands: Sequence[AxesByLabel]
    results: Sequence[AxesByLabel]
    run: Callable[[Arrays], Arrays]


class Operation(Protocol):
    """A function from arrays to arrays that chooses its own partitioning; hashable, a key of the caches below."""

    @property
    def operands(self) -> tuple[Leaf, ...]: ...

    @property
    def results(self) -> tuple[Leaf, ...]: ...

    @property
    def contracting(self) -> str:
        """Contracting labels: if one is sharded, devices compute partial results."""
        ...

    def run(self, arrays: Arrays) -> Arrays:
        """The whole operation on one device."""
        ...

    def shards(self, mesh: Any, operands: Sequence[AxesByLabel], results: Sequence[AxesByLabel]) -> Shards:
        """The computation of each device for propagated shardings of operands and results."""
        ...


def run_partitioned(operation: Operation, arrays: Arrays) -> Arrays:
    """Runs an operation in a program that XLA partitions."""
    return _partitioned(operation)(*arrays)


@functools.lru_cache(maxsize=4096)
def _partitioned(operation: Operation) -> Callable[..., Arrays]:
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with for_types():  # traced for its types only: XLA runs `Shards.run` instead
            return tuple(operation.run(arrays))

    def partition(mesh, operands, results):
        def propagated(leaves, types) -> list[AxesByLabel]:
            return [leaf.axes_by_label(mesh, type.sharding) for leaf, type in zip(leaves, types, strict=True)]

        def named(leaves, shardings) -> tuple[NamedSharding, ...]:
            return tuple(leaf.named_sharding(mesh, each) for leaf, each in zip(leaves, shardings, strict=True))

        of_operands, of_results = propagated(operation.operands, operands), propagated(operation.results, results)
        shards = operation.shards(mesh, of_operands, of_results)
        return (
            mesh,
            lambda *arrays: tuple(shards.run(arrays)),
            named(operation.results, shards.results),
            named(operation.operands, shards.operands),
        )

    partitioned = custom_partitioning(run)
    rule = propagation_rule(operation.operands, operation.results, operation.contracting)
    shardy: dict[str, Any] = {"sharding_rule": rule.text, "reduction_factors": rule.reduced, **rule.sizes}
    partitioned.def_partition(partition, decode_shardings=False, **shardy)
    with_vmap = custom_vmap(partitioned)

    @with_vmap.def_vmap
    def _(axis_size: int, is_batched: Sequence[bool], *arrays: jax.Array):
        batched = Batched(operation, axis_size, tuple(is_batched))
        return tuple(run_partitioned(batched, arrays)), (True,) * len(operation.results)

    return jax.jit(with_vmap)


@functools.lru_cache(maxsize=4096)
def axes_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...], mesh: Any) -> tuple[Axes, ...]:
    """For each axis of an array the mesh axes that it is sharded over, major to minor.

    () for an axis that XLA shards unevenly or over a part of a mesh axis, which no PartitionSpec expresses.
    """
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError:  # uneven
        return ((),) * len(shape)
    return tuple(_axes_along(axis, size, indices, mesh) for axis, size in enumerate(shape))


def _axes_along(axis: int, size: int, indices: Mapping[Any, tuple[slice, ...]], mesh: Any) -> Axes:
    """The mesh axes that one array axis is sharded over, major to minor; () if no PartitionSpec expresses it."""
    starts = np.vectorize(lambda device: indices[device][axis].start or 0)(mesh.devices)
    strides = {name: np.take(starts, 1, i).min() for i, name in enumerate(mesh.axis_names) if mesh.shape[name] > 1}
    names = sorted((name for name, stride in strides.items() if stride > 0), key=lambda name: -strides[name])
    shards = math.prod(mesh.shape[name] for name in names)
    if size % shards:
        return ()
    shard_index = np.zeros((), np.int64)
    for name in names:
        shard_index = shard_index * mesh.shape[name] + _coordinates(mesh, name)
    expected = np.broadcast_to(shard_index * (size // shards), starts.shape)
    return tuple(names) if np.array_equal(starts, expected) else ()


def _coordinates(mesh: Any, name: str) -> np.ndarray:
    """The coordinate of every device along a mesh axis, in the shape of the mesh."""
    return np.indices(mesh.devices.shape)[mesh.axis_names.index(name)]


class PropagationRule(NamedTuple):
    """A Shardy sharding rule for `custom_partitioning`: its text, reduction factors, and sizes of compound factors."""

    text: str
    reduced: tuple[str, ...]
    sizes: dict[str, int]


def propagation_rule(operands: Sequence[Leaf], results: Sequence[Leaf], contracting: str = "") -> PropagationRule:
    """The rule by which Shardy propagates shardings between operands and results: along equal labels.

    512 rows and the scales of their 4 blocks share a factor of 4; the 128 rows of a block are a factor of their own:

    >>> propagation_rule([Leaf((512,), ("m",))], [Leaf((512,), ("m",)), Leaf((4,), ("m",))])
    PropagationRule(text='(l0_0 l0_1) -> (l0_0 l0_1), l0_0', reduced=(), sizes={'l0_1': 128})
    """
    leaves = *operands, *results
    factors = _factors(leaves)
    names = iter(f"own{number}" for number in range(sum(len(leaf.shape) for leaf in leaves)))

    def factors_of(size: int, label: str | None) -> list[str]:
        shared = factors.get(label or "", {}).get(size)
        return [next(names)] if shared is None else shared

    by_leaf = [[factors_of(*each) for each in zip(leaf.shape, leaf.labels, strict=True)] for leaf in leaves]
    # JAX infers the size of a factor that is a whole axis of some array, and rejects a size passed for it.
    inferred = {axis[0] for leaf in by_leaf for axis in leaf if len(axis) == 1}
    sizes = {
        name: size // (previous or 1)
        for by_size in factors.values()
        for previous, (size, of_size) in zip((None, *by_size), by_size.items(), strict=False)
        for name in of_size[-1:]
        if name not in inferred
    }
    reduced = tuple(name for c in contracting for name in max(factors[c].values(), key=len, default=()))
    texts = [" ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in leaf) for leaf in by_leaf]
    return PropagationRule(
        f"{', '.join(texts[: len(operands)])} -> {', '.join(texts[len(operands) :])}", reduced, sizes
    )


def _factors(leaves: Sequence[Leaf]) -> dict[str, dict[int, list[str]]]:
    """For each label and each size of an axis with that label, the factors whose product is that size.

    A size is the product of the leading factors of its label: sizes 4 and 512 give factors of 4 and 128. A size that
    does not divide the next larger one has no factors, and neither has 1.
    """
    sizes: dict[str, set[int]] = {}
    for leaf in leaves:
        for size, label in zip(leaf.shape, leaf.labels, strict=True):
            if label is not None:
                sizes.setdefault(label, set()).add(size)
    factors: dict[str, dict[int, list[str]]] = {}
    for number, (label, of_label) in enumerate(sizes.items()):
        largest = max(of_label)
        chain: list[int] = []  # of divisors
        for size in sorted(of_label):
            if size > 1 and largest % size == 0 and (not chain or size % chain[-1] == 0):
                chain.append(size)
        factors[label] = {size: [f"l{number}_{i}" for i in range(j + 1)] for j, size in enumerate(chain)}
    return factors


@dataclasses.dataclass(frozen=True)
class Batched:
    """An Operation under `jax.vmap`: batched arrays have a leading dim of `size`."""

    operation: Any
    size: int
    is_batched: tuple[bool, ...]

    @property
    def label(self) -> str:
        """The label of the batch dim, unique under nested vmaps."""
        inner = self.operation.label if isinstance(self.operation, Batched) else "batch"
        return f"{inner}'"

    @property
    def operands(self) -> tuple[Leaf, ...]:
        leaves = zip(self.operation.operands, self.is_batched, strict=True)
        return tuple(self._with_batch(leaf) if batched else leaf for leaf, batched in leaves)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return tuple(map(self._with_batch, self.operation.results))

    @property
    def contracting(self) -> str:
        return self.operation.contracting

    def run(self, arrays: Arrays) -> Arrays:
        return self._mapped(self.operation.run)(arrays)

    def shards(self, mesh: Any, operands: Sequence[AxesByLabel], results: Sequence[AxesByLabel]) -> Shards:
        """The computation of one example on each device; the batch dim keeps the mesh axes that this does not use."""
        shards = self.operation.shards(mesh, operands, results)
        used = {axis for sharding in (*shards.operands, *shards.results) for axes in sharding.values() for axis in axes}
        propagated = next((axes for each in (*operands, *results) if (axes := each.get(self.label))), ())
        axes = tuple(axis for axis in propagated if axis not in used)
        if self.size % math.prod(mesh.shape[axis] for axis in axes):
            axes = ()
        operands, results = (
            [{**sharding, self.label: axes} for sharding in each] for each in (shards.operands, shards.results)
        )
        return Shards(operands, results, self._mapped(shards.run))

    def _with_batch(self, leaf: Leaf) -> Leaf:
        return Leaf((self.size, *leaf.shape), (self.label, *leaf.labels))

    def _mapped(self, run: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        axes = tuple(0 if batched else None for batched in self.is_batched)
        return lambda arrays: jax.vmap(lambda *example: tuple(run(example)), in_axes=axes)(*arrays)

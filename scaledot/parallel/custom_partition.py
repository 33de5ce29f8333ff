"""Operations that say themselves how XLA partitions them along automatic mesh axes.

XLA cannot look into a Pallas kernel: in a program that it partitions it would gather the operands and run the whole
kernel on every device. An `Operation` here is a `custom_partitioning`: Shardy propagates shardings through it by a
rule, and from the shardings that it has found the operation chooses what each device computes. XLA inserts the
transfers of its operands, which are codes and scales.

For y (m, n) = x (m, k) @ w (k, n) with x sharded as (fsdp, -) and w as (fsdp, tp), two casts and a matmul:

* Each device casts its shard. The amax of a tensor is all-reduced, over fsdp for x and over both axes for w.
* The matmul asks for w as (-, tp). XLA all-gathers its codes, and a device multiplies (m / fsdp, k) by (k, n / tp).

`custom_partitioning` has two limits. It has no batching rule; under `jax.vmap` an Operation becomes another one whose
arrays have one more axis. And it writes an address into the program, so that JAX's persistent compilation cache finds
nothing in the next process unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set.
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

from scaledot.parallel.shard_indices import Sharding
from scaledot.parallel.transfers import Axes
from scaledot.programs import for_types

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an operation: its shape, and for each axis the label whose sharding it follows; None for none.

    A scale (m / 128, 1) of codes (m, k) has the labels ("m", None).
    """

    shape: tuple[int, ...]
    labels: tuple[str | None, ...]

    def sharding(self, mesh: Any, of: jax.sharding.Sharding | None) -> Sharding:
        """What the sharding of the array says of its labels."""
        axes = () if of is None else axes_of(of, self.shape, mesh)
        return {label: found for label, found in zip(self.labels, axes, strict=False) if label is not None and found}

    def named_sharding(self, mesh: Any, sharding: Sharding) -> NamedSharding:
        entries = [None if label is None else sharding.get(label) or None for label in self.labels]
        return NamedSharding(mesh, PartitionSpec(*entries))


class Shards(NamedTuple):
    """What each device computes: how it needs the operands, how it leaves the results, and from shards to shards."""

    operands: Sequence[Sharding]
    results: Sequence[Sharding]
    run: Callable[[Arrays], Arrays]


class Operation(Protocol):
    """A function from arrays to arrays that chooses its own partitioning. It hashes: equal ones are one operation."""

    @property
    def operands(self) -> tuple[Leaf, ...]: ...

    @property
    def results(self) -> tuple[Leaf, ...]: ...

    @property
    def contracted(self) -> str:
        """Labels that are summed over: each device may have partial sums of them."""
        ...

    def run(self, arrays: Arrays) -> Arrays:
        """All of it, on one device."""
        ...

    def shards(self, mesh: Any, operands: Sequence[Sharding], results: Sequence[Sharding]) -> Shards:
        """What each device computes where arrays are sharded in these ways."""
        ...


def run_partitioned(operation: Operation, arrays: Arrays) -> Arrays:
    """The results of an operation in a program that XLA partitions."""
    return _partitioned(operation)(*arrays)


@functools.lru_cache(maxsize=4096)
def _partitioned(operation: Operation) -> Callable[..., Arrays]:
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with for_types():  # XLA runs what `shards` gives
            return tuple(operation.run(arrays))

    def partition(mesh, operands, results):
        splits = [leaf.sharding(mesh, a.sharding) for leaf, a in zip(operation.operands, operands, strict=True)]
        wanted = [leaf.sharding(mesh, a.sharding) for leaf, a in zip(operation.results, results, strict=True)]
        shards = operation.shards(mesh, splits, wanted)
        given = zip(operation.operands, shards.operands, strict=True)
        made = zip(operation.results, shards.results, strict=True)
        return (
            mesh,
            lambda *arrays: tuple(shards.run(arrays)),
            tuple(leaf.named_sharding(mesh, sharding) for leaf, sharding in made),
            tuple(leaf.named_sharding(mesh, sharding) for leaf, sharding in given),
        )

    partitioned = custom_partitioning(run)
    rule = propagation_rule(operation.operands, operation.results, operation.contracted)
    how: dict[str, Any] = {"sharding_rule": rule.text, "reduction_factors": rule.reduced, **rule.sizes}
    partitioned.def_partition(partition, decode_shardings=False, **how)
    called = custom_vmap(partitioned)

    @called.def_vmap
    def _(axis_size: int, is_batched: Sequence[bool], *arrays: jax.Array):
        batched = Batched(operation, axis_size, tuple(is_batched))
        return tuple(run_partitioned(batched, arrays)), (True,) * len(operation.results)

    return jax.jit(called)


@functools.lru_cache(maxsize=4096)
def axes_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...], mesh: Any) -> tuple[Axes, ...]:
    """For each axis of an array the mesh axes that it is sharded over, major to minor.

    XLA may also shard unevenly or over a part of a mesh axis, which no PartitionSpec describes: then (), as if
    replicated.
    """
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError:  # uneven
        return ((),) * len(shape)
    return tuple(_axes_along(axis, size, indices, mesh) for axis, size in enumerate(shape))


def _axes_along(axis: int, size: int, indices: Mapping[Any, tuple[slice, ...]], mesh: Any) -> Axes:
    """The mesh axes that one array axis is sharded over, major to minor; () if no PartitionSpec describes it."""
    starts = np.vectorize(lambda device: indices[device][axis].start or 0)(mesh.devices)
    strides = {name: np.take(starts, 1, i).min() for i, name in enumerate(mesh.axis_names) if mesh.shape[name] > 1}
    names = sorted((name for name, stride in strides.items() if stride > 0), key=lambda name: -strides[name])
    shards = math.prod(mesh.shape[name] for name in names)
    if size % shards:
        return ()
    numbers = np.zeros((), np.int64)
    for name in names:
        numbers = numbers * mesh.shape[name] + _coordinates(mesh, name)
    return tuple(names) if np.array_equal(starts, np.broadcast_to(numbers * (size // shards), starts.shape)) else ()


def _coordinates(mesh: Any, name: str) -> np.ndarray:
    """Of every device along a mesh axis."""
    return np.indices(mesh.devices.shape)[mesh.axis_names.index(name)]


class PropagationRule(NamedTuple):
    """A sharding rule as `custom_partitioning` takes it: its text, factors that are reduced, sizes of factors."""

    text: str
    reduced: tuple[str, ...]
    sizes: dict[str, int]


def propagation_rule(operands: Sequence[Leaf], results: Sequence[Leaf], contracted: str = "") -> PropagationRule:
    """How Shardy propagates shardings between operands and results: along equal labels.

    Codes of 512 rows and scales of 4 blocks of them share the sharding of those 4; 128 is a factor of its own:

    >>> propagation_rule([Leaf((512,), ("m",))], [Leaf((512,), ("m",)), Leaf((4,), ("m",))])
    PropagationRule(text='(l0_0 l0_1) -> (l0_0 l0_1), l0_0', reduced=(), sizes={'l0_1': 128})
    """
    leaves = *operands, *results
    factors = _factors(leaves)
    names = iter(f"own{number}" for number in range(sum(len(leaf.shape) for leaf in leaves)))

    def axis(size: int, label: str | None) -> list[str]:
        found = factors.get(label or "", {}).get(size)
        return [next(names)] if found is None else found

    texts = [[axis(*each) for each in zip(leaf.shape, leaf.labels, strict=True)] for leaf in leaves]
    alone = {names[0] for text in texts for names in text if len(names) == 1}
    sizes = {
        name: size // (previous or 1)
        for by_size in factors.values()
        for previous, (size, found) in zip((None, *by_size), by_size.items(), strict=False)
        for name in found[-1:]
        if name not in alone
    }
    reduced = tuple(name for c in contracted for name in max(factors[c].values(), key=len, default=()))
    texts = [" ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" for names in text) for text in texts]
    return PropagationRule(
        f"{', '.join(texts[: len(operands)])} -> {', '.join(texts[len(operands) :])}", reduced, sizes
    )


def _factors(leaves: Sequence[Leaf]) -> dict[str, dict[int, list[str]]]:
    """By label, and by each size that an axis of that label has, the factors of which that size is the product.

    The sizes of a label are products of its leading factors. One that does not divide the next longer has none, and
    neither has 1.
    """
    sizes: dict[str, set[int]] = {}
    for leaf in leaves:
        for size, label in zip(leaf.shape, leaf.labels, strict=True):
            if label is not None:
                sizes.setdefault(label, set()).add(size)
    found: dict[str, dict[int, list[str]]] = {}
    for number, (label, of_label) in enumerate(sizes.items()):
        longest = max(of_label)
        chain: list[int] = []
        for size in sorted(of_label):
            if size > 1 and longest % size == 0 and (not chain or size % chain[-1] == 0):
                chain.append(size)
        found[label] = {size: [f"l{number}_{i}" for i in range(j + 1)] for j, size in enumerate(chain)}
    return found


@dataclasses.dataclass(frozen=True)
class Batched:
    """An Operation under `jax.vmap`: arrays that are batched have a leading axis of `size`."""

    operation: Any
    size: int
    is_batched: tuple[bool, ...]

    @property
    def label(self) -> str:
        """Of the batch axis: one that the operation does not have."""
        depth = self.operation.label if isinstance(self.operation, Batched) else "batch"
        return f"{depth}'"

    @property
    def operands(self) -> tuple[Leaf, ...]:
        leaves = zip(self.operation.operands, self.is_batched, strict=True)
        return tuple(self._with_batch(leaf) if batched else leaf for leaf, batched in leaves)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return tuple(map(self._with_batch, self.operation.results))

    @property
    def contracted(self) -> str:
        return self.operation.contracted

    def run(self, arrays: Arrays) -> Arrays:
        return self._mapped(self.operation.run)(arrays)

    def shards(self, mesh: Any, operands: Sequence[Sharding], results: Sequence[Sharding]) -> Shards:
        """The batch axis keeps those of its mesh axes that nothing within an example is sharded over."""
        shards = self.operation.shards(mesh, operands, results)
        taken = {
            axis for sharding in (*shards.operands, *shards.results) for axes in sharding.values() for axis in axes
        }
        wanted = next((found for each in (*operands, *results) if (found := each.get(self.label))), ())
        axes = tuple(axis for axis in wanted if axis not in taken)
        if self.size % math.prod(mesh.shape[axis] for axis in axes):
            axes = ()
        operands, results = (
            [{**sharding, self.label: axes} for sharding in every] for every in (shards.operands, shards.results)
        )
        return Shards(operands, results, self._mapped(shards.run))

    def _with_batch(self, leaf: Leaf) -> Leaf:
        return Leaf((self.size, *leaf.shape), (self.label, *leaf.labels))

    def _mapped(self, run: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        axes = tuple(0 if batched else None for batched in self.is_batched)
        return lambda arrays: jax.vmap(lambda *example: tuple(run(example)), in_axes=axes)(*arrays)

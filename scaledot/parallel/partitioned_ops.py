"""Casts and matmuls by kernels, as Operations that XLA partitions along automatic mesh axes.

Kernels work on matrices, whose rows are often several collapsed dims, such as (batch, sequence). If both are sharded,
the rows of a device are not contiguous in the matrix, and no sharding of a matrix describes them. So an operation takes
and returns arrays with those dims (the members of an `Axis`) apart, and each device collapses them in its shard.

For x (8, 2048, 4096) sharded as (fsdp=4, tp=2, -) a device casts a shard (2, 1024, 4096) as a matrix (2048, 4096). Its
codes are results of shape (8, 2048, 4096), and its 1x128 scales of shape (8, 2048, 32), both sharded as x is.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scaledot.array import ScaledArray
from scaledot.contraction import Contraction, labels
from scaledot.kernels import table
from scaledot.kernels.layouts import RowPairs, Transposed
from scaledot.kernels.operands import LabeledScale, lay
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, Operand, Problem, accumulation_dtype
from scaledot.kernels.table import Kernel
from scaledot.numerics import blocks
from scaledot.numerics.rounding import raw_key
from scaledot.parallel import transfer_plan
from scaledot.parallel.custom_partition import Arrays, Leaf, Shards, run_partitioned
from scaledot.parallel.shard_indices import Axis, Sharding, Sizes, first_index
from scaledot.parallel.transfer_plan import Split
from scaledot.parallel.types import ONE_DEVICE
from scaledot.programs import for_types, program


@dataclasses.dataclass(frozen=True)
class Flat:
    """An array of the shape of a matrix, or of the shape of its scales, with the Axis of each dim; None for size 1."""

    shape: Sizes
    axes: tuple[Axis | None, ...]

    @property
    def leaf(self) -> Leaf:
        shape, names = [], []
        for size, axis in zip(self.shape, self.axes, strict=True):
            shape += [size] if axis is None else axis.open(size)
            names += [None] if axis is None else axis.labels
        return Leaf(tuple(shape), tuple(names))

    def shard(self, sharding: Sharding, mesh) -> "Flat":
        axes = tuple(None if axis is None else axis.shard(sharding, mesh) for axis in self.axes)
        sizes = zip(self.shape, self.axes, axes, strict=True)
        shape = (size if old is None or new is None else size * new.size // old.size for size, old, new in sizes)
        return Flat(tuple(shape), axes)


def flat_arrays(tree: Any, axes: Sequence[Axis]) -> Any:
    """The pytree of a quantised matrix in any layout of `kernels.layouts`, or an array, with a Flat for each leaf."""
    if isinstance(tree, Transposed):
        return dataclasses.replace(tree, stored=flat_arrays(tree.stored, axes[::-1]))
    if isinstance(tree, RowPairs):
        return dataclasses.replace(tree, stored=flat_arrays(tree.stored, axes))
    if not isinstance(tree, ScaledArray):
        return Flat(tree.shape, tuple(axes))

    def of_blocks(a: Any) -> Flat:
        return Flat(a.shape, tuple(None if size == 1 else axis for size, axis in zip(a.shape, axes, strict=True)))

    def constant(a: Any) -> Flat:
        return Flat(a.shape, (None,) * len(a.shape))

    return dataclasses.replace(
        tree,
        data=Flat(tree.data.shape, tuple(axes)),
        scale=of_blocks(tree.scale),
        tensor_scale=None if tree.tensor_scale is None else constant(tree.tensor_scale),
        zero=None if tree.zero is None else of_blocks(tree.zero),
    )


def _reshaped(arrays: Arrays, shapes: Sequence[Sizes]) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True))


def cast(problem: CastProblem, kernel: Kernel, x: jax.Array, given: CastArguments, members) -> CastResult:
    """The casts of x by a kernel, in a program that XLA partitions. members: sizes, for each axis of x."""
    leaves, tree = jax.tree.flatten(given._replace(keys=jax.tree.map(raw_key, given.keys)))
    operation = Cast(problem, kernel, members, tuple(leaf.shape for leaf in leaves), tree)
    made = run_partitioned(operation, [lax.stop_gradient(x).reshape(operation.operands[0].shape), *leaves])
    return jax.tree.unflatten(operation.tree, _reshaped(made, [flat.shape for flat in operation.flats]))


@dataclasses.dataclass(frozen=True)
class Cast:
    """The casts of one matrix. given: the shapes of its CastArguments, which every device has whole."""

    problem: CastProblem
    kernel: Kernel
    members: tuple[Sizes, ...]
    given: tuple[Sizes, ...]
    given_tree: Any

    contracted = ""

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        fresh = iter(labels(sum(map(len, self.members))))
        multiples = (self._multiple(axis) for axis in range(len(self.problem.shape)))
        return tuple(Axis.of(fresh, *each) for each in zip(self.members, multiples, strict=True))

    def _multiple(self, axis: int) -> int:
        """The size along an axis that shards must be multiples of, so that no block or rotation group is cut."""
        ndim, multiple = len(self.problem.shape), 1
        for view in self.problem.views:
            rotation = view.spec.rotation
            block = blocks.expand(view.spec.block, ndim)[axis]
            turned = rotation.size if rotation is not None and rotation.axis % ndim == axis else 1
            multiple = math.lcm(multiple, max(block, 1), turned, 2 if view.spec.format.bits == 4 else 1)
        return multiple

    @functools.cached_property
    def _result(self) -> CastResult:
        """The types of the results."""
        x = jax.ShapeDtypeStruct(self.problem.shape, self.problem.dtype)
        given = [
            jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(self.given, self._given_dtypes, strict=True)
        ]
        run = program(_run_cast, self.problem, self.kernel)
        with for_types():
            return jax.eval_shape(run, x, jax.tree.unflatten(self.given_tree, given))

    @property
    def _given_dtypes(self) -> list[Any]:
        """Words of keys, and then floats."""
        arguments = jax.tree.unflatten(self.given_tree, range(len(self.given)))
        keys = len(jax.tree.leaves(arguments.keys))
        return [jnp.uint32] * keys + [jnp.float32] * (len(self.given) - keys)

    @property
    def _is_stochastic(self) -> bool:
        """Random numbers are drawn by the indices of elements in the whole matrix."""
        return any(view.is_stochastic for view in self.problem.views)

    @property
    def tree(self) -> Any:
        return jax.tree.structure(self._result)

    @functools.cached_property
    def flats(self) -> list[Flat]:
        arrays, amax, sums = self._result
        of_amax = None if amax is None else Flat((), ())
        of_sums = None if sums is None else Flat(sums.shape, self.axes[-1:])
        return jax.tree.leaves(([flat_arrays(q, self.axes) for q in arrays], of_amax, of_sums))

    @property
    def operands(self) -> tuple[Leaf, ...]:
        given = (Leaf(shape, (None,) * len(shape)) for shape in self.given)
        return Flat(self.problem.shape, self.axes).leaf, *given

    @property
    def results(self) -> tuple[Leaf, ...]:
        return tuple(flat.leaf for flat in self.flats)

    def run(self, arrays: Arrays) -> Arrays:
        x, *given = arrays
        made = self._cast(self.problem, x, jax.tree.unflatten(self.given_tree, given))
        return _reshaped(jax.tree.leaves(made), [leaf.shape for leaf in self.results])

    def _cast(self, problem: CastProblem, x: jax.Array, given: CastArguments) -> CastResult:
        return program(_run_cast, problem, self.kernel)(x.reshape(problem.shape), given)

    def _run_shards(self, mesh, sharding: Sharding, arrays: Arrays) -> Arrays:
        x, *leaves = arrays
        given: CastArguments = jax.tree.unflatten(self.given_tree, leaves)
        if self._is_stochastic:
            given = given._replace(offset=first_index(self.axes, sharding, mesh))
        made = self._reduced(self._cast(self._shard(mesh, sharding), x, given), sharding)
        return _reshaped(jax.tree.leaves(made), [flat.shard(sharding, mesh).leaf.shape for flat in self.flats])

    def _reduced(self, made: CastResult, sharding: Sharding) -> CastResult:
        """With amax and column sums all-reduced over the devices that hold other shards."""
        every = tuple(axis for axes in sharding.values() for axis in axes)
        down = tuple(axis for along in self.axes[:-1] for c in along.labels for axis in sharding.get(c, ()))
        return made._replace(
            amax=lax.pmax(made.amax, every) if made.amax is not None and every else made.amax,
            column_sums=lax.psum(made.column_sums, down) if made.column_sums is not None and down else made.column_sums,
        )

    def shards(self, mesh: Any, operands: Sequence[Sharding], results: Sequence[Sharding]) -> Shards:
        sharding = self._fitting(mesh, operands[0])
        operands, results = [sharding, *({} for _ in self.given)], [sharding] * len(self.results)
        return Shards(operands, results, functools.partial(self._run_shards, mesh, sharding))

    def _fitting(self, mesh, wanted: Sharding) -> Sharding:
        """The sharding of x, less dims whose shards would be uneven, cut blocks, or not be supported by the kernel."""
        sharding = dict(wanted)
        misfits = [Axis.cut_member, *([Axis.scattered_member] if self._is_stochastic else [])]
        while cut := next((c for of in misfits for axis in self.axes if (c := of(axis, sharding, mesh))), None):
            del sharding[cut]
        while sharding and self.kernel.problem_reason(self._shard(mesh, sharding)) is not None:
            sharding.popitem()
        return sharding

    def _shard(self, mesh, sharding: Sharding) -> CastProblem:
        """The casts of a shard. Scales that extend beyond it follow from an amax over several devices."""
        shape = tuple(axis.shard(sharding, mesh).size for axis in self.axes)
        views = tuple(
            dataclasses.replace(view, spec=dataclasses.replace(view.spec, amax_axes=self._shared(view.spec, sharding)))
            for view in self.problem.views
        )
        row_length = self.axes[-1].size if self._is_stochastic else None
        fields = {"shape": shape, "views": views, "row_length": row_length, "partitioning": ONE_DEVICE}
        return dataclasses.replace(self.problem, **fields)

    def _shared(self, spec, sharding: Sharding) -> tuple[str, ...]:
        """The mesh axes over which the amax of a scale is all-reduced."""
        tile = blocks.expand(spec.block, len(self.axes))
        whole = (axis for axis, size in zip(self.axes, tile, strict=True) if size == 0 or spec.format.two_level)
        return tuple(name for axis in whole for c in axis.labels for name in sharding.get(c, ()))


def _run_cast(problem: CastProblem, kernel: Kernel, x: jax.Array, given: CastArguments) -> CastResult:
    return kernel.run(problem, x, given)


def contract(problem: Problem, kernel: str | None, lhs, rhs, bias, members: dict[str, Sizes]) -> jax.Array:
    """lhs (m, k) times rhs (k, n), both quantised, plus a bias (n,), as one operation that XLA partitions.

    kernel: the name of a kernel for the shards; None for the first in the table that supports them. members: by label
    of the contraction, the sizes of the dims that were collapsed to it.
    """
    arrays, tree = jax.tree.flatten((lhs, rhs, bias))
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    operation = Matmul(problem, kernel, tuple(sorted(members.items())), types, tree)
    (y,) = run_partitioned(operation, _reshaped(arrays, [leaf.shape for leaf in operation.operands]))
    return y.reshape([operation.sizes[c] for c in problem.contraction.out])


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A contraction of two scaled operands, plus a bias."""

    problem: Problem
    kernel: str | None
    members: tuple[tuple[str, Sizes], ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Of the labels of the problem."""
        return {
            c: size for operand in self.problem.operands for c, size in zip(operand.labels, operand.shape, strict=True)
        }

    @functools.cached_property
    def axes(self) -> dict[str, Axis]:
        members = dict(self.members)
        every = [members.get(c, (size,)) for c, size in self.sizes.items()]
        fresh = iter(labels(sum(map(len, every))))
        return {c: Axis.of(fresh, sizes, self._multiple(c)) for c, sizes in zip(self.sizes, every, strict=True)}

    def _multiple(self, label: str) -> int:
        multiple = 1
        for operand in self.problem.operands:
            if label in operand.labels:
                block = operand.block_of(label)
                turned = operand.rotation.size if operand.rotation is not None and operand.rotated == label else 1
                multiple = math.lcm(multiple, 1 if block == operand.size(label) else block, turned)
        return multiple

    @functools.cached_property
    def opened(self) -> Contraction:
        """The contraction before dims were collapsed: a label for every member."""
        c = self.problem.contraction
        return Contraction(*("".join(self.axes[label].labels for label in of) for of in (c.lhs, c.rhs, c.out)))

    @property
    def contracted(self) -> str:
        return self.opened.contracted

    @functools.cached_property
    def flats(self) -> list[Flat]:
        lhs, rhs, bias = jax.tree.unflatten(self.tree, self.types)
        c = self.problem.contraction
        of = (lhs, c.lhs), (rhs, c.rhs), (bias, c.rhs_free)
        return [
            flat for q, names in of if q is not None for flat in jax.tree.leaves(flat_arrays(q, self._along(names)))
        ]

    def _along(self, names: str) -> list[Axis]:
        return [self.axes[c] for c in names]

    @property
    def operands(self) -> tuple[Leaf, ...]:
        return tuple(flat.leaf for flat in self.flats)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return (self._result({}, None),)

    def _result(self, sharding: Sharding, mesh) -> Leaf:
        out = [
            axis if mesh is None else axis.shard(sharding, mesh) for axis in self._along(self.problem.contraction.out)
        ]
        return Flat(tuple(axis.size for axis in out), tuple(out)).leaf

    def run(self, arrays: Arrays) -> Arrays:
        y = self._multiplied(self.problem, *self._matrices(arrays, self.flats))
        return (y.reshape(self.results[0].shape),)

    def _matrices(self, arrays: Arrays, flats: Sequence[Flat]) -> tuple[Any, Any, Any]:
        """lhs, rhs and bias, or shards of them, with their dims collapsed again."""
        return jax.tree.unflatten(self.tree, _reshaped(arrays, [flat.shape for flat in flats]))

    def _multiplied(self, problem: Problem, lhs, rhs, bias) -> jax.Array:
        problem = dataclasses.replace(problem, lhs=_on_one(problem.lhs), rhs=_on_one(problem.rhs))
        return program(_run_matmul, problem, table.choose(problem, self.kernel))(lhs, rhs, bias)

    def shards(self, mesh: Any, operands: Sequence[Sharding], results: Sequence[Sharding]) -> Shards:
        plan, lhs, rhs = self._plan(mesh, *self._splits(operands, results))
        out = dict(plan.out)
        counts = [jax.tree.structure(q).num_leaves for q in jax.tree.unflatten(self.tree, self.types)]
        shardings = [each for each, count in zip((lhs, rhs, out), counts, strict=True) for _ in range(count)]
        flats = [flat.shard(sharding, mesh) for flat, sharding in zip(self.flats, shardings, strict=True)]
        return Shards(shardings, [out], lambda arrays: self._run_shards(mesh, plan, {**lhs, **rhs}, arrays, flats))

    def _splits(self, operands: Sequence[Sharding], results: Sequence[Sharding]) -> tuple[Split, Split, Split]:
        """How the codes of both operands and the result are sharded."""
        first_of_rhs = jax.tree.structure(jax.tree.unflatten(self.tree, self.types)[0]).num_leaves
        found = operands[0], operands[first_of_rhs], results[0]
        return tuple(tuple(each.items()) for each in found)  # pyright: ignore[reportReturnType]

    def _plan(self, mesh, lhs: Split, rhs: Split, out: Split) -> tuple[transfer_plan.TransferPlan, Sharding, Sharding]:
        """What devices do, and how both operands are sharded when they are multiplied.

        Axes whose shards would be uneven or cut blocks are left whole.
        """
        while True:
            plan = transfer_plan.make_transfer_plan(self.opened, lhs, rhs, out)
            left, right = transfer_plan.after(lhs, plan.lhs), transfer_plan.after(rhs, plan.rhs)
            shardings = left, right, dict(plan.out)
            every = (axis.cut_member(sharding, mesh) for sharding in shardings for axis in self.axes.values())
            cut = next(filter(None, every), None)
            if cut is None:
                return plan, left, right
            lhs, rhs, out = (tuple((c, axes) for c, axes in split if c != cut) for split in (lhs, rhs, out))

    def _run_shards(
        self, mesh, plan: transfer_plan.TransferPlan, work: Sharding, arrays: Arrays, flats: Sequence[Flat]
    ):
        """The matmul of shards. Partial sums are reduced in the dtype of sums, and only then the bias is added."""
        problem, (lhs, rhs, bias) = self._shard(mesh, work), self._matrices(arrays, flats)
        dtype = problem.out_dtype
        added_last = bias if plan.summed else None
        if plan.summed:
            problem, bias = dataclasses.replace(problem, preferred=accumulation_dtype(dtype)), None
        total = self._multiplied(problem, lhs, rhs, bias).reshape(self._result(work, mesh).shape)
        total = transfer_plan.added(total, self.opened.out, plan)
        if added_last is not None:
            axes = [self.axes[c].shard(dict(plan.out), mesh) for c in self.problem.contraction.rhs_free]
            names, sizes = "".join(axis.labels for axis in axes), [size for axis in axes for size in axis.sizes]
            total += lay(LabeledScale(added_last.astype(total.dtype).reshape(sizes), names), self.opened.out)
        return (total.astype(dtype),)

    def _shard(self, mesh, work: Sharding) -> Problem:
        def of(operand: Operand) -> Operand:
            shape = tuple(self.axes[c].shard(work, mesh).size for c in operand.labels)
            return dataclasses.replace(operand, shape=shape)

        return dataclasses.replace(self.problem, lhs=of(self.problem.lhs), rhs=of(self.problem.rhs))


def _on_one(operand: Operand) -> Operand:
    return dataclasses.replace(operand, partitioning=ONE_DEVICE)


def _run_matmul(problem: Problem, kernel: Kernel, lhs, rhs, bias) -> jax.Array:
    return table.run_and_add(kernel, problem, lhs, rhs, bias)

"""Casts and matmuls by Pallas kernels as Operations with custom partitioning along automatic mesh axes.

Kernels take matrices, whose rows are often several collapsed dims, such as (batch, sequence). If both are sharded, the
rows of a device are not contiguous in the matrix, and no sharding of a matrix expresses that. So the arrays of an
operation have these dims separate (the members of a `CollapsedDim`), and each device collapses them in its shard.

For x (8, 2048, 4096) sharded as (fsdp=4, tp=2, -) a device casts its shard (2, 1024, 4096) as a matrix (2048, 4096).
The operation returns codes (8, 2048, 4096) and scales of 1×128 blocks (8, 2048, 32), both sharded as x is.
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
from scaledot.kernels.operands import LabeledArray, align_to
from scaledot.kernels.spec import CastArguments, CastProblem, CastResult, Operand, Problem, accumulation_dtype
from scaledot.kernels.table import Kernel
from scaledot.numerics import blocks
from scaledot.numerics.rounding import raw_key
from scaledot.parallel import transfer_plan
from scaledot.parallel.custom_partition import Arrays, Leaf, Shards, run_partitioned
from scaledot.parallel.shard_indices import CollapsedDim, Sizes, first_index
from scaledot.parallel.transfer_plan import AxesByLabel, LabelSharding, TransferPlan
from scaledot.parallel.types import ONE_DEVICE
from scaledot.programs import for_types, program


@dataclasses.dataclass(frozen=True)
class CollapsedShape:
    """The shape of a matrix or of its scales, and the CollapsedDim of each dim; None for a dim of size 1."""

    shape: Sizes
    dims: tuple[CollapsedDim | None, ...]

    @property
    def leaf(self) -> Leaf:
        shape, names = [], []
        for size, dim in zip(self.shape, self.dims, strict=True):
            shape += [size] if dim is None else dim.expand(size)
            names += [None] if dim is None else dim.labels
        return Leaf(tuple(shape), tuple(names))

    def shard(self, sharding: AxesByLabel, mesh) -> "CollapsedShape":
        dims = tuple(None if dim is None else dim.shard(sharding, mesh) for dim in self.dims)
        sizes = zip(self.shape, self.dims, dims, strict=True)
        shape = (size if old is None or new is None else size * new.size // old.size for size, old, new in sizes)
        return CollapsedShape(tuple(shape), dims)


def broadcast_shape(shape: Sizes, dims: Sequence[CollapsedDim]) -> CollapsedShape:
    """The CollapsedShape of an array that broadcasts to a matrix with these dims."""
    return CollapsedShape(shape, tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=True)))


def with_collapsed_shapes(tree: Any, dims: Sequence[CollapsedDim]) -> Any:
    """A quantised matrix in any layout of `kernels.layouts`, or an array, with a CollapsedShape per leaf."""
    if isinstance(tree, Transposed):
        return dataclasses.replace(tree, stored=with_collapsed_shapes(tree.stored, dims[::-1]))
    if isinstance(tree, RowPairs):
        return dataclasses.replace(tree, stored=with_collapsed_shapes(tree.stored, dims))
    if not isinstance(tree, ScaledArray):
        return CollapsedShape(tree.shape, tuple(dims))

    def of_blocks(a: Any) -> CollapsedShape:
        return broadcast_shape(a.shape, dims)

    def replicated(a: Any) -> CollapsedShape:
        return CollapsedShape(a.shape, (None,) * len(a.shape))

    return dataclasses.replace(
        tree,
        data=CollapsedShape(tree.data.shape, tuple(dims)),
        scale=of_blocks(tree.scale),
        tensor_scale=None if tree.tensor_scale is None else replicated(tree.tensor_scale),
        zero=None if tree.zero is None else of_blocks(tree.zero),
    )


def _reshaped(arrays: Arrays, shapes: Sequence[Sizes]) -> tuple[jax.Array, ...]:
    return tuple(a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True))


def cast(problem: CastProblem, kernel: Kernel, x: jax.Array, arguments: CastArguments, flattened_sizes) -> CastResult:
    """Runs the casts of x by a kernel in a program that XLA partitions.

    flattened_sizes: for each axis of x, the sizes of the dims that were collapsed to it.
    """
    leaves, tree = jax.tree.flatten(arguments._replace(keys=jax.tree.map(raw_key, arguments.keys)))
    operation = Cast(problem, kernel, flattened_sizes, tuple(leaf.shape for leaf in leaves), tree)
    arrays = [lax.stop_gradient(x), *leaves]
    results = run_partitioned(operation, _reshaped(arrays, [leaf.shape for leaf in operation.operands]))
    return jax.tree.unflatten(
        operation.tree, _reshaped(results, [collapsed.shape for collapsed in operation.collapsed_shapes])
    )


@dataclasses.dataclass(frozen=True)
class Cast:
    """The casts of one matrix, as an Operation.

    flattened_sizes: for each dim, the sizes of the dims that were collapsed to it. argument_shapes: of the leaves of
    its CastArguments, which are replicated, except that the mean is sharded as the columns of the matrix are.
    """

    problem: CastProblem
    kernel: Kernel
    flattened_sizes: tuple[Sizes, ...]
    argument_shapes: tuple[Sizes, ...]
    argument_tree: Any

    contracting = ""

    @functools.cached_property
    def dims(self) -> tuple[CollapsedDim, ...]:
        fresh = iter(labels(sum(map(len, self.flattened_sizes))))
        multiples = (self._multiple(axis) for axis in range(len(self.problem.shape)))
        return tuple(CollapsedDim.of(fresh, *each) for each in zip(self.flattened_sizes, multiples, strict=True))

    def _multiple(self, axis: int) -> int:
        """What the size of shards along an axis must be a multiple of, so that no block or rotation group is cut."""
        ndim, multiple = len(self.problem.shape), 1
        for output in self.problem.outputs:
            rotation = output.spec.rotation
            block = blocks.expand(output.spec.block, ndim)[axis]
            rotation_group = rotation.size if rotation is not None and rotation.axis % ndim == axis else 1
            multiple = math.lcm(multiple, max(block, 1), rotation_group, 2 if output.spec.format.bits == 4 else 1)
        return multiple

    @functools.cached_property
    def _result(self) -> CastResult:
        """The types of the results."""
        x = jax.ShapeDtypeStruct(self.problem.shape, self.problem.dtype)
        arguments = map(jax.ShapeDtypeStruct, self.argument_shapes, self._argument_dtypes)
        run = program(_run_cast, self.problem, self.kernel)
        with for_types():
            return jax.eval_shape(run, x, jax.tree.unflatten(self.argument_tree, arguments))

    @property
    def _argument_dtypes(self) -> list[Any]:
        """uint32 for the words of raw keys, which are the first leaves, float32 for all others."""
        arguments = jax.tree.unflatten(self.argument_tree, range(len(self.argument_shapes)))
        keys = len(jax.tree.leaves(arguments.keys))
        return [jnp.uint32] * keys + [jnp.float32] * (len(self.argument_shapes) - keys)

    @property
    def _is_stochastic(self) -> bool:
        return any(output.is_stochastic for output in self.problem.outputs)

    @property
    def tree(self) -> Any:
        return jax.tree.structure(self._result)

    @functools.cached_property
    def collapsed_shapes(self) -> list[CollapsedShape]:
        arrays, amax, sums = self._result
        of_amax = None if amax is None else CollapsedShape((), ())
        of_sums = None if sums is None else CollapsedShape(sums.shape, self.dims[-1:])
        return jax.tree.leaves(([with_collapsed_shapes(q, self.dims) for q in arrays], of_amax, of_sums))

    @functools.cached_property
    def collapsed_operands(self) -> list[CollapsedShape]:
        mean = jax.tree.unflatten(self.argument_tree, range(len(self.argument_shapes))).mean
        arguments = (
            broadcast_shape(shape, self.dims) if i == mean else CollapsedShape(shape, (None,) * len(shape))
            for i, shape in enumerate(self.argument_shapes)
        )
        return [CollapsedShape(self.problem.shape, self.dims), *arguments]

    @property
    def operands(self) -> tuple[Leaf, ...]:
        return tuple(collapsed.leaf for collapsed in self.collapsed_operands)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return tuple(collapsed.leaf for collapsed in self.collapsed_shapes)

    def run(self, arrays: Arrays) -> Arrays:
        x, *leaves = _reshaped(arrays, [collapsed.shape for collapsed in self.collapsed_operands])
        result = self._cast(self.problem, x, jax.tree.unflatten(self.argument_tree, leaves))
        return _reshaped(jax.tree.leaves(result), [leaf.shape for leaf in self.results])

    def _cast(self, problem: CastProblem, x: jax.Array, arguments: CastArguments) -> CastResult:
        return program(_run_cast, problem, self.kernel)(x, arguments)

    def _run_shards(self, mesh, sharding: AxesByLabel, arrays: Arrays) -> Arrays:
        shapes = [collapsed.shard(sharding, mesh).shape for collapsed in self.collapsed_operands]
        x, *leaves = _reshaped(arrays, shapes)
        arguments: CastArguments = jax.tree.unflatten(self.argument_tree, leaves)
        if self._is_stochastic:  # random numbers are drawn by global indices
            arguments = arguments._replace(offset=first_index(self.dims, sharding, mesh))
        result = self._all_reduced(self._cast(self._shard(mesh, sharding), x, arguments), sharding)
        return _reshaped(
            jax.tree.leaves(result), [collapsed.shard(sharding, mesh).leaf.shape for collapsed in self.collapsed_shapes]
        )

    def _all_reduced(self, result: CastResult, sharding: AxesByLabel) -> CastResult:
        """All-reduces amax over all mesh axes of x, and column sums over those that shard its rows."""
        all_axes = tuple(axis for axes in sharding.values() for axis in axes)
        row_axes = tuple(axis for dim in self.dims[:-1] for c in dim.labels for axis in sharding.get(c, ()))
        amax, sums = result.amax, result.column_sums
        return result._replace(
            amax=lax.pmax(amax, all_axes) if amax is not None and all_axes else amax,
            column_sums=lax.psum(sums, row_axes) if sums is not None and row_axes else sums,
        )

    def shards(self, mesh: Any, operands: Sequence[AxesByLabel], results: Sequence[AxesByLabel]) -> Shards:
        sharding = self._supported_sharding(mesh, operands[0])
        operands, results = [sharding] * len(self.operands), [sharding] * len(self.results)
        return Shards(operands, results, functools.partial(self._run_shards, mesh, sharding))

    def _supported_sharding(self, mesh, propagated: AxesByLabel) -> AxesByLabel:
        """The sharding of x, less dims whose shards would be uneven, cut blocks, or not be supported by the kernel."""
        sharding = dict(propagated)
        checks = [CollapsedDim.indivisible_member]
        if self._is_stochastic:
            checks.append(CollapsedDim.noncontiguous_member)
        while label := next((c for check in checks for dim in self.dims if (c := check(dim, sharding, mesh))), None):
            del sharding[label]
        while sharding and self.kernel.problem_reason(self._shard(mesh, sharding)) is not None:
            sharding.popitem()
        return sharding

    def _shard(self, mesh, sharding: AxesByLabel) -> CastProblem:
        """The casts of a shard. The amax of a block that extends over several devices is all-reduced."""
        shape = tuple(dim.shard(sharding, mesh).size for dim in self.dims)
        specs = [dataclasses.replace(v.spec, amax_axes=self._amax_axes(v.spec, sharding)) for v in self.problem.outputs]
        outputs = tuple(
            dataclasses.replace(output, spec=spec) for output, spec in zip(self.problem.outputs, specs, strict=True)
        )
        row_length = self.dims[-1].size if self._is_stochastic else None
        fields = {"shape": shape, "outputs": outputs, "row_length": row_length, "partitioning": ONE_DEVICE}
        return dataclasses.replace(self.problem, **fields)

    def _amax_axes(self, spec, sharding: AxesByLabel) -> tuple[str, ...]:
        """The mesh axes over which an amax is all-reduced: those of dims that one scale covers entirely."""
        block = blocks.expand(spec.block, len(self.dims))
        covered = (dim for dim, size in zip(self.dims, block, strict=True) if size == 0 or spec.format.two_level)
        return tuple(name for dim in covered for c in dim.labels for name in sharding.get(c, ()))


def _run_cast(problem: CastProblem, kernel: Kernel, x: jax.Array, arguments: CastArguments) -> CastResult:
    return kernel.run(problem, x, arguments)


def contract(problem: Problem, kernel: str | None, lhs, rhs, bias, flattened_sizes: dict[str, Sizes]) -> jax.Array:
    """lhs (m, k) @ rhs (k, n) + bias (n,) with quantised operands, as one Operation in a program that XLA partitions.

    kernel: the name of a kernel for the shards; None for the first in the table that supports them. flattened_sizes:
    for each label of the contraction, the sizes of the dims that were collapsed to it.
    """
    arrays, tree = jax.tree.flatten((lhs, rhs, bias))
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    operation = Matmul(problem, kernel, tuple(sorted(flattened_sizes.items())), types, tree)
    (y,) = run_partitioned(operation, _reshaped(arrays, [leaf.shape for leaf in operation.operands]))
    return y.reshape([operation.sizes[c] for c in problem.contraction.out])


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A contraction of two scaled operands, plus a bias, as an Operation.

    flattened_sizes: for each label, the sizes of the dims that were collapsed to it; a label that it lacks is one dim.
    types, tree: the leaves of (lhs, rhs, bias) and their pytree structure.
    """

    problem: Problem
    kernel: str | None
    flattened_sizes: tuple[tuple[str, Sizes], ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the labels of the problem."""
        return {
            c: size for operand in self.problem.operands for c, size in zip(operand.labels, operand.shape, strict=True)
        }

    @functools.cached_property
    def dims(self) -> dict[str, CollapsedDim]:
        known = dict(self.flattened_sizes)
        all_sizes = {c: known.get(c, (size,)) for c, size in self.sizes.items()}
        fresh = iter(labels(sum(map(len, all_sizes.values()))))
        return {c: CollapsedDim.of(fresh, sizes, self._multiple(c)) for c, sizes in all_sizes.items()}

    def _multiple(self, label: str) -> int:
        """What the size of shards along a label must be a multiple of, so that no block or rotation group is cut."""
        multiple = 1
        for operand in self.problem.operands:
            if label in operand.labels:
                block = operand.block_of(label)
                rotation = operand.rotation if operand.rotated_label == label else None
                rotation_group = 1 if rotation is None else rotation.size
                multiple = math.lcm(multiple, 1 if block == operand.size(label) else block, rotation_group)
        return multiple

    @functools.cached_property
    def expanded(self) -> Contraction:
        """The contraction before dims were collapsed: a label for every member."""
        c = self.problem.contraction
        return Contraction(*("".join(self.dims[label].labels for label in of) for of in (c.lhs, c.rhs, c.out)))

    @property
    def contracting(self) -> str:
        return self.expanded.contracting

    @functools.cached_property
    def collapsed_shapes(self) -> list[CollapsedShape]:
        lhs, rhs, bias = jax.tree.unflatten(self.tree, self.types)
        c = self.problem.contraction
        labelled = (lhs, c.lhs), (rhs, c.rhs), (bias, c.rhs_free)
        trees = [with_collapsed_shapes(q, self._dims_of(names)) for q, names in labelled if q is not None]
        return jax.tree.leaves(trees)

    def _dims_of(self, names: str) -> list[CollapsedDim]:
        return [self.dims[c] for c in names]

    @property
    def operands(self) -> tuple[Leaf, ...]:
        return tuple(collapsed.leaf for collapsed in self.collapsed_shapes)

    @property
    def results(self) -> tuple[Leaf, ...]:
        return (self._result({}, None),)

    def _result(self, sharding: AxesByLabel, mesh) -> Leaf:
        """The result if `mesh` is None, else a device's shard of it."""
        dims = self._dims_of(self.problem.contraction.out)
        dims = dims if mesh is None else [dim.shard(sharding, mesh) for dim in dims]
        return CollapsedShape(tuple(dim.size for dim in dims), tuple(dims)).leaf

    def run(self, arrays: Arrays) -> Arrays:
        y = self._multiplied(self.problem, *self._matrices(arrays, self.collapsed_shapes))
        return (y.reshape(self.results[0].shape),)

    def _matrices(self, arrays: Arrays, collapsed_shapes: Sequence[CollapsedShape]) -> tuple[Any, Any, Any]:
        """lhs, rhs and bias, or their shards, with dims collapsed."""
        return jax.tree.unflatten(self.tree, _reshaped(arrays, [collapsed.shape for collapsed in collapsed_shapes]))

    def _multiplied(self, problem: Problem, lhs, rhs, bias) -> jax.Array:
        problem = dataclasses.replace(problem, lhs=_on_one_device(problem.lhs), rhs=_on_one_device(problem.rhs))
        return program(_run_matmul, problem, table.choose(problem, self.kernel))(lhs, rhs, bias)

    def shards(self, mesh: Any, operands: Sequence[AxesByLabel], results: Sequence[AxesByLabel]) -> Shards:
        plan, lhs, rhs = self._plan(mesh, *self._code_shardings(operands, results))
        out = dict(plan.out)
        counts = [jax.tree.structure(q).num_leaves for q in jax.tree.unflatten(self.tree, self.types)]
        shardings = [each for each, count in zip((lhs, rhs, out), counts, strict=True) for _ in range(count)]
        collapsed_shapes = [
            collapsed.shard(sharding, mesh)
            for collapsed, sharding in zip(self.collapsed_shapes, shardings, strict=True)
        ]
        return Shards(
            shardings, [out], lambda arrays: self._run_shards(mesh, plan, {**lhs, **rhs}, arrays, collapsed_shapes)
        )

    def _code_shardings(self, operands: Sequence[AxesByLabel], results: Sequence[AxesByLabel]) -> list[LabelSharding]:
        """The shardings of the codes of lhs, of the codes of rhs, and of the result."""
        codes_of_rhs = jax.tree.structure(jax.tree.unflatten(self.tree, self.types)[0]).num_leaves
        return [tuple(each.items()) for each in (operands[0], operands[codes_of_rhs], results[0])]

    def _plan(
        self, mesh, lhs: LabelSharding, rhs: LabelSharding, out: LabelSharding
    ) -> tuple[TransferPlan, AxesByLabel, AxesByLabel]:
        """The transfer plan, and the shardings of both operands in the matmul of shards, after their transfers.

        Dims whose shards would be uneven or cut blocks are replicated.
        """
        while True:
            plan = transfer_plan.make_transfer_plan(self.expanded, lhs, rhs, out)
            left, right = transfer_plan.sharding_after(lhs, plan.lhs), transfer_plan.sharding_after(rhs, plan.rhs)
            shardings = left, right, dict(plan.out)
            members = (dim.indivisible_member(sharding, mesh) for sharding in shardings for dim in self.dims.values())
            indivisible = next(filter(None, members), None)
            if indivisible is None:
                return plan, left, right
            lhs, rhs, out = (tuple((c, axes) for c, axes in each if c != indivisible) for each in (lhs, rhs, out))

    def _run_shards(
        self, mesh, plan: TransferPlan, work: AxesByLabel, arrays: Arrays, collapsed_shapes: Sequence[CollapsedShape]
    ):
        """The matmul of shards. Partial results are reduced in the accumulation dtype before the bias is added."""
        problem, (lhs, rhs, bias) = self._shard(mesh, work), self._matrices(arrays, collapsed_shapes)
        dtype = problem.out_dtype
        late_bias = bias if plan.reduced_axes else None
        if plan.reduced_axes:
            problem, bias = dataclasses.replace(problem, preferred=accumulation_dtype(dtype)), None
        y = self._multiplied(problem, lhs, rhs, bias).reshape(self._result(work, mesh).shape)
        y = transfer_plan.reduce_partials(y, self.expanded.out, plan)
        if late_bias is not None:
            dims = [self.dims[c].shard(dict(plan.out), mesh) for c in self.problem.contraction.rhs_free]
            names, sizes = "".join(dim.labels for dim in dims), [size for dim in dims for size in dim.sizes]
            y += align_to(LabeledArray(late_bias.astype(y.dtype).reshape(sizes), names), self.expanded.out)
        return (y.astype(dtype),)

    def _shard(self, mesh, work: AxesByLabel) -> Problem:
        """The problem of the shards."""

        def shard(operand: Operand) -> Operand:
            shape = tuple(self.dims[c].shard(work, mesh).size for c in operand.labels)
            return dataclasses.replace(operand, shape=shape)

        return dataclasses.replace(self.problem, lhs=shard(self.problem.lhs), rhs=shard(self.problem.rhs))


def _on_one_device(operand: Operand) -> Operand:
    return dataclasses.replace(operand, partitioning=ONE_DEVICE)


def _run_matmul(problem: Problem, kernel: Kernel, lhs, rhs, bias) -> jax.Array:
    return table.run_with_bias(kernel, problem, lhs, rhs, bias)

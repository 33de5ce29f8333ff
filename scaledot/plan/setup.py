"""The input of a plan: a model, a mesh, and tokens per step; and whether a recipe can run on that mesh."""

import dataclasses
import math

from scaledot.plan.gemm_kinds import block_size_along
from scaledot.plan.mesh import BATCH_AXES, Mesh
from scaledot.plan.models import Linear, Model
from scaledot.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model on a mesh.

    batch: sequences per index along dp and fsdp; the devices of a tp group share them.
    sequence: tokens per sequence.
    sequence_parallel: whether activations between the matmuls are sharded over tp.
    """

    model: Model
    mesh: Mesh
    batch: int
    sequence: int
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a tp group, all of which enter each of its devices' matmuls."""
        return self.batch * self.sequence

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.mesh.size_along(BATCH_AXES)

    @property
    def compilation_setup(self) -> "Setup":
        """This setup on the mesh that is compiled for, which may have fewer devices along dp."""
        return self.with_mesh(self.mesh.compilation_mesh())

    def with_mesh(self, mesh: Mesh) -> "Setup":
        return dataclasses.replace(self, mesh=mesh)

    def matmul_flops(self, linear: Linear) -> float:
        """Returns the FLOPs of one of fwd, dgrad and wgrad on a device; they are equal."""
        return 2 * self.tokens * linear.parameters / self.mesh.sizes["tp"]

    def local_elements(self, linear: Linear) -> dict[str, float]:
        """Returns the elements of x, w and g that a device casts."""
        sizes = self.mesh.sizes
        stream_tokens = self.tokens / (sizes["tp"] if self.sequence_parallel else 1)
        features = {"x": linear.inputs, "g": linear.outputs}
        # One of x and g is on the residual stream; the other has its features sharded over tp.
        stream, sharded = ("x", "g") if linear.tp_splits == "outputs" else ("g", "x")
        return {
            stream: stream_tokens * features[stream],
            sharded: self.tokens * features[sharded] / sizes["tp"],
            "w": linear.parameters / (sizes["fsdp"] * sizes["tp"]),
        }

    def check(self, recipe: Recipe) -> None:
        """Raises if a recipe cannot run on this mesh."""
        reason = self.unsupported_reason(recipe)
        if reason:
            raise ValueError(reason)

    def unsupported_reason(self, recipe: Recipe) -> str | None:
        """Returns why a recipe cannot run on this mesh, or None if it can.

        A mesh axis must divide the dims that are sharded over it into whole blocks of the recipe.
        """
        reasons = (_indivisible_reason(self.mesh, *dim, recipe) for dim in self._sharded_dims(recipe))
        return next(filter(None, reasons), None) or self._token_reason(recipe)

    def _sharded_dims(self, recipe: Recipe) -> list[tuple[str, str, int, int]]:
        """Returns (mesh axis, name of the dim, its size, block size) of every dim that is sharded."""
        model, block = self.model, max(block_size_along(recipe, "i"), block_size_along(recipe, "o"))
        dims: list[tuple[str, str, int, int]] = [
            ("fsdp", "width", model.width, block),
            ("tp", "kv_heads", model.kv_heads, 1),
            ("tp", "features of attention", model.attention_width, block),
            ("tp", "hidden", model.hidden, block),
            ("tp", "vocabulary", model.vocabulary, 1),
        ]
        if self.sequence_parallel:
            dims.append(("tp", "sequence", self.sequence, block_size_along(recipe, "t")))
        return dims

    def _token_reason(self, recipe: Recipe) -> str | None:
        block = block_size_along(recipe, "t")
        if not self.tokens % block:
            return None
        fitting = sorted({max(self.sequence // block, 1) * block, -(-self.sequence // block) * block})
        return (
            f"{self.batch} × {self.sequence} tokens per tp group are not a multiple of {recipe.name}'s blocks of "
            f"{block} tokens; sequences of {' or '.join(map(str, fitting))} would be"
        )


def _indivisible_reason(mesh: Mesh, axis: str, dim: str, size: int, block: int, recipe: Recipe) -> str | None:
    shards = mesh.sizes[axis]
    if shards == 1 or (not size % shards and not size // shards % block):
        return None
    works = [n for n in range(1, max(size // block, 1) + 1) if n == 1 or (not size % n and not size // n % block)]
    near = sorted(sorted(works, key=lambda n: abs(math.log(n / shards)))[:2])
    nearest = " or ".join(f"{axis}={n}" for n in near)
    if size % shards:
        return f"{axis}={shards} does not divide the model's {dim}, {size}; {nearest} would"
    return (
        f"{axis}={shards} leaves each device {size // shards} of the model's {dim}, {size}, which is not a multiple of "
        f"{recipe.name}'s blocks of {block}; {nearest} would work"
    )

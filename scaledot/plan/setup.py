"""What is planned: a model on a mesh, with so many tokens on a device; and whether a recipe can have it so."""

import dataclasses
import math

from scaledot.plan.gemm_kinds import block_along
from scaledot.plan.mesh import BATCH, Mesh
from scaledot.plan.models import Linear, Model
from scaledot.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Setup:
    """batch: sequences of each place along dp and fsdp, which its tp devices have in common. sequence: tokens of one.
    sequence_parallel: whether tp devices part it between products."""

    model: Model
    mesh: Mesh
    batch: int
    sequence: int
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        """Of a device in a product."""
        return self.batch * self.sequence

    @property
    def all_tokens(self) -> int:
        return self.tokens * self.mesh.along(BATCH)

    @property
    def compiled(self) -> "Setup":
        return self.on(self.mesh.compiled())

    def on(self, mesh: Mesh) -> "Setup":
        """The same on another mesh."""
        return dataclasses.replace(self, mesh=mesh)

    def flops(self, linear: Linear) -> float:
        """Of one of its three products on a device."""
        return 2 * self.tokens * linear.parameters / self.mesh.sizes["tp"]

    def parts(self, linear: Linear) -> dict[str, float]:
        """Elements of x, w and g that a device casts."""
        sizes = self.mesh.sizes
        between = self.tokens / (sizes["tp"] if self.sequence_parallel else 1)
        whole, split = ("x", "g") if linear.splits == "outputs" else ("g", "x")
        features = {"x": linear.inputs, "g": linear.outputs}
        weights = linear.parameters / (sizes["fsdp"] * sizes["tp"])
        return {whole: between * features[whole], split: self.tokens * features[split] / sizes["tp"], "w": weights}

    def check(self, recipe: Recipe) -> None:
        """Raise for an axis that does not divide what it splits, or that cuts blocks of the recipe."""
        reason = self.reason(recipe)
        if reason:
            raise ValueError(reason)

    def reason(self, recipe: Recipe) -> str | None:
        """Why a recipe cannot run on this mesh, or None."""
        reasons = (_split_reason(self.mesh, *split, recipe) for split in self._splits(recipe))
        return next(filter(None, reasons), None) or self._token_reason(recipe)

    def _splits(self, recipe: Recipe) -> list[tuple[str, str, int, int]]:
        """(axis, what it splits, its size, elements that must stay on one device)."""
        model, features = self.model, max(block_along(recipe, "i"), block_along(recipe, "o"))
        splits: list[tuple[str, str, int, int]] = [
            ("fsdp", "width", model.width, features),
            ("tp", "kv_heads", model.kv_heads, 1),
            ("tp", "features of attention", model.attention, features),
            ("tp", "hidden", model.hidden, features),
            ("tp", "vocabulary", model.vocabulary, 1),
        ]
        if self.sequence_parallel:
            splits.append(("tp", "sequence", self.sequence, block_along(recipe, "t")))
        return splits

    def _token_reason(self, recipe: Recipe) -> str | None:
        block = block_along(recipe, "t")
        if not self.tokens % block:
            return None
        fitting = sorted({max(self.sequence // block, 1) * block, -(-self.sequence // block) * block})
        return (
            f"{self.batch} × {self.sequence} tokens of a device cut blocks of {block} of {recipe.name}; sequences "
            f"of {' or '.join(map(str, fitting))} would not"
        )


def _split_reason(mesh: Mesh, axis: str, what: str, size: int, block: int, recipe: Recipe) -> str | None:
    parts = mesh.sizes[axis]
    if parts == 1 or (not size % parts and not size // parts % block):
        return None
    works = [n for n in range(1, max(size // block, 1) + 1) if n == 1 or (not size % n and not size // n % block)]
    near = sorted(sorted(works, key=lambda n: abs(math.log(n / parts)))[:2])
    nearest = " or ".join(f"{axis}={n}" for n in near)
    if size % parts:
        return f"{axis}={parts} does not divide the model's {what}, {size}; {nearest} would"
    return (
        f"{axis}={parts} leaves a device {size // parts} of the model's {what}, {size}, which cuts blocks of {block} "
        f"of {recipe.name}; {nearest} would not"
    )

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
        return dataclasses.replace(self, mesh=self.mesh.compiled())

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
        model, features = self.model, max(block_along(recipe, "i"), block_along(recipe, "o"))
        _check_split(self.mesh, "fsdp", "width", model.width, features, recipe)
        _check_split(self.mesh, "tp", "kv_heads", model.kv_heads, 1, recipe)
        _check_split(self.mesh, "tp", "features of attention", model.attention, features, recipe)
        _check_split(self.mesh, "tp", "hidden", model.hidden, features, recipe)
        _check_split(self.mesh, "tp", "vocabulary", model.vocabulary, 1, recipe)
        block = block_along(recipe, "t")
        if self.sequence_parallel:
            _check_split(self.mesh, "tp", "sequence", self.sequence, block, recipe)
        if self.tokens % block:
            fitting = sorted({max(self.sequence // block, 1) * block, -(-self.sequence // block) * block})
            raise ValueError(
                f"{self.batch} × {self.sequence} tokens of a device cut blocks of {block} of {recipe.name}; sequences "
                f"of {' or '.join(map(str, fitting))} would not"
            )


def _check_split(mesh: Mesh, axis: str, what: str, size: int, block: int, recipe: Recipe) -> None:
    parts = mesh.sizes[axis]
    if parts == 1 or (not size % parts and not size // parts % block):
        return
    works = [n for n in range(1, max(size // block, 1) + 1) if n == 1 or (not size % n and not size // n % block)]
    near = sorted(sorted(works, key=lambda n: abs(math.log(n / parts)))[:2])
    nearest = " or ".join(f"{axis}={n}" for n in near)
    if size % parts:
        raise ValueError(f"{axis}={parts} does not divide the model's {what}, {size}; {nearest} would")
    raise ValueError(
        f"{axis}={parts} leaves a device {size // parts} of the model's {what}, {size}, which cuts blocks of {block} "
        f"of {recipe.name}; {nearest} would not"
    )

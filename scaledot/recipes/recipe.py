"""A Recipe: the Gemms of fwd, dgrad and wgrad, which fit together."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from scaledot.hashing import hash_once
from scaledot.recipes.casts import GEMM_OPERANDS, Cast, Gemm
from scaledot.recipes.encoding import check_keys, gemm_from_dict, gemm_to_dict


@hash_once
@dataclasses.dataclass(frozen=True)
class Recipe:
    """The casts of fwd, dgrad and wgrad; None for dgrad or wgrad is the straight-through estimator.

    amax_scope: for a scale that covers a whole axis or tensor which is sharded along explicit mesh axes, by `specs` or
        in a shard_map: "global" all-reduces the amax, so that codes are bit-identical to single-device quantisation,
        except of differences to a mean, which depends on the order of its sum;
        "local" uses the amax of each shard, without a collective, unless codes of several shards are gathered.

    >>> from scaledot.recipes import FP8_CURRENT
    >>> mine = dataclasses.replace(FP8_CURRENT, name="exact_wgrad", wgrad=Gemm())
    >>> print(mine)
    exact_wgrad
      fwd    x fp8_e4m3      w fp8_e4m3
      dgrad  g fp8_e5m2      w fp8_e4m3
      wgrad  x unquantised      g unquantised
    """

    name: str
    fwd: Gemm
    dgrad: Gemm | None = None
    wgrad: Gemm | None = None
    amax_scope: str = "global"

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise TypeError(f"`name` of a Recipe must be a string, not {self.name!r}")
        if self.amax_scope not in ("global", "local"):
            raise ValueError(f"`amax_scope` {self.amax_scope!r} is not known; use 'global' or 'local'")
        for matmul in GEMM_OPERANDS:
            gemm = getattr(self, matmul)
            if not isinstance(gemm, Gemm) and (gemm is not None or matmul == "fwd"):
                raise TypeError(f"`{matmul}` of a Recipe must be a Gemm, not {gemm!r}")
        self._check_requantized()
        for tensor in "xwg":
            delayed = {cast for _, name, cast in self.casts() if name == tensor and cast.delayed is not None}
            if len(delayed) > 1:
                names = " and ".join(sorted(map(str, delayed)))
                raise ValueError(f"{tensor} of {self.name} has one amax history, but two delayed casts: {names}")
        self._check_straight_through()
        _check_means(self)

    def _check_straight_through(self) -> None:
        for matmul, clipped, multiplied in (("dgrad", "x", "w"), ("wgrad", "w", "x")):
            if getattr(self, matmul) is not None:
                continue
            forward = dict(zip("xw", (self.fwd.lhs, self.fwd.rhs), strict=True))
            cast = forward[clipped]
            if cast is not None and cast.clips and cast.rotation is not None:
                raise ValueError(
                    f"{matmul} of {self.name} is straight-through, but {cast} clips elements after the rotation, which "
                    "gives no mask of the unrotated ones; drop the rotation or use calibration='absmax'"
                )
            cast = forward[multiplied]
            if cast is not None and cast.rotation is not None and cast.rotation.draws_signs:
                raise ValueError(
                    f"{matmul} of {self.name} is straight-through and multiplies by the dequantised {multiplied} of "
                    f"fwd, but the signs of its rotation are drawn and not stored; use a fixed `mask` there, or "
                    f"{matmul}=Gemm() for an unquantised {matmul}"
                )

    def _check_requantized(self) -> None:
        forward = dict(zip("xw", (self.fwd.lhs, self.fwd.rhs), strict=True))
        for matmul, tensor, cast in self.casts():
            if not cast.requantized:
                continue
            of_forward = forward.get(tensor)
            if matmul == "fwd" or of_forward is None:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized`, which needs a forward cast of the same "
                    "tensor: it is for x of wgrad and w of dgrad, if fwd casts them"
                )
            if cast.delayed != of_forward.delayed:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized` from the operand of fwd, so both casts need "
                    f"the same `delayed`, not {cast.delayed} and {of_forward.delayed}"
                )
            if of_forward.rotation is not None and of_forward.rotation.draws_signs:
                raise ValueError(
                    f"{tensor} of {matmul} in {self.name} is `requantized`, but the signs of its forward rotation are "
                    "not stored; use a fixed `mask` there"
                )

    def casts(self) -> Iterator[tuple[str, str, Cast]]:
        """Yields (matmul, tensor, cast) for each operand that is quantised."""
        for matmul, tensors in GEMM_OPERANDS.items():
            gemm = getattr(self, matmul)
            for tensor, cast in zip(tensors, (gemm.lhs, gemm.rhs) if gemm else (), strict=False):
                if cast is not None:
                    yield matmul, tensor, cast

    @functools.cached_property
    def delayed(self) -> dict[str, Cast]:
        """The casts with delayed scaling, by tensor: "x", "w" or "g"."""
        return {tensor: cast for _, tensor, cast in self.casts() if cast.delayed is not None}

    @functools.cached_property
    def has_blocks_or_rotation(self) -> bool:
        """Whether blocks or a rotation of any cast divide an axis into groups of elements."""
        return any(cast.has_blocks_or_rotation for _, _, cast in self.casts())

    @functools.cached_property
    def mean_subtracted(self) -> frozenset[tuple[str, str]]:
        """The operands whose mean is subtracted before the cast, as (matmul, tensor)."""
        return frozenset((matmul, tensor) for matmul, tensor, cast in self.casts() if cast.subtract_mean)

    @functools.cached_property
    def stochastic(self) -> tuple[str, ...]:
        """The operands that use stochastic rounding or draw the signs of a rotation, such as "g of dgrad"."""
        return tuple(f"{tensor} of {matmul}" for matmul, tensor, cast in self.casts() if cast.draws_random_numbers)

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain Python values, without fields at their defaults; `Recipe.from_dict` is the inverse."""
        gemms = {m: gemm_to_dict(getattr(self, m)) for m in GEMM_OPERANDS if getattr(self, m) is not None}
        scope = {} if self.amax_scope == "global" else {"amax_scope": self.amax_scope}
        return {"name": self.name, **gemms, **scope}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_dict` encoded.

        >>> Recipe.from_dict({"name": "w8", "fwd": {"rhs": {"format": "int8"}}}).fwd.rhs.format
        Format('int8')
        """
        check_keys("recipe", fields, ("name", *GEMM_OPERANDS, "amax_scope"))
        missing = [name for name in ("name", "fwd") if name not in fields]
        if missing:
            raise ValueError(f"a recipe needs {missing[0]!r}; it has {', '.join(fields) or 'nothing'}")
        gemms = (gemm_from_dict(fields.get(matmul)) for matmul in GEMM_OPERANDS)
        return cls(fields["name"], *gemms, amax_scope=fields.get("amax_scope", "global"))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        rows = [
            (matmul, *(f"{t} {_describe(c)}" for t, c in zip(tensors, (gemm.lhs, gemm.rhs), strict=True)))
            for matmul, tensors in GEMM_OPERANDS.items()
            if (gemm := getattr(self, matmul)) is not None
        ]
        width = max(len(left) for _, left, _ in rows) + 5
        lines = [f"  {matmul:<5}  {left:<{width}} {right}" for matmul, left, right in rows]
        unset = " and ".join(matmul for matmul in GEMM_OPERANDS if getattr(self, matmul) is None)
        lines += [f"  {unset} straight through"] if unset else []
        lines += ["  amax of each shard"] if self.amax_scope == "local" else []
        return "\n".join([self.name, *lines])


def _check_means(recipe: Recipe) -> None:
    """Raises ValueError unless `subtract_mean` is set for x or g only, and alike in both matmuls that quantise it."""
    if not recipe.mean_subtracted:
        return
    if any(tensor == "w" for _, tensor in recipe.mean_subtracted):
        raise ValueError(f"w of {recipe.name} has `subtract_mean`, but w has no tokens to average; set it for x or g")
    missing = [matmul for matmul in ("dgrad", "wgrad") if getattr(recipe, matmul) is None]
    if missing:
        raise ValueError(
            f"{missing[0]} of {recipe.name} is straight-through, which `subtract_mean` does not support; pass Gemm() "
            f"as `{missing[0]}` to leave its operands unquantised"
        )
    for tensor in "xg":
        choices = {matmul: cast.subtract_mean for matmul, name, cast in recipe.casts() if name == tensor}
        if len(set(choices.values())) > 1:
            having, lacking = sorted(choices, key=lambda matmul: not choices[matmul])
            raise ValueError(
                f"{tensor} of {recipe.name} has `subtract_mean` in {having} and not in {lacking}; set it in both"
            )


def _describe(cast: Cast | None) -> str:
    return "unquantised" if cast is None else str(cast)

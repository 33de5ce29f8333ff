"""A set of quantizers is a recipe with its state and its key."""

import dataclasses

import jax

from scaledot.compat.transformer_engine.quantize.quantizer import Quantizer
from scaledot.recipes import Gemm, Recipe
from scaledot.state import State, merge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizerSet:
    """The quantizers of a layer; None leaves a tensor as it is.

    >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
    >>> print(QuantizerFactory.create_set(fp8_recipe="mxfp8").core)
    quantizer_set
      fwd    x mxfp8 1×32      w mxfp8 1×32
      dgrad  g mxfp8 1×32      w mxfp8 1×32
      wgrad  x mxfp8 1×32      g mxfp8 1×32
    """

    x: Quantizer | None = None
    kernel: Quantizer | None = None
    dgrad: Quantizer | None = None

    @property
    def held(self) -> dict[str, Quantizer]:
        """The quantizers that there are, by the core's names of tensors."""
        named = {"x": self.x, "w": self.kernel, "g": self.dgrad}
        return {tensor: quantizer for tensor, quantizer in named.items() if quantizer is not None}

    @property
    def core(self) -> Recipe | None:
        """The recipe that the set stands for; None if nothing is quantised."""
        rows, columns = ({t: q.cast(side) for t, q in self.held.items()} for side in (False, True))
        if not rows:
            return None
        fwd, dgrad = Gemm(rows.get("x"), rows.get("w")), Gemm(rows.get("g"), rows.get("w"))
        return Recipe("quantizer_set", fwd, dgrad, Gemm(columns.get("x"), columns.get("g")))

    @property
    def state(self) -> State | None:
        """The state of delayed scaling, None if there is none."""
        return {t: q.state for t, q in self.held.items() if q.scaling_mode.row.delayed} or None

    @property
    def key(self) -> jax.Array | None:
        """The key of the first stochastic quantizer; casts of a step draw independent bits from it."""
        return next((q.key for q in self.held.values() if q.key is not None), None)

    @property
    def checkpoint_name(self) -> str | None:
        """The name under which a layer keeps codes, if its quantizers have one."""
        names = {q.checkpoint_name for t, q in self.held.items() if t != "g"} - {None}
        if len(names) > 1:
            raise ValueError(f"x and kernel are kept under one `checkpoint_name`, not {sorted(map(str, names))}")
        return next(iter(names), None)

    @staticmethod
    def merge(*sets: "QuantizerSet") -> "QuantizerSet":
        """One set of the next sets that several micro-batches gave, as if they had been one batch.

        >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
        >>> start = QuantizerFactory.create_set(fp8_recipe="fp8_delayed").x
        >>> QuantizerSet.merge(*(QuantizerSet(start.update(amax)) for amax in (2.0, 8.0))).x.scale
        Array([56.], dtype=float32)
        """
        if not sets:
            raise ValueError("merge needs at least one set")
        first, states = sets[0], [quantizers.state for quantizers in sets]
        merged = merge(*states) if first.state else {}
        updated = {t: q.with_state(merged[t]) if t in merged else q for t, q in first.held.items()}
        return QuantizerSet(updated.get("x"), updated.get("w"), updated.get("g"))


noop_quantizer_set = QuantizerSet()

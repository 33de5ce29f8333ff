"""QuantizerSet: the quantizers of a layer's x, kernel and gradient; a recipe with its state and key."""

import dataclasses

import jax

from scaledot.compat.transformer_engine.quantize.quantizer_class import Quantizer
from scaledot.recipes import Gemm, Recipe
from scaledot.state import State, merge


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class QuantizerSet:
    """The quantizers of a layer's x, kernel and output gradient; None leaves a tensor unquantised.

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
    def by_tensor(self) -> dict[str, Quantizer]:
        """The quantizers that are not None, by scaledot's names of the tensors: x, w, g."""
        quantizers = {"x": self.x, "w": self.kernel, "g": self.dgrad}
        return {tensor: quantizer for tensor, quantizer in quantizers.items() if quantizer is not None}

    @property
    def core(self) -> Recipe | None:
        """The equivalent scaledot.Recipe; None if nothing is quantised."""
        quantizers = self.by_tensor
        rowwise, colwise = ({t: q.cast(is_colwise) for t, q in quantizers.items()} for is_colwise in (False, True))
        if not rowwise:
            return None
        fwd, dgrad = Gemm(rowwise.get("x"), rowwise.get("w")), Gemm(rowwise.get("g"), rowwise.get("w"))
        return Recipe("quantizer_set", fwd, dgrad, Gemm(colwise.get("x"), colwise.get("g")))

    @property
    def state(self) -> State | None:
        """The state of delayed scaling; None if no quantizer uses it."""
        return {t: q.state for t, q in self.by_tensor.items() if q.scaling_mode.spec.delayed} or None

    @property
    def key(self) -> jax.Array | None:
        """The key of the first quantizer with stochastic rounding; all casts of a step derive their keys from it."""
        return next((q.key for q in self.by_tensor.values() if q.key is not None), None)

    @property
    def checkpoint_name(self) -> str | None:
        """The name under which a layer saves its residuals, if its quantizers set one."""
        names = {q.checkpoint_name for t, q in self.by_tensor.items() if t != "g"} - {None}
        if len(names) > 1:
            raise ValueError(f"`checkpoint_name` of x and kernel must be equal, not {sorted(map(str, names))}")
        return next(iter(names), None)

    @staticmethod
    def merge(*sets: "QuantizerSet") -> "QuantizerSet":
        """Merges the sets that the backward passes of several micro-batches returned, as if they were one batch.

        >>> from scaledot.compat.transformer_engine.quantize import QuantizerFactory
        >>> start = QuantizerFactory.create_set(fp8_recipe="fp8_delayed").x
        >>> QuantizerSet.merge(*(QuantizerSet(start.update(amax)) for amax in (2.0, 8.0))).x.scale
        Array([56.], dtype=float32)
        """
        if not sets:
            raise ValueError("merge needs at least one set")
        first, states = sets[0], [quantizers.state for quantizers in sets]
        merged = merge(*states) if first.state else {}
        updated = {t: q.with_state(merged[t]) if t in merged else q for t, q in first.by_tensor.items()}
        return QuantizerSet(updated.get("x"), updated.get("w"), updated.get("g"))


noop_quantizer_set = QuantizerSet()

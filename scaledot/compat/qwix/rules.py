"""Quantisation rules for whole models, and the providers that hold them.

A rule says by a regular expression over module paths, and by names of operations, how contractions are quantised; the
first rule that matches applies, and one without `weight_qtype` leaves contractions as they are. `quantize_model` runs a
model under the rules of a provider: contractions of the traced program are replaced (`scaledot.transform`), each with
the Recipe that its rule describes.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from scaledot.compat.qwix import how
from scaledot.compat.qwix.how import TileSize
from scaledot.compat.qwix.qt_config import DotGeneralQtConfig, recipe_of
from scaledot.compat.qwix.quantizers import HowToQuantize
from scaledot.compat.qwix.stochastic_rounding import NoiseFn, check_method
from scaledot.compat.qwix.weight_sites import WeightSite
from scaledot.recipes import Recipe
from scaledot.transform import Rule, Site

OP_NAMES = ("dot_general", "einsum", "conv_general_dilated", "ragged_dot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """How the contractions of some modules are quantised.

    module_path: a regular expression that must match the whole path of a module, such as "decoder/layer_.*/mlp".
    op_names: some of "dot_general", "einsum", "conv_general_dilated" and "ragged_dot"; empty for all.
    weight_qtype, act_qtype: of weights and activations; see HowToQuantize. None does not quantise.
    tile_size: elements per scale along the last contracting dim, or {axis: elements} for matrices.
    weight_calibration_method, act_calibration_method: see HowToQuantize; for activations "absmax" by default.
    act_static_scale: only None or False; scales of activations are computed from the activations.
    act_batch_axes: only used by static scales.

    >>> QuantizationRule(module_path="mlp/.*", weight_qtype="int4", tile_size=128).act_qtype is None
    True
    """

    module_path: str = ".*"
    op_names: Collection[str] = ()
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: TileSize = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] = (0,)

    def __post_init__(self):
        if self.act_static_scale:
            raise ValueError(
                "`act_static_scale` is not supported: scales of activations are computed from the activations; use "
                "act_calibration_method='fixed,8' for a static range"
            )
        if self.act_static_scale is not None and self.act_qtype is None:
            raise ValueError("`act_static_scale` is set, but `act_qtype` is None; set both or none")
        unknown = [name for name in self.op_names if name not in OP_NAMES]
        if unknown:
            raise ValueError(f"`op_names` has {unknown[0]!r}; known names are {', '.join(OP_NAMES)}")

    def applies_to(self, module_path: str, op_name: str) -> bool:
        is_op = not self.op_names or op_name in self.op_names
        return is_op and re.fullmatch(self.module_path, module_path) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A QuantizationRule for training.

    bwd_qtype: of gradients in both backward matmuls; None computes these with full-precision residuals.
    bwd_calibration_method: of gradients. bwd_weight_grad_tile_size: elements per scale along the last contracting dim
    of the matmul that computes the gradient of a weight.
    disable_channelwise_axes: one scale per tensor (or tile) instead of one per channel.
    bwd_stochastic_rounding: "uniform" or "low_bit_uniform"; both round integer gradients with independent noise for
    each element, so `channelwise_noise_axes` is not used.
    additional_qt_config: fields of DotGeneralQtConfig to replace, for dot_general and einsum.
    """

    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: TileSize = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: str | None = None
    channelwise_noise_axes: Sequence[int] = (0,)
    additional_qt_config: Mapping[str, Any] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.bwd_stochastic_rounding is not None:
            check_method(self.bwd_stochastic_rounding)


@dataclasses.dataclass(frozen=True)
class _SiteRule(Rule):
    """A rule of `scaledot.transform` that matches by a function of the Site, and need not match any."""

    selects: Callable[[Site], bool] = lambda site: False

    def matches(self, site: Site) -> bool:
        return self.selects(site)


class QuantizationProvider:
    """Rules in order of precedence. Use PtqProvider or QtProvider.

    disable_jit is accepted and not used: functions under jax.jit are quantised as well.
    """

    rule_class: type[QuantizationRule] = QuantizationRule

    def __init__(self, rules: Sequence[QuantizationRule], *, disable_jit: bool = False):
        self.rules = tuple(map(self._as_own_rule, rules))
        self._used: set[int] = set()

    def _as_own_rule(self, rule: QuantizationRule) -> QuantizationRule:
        if not isinstance(rule, QuantizationRule):
            raise TypeError(f"`rules` must hold QuantizationRules, not {rule!r}")
        fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
        return rule if isinstance(rule, self.rule_class) else self.rule_class(**fields)

    def rule_for(self, module_path: str, op_name: str) -> QuantizationRule | None:
        """The first rule that applies; None if there is none, or if it does not quantise weights."""
        for index, rule in enumerate(self.rules):
            if rule.applies_to(module_path, op_name):
                self._used.add(index)
                return rule if rule.weight_qtype is not None else None
        return None

    def get_unused_rules(self) -> list[QuantizationRule]:
        """The rules that applied to no contraction of the models that were run so far."""
        return [rule for index, rule in enumerate(self.rules) if index not in self._used]

    def site_rules(self) -> tuple[Rule, ...]:
        """The rules for `scaledot.transform`: for each rule, recipes by kind of operands and primitive."""
        return tuple(
            _SiteRule(recipe, selects=_selector(self, rule, operands, primitive))
            for rule in self.rules
            for operands, primitive, recipe in self.recipes(rule)
            if rule.weight_qtype is not None
        )

    def recipes(self, rule: Any) -> Iterator[tuple[str, str, Recipe]]:
        """Yields (operands, primitive, recipe) for the contractions that a rule quantises."""
        raise TypeError(f"{type(self).__name__} is abstract; use PtqProvider or QtProvider")


def _selector(provider: QuantizationProvider, rule: QuantizationRule, operands: str, primitive: str):
    def selects(site: Site) -> bool:
        is_kind = site.operands == operands and site.primitive == primitive
        return is_kind and provider.rule_for(module_path(site), op_name(site.primitive, site.scope)) is rule

    return selects


def module_path(site: Site) -> str:
    """The path of the module that a contraction is in: that of its weight, or the scopes of linen modules."""
    if site.operands == "weight":
        layer = site.path.split(" + ")[0]
        return layer if any(name.startswith(f"{layer}/") for name in site.names) else ""  # a parameter of the root
    modules = [part for part in site.scope.split("/")[1:] if not _is_einsum(part)]  # the first is the root's class
    return "/".join(modules)


def op_name(primitive: str, scope: str) -> str:
    """The name of an operation in `op_names`; jnp.einsum is a dot_general in a scope named by its subscripts."""
    if primitive == "dot_general":
        return "einsum" if _is_einsum(scope.rpartition("/")[-1]) else "dot_general"
    return "ragged_dot" if primitive == "ragged_dot_general" else primitive


def _is_einsum(scope: str) -> bool:
    return "->" in scope or "," in scope


class QtProvider(QuantizationProvider):
    """Rules for training: quantised forward and, with `bwd_qtype`, backward passes.

    Where a rule quantises gradients, residuals are quantised along the contracting dims of the backward matmul, from
    full precision; Qwix reuses their forward codes, as `dot_general_qt` does.
    """

    rule_class = QtRule

    def recipes(self, rule: QtRule) -> Iterator[tuple[str, str, Recipe]]:
        config = _dot_config(rule)
        weights = dataclasses.replace(config, drhs_tile_size=rule.bwd_weight_grad_tile_size if rule.bwd_qtype else None)
        weights = dataclasses.replace(weights, **(rule.additional_qt_config or {}))
        yield "weight", "dot_general", recipe_of(weights)
        plain = dataclasses.replace(config, tile_size=None, use_original_residuals=False)
        yield "weight", "conv_general_dilated", recipe_of(plain)
        yield "weight", "ragged_dot_general", recipe_of(plain)
        if rule.act_qtype is not None:
            activations = {"rhs_qtype": rule.act_qtype, "rhs_calibration_method": config.lhs_calibration_method}
            config = dataclasses.replace(config, **activations)
            yield (
                "activations",
                "dot_general",
                recipe_of(dataclasses.replace(config, **(rule.additional_qt_config or {}))),
            )


def _dot_config(rule: QtRule) -> DotGeneralQtConfig:
    """The config of activations times a weight."""
    noise: Any = None
    if rule.bwd_stochastic_rounding is not None:
        noise = NoiseFn(None, rule.bwd_stochastic_rounding, rule.channelwise_noise_axes)  # keys come with calls
    sides: dict[str, Any] = {
        f"{side}_disable_channelwise_axes": rule.disable_channelwise_axes for side in ("lhs", "rhs")
    }
    for gradient in ("dlhs", "drhs"):
        sides |= {
            f"{gradient}_grad_qtype": rule.bwd_qtype,
            f"{gradient}_grad_calibration_method": rule.bwd_calibration_method,
            f"{gradient}_grad_disable_channelwise_axes": rule.disable_channelwise_axes,
            f"{gradient}_stochastic_rounding_noise_fn": noise,
        }
    return DotGeneralQtConfig(
        lhs_qtype=rule.act_qtype,
        rhs_qtype=rule.weight_qtype,
        lhs_calibration_method=rule.act_calibration_method or "absmax",
        rhs_calibration_method=rule.weight_calibration_method,
        tile_size=rule.tile_size,
        use_original_residuals=rule.bwd_qtype is None,
        **sides,
    )


class PtqProvider(QuantizationProvider):
    """Rules for inference with weights that were quantised before; see `quantize_params`.

    As in Qwix, weights of ragged dots and of `w @ x`, on the left, are not quantised. Those of convolutions are
    dequantised before the convolution, so a rule for them must not have an `act_qtype`.
    """

    def recipes(self, rule: QuantizationRule) -> Iterator[tuple[str, str, Recipe]]:
        method = rule.act_calibration_method or "absmax"
        config = DotGeneralQtConfig(lhs_qtype=rule.act_qtype, lhs_calibration_method=method, tile_size=rule.tile_size)
        yield "weight", "dot_general", recipe_of(config)
        if rule.act_qtype is not None:
            both = dataclasses.replace(config, rhs_qtype=rule.act_qtype, rhs_calibration_method=method)
            yield "activations", "dot_general", recipe_of(both)

    def how_to_quantize(self, site: WeightSite) -> HowToQuantize | None:
        """How the weight of a contraction is quantised; None if it is not."""
        name = op_name(site.primitive, site.scope)  # jnp.einsum may swap its operands
        rule = None if (name, site.index) == ("dot_general", 0) else self.rule_for(site.module_path, name)
        if rule is None:
            return None
        fields = {"qtype": rule.weight_qtype, "calibration_method": rule.weight_calibration_method}
        if site.primitive == "dot_general":
            return how.of_operand(site.ndim, site.contracting, rule.tile_size, **fields)
        if rule.act_qtype is not None:
            raise ValueError(
                f"the rule {rule.module_path!r} has an `act_qtype`, which PtqProvider does not support for the "
                f"convolution of {site.param!r}; add a rule without it for op_names=['conv_general_dilated']"
            )
        return HowToQuantize(channelwise_axes=site.free, **fields)

"""Maps the names of a checkpoint's tensors to the paths of a model's parameters, and back.

A `NameMap` is a table of templates. `{}` stands for the same text in both columns; `/` separates the keys of nested
dictionaries; a path that ends in `.T` is the transposed tensor: weights are (outputs, inputs) in the files of PyTorch
models and (inputs, outputs) in the kernels of Flax.

>>> names = NameMap({"model.layers.{}.{}.weight": "layers_{}/{}/kernel.T"})
>>> names.to_path("model.layers.0.up_proj.weight")
Location(name='layers_0/up_proj/kernel', is_transposed=True)
>>> names.to_name("layers_0/up_proj/kernel")
Location(name='model.layers.0.up_proj.weight', is_transposed=True)

Other tensors of a module whose weight is mapped, such as `input_scale`, keep their name beside it.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_GAP = "{}"


class Location(NamedTuple):
    """Where a tensor is: its name or path there, and whether it is transposed."""

    name: str
    is_transposed: bool


class NameMap:
    """A bijection between names of tensors and paths of parameters, from templates {name: path}."""

    def __init__(self, templates: Mapping[str, str]):
        for name, path in templates.items():
            if name.count(_GAP) != path.count(_GAP):
                raise ValueError(f"the templates {name!r} and {path!r} must have the same number of {_GAP}")
        if len(set(templates.values())) < len(templates):
            raise ValueError("two templates have the same path, so that names could not be restored from paths")
        self.templates = dict(templates)
        self._rows = [_Row.of(name, path) for name, path in templates.items()]

    def __or__(self, templates: Mapping[str, str]) -> "NameMap":
        """This map with further templates, which apply before those that it has."""
        return NameMap(dict(templates) | {n: p for n, p in self.templates.items() if n not in templates})

    def to_path(self, name: str) -> Location:
        """The path of a tensor; raises ValueError if no template matches."""
        for row in self._rows:
            if (match := row.name_pattern.fullmatch(name)) is not None:
                return Location(row.path.format(*match.groups()), row.is_transposed)
        module, _, tensor = name.rpartition(".")
        for row in self._rows if tensor != "weight" else ():
            if (match := row.name_pattern.fullmatch(f"{module}.weight")) is not None:
                return Location(f"{_parent(row.path.format(*match.groups()))}/{tensor}", False)
        raise ValueError(f"no template of the name map matches the tensor {name!r}")

    def to_name(self, path: str) -> Location:
        """The inverse of `to_path`."""
        for row in self._rows:
            if (match := row.path_pattern.fullmatch(path)) is not None:
                return Location(row.name.format(*match.groups()), row.is_transposed)
        module, _, tensor = path.rpartition("/")
        for row in self._rows:
            parent = re.compile(_pattern(_parent(row.path)))
            if row.name.endswith(".weight") and (match := parent.fullmatch(module)) is not None:
                return Location(f"{row.name.removesuffix('.weight').format(*match.groups())}.{tensor}", False)
        raise ValueError(f"no template of the name map matches the path {path!r}")


class _Row(NamedTuple):
    name: str
    path: str
    is_transposed: bool
    name_pattern: re.Pattern[str]
    path_pattern: re.Pattern[str]

    @classmethod
    def of(cls, name: str, path: str) -> "_Row":
        is_transposed, path = path.endswith(".T"), path.removesuffix(".T")
        return cls(name, path, is_transposed, re.compile(_pattern(name)), re.compile(_pattern(path)))


def _pattern(template: str) -> str:
    """A regular expression in which each gap matches text without separators."""
    return "([^./]+)".join(map(re.escape, template.split(_GAP)))


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


_ATTENTION = {
    "model.layers.{}.self_attn.{}_proj.weight": "layers_{}/self_attn/{}_proj/kernel.T",
    "model.layers.{}.self_attn.{}_proj.bias": "layers_{}/self_attn/{}_proj/bias",
    "model.layers.{}.self_attn.{}_norm.weight": "layers_{}/self_attn/{}_norm/scale",  # Qwen3
    "model.layers.{}.{}_layernorm.weight": "layers_{}/{}_layernorm/scale",
    "model.embed_tokens.weight": "embed_tokens/embedding",
    "model.norm.weight": "norm/scale",
    "lm_head.weight": "lm_head/kernel.T",
}
_MLP = {
    "model.layers.{}.mlp.{}_proj.weight": "layers_{}/mlp/{}_proj/kernel.T",
    "model.layers.{}.mlp.{}_proj.bias": "layers_{}/mlp/{}_proj/bias",
}

LLAMA = NameMap(_ATTENTION | _MLP)
QWEN = LLAMA | {
    "model.layers.{}.mlp.gate.weight": "layers_{}/mlp/gate/kernel.T",
    "model.layers.{}.mlp.experts.{}.{}_proj.weight": "layers_{}/mlp/experts_{}/{}_proj/kernel.T",
    "model.layers.{}.mlp.shared_expert.{}_proj.weight": "layers_{}/mlp/shared_expert/{}_proj/kernel.T",
    "model.layers.{}.mlp.shared_expert_gate.weight": "layers_{}/mlp/shared_expert_gate/kernel.T",
}
MIXTRAL = NameMap(_ATTENTION) | {
    "model.layers.{}.block_sparse_moe.gate.weight": "layers_{}/block_sparse_moe/gate/kernel.T",
    "model.layers.{}.block_sparse_moe.experts.{}.{}.weight": "layers_{}/block_sparse_moe/experts_{}/{}/kernel.T",
}
GPT_OSS = NameMap(_ATTENTION) | {
    "model.layers.{}.self_attn.sinks": "layers_{}/self_attn/sinks",
    "model.layers.{}.mlp.router.weight": "layers_{}/mlp/router/kernel.T",
    "model.layers.{}.mlp.router.bias": "layers_{}/mlp/router/bias",
    "model.layers.{}.mlp.experts.{}_proj": "layers_{}/mlp/experts/{}_proj/kernel.T",
    "model.layers.{}.mlp.experts.{}_proj_bias": "layers_{}/mlp/experts/{}_proj/bias",
}

"""Sizes of dense decoder transformers: the table `models.json`, or a JSON file with the same fields.

A decoder block has four linear layers: queries, keys and values in one; the output projection of attention; up (and
gate, if there is one, in the same matrix); and down. The model also has norms with one scale per feature, the token
embedding, and an output head unless that is tied to the embedding.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scaledot.formats import row_of


class Linear(NamedTuple):
    """Sizes of a linear layer.

    tp_splits: the dim of the weight that tensor parallelism splits, "outputs" (column-parallel) or "inputs"
      (row-parallel).
    """

    name: str
    inputs: int
    outputs: int
    tp_splits: str

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder transformer.

    layers: the number of decoder blocks.
    sequence: tokens per training sequence.
    gated: whether the MLP has a gate, as in SwiGLU.
    tied: whether the output head is the transposed embedding.
    """

    name: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    sequence: int
    gated: bool = True
    tied: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`{field.name}` of a model must be a whole number of at least 1, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"`heads` {self.heads} must be a multiple of `kv_heads` {self.kv_heads}")

    @property
    def attention_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_size

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of a decoder block."""
        up_and_gate = (2 if self.gated else 1) * self.hidden
        return (
            Linear("qkv", self.width, self.attention_width + 2 * self.kv_heads * self.head_size, "outputs"),
            Linear("out", self.attention_width, self.width, "inputs"),
            Linear("up", self.width, up_and_gate, "outputs"),
            Linear("down", self.hidden, self.width, "inputs"),
        )

    @property
    def head(self) -> Linear:
        """The output head."""
        return Linear("head", self.width, self.vocabulary, "outputs")

    @property
    def matrix_parameters(self) -> int:
        """Parameters that are sharded: all but those of norms."""
        embedding_and_head = self.head.parameters * (1 if self.tied else 2)
        return self.layers * sum(linear.parameters for linear in self.linears) + embedding_and_head

    @property
    def parameters(self) -> int:
        """The number of parameters, with those of norms.

        >>> MODELS["llama3-8b"].parameters
        8030261248
        """
        return self.matrix_parameters + (2 * self.layers + 1) * self.width


def find_model(name_or_path: str) -> Model:
    """Returns the model of that name, or of the JSON file at that path (it ends in .json)."""
    path = Path(name_or_path)
    if path.suffix != ".json":
        return row_of("model", name_or_path, Model, MODELS, "the table of models")
    if not path.exists():
        raise ValueError(f"`model` file {name_or_path!r} does not exist")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"`model` file {name_or_path!r} is not JSON: {error}") from None
    return _model(path.stem, fields, str(path))


def _model(name: str, fields: Mapping[str, Any], source: str) -> Model:
    known = {field.name: field for field in dataclasses.fields(Model) if field.name != "name"}
    unknown = [key for key in fields if key not in known]
    missing = [key for key, field in known.items() if key not in fields and field.default is dataclasses.MISSING]
    if unknown or missing:
        problem = f"has an unknown field {unknown[0]!r}" if unknown else f"lacks the field {missing[0]!r}"
        raise ValueError(f"a model in {source} {problem}; its fields are {', '.join(known)}")
    return Model(name=name, **fields)


def _table() -> dict[str, Model]:
    path = Path(__file__).with_name("models.json")
    return {name: _model(name, fields, path.name) for name, fields in json.loads(path.read_text()).items()}


MODELS: Mapping[str, Model] = _table()

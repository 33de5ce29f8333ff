"""Dense decoder transformers by their sizes: the table `models.json`, or a file of the same fields.

A layer has four linear products: queries, keys and values in one; the way out of attention; the one or two ways up
in one; and down. Beside them there are norms, with a scale for each feature, the embedding, and the head unless it is
the embedding.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scaledot.formats import row_of


class Linear(NamedTuple):
    """A product of a layer. splits: what tensor parallelism splits, its "outputs" (by columns) or "inputs" (rows)."""

    name: str
    inputs: int
    outputs: int
    splits: str

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes. sequence: tokens that it is trained on at a time. gated: whether there are two ways up. tied: whether the
    head is the embedding."""

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
            raise ValueError(f"{self.heads} `heads` cannot share {self.kv_heads} `kv_heads` evenly")

    @property
    def attention(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_size

    @property
    def linears(self) -> tuple[Linear, ...]:
        ways = 2 if self.gated else 1
        return (
            Linear("qkv", self.width, self.attention + 2 * self.kv_heads * self.head_size, "outputs"),
            Linear("out", self.attention, self.width, "inputs"),
            Linear("up", self.width, ways * self.hidden, "outputs"),
            Linear("down", self.hidden, self.width, "inputs"),
        )

    @property
    def head(self) -> Linear:
        return Linear("head", self.width, self.vocabulary, "outputs")

    @property
    def matrices(self) -> int:
        """Parameters that devices split: all but those of norms."""
        tables = self.head.parameters * (1 if self.tied else 2)
        return self.layers * sum(linear.parameters for linear in self.linears) + tables

    @property
    def parameters(self) -> int:
        """
        >>> MODELS["llama3-8b"].parameters
        8030261248
        """
        return self.matrices + (2 * self.layers + 1) * self.width


def find_model(given: str) -> Model:
    """The model of that name, or of a JSON file at that path."""
    path = Path(given)
    if path.suffix != ".json":
        return row_of("model", given, Model, MODELS, "the table of models")
    if not path.exists():
        raise ValueError(f"`model` {given!r} is not there")
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"`model` {given!r} is not JSON: {error}") from None
    return _model(path.stem, fields, str(path))


def _model(name: str, fields: Mapping[str, Any], where: str) -> Model:
    known = {field.name: field for field in dataclasses.fields(Model) if field.name != "name"}
    unknown = [key for key in fields if key not in known]
    missing = [key for key, field in known.items() if key not in fields and field.default is dataclasses.MISSING]
    if unknown or missing:
        what = f"has no field {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        raise ValueError(f"a model {what}: {where}; it takes {', '.join(known)}")
    return Model(name=name, **fields)


def _table() -> dict[str, Model]:
    path = Path(__file__).with_name("models.json")
    return {name: _model(name, fields, path.name) for name, fields in json.loads(path.read_text()).items()}


MODELS: Mapping[str, Model] = _table()

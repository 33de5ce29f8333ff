"""`report`: the matmuls of a function with an adapter, and why the others have none."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from scaledot.lora.config import Config, Rules
from scaledot.lora.program import AdapterProgram, with_adapters
from scaledot.transform.program import ParamArgs


@dataclasses.dataclass(frozen=True)
class Row:
    """A contraction, or a parameter that no contraction uses: the Config of its adapter, or the `reason` without one.

    operands: types of lhs and rhs, "" for a parameter without a contraction.
    """

    path: str
    operands: str
    config: Config | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of all contractions, in program order. trainable: the number of elements of all adapters. `str`: a table."""

    rows: tuple[Row, ...]
    trainable: int

    def __str__(self) -> str:
        lines = [("path", "operands", "adapter, or the reason"), *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        count = sum(row.config is not None for row in self.rows)
        return "\n".join([*text, f"{count} of {len(self.rows)} with an adapter: {self.trainable} trainable elements"])


def _cells(row: Row) -> tuple[str, str, str]:
    return row.path, row.operands or "-", str(row.config) if row.config else f"none: {row.reason}"


def report(fn: Callable[..., Any], rules: Rules, *, params: ParamArgs = 0) -> Callable[..., Report]:
    """A function of the arguments of `fn` that returns the `Report` of `adapted(fn, rules)`.

    Nothing is computed; arguments may be ShapeDtypeStructs.

    >>> import jax.numpy as jnp
    >>> def f(params, tokens):
    ...     return params["embedding"][tokens] @ params["head"]
    >>> shapes = {"embedding": jnp.ones((99, 8)), "head": jnp.ones((8, 99))}
    >>> print(report(f, Config(rank=2, alpha=4))(shapes, jnp.array([1, 2, 3])))
    path       operands                      adapter, or the reason
    head       float32[3,8] x float32[8,99]  rank 2, alpha 4
    embedding  -                             none: its parameter is an operand of gather, which takes no adapter
    1 of 2 with an adapter: 214 trainable elements
    """
    transform = with_adapters(fn, rules, params)

    def call(*args: Any, **kwargs: Any) -> Report:
        program, _ = transform.program(args, kwargs)
        shapes = (
            shape for one in program.parameters.values() for pair in one.shapes.values() for shape in pair.values()
        )
        return Report(tuple(_rows(program)), sum(map(math.prod, shapes)))

    return call


def _rows(program: AdapterProgram) -> list[Row]:
    rows = []
    for site, _, outcome in program.decisions:
        operands = " x ".join(f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]" for aval in (site.lhs, site.rhs))
        config, reason = (outcome, "") if isinstance(outcome, Config) else (None, outcome)
        rows.append(Row(site.path, operands, config, reason))
    return [*rows, *(Row(path, "", None, reason) for path, reason in program.reasons_of_tables().items())]

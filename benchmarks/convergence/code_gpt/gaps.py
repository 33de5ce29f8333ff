"""Gaps to bf16 over paired seeds, their standard errors, and a comparison with the gap of nvfp4.

Runs of one seed share their first steps and their batches, so losses are compared per seed. A loss is modelled as the
sum of an effect of its row, one of its seed and noise of the same standard deviation in all runs, which is estimated
from all rows together: three seeds of a single row would say little about it.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from benchmarks.convergence.code_gpt.rows import BASELINE, REFERENCE

PRECISION = 0.05  # of the reference's gap: the standard error to reach
SIGNIFICANT_T = 3.0  # stricter than the usual 2, because dozens of rows are compared
Losses = Mapping[str, Mapping[int, float]]  # row: seed: loss


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and its standard error; the latter is None if no row was trained with several seeds."""

    value: float
    error: float | None

    @property
    def t(self) -> float | None:
        """The value in standard errors; None without an error, or if the error is 0."""
        return self.value / self.error if self.error else None

    @property
    def is_significant(self) -> bool:
        if self.t is None:
            raise ValueError(f"whether {self.value:+.4f} is significant needs a standard error, which is {self.error}")
        return abs(self.t) >= SIGNIFICANT_T


@dataclasses.dataclass(frozen=True)
class Difference:
    """The gaps to bf16 of two rows over the seeds that both have, and the second minus the first."""

    seeds: int
    first: float
    second: float
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Summary:
    """A recipe's loss, and its comparison with bf16 and nvfp4 over the seeds that were trained with both recipes.

    loss: the mean over its seeds. gap: the loss minus that of bf16, in nats; relative_gap: in percent of bf16's loss.
    ratio: the gap divided by that of nvfp4. to_reference: the loss minus that of nvfp4.
    more_seeds: the number of further seeds after which the standard error of the gap is PRECISION × nvfp4's gap.
    A comparison without a seed in common is None.
    """

    row: str
    seeds: int
    loss: float
    gap: Estimate | None = None
    relative_gap: float | None = None
    ratio: Estimate | None = None
    to_reference: Estimate | None = None
    more_seeds: int | None = None


class Comparison:
    """Compares recipes by their losses.

    deviation: the standard deviation of the loss of a run. degrees_of_freedom: of the estimate of `deviation`.
    """

    def __init__(self, losses: Losses):
        self.losses = losses
        self.deviation, self.degrees_of_freedom = _deviation(losses)

    def summaries(self) -> dict[str, Summary]:
        """Returns the summary of each row, in their order."""
        return {row: self._summary(row) for row in self.losses}

    def difference(self, first: str, second: str) -> Difference | None:
        """Returns the difference of two rows, or None if they and bf16 have no seed in common."""
        if not (paired := self._paired(first, second, BASELINE)):
            return None
        seeds, (first_loss, second_loss, baseline) = paired
        difference = self._estimate(second_loss - first_loss, 2 / seeds)
        return Difference(seeds, first_loss - baseline, second_loss - baseline, difference)

    def _summary(self, row: str) -> Summary:
        own = self.losses[row]
        summary = Summary(row, len(own), float(np.mean(list(own.values()))))
        if row != BASELINE and (paired := self._paired(row, BASELINE)):
            seeds, (loss, baseline) = paired
            gap = self._estimate(loss - baseline, 2 / seeds)
            summary = dataclasses.replace(
                summary, gap=gap, relative_gap=100 * gap.value / baseline, more_seeds=self._more_seeds(seeds)
            )
        if row not in (BASELINE, REFERENCE) and (paired := self._paired(row, REFERENCE, BASELINE)):
            seeds, (loss, reference, baseline) = paired
            ratio = (loss - baseline) / (reference - baseline)
            # The delta method: the error of row - ratio · reference - (1 - ratio) · bf16, over the reference's gap.
            variance = (1 + ratio**2 + (1 - ratio) ** 2) / (seeds * (reference - baseline) ** 2)
            summary = dataclasses.replace(
                summary,
                ratio=self._estimate(ratio, variance),
                to_reference=self._estimate(loss - reference, 2 / seeds),
            )
        return summary

    def _paired(self, *rows: str) -> tuple[int, list[float]] | None:
        """Returns the number of seeds that all rows have, and the mean loss of each row over them; None without any."""
        losses = [self.losses.get(row, {}) for row in rows]
        seeds = sorted(set(losses[0]).intersection(*losses[1:]))
        return (len(seeds), [float(np.mean([each[seed] for seed in seeds])) for each in losses]) if seeds else None

    def _estimate(self, value: float, variance: float) -> Estimate:
        """Returns an Estimate whose variance is `variance` times that of the loss of a run."""
        return Estimate(value, None if self.deviation is None else self.deviation * math.sqrt(variance))

    def _more_seeds(self, seeds: int) -> int | None:
        paired = self._paired(REFERENCE, BASELINE)
        if self.deviation is None or paired is None:
            return None
        reference_gap = paired[1][0] - paired[1][1]
        if not (reference_gap > 0 and math.isfinite(self.deviation)):
            return None
        return max(0, math.ceil(2 * (self.deviation / (PRECISION * reference_gap)) ** 2) - seeds)


def _deviation(losses: Losses) -> tuple[float | None, int]:
    """Returns the standard deviation of losses around row and seed effects, and its degrees of freedom.

    The deviation is None without degrees of freedom: at least two rows must share two seeds.
    """
    rows, seeds = list(losses), sorted({seed for of_row in losses.values() for seed in of_row})
    cells = [(i, seeds.index(seed), loss) for i, row in enumerate(rows) for seed, loss in losses[row].items()]
    effects = np.zeros((len(cells), len(rows) + len(seeds)))
    for effect, (i, j, _) in zip(effects, cells, strict=True):
        effect[[i, len(rows) + j]] = 1
    degrees_of_freedom = len(cells) - int(np.linalg.matrix_rank(effects)) if cells else 0
    if degrees_of_freedom == 0:
        return None, 0
    observed = np.array([loss for *_, loss in cells])
    if not np.isfinite(observed).all():
        return math.nan, degrees_of_freedom
    fitted = effects @ np.linalg.lstsq(effects, observed, rcond=None)[0]
    return math.sqrt(float(np.sum((observed - fitted) ** 2)) / degrees_of_freedom), degrees_of_freedom


def table(comparison: Comparison) -> str:
    """Returns the summaries as lines of text."""
    rows = comparison.summaries().values()
    widest = max(len(row.row) for row in rows)
    header = f"{'row':<{widest}}  seeds    loss  gap to bf16 (nats)      %  gap / nvfp4's    t to nvfp4  more seeds"
    note = f"more seeds: for a standard error of the gap of at most {PRECISION:.0%} of nvfp4's gap"
    if comparison.deviation is None:
        note = "± and more seeds: unknown until two rows were trained with the same two seeds"
    return "\n".join([header, *(_line(row, widest) for row in rows), note])


def _line(row: Summary, widest: int) -> str:
    gap = _text(row.gap, "{:+.5f}", "{:.5f}")
    relative = "" if row.relative_gap is None else f"{row.relative_gap:+.2f}"
    ratio = _text(row.ratio, "{:.3f}", "{:.3f}")
    more = "" if row.gap is None else "unknown" if row.more_seeds is None else str(row.more_seeds)
    start = f"{row.row:<{widest}}  {row.seeds:>5}  {row.loss:.4f}"
    return f"{start}  {gap:<19} {relative:>6}  {ratio:<15}  {t_text(row):>10}  {more:>10}".rstrip()


def t_text(row: Summary) -> str:
    """The t statistic of the difference to nvfp4."""
    return "" if row.to_reference is None or row.to_reference.t is None else f"{row.to_reference.t:+.1f}"


def gap_text(gap: Estimate | None) -> str:
    return _text(gap, "{:+.4f}", "{:.4f}")


def ratio_text(ratio: Estimate | None) -> str:
    return _text(ratio, "{:.2f}", "{:.2f}")


def _text(estimate: Estimate | None, value: str, error: str) -> str:
    if estimate is None:
        return ""
    return value.format(estimate.value) + ("" if estimate.error is None else f" ± {error.format(estimate.error)}")

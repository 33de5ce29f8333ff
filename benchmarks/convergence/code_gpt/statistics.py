"""Gaps to bf16 over paired seeds, their standard errors, and a comparison with the gap of nvfp4.

Losses of one seed are correlated between rows, which share their first steps and batches: differences are taken per
seed, and their spread over seeds is much smaller than that of the losses.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from benchmarks.convergence.code_gpt.rows import BASELINE, REFERENCE

PRECISION = 0.05  # of the reference's gap: the standard error to reach
CRITICAL_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # by number of seeds
Losses = Mapping[str, Mapping[int, float]]  # row: seed: loss


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; the latter is None with one seed."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        return cls(float(values.mean()), _standard_error(values))


@dataclasses.dataclass(frozen=True)
class Summary:
    """A row's comparison with bf16 and with nvfp4, over the seeds that both rows of each comparison have.

    loss: the mean over the row's seeds. gap: to bf16, in nats; deviation: its standard deviation over seeds;
    relative_gap: in percent of bf16's loss.
    ratio: of the gap to that of nvfp4, with the delta method's standard error for paired seeds.
    t: of the difference to nvfp4. more_seeds: how many the gap lacks for a standard error of PRECISION × nvfp4's gap.
    A field is None if its seeds are missing.
    """

    row: str
    seeds: int
    loss: float
    gap: Estimate | None
    deviation: float | None
    relative_gap: float | None
    ratio: Estimate | None
    t: float | None
    more_seeds: int | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """The gaps to bf16 of two rows over the seeds that both have, and the second minus the first.

    deviation: the standard deviation of the difference over seeds; None with one seed.
    """

    seeds: int
    first: float
    second: float
    difference: Estimate
    deviation: float | None


def difference(losses: Losses, first: str, second: str) -> Difference | None:
    """Returns the difference of two rows, or None if they and bf16 have no seed in common."""
    paired = _paired(*(losses.get(row, {}) for row in (first, second, BASELINE)))
    if not paired:
        return None
    gap, other = (row - paired[2] for row in paired[:2])
    differences = other - gap
    return Difference(
        gap.size, float(gap.mean()), float(other.mean()), Estimate.of(differences), _deviation(differences)
    )


def is_within_noise(found: Difference, noise: float) -> bool:
    """Whether a difference is not significant (p > 0.05); over one seed, whether it is below `noise`."""
    mean, error = abs(found.difference.value), found.difference.error
    return mean < noise if error is None else mean <= critical_t(found.seeds) * error


def critical_t(seeds: int) -> float:
    """Returns the 97.5 % quantile of Student's t with seeds - 1 degrees of freedom."""
    try:
        return CRITICAL_T[seeds]
    except KeyError:
        raise ValueError(f"CRITICAL_T has no quantile for {seeds} seeds: add it") from None


def summaries(losses: Losses) -> list[Summary]:
    """Returns the summary of each row, in their order."""
    return [_summary(row, losses) for row in losses]


def _summary(row: str, losses: Losses) -> Summary:
    own, baseline, reference = losses[row], losses.get(BASELINE, {}), losses.get(REFERENCE, {})
    gap = deviation = relative = ratio = t = more = None
    if row != BASELINE and (paired := _paired(own, baseline)):
        gaps = paired[0] - paired[1]
        gap, relative = Estimate.of(gaps), float(100 * gaps.mean() / paired[1].mean())
        deviation = _deviation(gaps)
        if of_reference := _paired(reference, baseline):
            more = more_seeds(gaps, float((of_reference[0] - of_reference[1]).mean()))
    if row not in (BASELINE, REFERENCE):
        if paired := _paired(own, reference, baseline):
            ratio = ratio_of_means(paired[0] - paired[2], paired[1] - paired[2])
        if paired := _paired(own, reference):
            t = t_value(paired[0] - paired[1])
    return Summary(row, len(own), float(np.mean(list(own.values()))), gap, deviation, relative, ratio, t, more)


def _paired(*rows: Mapping[int, float]) -> list[np.ndarray]:
    """Returns the losses of the seeds that all rows have, or [] if there are none."""
    seeds = sorted(set(rows[0]).intersection(*rows[1:]))
    return [np.array([row[seed] for seed in seeds]) for row in rows] if seeds else []


def _deviation(values: np.ndarray) -> float | None:
    """The standard deviation; None for one value."""
    return float(values.std(ddof=1)) if values.size > 1 else None


def _standard_error(values: np.ndarray) -> float | None:
    deviation = _deviation(values)
    return None if deviation is None else deviation / math.sqrt(values.size)


def ratio_of_means(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Returns mean(a) / mean(b) of paired values; the delta method's variance is that of a - ratio · b."""
    ratio = float(a.mean() / b.mean())
    error = _standard_error(a - ratio * b)
    return Estimate(ratio, None if error is None else error / abs(float(b.mean())))


def t_value(differences: np.ndarray) -> float | None:
    """Returns mean / standard error; None with one seed."""
    error = _standard_error(differences)
    mean = float(differences.mean())
    return None if error is None else math.copysign(math.inf, mean) if error == 0 else mean / error


def more_seeds(gaps: np.ndarray, reference_gap: float) -> int | None:
    """Returns how many seeds the mean of `gaps` lacks for a standard error of PRECISION × reference_gap.

    It assumes the observed standard deviation; None with one seed, or where losses or the reference's gap are useless.
    """
    if gaps.size < 2 or not np.isfinite(gaps).all() or not reference_gap > 0:
        return None
    needed = (float(gaps.std(ddof=1)) / (PRECISION * reference_gap)) ** 2
    return max(0, math.ceil(needed) - gaps.size)


def table(rows: list[Summary]) -> str:
    """Returns the summaries as lines of text."""
    widest = max(len(row.row) for row in rows)
    header = f"{'row':<{widest}}  seeds    loss  gap to bf16 (nats)      %  gap / nvfp4's    t to nvfp4  more seeds"
    lines = [_line(row, widest) for row in rows]
    note = (
        f"more seeds: for a standard error of the gap of at most {PRECISION:.0%} of nvfp4's gap; 2 are needed to tell"
    )
    return "\n".join([header, *lines, note])


def _line(row: Summary, widest: int) -> str:
    gap = _text(row.gap, "{:+.5f}", "{:.5f}")
    relative = "" if row.relative_gap is None else f"{row.relative_gap:+.2f}"
    ratio = _text(row.ratio, "{:.3f}", "{:.3f}")
    t = "" if row.t is None else f"{row.t:+.1f}"
    more = "" if row.gap is None else "unknown" if row.more_seeds is None else str(row.more_seeds)
    start = f"{row.row:<{widest}}  {row.seeds:>5}  {row.loss:.4f}"
    return f"{start}  {gap:<19} {relative:>6}  {ratio:<15}  {t:>10}  {more:>10}".rstrip()


def _text(estimate: Estimate | None, value: str, error: str) -> str:
    if estimate is None:
        return ""
    return value.format(estimate.value) + ("" if estimate.error is None else f" ± {error.format(estimate.error)}")


def gap_text(gap: Estimate | None) -> str:
    return _text(gap, "{:+.4f}", "{:.4f}")


def ratio_text(ratio: Estimate | None) -> str:
    return _text(ratio, "{:.2f}", "{:.2f}")

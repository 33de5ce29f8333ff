"""AmaxComputeAlgo: how delayed scaling computes a scale from an amax history."""

import enum
from typing import NoReturn


class AmaxComputeAlgo(enum.Enum):
    """Whether a scale comes from the largest or from the latest amax of a history.

    >>> AmaxComputeAlgo("most_recent")
    <AmaxComputeAlgo.MOST_RECENT: 'most_recent'>
    """

    MAX = "max"
    MOST_RECENT = "most_recent"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"`amax_compute_algo` must be 'max' or 'most_recent', not {value!r}")

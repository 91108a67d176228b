"""Counters and times of a scheduler, exact under preemption and abort."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BOUNDS = tuple(float(f"{m}e{e}") for e in range(-5, 4) for m in (1, 2, 5))
"""Upper bounds of the histogram buckets, in seconds: 10 us to 5,000 s, three a decade."""
_BOUNDS_ARRAY = np.array(BOUNDS)


@dataclass(slots=True)
class Histogram:
    """Times in seconds, in fixed buckets; bucket i counts values <= BOUNDS[i]."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BOUNDS) + 1, np.int64))
    total: float = 0.0
    count: int = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count one value ``times`` times; O(1)."""
        self.counts[bisect_left(BOUNDS, value)] += times
        self.total += value * times
        self.count += times

    def add_many(self, values: NDArray[np.float64]) -> None:
        """Count each of ``values``."""
        if len(values):
            where = np.searchsorted(_BOUNDS_ARRAY, values)
            self.counts += np.bincount(where, minlength=len(BOUNDS) + 1)
            self.total += float(values.sum())
            self.count += len(values)

    @property
    def mean(self) -> float:
        """Mean in seconds; 0 without values."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class SchedulerStats:
    """A scheduler's own running counts; read it at any time, write it never.

    ``query_tokens`` and ``hit_tokens`` count a request once, at its first admission: tries that
    failed and resumes add nothing (case B40).
    """

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_time: Histogram = field(default_factory=Histogram)
    """Arrival to first admission."""
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_time: Histogram = field(default_factory=Histogram)

    @property
    def hit_rate(self) -> float:
        """hit_tokens / query_tokens; 0 before the first admission."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted_tokens / drafted_tokens; 0 before the first draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot: how full things are now. usage = used / usable, within [0, 1]."""

    running: int
    waiting: int
    usable: int
    used: int
    available: int
    fenced: int

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that requests hold."""
        return self.used / self.usable if self.usable else 0.0

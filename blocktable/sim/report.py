"""What a simulation found: numbers, a table, plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlocktableError


class Percentiles(NamedTuple):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentiles(values: NDArray[np.float64]) -> Percentiles:
    """Mean, percentiles and maximum; zeros for no values."""
    if not len(values):
        return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Percentiles(float(values.mean()), p50, p90, p99, float(values.max()))


class PoolUse:
    """Pool use over time in at most ``2 * samples`` points: when full, every second is dropped.
    The peak is exact."""

    def __init__(self, samples: int) -> None:
        self._points: list[tuple[float, int, int, int, int]] = []
        self._most, self._every, self._seen = 2 * samples, 1, 0
        self.peak = 0

    def add(self, time: float, used: int, cached: int, running: int, waiting: int) -> None:
        """One observation; O(1) amortised."""
        self.peak = max(self.peak, used)
        self._seen += 1
        if self._seen % self._every:
            return
        self._points.append((time, used, cached, running, waiting))
        if len(self._points) >= self._most:
            self._points = self._points[1::2]
            self._every *= 2

    def arrays(self) -> dict[str, list[float]]:
        """Columns ``time_s``, ``used_blocks``, ``cached_blocks``, ``running``, ``waiting``."""
        names = ("time_s", "used_blocks", "cached_blocks", "running", "waiting")
        columns = zip(*self._points, strict=True) if self._points else ((),) * len(names)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}


@dataclass(frozen=True)
class SimReport:
    """Result of one simulation. Tokens, blocks, bytes, seconds; ``usable_blocks`` and
    ``pool_bytes`` are None for an unbounded pool. Queries and hits count a request once, when it is
    admitted; prompts of requests that can never fit are ``refused_tokens``."""

    requests: int
    finished: int
    refused: int
    refused_tokens: int
    usable_blocks: int | None
    block_size: int
    pool_bytes: int | None
    query_tokens: int
    hit_tokens: int
    hit_rate: float
    preemptions: int
    steps: int
    scheduled_tokens: int
    generated_tokens: int
    makespan_s: float
    peak_used_blocks: int
    ttft_s: Percentiles
    queue_s: Percentiles
    inter_token_s: Percentiles
    step_time_model: str
    pool_use: dict[str, list[float]]

    @property
    def hit_share(self) -> float:
        """Hits as a fraction of all prompt tokens, those of refused requests included; this is
        what pool sizes compare by."""
        asked = self.query_tokens + self.refused_tokens
        return self.hit_tokens / asked if asked else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON, percentiles by name."""
        out = asdict(self)
        for name in ("ttft_s", "queue_s", "inter_token_s"):
            out[name] = getattr(self, name)._asdict()
        return out

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of each line of a summary for people."""
        blocks = "unbounded" if self.usable_blocks is None else f"{self.usable_blocks:,}"
        size = "" if self.pool_bytes is None else f" ({self.pool_bytes / 1e9:,.1f} GB)"
        return [
            ("requests", f"{self.requests:,}, {self.finished:,} done, {self.refused:,} refused"),
            ("pool", f"{blocks} blocks of {self.block_size} tokens{size}, peak in use "
                     f"{self.peak_used_blocks:,}"),
            ("prefix hits", f"{self.hit_tokens:,} of {self.query_tokens:,} prompt tokens "
                            f"({self.hit_rate:.1%})"),
            ("preemptions", f"{self.preemptions:,}"),
            ("steps", f"{self.steps:,} in {self.makespan_s:,.0f} simulated s"),
            ("time to first token", _seconds(self.ttft_s)),
            ("waiting for a place", _seconds(self.queue_s)),
            ("time between tokens", _seconds(self.inter_token_s)),
            ("step time", self.step_time_model),
        ]  # fmt: skip


def _seconds(p: Percentiles) -> str:
    return f"mean {p.mean:.3f} s, p50 {p.p50:.3f}, p90 {p.p90:.3f}, p99 {p.p99:.3f}"


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


SWEEP_HEADER = ("pool", "blocks", "hits", "preempted", "refused", "TTFT p50", "p99",
                "queue p99", "total")  # fmt: skip
"""``hits`` are of all prompt tokens of the trace, those of refused requests included."""


def sweep_rows(reports: Sequence[SimReport]) -> list[tuple[str, ...]]:
    """One line of text cells a pool size, under ``SWEEP_HEADER``."""
    return [
        (
            "unbounded" if r.pool_bytes is None else f"{r.pool_bytes / 1e9:,.0f} GB",
            "-" if r.usable_blocks is None else f"{r.usable_blocks:,}",
            f"{r.hit_share:.1%}", f"{r.preemptions:,}", f"{r.refused:,}", _short(r.ttft_s.p50),
            _short(r.ttft_s.p99), _short(r.queue_s.p99), f"{r.makespan_s:,.0f} s",
        )
        for r in reports
    ]  # fmt: skip


def write_json(reports: Sequence[SimReport], path: str | Path) -> None:
    """Write one report as an object, several as ``{"sweep": [...]}``."""
    body = (
        reports[0].as_dict()
        if len(reports) == 1
        else {"sweep": [report.as_dict() for report in reports]}
    )
    try:
        Path(path).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BlocktableError(f"cannot write {path}: {error}") from None

"""What a run did: speeds, reuse, memory. Measured step by step, drawn at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from blocktable.cli.blockmap import PoolPicture, draw_map, legend, picture
from blocktable.core.specs import ceil_div


@dataclass
class RunMeter:
    """Times and counts of a run, fed once a step; keeps the pool's picture at its fullest step.

    A step that computes prompt tokens counts as prefill, any other as decode: each rate is the
    tokens of its steps over the time of its steps.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    mixed_tokens: int = 0  # generated in steps that also computed prompts
    peak_used: int = 0
    peak_rows: int = 0
    peak: PoolPicture | None = None
    _last: tuple[int, int] = (0, 0)
    _owners: dict[str, int] = field(default_factory=dict)

    def name(self, request_id: str, number: int) -> None:
        """Number under which a request appears in the map."""
        self._owners[request_id] = number

    def step(self, scheduler: Any, seconds: float) -> None:
        """Account one engine step that took ``seconds``."""
        stats = scheduler.stats
        rejected = stats.drafted_tokens - stats.accepted_tokens
        now = stats.scheduled_tokens - rejected, stats.generated_tokens
        scheduled, generated = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        if scheduled > generated:
            self.prefill_tokens += scheduled - generated
            self.mixed_tokens += generated
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += generated
            self.decode_seconds += seconds

    def look(self, scheduler: Any) -> None:
        """Keep the pool's picture if more blocks are in use than at any look before."""
        rows = [(row, request) for row, request in enumerate(scheduler.requests) if request]
        self.peak_rows = max(self.peak_rows, len(rows))
        used = scheduler.manager.pool.used
        if used <= self.peak_used:
            return
        self.peak_used = used
        owner = np.full(len(scheduler.requests), -1, np.int32)
        for row, request in rows:
            owner[row] = self._owners.get(request.request_id.split("#")[0], -1)
        self.peak = picture(scheduler.manager, owner)


@dataclass(frozen=True)
class RunFacts:
    """What the summary says besides the meter's numbers."""

    model: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    block_size: int
    usable_blocks: int
    max_model_len: int
    block_bytes: int
    preemptions: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


def contiguous_blocks(facts: RunFacts, rows: int) -> int:
    """Blocks that ``rows`` contiguous buffers of the model's maximum length would have taken."""
    return rows * ceil_div(facts.max_model_len, facts.block_size)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "none"


def _megabytes(blocks: int, facts: RunFacts) -> str:
    return f"{blocks * facts.block_bytes / 2**20:,.1f} MiB"


def summary_rows(meter: RunMeter, facts: RunFacts) -> list[tuple[str, str]]:
    """The summary as (name, value) pairs."""
    contiguous = contiguous_blocks(facts, meter.peak_rows)
    saved = f", {contiguous / meter.peak_used:.0f}x as many" if meter.peak_used else ""
    share = 100 * facts.cached_tokens / max(facts.prompt_tokens, 1)
    rows = [
        ("model", facts.model),
        ("requests", f"{facts.num_requests}, at most {meter.peak_rows} at once"),
        ("prefill", f"{_rate(meter.prefill_tokens, meter.prefill_seconds)} "
         f"({meter.prefill_tokens:,} tokens computed in {meter.prefill_seconds:.1f} s)"),
        ("decode", f"{_rate(meter.decode_tokens, meter.decode_seconds)} "
         f"({meter.decode_tokens:,} tokens in {meter.decode_seconds:.1f} s)"),
        ("prefix hits", f"{facts.cached_tokens:,} of {facts.prompt_tokens:,} prompt tokens "
         f"({share:.0f}%) came from the cache"),
        ("blocks at the peak", f"{meter.peak_used:,} of {facts.usable_blocks:,}, "
         f"{facts.block_size} tokens each ({_megabytes(meter.peak_used, facts)})"),
        ("contiguous buffers", f"{contiguous:,} blocks for the same requests at maximum length "
         f"{facts.max_model_len:,} ({_megabytes(contiguous, facts)}){saved}"),
        ("preemptions", f"{facts.preemptions}"),
        ("drafts", f"{facts.accepted_tokens:,} of {facts.drafted_tokens:,} guesses accepted"),
        ("whole run", f"{facts.seconds:.1f} s, {facts.generated_tokens:,} tokens generated, "
         f"{_rate(facts.generated_tokens, facts.seconds)}"),
    ]  # fmt: skip
    return [row for row in rows if row[0] != "drafts" or facts.drafted_tokens]


def summary_panel(meter: RunMeter, facts: RunFacts, width: int) -> RenderableType:
    """The summary and the block map for a terminal of ``width`` columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in summary_rows(meter, facts):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if meter.peak is not None:
        inner = max(16, min(width - 6, 128))
        parts += [
            Text("\nblock pool at the peak", style="bold"),
            draw_map(meter.peak, inner),
            Text(),
            legend(meter.peak),
        ]
    return Panel(Group(*parts), title=" summary ", title_align="left", border_style="bold")


def print_summary(meter: RunMeter, facts: RunFacts) -> None:
    """The summary as plain lines on standard output, the map included."""
    for name, value in summary_rows(meter, facts):
        print(f"{name}: {value}")
    if meter.peak is not None:
        print("block pool at the peak:")
        print(draw_map(meter.peak, 100).plain)
        print(legend(meter.peak).plain)

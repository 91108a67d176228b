"""PNG plots of simulations (matplotlib, imported when a plot is made)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blocktable.core.errors import BlocktableError, ConfigError
from blocktable.sim.report import SimReport


def plot_pool(report: SimReport, path: str | Path) -> None:
    """Blocks in use and cached, requests running and waiting, over simulated time."""
    figure, (top, bottom) = _figure(2)
    use = report.pool_use
    time = [t / 60 for t in use["time_s"]]
    both = [a + b for a, b in zip(use["used_blocks"], use["cached_blocks"], strict=True)]
    top.fill_between(time, use["used_blocks"], label="held by requests", color="#2b6cb0")
    top.fill_between(time, use["used_blocks"], both, label="cached, evictable", color="#bee3f8")
    if report.usable_blocks is not None:
        top.axhline(report.usable_blocks, color="black", linewidth=0.8, label="usable")
    top.set_ylabel(f"blocks of {report.block_size} tokens")
    title = f"hit rate {report.hit_rate:.1%}, {report.preemptions:,} preemptions"
    top.set_title(title, loc="left", fontsize=11)
    top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=8, frameon=False)
    bottom.plot(time, use["running"], label="running", color="#2f855a")
    bottom.plot(time, use["waiting"], label="waiting", color="#c05621")
    bottom.set_ylabel("requests")
    bottom.set_xlabel("simulated minutes")
    bottom.legend(loc="upper left", fontsize=8)
    _save(figure, path)


def plot_sweep(reports: Sequence[SimReport], path: str | Path) -> None:
    """Hit rate and time to first token against pool size; the unbounded pool as a line."""
    figure, (top, bottom) = _figure(2)
    sized = [r for r in reports if r.pool_bytes is not None]
    size = [(r.pool_bytes or 0) / 1e9 for r in sized]
    top.plot(size, [100 * r.hit_share for r in sized], marker="o", color="#2b6cb0")
    for r in reports:
        if r.pool_bytes is None:
            top.axhline(100 * r.hit_share, color="black", linewidth=0.8, linestyle="--")
            top.annotate(
                "unbounded", (0.01, 100 * r.hit_share), xycoords=("axes fraction", "data"),
                xytext=(0, -4), textcoords="offset points", va="top", fontsize=9,
            )  # fmt: skip
    top.set_ylabel("prefix hits, % of all prompt tokens")
    bottom.plot(size, [r.ttft_s.p50 for r in sized], marker="o", label="p50", color="#2f855a")
    bottom.plot(size, [r.ttft_s.p99 for r in sized], marker="o", label="p99", color="#c05621")
    bottom.set_yscale("log")
    bottom.set_ylabel("time to first token, s")
    bottom.set_xlabel("KV cache, GB")
    bottom.set_xscale("log")
    bottom.set_xticks(size, [f"{gb:,.2g}" if gb < 10 else f"{gb:,.0f}" for gb in size])
    bottom.minorticks_off()
    bottom.legend(fontsize=8)
    _save(figure, path)


def _figure(rows: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'blocktable[plot]'") from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, sharex=True)


def _save(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise BlocktableError(f"cannot write plot {path}: {error}") from None

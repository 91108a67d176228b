"""A `Plan` as a table for a terminal, as JSON, and as a plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.plan.planner import UNBOUNDED, Plan

_FIRST_COLUMN = 14  # characters: kinds of groups are told whole
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1, three figures."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def percent(share: float) -> str:
    """A small share in percent, two figures, never as a power of ten."""
    digits = 1 - math.floor(math.log10(100 * share)) if share > 0 else 1
    return f"{100 * share:.{min(12, max(1, digits))}f}%"


def as_json(plan: Plan) -> str:
    """The whole plan as JSON, byte counts exact."""
    return json.dumps(plan.as_dict(), indent=2)


def render(plan: Plan, console: Any = None) -> None:
    """Print the plan with Rich, to ``console`` (a rich.console.Console) or the terminal."""
    from rich.console import Console

    out = console or Console()
    out.print(_summary(plan))
    out.print(_groups(plan))
    out.print(_fits(plan))
    if plan.savings:
        out.print(_savings(plan))
    for note in plan.notes:
        out.print(f"[dim]{note}[/dim]")


def _table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index else "left", min_width=0 if index else _FIRST_COLUMN
        )
    return table


def _summary(plan: Plan) -> Any:
    t = plan.table
    table = _table(
        f"{plan.model} ({plan.model_type}), {plan.tensor_parallel_size} x {plan.device}, per rank",
        "what",
        "value",
    )
    verdict = "fit" if plan.enough else "do NOT fit"
    rows = [
        ("memory", size(plan.device_bytes)),
        ("weights / activations", f"{size(plan.weight_bytes)} / {size(plan.activation_bytes)}"),
        ("KV cache", f"{size(plan.cache_bytes)} in {plan.num_blocks:,} blocks (1 reserved)"),
        ("KV bytes a token", f"{plan.bytes_per_token:,} ({plan.kv_dtype})"),
        ("bytes a block", f"{plan.block_bytes:,} ({plan.block_size} tokens)"),
        ("recurrent state a request", size(plan.state_bytes_per_request)),
        (f"request of {plan.context:,} tokens", f"{plan.request_blocks:,} blocks, "
                                                f"{size(plan.request_bytes)}"),
        ("such requests at once", f"{plan.max_requests:,}: {plan.requests:,} {verdict}"),
        (f"longest context for {plan.requests:,}",
         "without limit" if plan.longest_context == UNBOUNDED
         else f"{plan.longest_context:,} tokens"),
        ("block table, a row", f"{t.row_bytes:,} B"),
        ("block tables, host / device", f"{size(t.host_bytes)} / {size(t.device_bytes)}"),
        ("entry as share of its block", percent(t.share_of_cache)),
        ("tables as share of the KV cache", percent(t.whole_share)),
        ("upload a decode step, mean / worst", f"{size(t.upload_mean_bytes)} / "
                                               f"{size(t.upload_worst_bytes)}"),
        ("  if whole rows were uploaded", size(t.upload_whole_bytes)),
        (f"row kept in {size(t.shared_memory_bytes)} shared memory",
         f"{t.kernel_share:.1%} ({t.kernel_tokens:,} tokens fit wholly)"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _groups(plan: Plan) -> Any:
    table = _table(
        "KV cache groups",
        "kind",
        "layers",
        "bytes a token",
        "page",
        "blocks a request",
        "row",
    )
    for g in plan.groups:
        table.add_row(
            g.kind, str(g.num_layers), f"{g.bytes_per_token:,}", f"{g.page_bytes:,} B",
            f"{g.blocks_per_request:,}", f"{g.table_width:,}",
        )  # fmt: skip
    return table


def _fits(plan: Plan) -> Any:
    table = _table("Requests that fit at once", "tokens each", "blocks each", "requests")
    for fit in plan.fits:
        table.add_row(f"{fit.tokens:,}", f"{fit.blocks:,}", f"{fit.requests:,}")
    return table


def _savings(plan: Plan) -> Any:
    table = _table(
        f"What {plan.requests:,} requests save by a shared prefix",
        "prefix tokens",
        "blocks",
        "bytes",
        "of their need",
    )
    for saving in plan.savings:
        table.add_row(
            f"{saving.tokens:,}", f"{saving.blocks:,}", size(saving.bytes), f"{saving.share:.1%}"
        )
    return table


def plot(plan: Plan, path: str | Path) -> Path:
    """Write a picture (the suffix says the format): where the memory goes, and how many requests
    fit at which length. Needs matplotlib; ConfigError says so when it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'blocktable[plot]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_memory(plan, left)
    _plot_fits(plan, right)
    figure.suptitle(f"{plan.model} on {plan.tensor_parallel_size} x {plan.device}")
    try:
        figure.savefig(Path(path), dpi=120)
    except (OSError, ValueError) as error:  # no such folder, or no such kind of picture
        raise ConfigError(f"cannot draw into {path}: {error}") from None
    return Path(path)


def _plot_memory(plan: Plan, axes: Any) -> None:
    states = plan.state_bytes_per_request * plan.requests
    parts = {
        "weights": plan.weight_bytes,
        "activations": plan.activation_bytes,
        "recurrent states": states,
        "KV cache": plan.cache_bytes,
    }
    parts["left free"] = max(0, plan.device_bytes - sum(parts.values()))
    bottom = 0.0
    for name, value in parts.items():
        if value:
            gib = value / (1 << 30)
            axes.bar(0, gib, bottom=bottom, width=0.5, label=f"{name}, {size(value)}")
            bottom += gib
    axes.set_xlim(-0.5, 1.5)
    axes.set_xticks([])
    axes.set_ylabel("GiB per rank")
    axes.legend(loc="center right", fontsize=8)


def _plot_fits(plan: Plan, axes: Any) -> None:
    axes.plot([f.tokens for f in plan.fits], [f.requests for f in plan.fits], marker="o")
    axes.axhline(plan.requests, linestyle="--", color="grey", label=f"{plan.requests} wanted")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens a request")
    axes.set_ylabel("requests at once")
    axes.legend(fontsize=8)

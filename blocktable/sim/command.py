"""What ``blocktable simulate`` does, as a function: read, simulate, print, write, plot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from blocktable.core.errors import ConfigError
from blocktable.sim.plots import plot_pool, plot_sweep
from blocktable.sim.report import SWEEP_HEADER, SimReport, sweep_rows, write_json
from blocktable.sim.simulator import (
    DEFAULT_SWEEP_GB,
    SimOptions,
    blocks_for_bytes,
    simulate,
    sweep,
)
from blocktable.sim.trace import HASH_BLOCK, Trace, read_trace


@dataclass(frozen=True, kw_only=True)
class SimCommand:
    """Options of one call. ``blocks``: a number of usable blocks, or "unbounded"; without it
    ``memory_gb`` (1e9 bytes) of KV at the model's bytes per token. ``sweep_gb`` not empty: run
    every one of these sizes and the unbounded pool instead."""

    trace: Path
    blocks: str | None = None
    memory_gb: float = 80.0
    block_size: int = HASH_BLOCK
    limit: int | None = None
    sweep_gb: tuple[float, ...] = ()
    json_file: Path | None = None
    plot: Path | None = None
    options: SimOptions = field(default_factory=SimOptions)


def run(command: SimCommand, console: Console | None = None) -> list[SimReport]:
    """Do it and return the reports. Raises TraceError, ConfigError or BlocktableError with one
    line that names file, value and limit; nothing is simulated before all options are checked."""
    console = console or Console()
    trace = read_trace(command.trace, command.block_size, command.limit)
    begin = time.perf_counter()
    if command.sweep_gb:
        reports = sweep(trace, command.options, command.sweep_gb)
        _print_sweep(reports, console)
    else:
        blocks = usable_blocks(command, trace)
        reports = [simulate(trace, replace(command.options, num_blocks=blocks))]
        _print_report(reports[0], console)
    console.print(f"simulated in {time.perf_counter() - begin:.1f} s")
    if command.plot is not None:
        if command.sweep_gb:
            plot_sweep(reports, command.plot)
        else:
            plot_pool(reports[0], command.plot)
        console.print(f"plot: {command.plot}")
    if command.json_file is not None:
        write_json(reports, command.json_file)
    return reports


def usable_blocks(command: SimCommand, trace: Trace) -> int | None:
    """``command.blocks`` as a number; None = unbounded. ConfigError for anything else."""
    if command.blocks is None:
        count = blocks_for_bytes(command.memory_gb * 1e9, trace, command.options.step_time)
        if count < 1:
            raise ConfigError(
                f"{command.memory_gb:g} GB hold no block of {trace.block_size} tokens"
            )
        return count
    if command.blocks == "unbounded":
        return None
    try:
        return int(command.blocks)
    except ValueError:
        raise ConfigError(
            f"blocks must be a number or 'unbounded', got {command.blocks!r}"
        ) from None


def parse_sizes(text: str) -> tuple[float, ...]:
    """Pool sizes in GB from "1,16,80"; "default" = a range from 1 GB up. ConfigError."""
    if text == "default":
        return DEFAULT_SWEEP_GB
    try:
        sizes = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"sizes must be numbers of GB with commas, got {text!r}") from None
    if not all(0 < size < float("inf") for size in sizes):
        raise ConfigError(f"sizes must be above 0 GB, got {text!r}")
    return sizes


def _print_report(report: SimReport, console: Console) -> None:
    table = Table(show_header=False, box=None)
    for label, value in report.lines():
        table.add_row(label, value)
    console.print(table)


def _print_sweep(reports: list[SimReport], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in SWEEP_HEADER:
        table.add_column(name, justify="right", no_wrap=True)
    for row in sweep_rows(reports):
        table.add_row(*row)
    console.print(table)
    console.print(reports[0].step_time_model)

"""Whether a step message stays within a rank's tables, before anything is made of its numbers.

A message that was decoded is well formed, but its numbers may be anything: an interval of two
thousand million entries, written down, would take gigabytes. Cost: a reduction a non-empty column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktable.core.errors import RankError
from blocktable.parallel.wire import GroupDelta, Ints, StepMessage


def check_bounds(
    message: StepMessage, widths: Sequence[int], num_rows: int, max_model_len: int
) -> None:
    """Raise RankError, naming column, value and limit, for a number that has no place in tables of
    these widths and ``num_rows`` rows of at most ``max_model_len`` tokens."""
    step = message.step
    for delta, width in zip(message.groups, widths, strict=True):
        _check_group(step, delta, width, num_rows)
    for name in ("rows", "start_rows", "released", "fork_rows", "fork_parents"):
        _within(step, name, getattr(message, name), 0, num_rows)
    entries = len(message.rows)
    _within(step, "start_positions", message.start_positions, 0, max_model_len + 1)
    _within(step, "num_scheduled", message.num_scheduled, 1, max_model_len + 1)
    _within(step, "sample_index", message.sample_index, -1, entries)
    _within(step, "user", message.user, 0, entries)


def _check_group(step: int, delta: GroupDelta, width: int, num_rows: int) -> None:
    for name in ("move_from", "move_to", "truncate_rows", "null_rows", "set_rows", "append_rows"):
        _within(step, name, getattr(delta, name), 0, num_rows)
    for name in ("truncate_counts", "null_starts", "null_stops", "append_counts"):
        _within(step, name, getattr(delta, name), 0, width + 1)
    _within(step, "set_columns", delta.set_columns, 0, width)
    if len(delta.null_rows) and bool((delta.null_starts > delta.null_stops).any()):
        raise RankError(f"step {step}: an interval of null entries ends before it begins")
    for name in ("move_from", "move_to", "truncate_rows", "append_rows"):
        rows = getattr(delta, name)
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise RankError(f"step {step}: a row is named twice in {name}")


def _within(step: int, name: str, values: Ints, first: int, stop: int) -> None:
    if not len(values):
        return
    low, high = int(values.min()), int(values.max())
    if low < first or high >= stop:
        bad = low if low < first else high
        raise RankError(f"step {step}: {name} has {bad}, outside {first} .. {stop - 1}")

"""A copy of the scheduler's block tables that follows step messages, on every rank.

The driver keeps one too: it turns what changed in its tables into a `GroupDelta` by comparing with
the copy, applies the delta to the copy by the same code as the ranks, and sends the digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blocktable.core.table import HostTable, TableDelta
from blocktable.core.types import Counts, RowIds
from blocktable.parallel.digest import TableDigest, mix
from blocktable.parallel.wire import EMPTY, GroupDelta, Ints


def spread(starts: NDArray, stops: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For intervals [n]: the index of each covered entry's interval, and the entry."""
    lengths = (stops - starts).astype(np.int64)
    index = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.cumsum(lengths) - lengths
    return index, np.arange(len(index)) + np.repeat(starts - offset, lengths)


class MirrorTable:
    """One group's table and its digest. ``table`` is a `HostTable` with the driver's block ids."""

    def __init__(self, max_rows: int, width: int) -> None:
        self.table = HostTable(max_rows, width)
        self.digest = TableDigest(max_rows)

    def apply(self, delta: GroupDelta) -> None:
        """Do what the delta says. Raises RowError for rows or entries the table does not have."""
        table, digest = self.table, self.digest
        if len(delta.move_from):
            table.move_rows(delta.move_from, delta.move_to)
            digest.move(delta.move_from, delta.move_to)
        if len(delta.truncate_rows):
            self._truncate(delta.truncate_rows, delta.truncate_counts)
        if len(delta.null_rows):
            rows, columns = _entries(delta.null_rows, delta.null_starts, delta.null_stops)
            old = table.rows[rows, columns]
            table.null(delta.null_rows, delta.null_starts, delta.null_stops)
            digest.remove(rows, columns, old)
        if len(delta.set_rows):
            old = table.rows[delta.set_rows, delta.set_columns]
            table.write(delta.set_rows, delta.set_columns, delta.set_ids)
            digest.change(delta.set_rows, delta.set_columns, old, delta.set_ids)
        if len(delta.append_rows):
            starts = table.counts[delta.append_rows].copy()
            table.append(delta.append_rows, delta.append_counts, delta.append_ids)
            digest.append(delta.append_rows, starts, delta.append_counts, delta.append_ids)

    def _truncate(self, rows: RowIds, counts: Counts) -> None:
        empty = counts == 0
        cut, keep = rows[~empty], counts[~empty]
        if len(cut):
            entries, columns = _entries(cut, keep, np.maximum(self.table.counts[cut], keep))
            old = self.table.rows[entries, columns]
            self.table.truncate(cut, keep)
            self.digest.remove(entries, columns, old)
        self.table.truncate(rows[empty], 0)
        self.digest.clear(rows[empty])


def _entries(rows: RowIds, starts: NDArray, stops: NDArray) -> tuple[RowIds, NDArray]:
    index, columns = spread(starts, stops)
    return rows[index], columns


def combined_digest(tables: Sequence[MirrorTable]) -> int:
    """One uint64 for the tables of all groups, in order."""
    if len(tables) == 1:
        return tables[0].digest.value
    values = np.array([t.digest.value for t in tables], np.uint64)
    values ^= mix(np.arange(len(tables), dtype=np.uint64))
    return int(np.bitwise_xor.reduce(mix(values)))


def group_delta(
    table: HostTable, change: TableDelta, mirror: MirrorTable, released: RowIds = EMPTY
) -> GroupDelta:
    """What turns ``mirror`` into ``table``, given the record ``change`` of what was touched.

    ``released`` rows had their request replaced or ended: they are cleared instead of having each
    entry replaced.
    """
    rows = change.rows
    if not len(rows):
        return GroupDelta()
    before = mirror.table.counts.copy()
    moved = len(change.copy_dst) > 0
    if moved:
        before[np.setdiff1d(change.copy_src, change.copy_dst)] = 0
        before[change.copy_dst] = mirror.table.counts[change.copy_src]
    cut_rows, cut_counts = _cuts(table, rows, before, released)
    before[cut_rows] = cut_counts
    kept = np.minimum(before, table.counts)
    stop = np.minimum(change.fill_stop, kept[change.fill_row])
    inner = change.fill_start < stop
    nulls = change.fill_row[inner], change.fill_start[inner], stop[inner]
    sets = _sets(table, change, kept, None if moved or len(nulls[0]) else mirror)
    grown = rows[table.counts[rows] > kept[rows]]
    added = table.counts[grown] - kept[grown]
    index, columns = spread(kept[grown], table.counts[grown])
    return GroupDelta(
        change.copy_src, change.copy_dst, cut_rows, cut_counts, *nulls, *sets,
        grown, added, table.rows[grown[index], columns],
    )  # fmt: skip


def _cuts(
    table: HostTable, rows: RowIds, before: Counts, released: RowIds
) -> tuple[RowIds, Counts]:
    cleared = released[before[released] > 0].astype(np.int32)
    shorter = rows[table.counts[rows] < before[rows]]
    if len(cleared):
        shorter = np.setdiff1d(shorter, cleared).astype(np.int32)
    counts = np.concatenate([np.zeros(len(cleared), np.int32), table.counts[shorter]])
    return np.concatenate([cleared, shorter]), counts


def _sets(
    table: HostTable, change: TableDelta, kept: Counts, mirror: MirrorTable | None
) -> tuple[Ints, Ints, Ints]:
    """Entries below the kept counts that were written; with ``mirror``, those that differ."""
    stop = np.minimum(change.write_stop, kept[change.write_row])
    below = change.write_start < stop
    if not below.any():
        return EMPTY, EMPTY, EMPTY
    rows, columns = _entries(change.write_row[below], change.write_start[below], stop[below])
    ids = table.rows[rows, columns]
    if mirror is not None:
        differ = mirror.table.rows[rows, columns] != ids
        rows, columns, ids = rows[differ], columns[differ], ids[differ]
    return rows, columns.astype(np.int32), ids

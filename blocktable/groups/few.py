"""The step of a handful of rows, one after another in plain Python.

NumPy's cost a call is that of some ten plain statements, so below `FEW` rows that need something
this is faster: 20 us instead of 52 for a step of 16 requests, of which one or two need a block or
complete one. Same order, same results as `Growth.grow`; what it does not handle it leaves alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blocktable.groups.base import NEVER, Group, Ints

if TYPE_CHECKING:
    from blocktable.groups.growth import Growth

FEW = 16


def grow_few(growth: Growth, rows: Ints, computed: Ints, total: Ints, limit: Ints) -> bool:
    """As `Growth.grow` with its demand. False: something else than plain growth is due, or there
    are not enough blocks; nothing has changed."""
    names, targets = rows.tolist(), total.tolist()
    needs = _needs(growth, names, computed.tolist(), limit.tolist())
    if needs is None:
        return False
    if needs:
        ids = growth.pool.take(sum(more for _, _, more in needs))
        used = 0
        for group, row, more in needs:
            group.table.append_run(row, ids[used : used + more])
            group.capacity[row] = group.capacity_of(int(group.table.counts[row]))
            used += more
    for row, target in zip(names, targets, strict=True):
        growth.num_computed[row] = target
    for group in growth.keyed_groups:
        if not group.deferred_keys:
            _give_keys(growth, group, names, targets)
    for row in names:
        growth.due[row] = min(growth.max_len + 1, *(_due(group, row) for group in growth.groups))
    return True


def _needs(
    growth: Growth, rows: list[int], computed: list[int], limit: list[int]
) -> list[tuple[Group, int, int]] | None:
    """Group, row and blocks of each row that must grow; None: see `grow_few`."""
    if growth.num_sharing:
        return None
    needs, blocks = [], 0
    for group in growth.groups:
        for row, done, want in zip(rows, computed, limit, strict=True):
            if group.skips and done >= _skip_due(group, row):
                return None
            if group.deferred_keys and done >= group.key_due[row]:
                return None
            if want > group.capacity[row]:
                more = int(group.entries_for(want)) - int(group.table.counts[row])
                if more > 1 and group.blocks_among(more) != more:
                    return None
                needs.append((group, row, more))
                blocks += more
    return needs if blocks <= growth.pool.available else None


def _give_keys(growth: Growth, group: Group, rows: list[int], totals: list[int]) -> None:
    book = growth.book
    for row, total in zip(rows, totals, strict=True):
        known = min(total, int(growth.num_tokens[row]))
        if book is not None and known >= group.key_due[row]:
            book.give_row(group, row, known // group.block_size)


def _skip_due(group: Group, row: int) -> int:
    return int(group.skip_due(max(int(group.skipped[row]), group.kept_head)))


def _due(group: Group, row: int) -> int:
    """`Group.due_at` of one row."""
    due = min(int(group.capacity[row]), NEVER - 1) + 1
    if group.caching:
        due = min(due, int(group.key_due[row]))
    return min(due, _skip_due(group, row)) if group.skips else due

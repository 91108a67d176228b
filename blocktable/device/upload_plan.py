"""From what changed on the host to what one kernel does on the device.

Two kinds of work, packed into one int32 buffer::

    | cells [n] | values [n] | starts [c + 1] | operations [o, 5] | values of operations ... |

*Entries* are single cells and their values: what a decode step makes, 8 bytes each. *Operations*
work on a span of one row: put values, put nulls, or copy from another row. Operations whose rows
depend on each other (a row is read by one copy and written by another operation) form a *chain*:
one program does a chain's operations in order for its columns, so that every copy reads what its
source held before the commit. A cycle (swap) begins by saving its first row's old columns.

    move 5 -> 2, then a new request in 5:   2 <- copy 5;  5 <- values;  5 <- nulls
    swap 0 and 3:                           save 0;  0 <- copy 3;  3 <- saved
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.table import TableDelta

FILL, VALUES, COPY, SAVED = 0, 1, 2, 3
"""Kinds of operation."""
OPERATION_FIELDS = 5
"""kind, first cell of the row, start column, stop column, source (see `UploadPlan`)."""
LONGEST_ENTRY_SPAN = 4
"""Spans up to this long are packed as entries (8 bytes a cell), longer ones as operations."""

Ints = NDArray[np.int64]


class GroupDelta(NamedTuple):
    """One group's changes in kernel blocks, and where its rows lie in the arena."""

    delta: TableDelta
    flat: NDArray[np.int32]  # the host rows, flattened
    width: int
    base: int  # first cell of row 0 in the arena


class UploadPlan(NamedTuple):
    """Everything one commit does. ``operations`` int32 [o, 5]; the source of VALUES is an offset
    into ``values``, that of COPY the first cell of the source row."""

    cells: NDArray[np.int32]  # [n]
    cell_values: NDArray[np.int32]  # [n]
    starts: NDArray[np.int32]  # [chains + 1]
    operations: NDArray[np.int32]  # [o, 5]
    values: NDArray[np.int32]

    @property
    def num_chains(self) -> int:
        """Independent chains of operations."""
        return len(self.starts) - 1

    @property
    def num_ints(self) -> int:
        """int32 values the packed form takes; 4 bytes each is what a commit uploads."""
        parts = 2 * len(self.cells) + len(self.values)
        return parts + (len(self.starts) + self.operations.size if self.num_chains else 0)

    @property
    def max_stop(self) -> int:
        """Columns the widest operation reaches."""
        return int(self.operations[:, 3].max(initial=0))

    def pack(self, out: NDArray[np.int32]) -> None:
        """Write the packed form to the front of ``out``."""
        at = 0
        parts = [self.cells, self.cell_values]
        if self.num_chains:
            parts += [self.starts, self.operations.reshape(-1)]
        for part in (*parts, self.values):
            out[at : at + len(part)] = part
            at += len(part)


_NONE = np.zeros(0, np.int32)
_NO_OPERATIONS = np.zeros((0, OPERATION_FIELDS), np.int32)
_NO_CHAINS = np.zeros(1, np.int32)


def spans(start: NDArray, length: NDArray) -> Ints:
    """All integers of the intervals ``start[i] .. start[i] + length[i] - 1``, in order."""
    total = int(length.sum())
    shift = start.astype(np.int64) - (np.cumsum(length) - length)
    return np.repeat(shift, length) + np.arange(total)


def plan_upload(
    groups: Sequence[GroupDelta], entries: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
) -> UploadPlan:
    """One plan for all groups' changes, and the ``entries`` (cells, values) found already.

    O(entries changed); nothing in it refers to the host tables.
    """
    cells: list[NDArray] = [] if entries is None else [entries[0]]
    values: list[NDArray] = [] if entries is None else [entries[1]]
    rest: list[GroupDelta] = []
    for group in groups:
        delta = group.delta
        first = delta.write_row.astype(np.int64) * group.width + delta.write_start
        length = delta.write_stop - delta.write_start
        plain = not len(delta.copy_dst) and not len(delta.fill_row)
        if plain and length.max(initial=0) == 1:  # a decode step
            cells.append(first + group.base)
            values.append(group.flat[first])
        elif len(delta.rows):
            rest.append(group)
    if rest:
        return _plan_general(cells, values, rest)
    return entries_plan(_join(cells), _join(values))


def entries_plan(cells: NDArray[np.int32], values: NDArray[np.int32]) -> UploadPlan:
    """A plan of single entries only."""
    return UploadPlan(cells, values, _NO_CHAINS, _NO_OPERATIONS, _NONE)


def _join(parts: Sequence[NDArray]) -> NDArray[np.int32]:
    if len(parts) == 1:
        return parts[0].astype(np.int32, copy=False)
    return np.concatenate(parts).astype(np.int32) if parts else _NONE


class _Spans(NamedTuple):
    """Row spans of one group, one kind after another."""

    kind: Ints
    row: Ints
    start: Ints
    stop: Ints
    source: Ints  # source row of a COPY, -1 otherwise


def _group_spans(group: GroupDelta, counts_fill: NDArray[np.bool_]) -> _Spans:
    """``counts_fill`` marks the fills behind the row's last entry: nulls made on the device. The
    other fills are sent as values, because a later write may overlap them."""
    d = group.delta
    parts = [
        (np.where(counts_fill, FILL, VALUES), d.fill_row, d.fill_start, d.fill_stop),
        (np.full(len(d.write_row), VALUES), d.write_row, d.write_start, d.write_stop),
        (np.full(len(d.copy_dst), COPY), d.copy_dst, np.zeros_like(d.copy_len), d.copy_len),
    ]
    kind, row, start, stop = (
        np.concatenate([part[i] for part in parts]).astype(np.int64) for i in range(4)
    )
    source = np.full(len(row), -1, np.int64)
    source[len(row) - len(d.copy_src) :] = d.copy_src
    return _Spans(kind, row, start, stop, source)


def _plan_general(
    cells: list[NDArray], cell_values: list[NDArray], groups: Sequence[GroupDelta]
) -> UploadPlan:
    """Plan with spans and copies; ``cells`` come from the groups that had only single entries."""
    operations: list[NDArray[np.int32]] = []
    values: list[NDArray[np.int32]] = []
    lengths: list[NDArray] = [_NONE]
    num_values = 0
    for group in groups:
        found = _group_spans(group, _is_tail(group))
        chain, depth, found = _order(found)
        small = (
            (chain < 0) & (found.kind == VALUES)
            & (found.stop - found.start <= LONGEST_ENTRY_SPAN)
        )  # fmt: skip
        at = spans(
            found.row[small] * group.width + found.start[small], (found.stop - found.start)[small]
        )
        cells.append(at + group.base)
        cell_values.append(group.flat[at])
        big = np.flatnonzero(~small & ((found.stop > found.start) | (chain >= 0)))
        chain = np.where(chain < 0, len(found.row) + np.arange(len(chain)), chain)
        order = big[np.lexsort((_stage(found.kind[big]), depth[big], chain[big]))]
        packed, data = _pack_operations(group, found, order, num_values)
        num_values += len(data)
        operations.append(packed)
        values.append(data)
        lengths.append(np.unique(chain[order], return_counts=True)[1])
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32)
    return UploadPlan(
        _join(cells), _join(cell_values), starts, np.concatenate(operations), _join(values)
    )


def _is_tail(group: GroupDelta) -> NDArray[np.bool_]:
    """Fills whose first cell is past the row's count: the host holds null from there on, and no
    write of the same delta reaches it."""
    d = group.delta
    reach = np.zeros(int(d.rows.max(initial=0)) + 1, np.int64)
    np.maximum.at(reach, d.write_row, d.write_stop)
    return d.fill_start >= reach[d.fill_row]


def _stage(kind: Ints) -> Ints:
    """Order within a row: copies, then nulls, then values."""
    return np.where(kind >= COPY, 0, np.where(kind == FILL, 1, 2))


def _pack_operations(
    group: GroupDelta, found: _Spans, order: Ints, first_value: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    kind, row, start, stop, source = (field[order] for field in found)
    packed = np.zeros((len(order), OPERATION_FIELDS), np.int64)
    packed[:, 0], packed[:, 1] = kind, row * group.width + group.base
    packed[:, 2], packed[:, 3] = start, stop
    valued = kind == VALUES
    length = (stop - start)[valued]
    packed[valued, 4] = first_value + np.cumsum(length) - length
    copied = kind == COPY
    packed[copied, 4] = source[copied] * group.width + group.base
    data = group.flat[spans(row[valued] * group.width + start[valued], length)]
    return packed.astype(np.int32), data


def _order(found: _Spans) -> tuple[Ints, Ints, _Spans]:
    """Chain and place in it of every span (chain -1: independent), and the spans with the closing
    copy of each cycle turned into SAVED.

    A row is read by at most one copy, so rows form paths and cycles. Path and place are found by
    pointer doubling: log2(copies) vector steps.
    """
    copy = np.flatnonzero(found.kind == COPY)
    chain, depth = np.full(len(found.row), -1, np.int64), np.zeros(len(found.row), np.int64)
    if not len(copy):
        return chain, depth, found
    dst, src = found.row[copy], found.source[copy]
    top = int(max(found.row.max(), src.max())) + 1
    reader = np.full(top, -1, np.int64)  # row -> row that copies from it
    reader[src] = dst
    cycle_head = _cycle_heads(reader, dst)
    kind = found.kind.copy()
    closing = np.isin(src, cycle_head)
    kind[copy[closing]] = SAVED
    reader[cycle_head] = -1
    head, place = _follow(reader)
    involved = np.zeros(top, bool)
    involved[dst] = involved[src] = True
    mine = involved[found.row]
    chain[mine], depth[mine] = head[found.row[mine]], place[found.row[mine]]
    return chain, depth, found._replace(kind=kind)


def _cycle_heads(reader: Ints, rows: Ints) -> Ints:
    """The smallest row of each cycle of ``reader``."""
    jump, least = reader.copy(), np.arange(len(reader))
    for _ in range(len(rows).bit_length() + 1):
        on = jump >= 0
        target = jump[on]
        least[on] = np.minimum(least[on], least[target])
        jump[on] = jump[target]
    circling = np.flatnonzero(jump >= 0)
    return circling[least[circling] == circling]


def _follow(reader: Ints) -> tuple[Ints, Ints]:
    """For each row the last row of its path along ``reader``, and the steps to it. No cycles."""
    rows = np.arange(len(reader))
    jump = np.where(reader >= 0, reader, rows)
    place = (reader >= 0).astype(np.int64)
    while True:
        further = jump[jump]
        if (further == jump).all():
            return jump, place
        place += place[jump]
        jump = further

"""A rolling 64-bit digest of a block table's logical state.

    entry digest  e = mix(column, block id)            (a null entry contributes nothing)
    row digest    r = sum of e over the row            (0 for an empty row; moves with the row)
    table digest  d = sum of mix(row, r) over the rows

All sums are modulo 2**64, so an append adds, a truncation subtracts, and a cleared row is set to
0: the cost of a change is proportional to the entries it changes, whatever the size of the table.
Equal tables have equal digests whatever the order of the changes that led to them. Two tables that
differ by accident have equal digests with probability 2**-64; it is no defence against intent.

The digest describes what the operations said. `TableDigest.verify` re-reads the table's memory and
finds entries that changed behind its back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import BlockIds, Counts, RowIds

U64 = NDArray[np.uint64]
_ADD = np.uint64(0x9E3779B97F4A7C15)
_MUL1, _MUL2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK64 = (1 << 64) - 1
_S30, _S27, _S31, _S32 = (np.uint64(bits) for bits in (30, 27, 31, 32))


def mix(words: U64) -> U64:
    """SplitMix64's finaliser over uint64 [n]; changes ``words`` in place and returns it."""
    words += _ADD
    words ^= words >> _S30
    words *= _MUL1
    words ^= words >> _S27
    words *= _MUL2
    words ^= words >> _S31
    return words


def entry_digests(columns: NDArray, block_ids: BlockIds) -> U64:
    """uint64 [n]: the digest of each entry; 0 where the block is null."""
    words = columns.astype(np.uint64)
    words <<= _S32
    words |= block_ids.astype(np.uint32)
    words = mix(words)
    words[np.asarray(block_ids) == 0] = 0
    return words


class TableDigest:
    """Digest of one group's table of ``max_rows`` rows, kept up to date by its bulk operations.

    `value` is the table digest; `rows` (uint64 [max_rows]) are the row digests, by which two
    tables that differ find their first differing row.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows: U64 = np.zeros(max_rows, np.uint64)
        self._index_mix = mix(np.arange(max_rows, dtype=np.uint64))
        self._value = 0
        self._cursor = 0

    @property
    def value(self) -> int:
        """The table digest, 0 for an empty table."""
        return self._value

    def _weights(self, rows: RowIds, digests: U64) -> U64:
        """uint64 [n]: what each row adds to the table digest; an empty row adds nothing."""
        out = mix(digests ^ self._index_mix[rows])
        out[digests == 0] = 0
        return out

    def _assign(self, rows: RowIds, digests: U64) -> None:
        """Set the digests of distinct ``rows``."""
        gone = int(np.add.reduce(self._weights(rows, self.rows[rows])))
        come = int(np.add.reduce(self._weights(rows, digests)))
        self._value = self._value - gone + come & _MASK64
        self.rows[rows] = digests

    def append(self, rows: RowIds, starts: NDArray, counts: Counts, block_ids: BlockIds) -> None:
        """``counts[i]`` blocks went to the end of distinct ``rows[i]``, from ``starts[i]`` on."""
        if len(rows) == len(block_ids) and bool((counts == 1).all()):
            columns, added = starts, entry_digests(starts, block_ids)
        else:
            ends = np.cumsum(counts, dtype=np.int64)
            columns = np.arange(len(block_ids)) + np.repeat(starts - (ends - counts), counts)
            sums = np.concatenate([np.zeros(1, np.uint64), entry_digests(columns, block_ids)])
            np.cumsum(sums, out=sums)
            added = sums[ends] - sums[ends - counts]
        self._assign(rows, self.rows[rows] + added)

    def remove(self, rows: RowIds, columns: NDArray, block_ids: BlockIds) -> None:
        """Entries were taken away: [n] rows (may repeat), columns, and the ids they had."""
        self.change(rows, columns, block_ids, np.zeros_like(block_ids))

    def change(self, rows: RowIds, columns: NDArray, old_ids: BlockIds, new_ids: BlockIds) -> None:
        """Entries (distinct pairs of row and column, [n]) changed from old to new ids."""
        if not len(rows):
            return
        delta = entry_digests(columns, new_ids) - entry_digests(columns, old_ids)
        touched, inverse = np.unique(rows, return_inverse=True)
        sums = np.zeros(len(touched), np.uint64)
        np.add.at(sums, inverse, delta)
        self._assign(touched, self.rows[touched] + sums)

    def clear(self, rows: RowIds) -> None:
        """Distinct ``rows`` were emptied. O(len(rows)), whatever they held."""
        self._assign(rows, np.zeros(len(rows), np.uint64))

    def move(self, source: RowIds, target: RowIds) -> None:
        """Rows were moved, all at once; those left are empty."""
        digests = self.rows[source]
        self.clear(source)
        self._assign(target, digests)

    def recompute(self, table: BlockIds, counts: Counts, rows: RowIds | None = None) -> U64:
        """uint64 [len(rows)]: row digests read from the table's memory (int32 [max_rows, W])."""
        if rows is None:
            rows = np.arange(len(self.rows), dtype=np.int32)
        width = int(counts[rows].max(initial=0))
        columns = np.arange(width)
        ids = np.where(columns < counts[rows, None], table[rows, :width], 0)
        flat = entry_digests(np.broadcast_to(columns, ids.shape).ravel(), ids.ravel())
        return np.add.reduce(flat.reshape(ids.shape), axis=1)

    def next_rows(self, counts: Counts, budget: int) -> RowIds:
        """The next rows in turn that hold about ``budget`` entries; an empty row counts as one."""
        size = len(self.rows)
        order = np.arange(self._cursor, self._cursor + min(size, budget)) % size
        taken = int(np.searchsorted(np.cumsum(counts[order] + 1), budget)) + 1
        rows = order[: min(taken, len(order))].astype(np.int32)
        self._cursor = (self._cursor + len(rows)) % size
        return rows

    def verify(self, table: BlockIds, counts: Counts, budget: int | None = None) -> int | None:
        """First row whose memory does not say what the operations said, or None.

        With ``budget`` the `next_rows` are read, so that calls in sequence go round the whole
        table; without it, all rows are.
        """
        if budget is None:
            rows = np.arange(len(self.rows), dtype=np.int32)
        else:
            rows = self.next_rows(counts, budget)
        wrong = self.recompute(table, counts, rows) != self.rows[rows]
        return int(rows[wrong].min()) if wrong.any() else None


def first_difference(a: U64, b: U64) -> int | None:
    """First row whose digests differ, or None."""
    differ = np.flatnonzero(a != b)
    return int(differ[0]) if len(differ) else None

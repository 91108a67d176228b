"""Block tables as host arrays, and a record of what changed since they were last uploaded.

::

    rows   [max_rows, max_blocks_per_row]      counts
           +----+----+----+----+----+----+
    row 0  |  7 |  8 | 12 |  0 |  0 |  0 |      3      entries past the count are null (0)
    row 1  |  0 |  0 |  9 | 10 |  0 |  0 |      4      nulls inside a row: left its window
           +----+----+----+----+----+----+

Every change is remembered per row as (a) the device row its content can be copied from, (b) one
interval of entries to upload and (c) one interval of entries that became null. ``drain`` turns
that into a `TableDelta` whose size follows the changes, not the table: moving or swapping long
rows costs a row copy on the device, never an upload. The record is bounded by the number of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blocktable.core.errors import RowError
from blocktable.core.types import NULL_BLOCK, BlockIds, Counts, RowIds

_EMPTY = np.zeros(0, np.int32)
_NO_SOURCE = -1
_BIG = np.iinfo(np.int32).max
_GONE = np.array([[0], [_BIG], [0], [_BIG], [0], [_NO_SOURCE]], np.int32)  # state of a left row


class TableDelta(NamedTuple):
    """What a device table must do to equal the host again, in this order.

    1. copy: row ``copy_dst[i]`` takes the first ``copy_len[i]`` entries that row ``copy_src[i]``
       had *before* this delta (a permutation is possible: read all sources before writing);
    2. fill: entries ``fill_start[i] .. fill_stop[i]`` of ``fill_row[i]`` become null;
    3. write: entries ``write_start[i] .. write_stop[i]`` of ``write_row[i]`` take the host values.

    All arrays are int32. Rows in ``rows`` are every row whose entries or count changed.
    """

    rows: RowIds
    copy_dst: RowIds
    copy_src: RowIds
    copy_len: Counts
    fill_row: RowIds
    fill_start: Counts
    fill_stop: Counts
    write_row: RowIds
    write_start: Counts
    write_stop: Counts

    @property
    def num_written(self) -> int:
        """Entries whose values must be uploaded."""
        return int((self.write_stop - self.write_start).sum())


def whole_numbers(what: str, values: ArrayLike) -> NDArray[Any]:
    """``values`` as int64 [n], an empty list too; RowError where they are no integers (a row 1.5
    or "1" would become another row). The array itself where it is int64 already."""
    found = np.atleast_1d(np.asarray(values))
    if found.dtype.kind not in "iu" and found.size:
        raise RowError(f"{what} must be integers, got {found.flat[0]!r}")
    return found.astype(np.int64, copy=False)


class HostTable:
    """Rows of block ids with bulk operations over arrays of rows.

    Row lists given to one call must be distinct. All operations cost O(rows + entries touched).
    A call that raises `RowError` has changed nothing.

    Attributes: ``rows`` int32 [max_rows, max_blocks_per_row]; ``counts`` int32 [max_rows].
    Both are written by the methods below only.
    """

    def __init__(self, max_rows: int, max_blocks_per_row: int) -> None:
        if max_rows < 1 or max_blocks_per_row < 1:
            raise RowError(f"a table of {max_rows} rows x {max_blocks_per_row} blocks has no room")
        self.max_rows, self.max_blocks_per_row = max_rows, max_blocks_per_row
        self.rows = np.zeros((max_rows, max_blocks_per_row), np.int32)
        self.flat = self.rows.reshape(-1)  # the same memory
        # what moves with a row's content, in one array so that a move is one operation
        self._state = np.zeros((6, max_rows), np.int32)
        self.counts, self._lo, self._hi, self._null_lo, self._null_hi, self._origin = self._state
        self._lo[:] = self._null_lo[:] = _BIG  # intervals to upload, and that became null
        self._origin[:] = np.arange(max_rows)  # device row to copy from
        self._extent = np.zeros(max_rows, np.int32)  # device entries that may be non-null
        self._flag = np.zeros(max_rows, bool)  # scratch, all false between calls
        self._log = np.zeros(4 * max_rows + 16, np.int32)  # rows changed, repeats allowed
        # entries of the log; whether something else than appending was done since the last drain
        self._log_n = np.zeros(2, np.int64)
        self._stamp = np.zeros(max_rows, np.int32)  # scratch
        self._order = np.arange(len(self._log), dtype=np.int32)

    # -- checks ---------------------------------------------------------------------------------

    def _check_rows(self, rows: ArrayLike) -> RowIds:
        found = np.atleast_1d(np.asarray(rows))
        if found.dtype.kind not in "iu":
            found = whole_numbers("row numbers", found)
        if found.size and (found.min() < 0 or found.max() >= self.max_rows):
            bad = found[(found < 0) | (found >= self.max_rows)][0]
            raise RowError(f"row {bad} is outside a table of {self.max_rows} rows")
        return found

    def _overflow(self, rows: RowIds, wanted: NDArray) -> RowError:
        worst = int(np.argmax(wanted))
        return RowError(
            f"row {rows[worst]} would hold {wanted[worst]} blocks, "
            f"but a row has room for {self.max_blocks_per_row}"
        )

    def _touch(self, rows: RowIds) -> None:
        n, k = int(self._log_n[0]), len(rows)
        if n + k > len(self._log):
            kept = np.unique(self._log[:n])
            n = len(kept)
            self._log[:n] = kept
            if n + k > len(self._log):  # a caller with repeated rows
                rows = np.unique(rows)
                k = len(rows)
        self._log[n : n + k] = rows
        self._log_n[0] = n + k

    # -- growing --------------------------------------------------------------------------------

    def append_one(self, rows: RowIds, block_ids: BlockIds) -> None:
        """Append ``block_ids[i]`` to ``rows[i]``; the hot path of a decode step."""
        count = self.counts[rows]
        if np.count_nonzero(count >= self.max_blocks_per_row):
            raise self._overflow(rows, count + 1)
        self.flat[rows.astype(np.int64) * self.max_blocks_per_row + count] = block_ids
        after = count + 1
        self.counts[rows] = after
        self._lo[rows] = np.minimum(self._lo[rows], count)
        self._hi[rows] = np.maximum(self._hi[rows], after)
        self._touch(rows)

    def append_run(self, row: int, block_ids: BlockIds) -> None:
        """Append ``block_ids`` to one row; for a handful of rows this beats the arrays."""
        start = int(self.counts[row])
        stop = start + len(block_ids)
        if stop > self.max_blocks_per_row:
            raise self._overflow(np.array([row]), np.array([stop]))
        self.rows[row, start:stop] = block_ids
        self.counts[row] = stop
        if start < self._lo[row]:
            self._lo[row] = start
        if stop > self._hi[row]:
            self._hi[row] = stop
        n = int(self._log_n[0])
        if n == len(self._log):
            self._touch(np.array([row]))
        else:
            self._log[n] = row
            self._log_n[0] = n + 1

    def append(self, rows: ArrayLike, num_blocks: ArrayLike, block_ids: ArrayLike) -> None:
        """Append to each of ``rows`` its share of ``block_ids``: the first ``num_blocks[0]`` go
        to ``rows[0]``, and so on. Null ids may be appended. Raises RowError when a row is full
        or the shares do not add up."""
        rows, ids = self._check_rows(rows), np.asarray(block_ids, np.int32).reshape(-1)
        shares = np.broadcast_to(np.asarray(num_blocks, np.int64), rows.shape)
        if (shares.size and shares.min() < 0) or int(shares.sum()) != len(ids):
            raise RowError(f"{len(ids)} block ids cannot be shared out as {shares.tolist()}")
        start = self.counts[rows].astype(np.int64)
        stop = start + shares
        if stop.size and stop.max() > self.max_blocks_per_row:
            raise self._overflow(rows, stop)
        if len(rows) == 1:
            self.rows[rows[0], start[0] : stop[0]] = ids
        else:
            first = np.cumsum(shares) - shares
            base = rows * np.int64(self.max_blocks_per_row) + start - first
            self.flat[np.repeat(base, shares) + np.arange(len(ids))] = ids
        grown = rows if shares.all() else rows[shares > 0]
        if len(grown) != len(rows):
            start, stop = start[shares > 0], stop[shares > 0]
        self.counts[grown] = stop
        self._mark(grown, start, stop)

    def set(self, rows: ArrayLike, num_blocks: ArrayLike, block_ids: ArrayLike) -> None:
        """Replace the rows' contents (an earlier occupant's entries do not survive)."""
        rows, ids = self._check_rows(rows), np.asarray(block_ids, np.int32).reshape(-1)
        shares = np.broadcast_to(np.asarray(num_blocks, np.int64), rows.shape)
        if shares.size and shares.max() > self.max_blocks_per_row:
            raise self._overflow(rows, shares)
        if int(shares.sum()) != len(ids) or (shares.size and shares.min() < 0):
            raise RowError(f"{len(ids)} block ids cannot be shared out as {shares}")
        self.clear(rows)
        self.append(rows, shares, ids)

    def write(self, rows: RowIds, columns: NDArray, block_ids: ArrayLike) -> None:
        """Replace single entries below the rows' counts (copy-on-write); rows may repeat."""
        rows, columns = self._check_rows(rows), np.asarray(columns)
        if columns.size and ((columns < 0) | (columns >= self.counts[rows])).any():
            raise RowError(f"columns {columns.tolist()} are not all below the rows' counts")
        self.rows[rows, columns] = block_ids
        np.minimum.at(self._lo, rows, columns.astype(np.int32))
        np.maximum.at(self._hi, rows, (columns + 1).astype(np.int32))
        self._touch(rows)

    def _mark(self, rows: RowIds, start: NDArray, stop: NDArray) -> None:
        self._lo[rows] = np.minimum(self._lo[rows], start)
        self._hi[rows] = np.maximum(self._hi[rows], stop)
        self._touch(rows)

    # -- shrinking ------------------------------------------------------------------------------

    def truncate(self, rows: ArrayLike, num_blocks: ArrayLike) -> None:
        """Cut each row to at most ``num_blocks`` entries; the rest become null."""
        rows = self._check_rows(rows)
        self._log_n[1] = 1
        wanted = np.asarray(num_blocks)
        if wanted.size and (wanted.dtype.kind not in "iu" or wanted.min() < 0):
            raise RowError(f"rows cannot be cut to {wanted.tolist()} blocks")
        most = np.minimum(wanted, self.max_blocks_per_row).astype(np.int32)
        keep = np.broadcast_to(most, rows.shape)
        shorter = keep < self.counts[rows]
        rows, keep = rows[shorter], keep[shorter]
        self._fill_null(rows, keep, self.counts[rows])
        self.counts[rows] = keep
        self._hi[rows] = np.minimum(self._hi[rows], keep)
        self._touch(rows)

    def clear(self, rows: ArrayLike | None = None) -> None:
        """Empty the rows (all of them by default): null entries, count 0."""
        self._log_n[1] = 1
        every: RowIds = (
            np.arange(self.max_rows, dtype=np.int32) if rows is None else self._check_rows(rows)
        )
        counts = self.counts[every]
        width = int(counts.max(initial=0))
        if len(every) == 1:
            self.rows[int(every[0]), :width] = NULL_BLOCK
        elif len(every) * width <= 4 * int(counts.sum()):  # rows of like length: one memset
            self.rows[every, :width] = NULL_BLOCK
        else:
            self._fill_null(every, np.zeros_like(counts), counts)
        self.counts[every] = 0
        self._hi[every] = 0
        self._touch(every)

    def null(self, rows: RowIds, start: NDArray, stop: NDArray) -> None:
        """Entries ``start[i] .. stop[i]`` of ``rows[i]`` become null in place; counts stay."""
        self._log_n[1] = 1
        rows, start, stop = self._check_rows(rows), np.asarray(start), np.asarray(stop)
        some = stop > start
        rows, start, stop = rows[some], start[some], stop[some]
        if rows.size == 0:
            return
        if start.min() < 0 or (stop > self.counts[rows]).any():
            raise RowError("null intervals must lie below the rows' counts")
        self._fill_null(rows, start, stop)
        lo, hi = self._null_lo[rows], self._null_hi[rows]
        joins = (lo == _BIG) | (start <= hi) & (stop >= lo)
        grow = rows[joins]
        self._null_lo[grow] = np.minimum(lo[joins], start[joins])
        self._null_hi[grow] = np.maximum(hi[joins], stop[joins])
        apart = ~joins  # a second interval: uploaded as values instead
        if apart.any():
            self._mark(rows[apart], start[apart], stop[apart])
        self._touch(rows)

    def _fill_null(self, rows: RowIds, start: NDArray, stop: NDArray) -> None:
        """Null in entries start .. stop of each row: a memset where the intervals agree."""
        if rows.size == 0:
            return
        first = int(start.min())
        if len(rows) == 1:
            self.rows[int(rows[0]), first : int(stop[0])] = NULL_BLOCK
            return
        if (start == first).all() and (self.counts[rows] == stop).all():
            self.rows[rows, first : int(stop.max())] = NULL_BLOCK
            return
        size = (stop - start).astype(np.int64)
        base = rows * np.int64(self.max_blocks_per_row) + start - (np.cumsum(size) - size)
        self.flat[np.repeat(base, size) + np.arange(int(size.sum()))] = NULL_BLOCK

    # -- moving ---------------------------------------------------------------------------------

    def move(self, src: int, dst: int) -> None:
        """Row ``dst`` becomes row ``src``; ``src`` is empty afterwards."""
        self.move_rows(np.array([src]), np.array([dst]))

    def move_rows(self, src: ArrayLike, dst: ArrayLike) -> None:
        """Bulk move: all sources are read before any is written; sources that are no
        destination are empty afterwards."""
        self._log_n[1] = 1
        src, dst = self._check_rows(src), self._check_rows(dst)
        if len(src) != len(dst):
            raise RowError(f"{len(src)} rows cannot be moved to {dst.tolist()}")
        self._flag[dst] = True
        distinct = int(np.count_nonzero(self._flag)) == len(dst)
        gone = src[~self._flag[src]]
        self._flag[dst] = False
        if not distinct or np.bincount(src).max(initial=0) > 1:
            raise RowError(f"rows {src.tolist()} to {dst.tolist()}: a row is named twice")
        if src.size == 0:
            return
        width = int(max(self.counts[src].max(), self.counts[dst].max()))
        self.rows[dst, :width] = self.rows[src, :width]
        self._state[:, dst] = self._state[:, src]
        self.rows[gone, :width] = NULL_BLOCK
        self._state[:, gone] = _GONE
        self._touch(dst)
        self._touch(gone)

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows, counts and all; a row with itself changes nothing."""
        pair = np.concatenate([self._check_rows(a), self._check_rows(b)])
        pair = pair[:1] if a == b else pair
        self.move_rows(pair, pair[::-1])

    # -- upload ---------------------------------------------------------------------------------

    @property
    def is_dirty(self) -> bool:
        """Whether anything changed since the last drain."""
        return bool(self._log_n[0])

    @property
    def record(self) -> tuple[NDArray[np.int32], NDArray[np.int32], RowIds, NDArray[np.int64]]:
        """The record of changes itself, for a compiled `drain`: state int32 [6, max_rows] (counts,
        lo, hi, null_lo, null_hi, origin), extent int32 [max_rows], log of rows, its length [2]."""
        return self._state, self._extent, self._log, self._log_n

    @property
    def record_arrays(self) -> tuple[NDArray[Any], ...]:
        """Rows, counts and the record of changes, for a compiled `append` and `null`."""
        state = self.rows, self.counts, self._lo, self._hi, self._null_lo, self._null_hi
        return *state, self._log, self._log_n

    def drain(self) -> TableDelta:
        """All changes since the last drain (or construction), and forget them. O(rows changed)."""
        if not self._log_n[1]:
            return self._drain_appended()
        self._log_n[1] = 0
        delta = self.peek()
        rows = delta.rows
        self._log_n[0] = 0
        self._extent[rows] = self.counts[rows]
        self._lo[rows], self._hi[rows] = _BIG, 0
        self._null_lo[rows], self._null_hi[rows] = _BIG, 0
        self._origin[rows] = rows
        return delta

    def _drain_appended(self) -> TableDelta:
        """As drain, when entries were only appended or replaced since the last one: a third of
        the time (6 us for 64 rows)."""
        n = int(self._log_n[0])
        self._log_n[0] = 0
        rows = self._log[:n].copy()
        if n > 1:
            order = self._order[:n]
            self._stamp[rows] = order
            last = self._stamp[rows] == order
            if np.count_nonzero(last) < n:
                rows = rows[last]
        lo, hi = self._lo[rows], self._hi[rows]
        self._lo[rows] = _BIG
        self._hi[rows] = 0
        self._extent[rows] = self.counts[rows]
        none = _EMPTY
        return TableDelta(rows, none, none, none, none, none, none, rows, lo, hi)

    def peek(self) -> TableDelta:
        """What `drain` would return, and keep it: for a reader beside the one that drains."""
        n = int(self._log_n[0])
        rows = np.unique(self._log[:n]) if n > 1 else self._log[:n].copy()
        if n == 0:
            return TableDelta(*([_EMPTY] * 10))
        counts, origin = self.counts[rows], self._origin[rows]
        moved = (origin != rows) & (origin != _NO_SOURCE)
        source = np.where(moved, origin, rows)
        copied = np.where(moved, self._extent[source], 0)
        copied = np.minimum(copied, counts).astype(np.int32)
        old = self._extent[rows]
        fills = self._fills(rows, counts, old, origin)
        lo, hi = self._lo[rows], np.minimum(self._hi[rows], counts)
        write = lo < hi
        return TableDelta(
            rows, rows[moved], origin[moved], copied[moved], *fills,
            rows[write], lo[write], hi[write],
        )  # fmt: skip

    def _fills(
        self, rows: RowIds, counts: Counts, old: Counts, origin: RowIds
    ) -> tuple[RowIds, Counts, Counts]:
        tail = old > counts
        lo, hi = self._null_lo[rows], np.minimum(self._null_hi[rows], counts)
        inner = lo < hi
        # a row whose content left keeps the device's old entries below its new count: overwritten
        # by the write interval, which then starts at 0
        gone = (origin == _NO_SOURCE) & (counts > 0)
        if gone.any():
            self._lo[rows[gone]], self._hi[rows[gone]] = 0, counts[gone]
        return (
            np.concatenate([rows[tail], rows[inner]]),
            np.concatenate([counts[tail], lo[inner]]),
            np.concatenate([old[tail], hi[inner]]),
        )

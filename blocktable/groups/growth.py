"""How running rows grow: skipped blocks out, new blocks in, shared tails copied, keys given.

Everything here is over arrays of rows; `KVCacheManager.allocate` is its only caller besides
admission. Order within a call, as the oracle has it: blocks outside a window are released, then
blocks are taken, then keys are given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import OutOfBlocks, RowError
from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds
from blocktable.groups.base import Group, Ints
from blocktable.groups.demand import Copies, Demand, Need, TailCopy
from blocktable.groups.few import FEW, grow_few
from blocktable.groups.keybook import KeyBook, spread


class Growth:
    """Rows of all groups over one pool. ``shares_tail`` bool [max_rows] marks rows whose partly
    filled last block may be shared or keyed; ``copies`` collects copy-on-write pairs."""

    def __init__(
        self, pool: BlockPool, groups: tuple[Group, ...], book: KeyBook | None,
        num_tokens: Ints, num_computed: Ints, max_len: int,
    ) -> None:  # fmt: skip
        self.max_len = max_len
        self.pool, self.groups, self.book = pool, groups, book
        self.num_tokens, self.num_computed = num_tokens, num_computed
        self.skipping = tuple(g for g in groups if g.skips)
        self.keyed_groups = tuple(g for g in groups if g.caching) if book is not None else ()
        self.due = np.zeros(len(num_tokens), np.int32)  # see groups/base.py
        for group in groups:
            group.due = self.due
        self.shares_tail = np.zeros(len(num_tokens), np.bool_)
        self.num_sharing = 0
        self.copies: list[Copies] = []

    # -- the whole step -------------------------------------------------------------------------

    def serve(self, rows: Ints, computed: Ints, total: Ints, reach: Ints, partial: bool) -> int:
        """Bring rows that need something from ``computed`` to ``total`` tokens, with room for
        ``reach``. Returns how many leading rows were served, all of them without ``partial``;
        OutOfBlocks, RowError."""
        if np.count_nonzero(total > self.max_len):
            at = int(np.argmax(total))
            raise RowError(f"row {rows[at]} would have {total[at]} tokens, above {self.max_len}")
        limit = np.minimum(reach, self.max_len)
        if len(rows) <= FEW and grow_few(self, rows, computed, total, limit):
            return len(rows)
        demand = self.demand(rows, computed, limit)
        if demand.blocks > self.pool.available:
            return self.grow_scarce(rows, computed, total, limit, partial)
        self.grow(rows, computed, total, limit, demand)
        return len(rows)

    def grow(self, rows: Ints, computed: Ints, total: Ints, limit: Ints, demand: Demand) -> None:
        """Bring the rows from ``computed`` to ``total`` tokens with room for ``limit``. The
        caller made sure that the pool has what ``demand`` says."""
        if self.skipping:
            self.give_deferred_keys(rows, computed)
            self.release_skipped(rows, computed)
        self.supply(rows, demand)
        if self.num_sharing:
            self.settle_tails(rows, computed)
        self.num_computed[rows] = total
        self.give_keys(rows, total, self.num_tokens[rows])
        self.due[rows] = self.due_at(rows)

    def due_at(self, rows: Ints) -> Ints:
        """``due`` of the rows, of all groups."""
        due = self.groups[0].due_at(rows)
        for group in self.groups[1:]:
            due = np.minimum(due, group.due_at(rows))
        return np.minimum(due, self.max_len + 1)

    def grow_scarce(
        self, rows: Ints, computed: Ints, total: Ints, limit: Ints, partial: bool
    ) -> int:
        """As `grow` when the pool cannot serve all rows out of hand: window groups free blocks
        as the rows go by. Returns how many leading rows were served; without ``partial``
        raises OutOfBlocks before anything changed."""
        served, size = 0, len(rows)
        while served < size:
            left, done = rows[served:], computed[served:]
            demand = self.demand(left, done, limit[served:])
            needed = np.cumsum(demand.per_row(len(left)))
            room = self.pool.available + np.cumsum(self.freed_by_skipping(left, done))
            fits = int(np.argmin(np.append(needed <= room, False)))
            if fits < len(left) and not partial:
                raise self.out_of_blocks(int(left[fits]), int(needed[-1]))
            if fits:
                part = slice(served, served + fits)
                demand = self.demand(rows[part], computed[part], limit[part])
                self.grow(rows[part], computed[part], total[part], limit[part], demand)
                served += fits
            if served < size:
                one = slice(served, served + 1)
                self.give_deferred_keys(rows[one], computed[one])
                self.release_skipped(rows[one], computed[one])
                demand = self.demand(rows[one], computed[one], limit[one])
                if demand.blocks > self.pool.available:
                    break
                self.grow(rows[one], computed[one], total[one], limit[one], demand)
                served += 1
        return served

    def out_of_blocks(self, row: int, needed: int) -> OutOfBlocks:
        """The error for a row that cannot grow."""
        held = sum(int(np.count_nonzero(g.table.rows[row, : g.table.counts[row]]))
                   for g in self.groups)  # fmt: skip
        return OutOfBlocks(
            row, held=held, needed=needed, available=self.pool.available, fenced=self.pool.fenced
        )

    # -- what is needed -------------------------------------------------------------------------

    def demand(self, rows: Ints, computed: Ints, limit: Ints) -> Demand:
        """What the rows need to hold ``limit`` tokens. No side effects."""
        needs, total = [], 0
        for group in self.groups:
            at = (limit > group.capacity[rows]).nonzero()[0]
            if len(at) == 0:
                continue
            entries = group.entries_for(limit[at]) - group.table.counts[rows[at]]
            blocks = group.blocks_among(entries)
            needs.append(Need(group, at, entries, blocks, int(blocks.sum())))
            total += needs[-1].count
        copies: list[TailCopy] = []
        if self.num_sharing:
            copies = self._tail_copies(rows, computed)
            total += sum(len(copy.at) for copy in copies)
        return Demand(needs, copies, total)

    def _tail_copies(self, rows: Ints, computed: Ints) -> list[TailCopy]:
        flagged = np.flatnonzero(self.shares_tail[rows])
        copies = []
        for group in self.groups if flagged.size else ():
            column = group.tail_column(computed[flagged])
            written = (column >= 0) & (column < group.table.counts[rows[flagged]])
            at, column = flagged[written], column[written]
            blocks = group.table.rows[rows[at], column]
            # of several writers in one call, the last may keep the block if no one else holds it
            order = np.argsort(blocks, kind="stable")
            ranked = blocks[order]
            starts = np.flatnonzero(np.diff(ranked, prepend=-1))
            rank = np.arange(len(ranked)) - np.repeat(starts, np.diff(starts, append=len(ranked)))
            shared = np.zeros(len(blocks), np.bool_)
            shared[order] = rank < self.pool.ref[ranked] - 1
            shared &= blocks != 0
            if shared.any():
                copies.append(TailCopy(group, at[shared], column[shared]))
        return copies

    def freed_by_skipping(self, rows: Ints, computed: Ints) -> NDArray[np.int64]:
        """Blocks that become available when each row gives up what it skips, at least."""
        freed = np.zeros(len(rows), np.int64)
        if self.pool.steps_in_flight:
            return freed
        for group in self.skipping:
            at, start, stop = self._skips(group, rows, computed)
            owner, column = spread(at, start, stop - start)
            blocks = group.table.rows[rows[owner], column]
            alone = (blocks != 0) & (self.pool.ref[blocks] == 1)
            freed += np.bincount(owner[alone], minlength=len(rows))
        return freed

    # -- doing it -------------------------------------------------------------------------------

    def release_skipped(self, rows: Ints, computed: Ints) -> None:
        """Blocks no later token attends to go back to the pool, the highest column first."""
        for group in self.skipping:
            at, start, stop = self._skips(group, rows, computed)
            if at.size == 0:
                continue
            who, spans = rows[at], stop - start
            owner, up = spread(who, np.zeros_like(spans), spans)
            column = np.repeat(stop, spans) - 1 - up
            blocks = group.table.rows[owner, column]
            self.pool.release(blocks)
            group.table.null(who, start, stop)
            group.skipped[who] = stop

    def _skips(
        self, group: Group, rows: Ints, computed: Ints
    ) -> tuple[NDArray[np.intp], Ints, Ints]:
        stop = np.minimum(group.skipped_for(computed), group.table.counts[rows])
        start = np.maximum(group.skipped[rows], group.kept_head)
        at = np.flatnonzero(stop > start)
        return at, start[at], stop[at].astype(np.int32)

    def supply(self, rows: Ints, demand: Demand) -> None:
        """Take the demanded blocks and put them into the rows."""
        if demand.blocks == 0 and not demand.needs:
            return
        ids = self.pool.take(demand.blocks)
        used = 0
        for copy in demand.copies:
            fresh = ids[used : used + len(copy.at)]
            used += len(copy.at)
            self._copy_tail(copy, rows[copy.at], fresh)
        for need in demand.needs:
            self._extend(need, rows[need.at], ids[used : used + need.count])
            used += need.count

    def _copy_tail(self, copy: TailCopy, rows: Ints, fresh: BlockIds) -> None:
        table = copy.group.table
        old = table.rows[rows, copy.column]
        table.write(rows, copy.column, fresh)
        self.pool.release(old)
        where = np.full(len(old), copy.group.group_id, np.int32)
        self.copies.append(Copies(where, old, fresh))

    def _extend(self, need: Need, rows: Ints, ids: BlockIds) -> None:
        group, entries = need.group, need.entries
        if entries.max() == 1 and len(ids) == len(rows):
            group.table.append_one(rows, ids)
        elif len(ids) == int(entries.sum()):
            group.table.append(rows, entries, ids)
        else:  # states between chunk ends are never materialised: null entries, then a block
            padded = np.zeros(int(entries.sum()), np.int32)
            last = np.cumsum(entries) - 1
            padded[last[need.blocks > 0]] = ids
            group.table.append(rows, entries, padded)
        group.capacity[rows] = group.capacity_of(group.table.counts[rows])

    def settle_tails(self, rows: Ints, computed: Ints) -> None:
        """After copy-on-write: a written tail carries no key, and its row shares nothing."""
        flagged = rows[self.shares_tail[rows]]
        if flagged.size == 0:
            return
        where = computed[self.shares_tail[rows]]
        for group in self.keyed_groups:
            column = group.tail_column(where)
            some = (column >= 0) & (column < group.table.counts[flagged])
            blocks = group.table.rows[flagged[some], column[some]]
            blocks = blocks[self.pool.keyed[blocks]]
            if blocks.size and self.book is not None:
                self.book.drop(np.unique(blocks))
        self.shares_tail[flagged] = False
        self.num_sharing = int(np.count_nonzero(self.shares_tail))

    def share_tails(self, rows: Ints) -> None:
        """The rows' last blocks may be shared or keyed from now on."""
        self.shares_tail[rows] = True
        self.due[rows] = 0
        self.num_sharing = int(np.count_nonzero(self.shares_tail))

    # -- shrinking and sharing ------------------------------------------------------------------

    def cut(self, rows: Ints, computed: Ints) -> None:
        """Keep the blocks that hold the rows' ``computed`` tokens; release the rest with the keys
        they have. The last one kept may be shared or keyed from now on."""
        for group in self.groups:
            self.shrink(group, rows, group.entries_for(computed))
            group.keyed[rows] = np.minimum(group.keyed[rows], computed // group.block_size)
            group.sync(rows)
        self.share_tails(rows)

    def roll_back(self, rows: Ints, computed: Ints) -> BlockIds:
        """The tokens after ``computed`` count as not computed. Keys of their blocks are withdrawn
        (see KeyBook.withdraw), except where nothing was scheduled since a fork or truncation;
        blocks that others share are given up rather than written again."""
        idle = self.shares_tail[rows]
        orphans = [np.zeros(0, np.int32)]
        if self.book is not None:
            for group in self.keyed_groups:
                keep = computed[~idle] // group.block_size
                orphans.append(self.book.withdraw(group, rows[~idle], keep))
        shared = idle | self._shared_from(rows, computed)
        if shared.any():
            self.cut(rows[shared], computed[shared])
        return np.concatenate(orphans)

    def _shared_from(self, rows: Ints, computed: Ints) -> NDArray[np.bool_]:
        """Rows that share a block the tokens after ``computed`` are written into."""
        shared = np.zeros(len(rows), np.bool_)
        for group in self.groups:
            start = np.minimum(computed // group.block_size, group.table.counts[rows])
            owner, column = spread(np.arange(len(rows)), start, group.table.counts[rows] - start)
            blocks = group.table.rows[rows[owner], column]
            shared[owner[self.pool.ref[blocks] > 1]] = True
        return shared

    def shrink(self, group: Group, rows: Ints, entries: Ints) -> None:
        """Cut rows to at most ``entries`` and release what is beyond, tail first."""
        counts = group.table.counts[rows]
        some = counts > entries
        if not some.any():
            return
        rows, keep, counts = rows[some], entries[some], counts[some]
        spans = counts - keep
        owner, up = spread(rows, np.zeros_like(spans), spans)
        blocks = group.table.rows[owner, np.repeat(counts, spans) - 1 - up]
        self.pool.release(blocks)
        group.table.truncate(rows, keep)

    def release_rows(self, rows: Ints, request: object) -> None:
        """All blocks of the rows go back: row by row, group by group, tail first."""
        counts = np.stack([g.table.counts[rows] for g in self.groups], axis=1)  # [rows, groups]
        sizes = counts.reshape(-1)
        total = int(sizes.sum())
        blocks = np.empty(total, np.int32)
        start = (np.cumsum(sizes) - sizes).reshape(counts.shape)
        for i, group in enumerate(self.groups):
            spans = counts[:, i]
            if len(rows) == 1:
                count, first = int(spans[0]), int(start[0, i])
                blocks[first : first + count] = group.table.rows[int(rows[0]), :count][::-1]
            else:
                owner, up = spread(rows, np.zeros_like(spans), spans)
                column = np.repeat(spans, spans) - 1 - up
                blocks[np.repeat(start[:, i], spans) + up] = group.table.rows[owner, column]
        self.pool.release(blocks, request=request)
        for group in self.groups:
            group.clear(rows)
        if self.num_sharing:
            self.shares_tail[rows] = False
            self.num_sharing = int(np.count_nonzero(self.shares_tail))

    def share_row(self, row: int, new_rows: Ints, computed: int) -> None:
        """Give the empty ``new_rows`` the blocks that hold the row's computed tokens."""
        for group in self.groups:
            count = int(group.table.counts[row])
            keep = min(count, int(group.entries_for(np.int64(computed))))
            entries = group.table.rows[row, :keep]
            held = np.unique(entries[entries != 0])
            self.pool.touch(np.tile(held, len(new_rows)))
            group.table.append(new_rows, keep, np.tile(entries, len(new_rows)))
            group.keyed[new_rows] = group.keyed[row]
            group.skipped[new_rows] = group.skipped[row]
            group.keys_stopped[new_rows] = group.keys_stopped[row]
            group.sync(new_rows)
        self.share_tails(np.append(new_rows, row))

    def take_copies(self) -> Copies:
        """Copy-on-write pairs since the last call, in order."""
        parts, self.copies = self.copies, []
        if not parts:
            none = np.zeros(0, np.int32)
            return Copies(none, none, none)
        return Copies(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def stop_keys(self, rows: Ints) -> None:
        """The rows get no keys any more."""
        for group in self.groups:
            group.keys_stopped[rows] = True
            group.sync(rows)

    # -- keys -----------------------------------------------------------------------------------

    def give_keys(self, rows: Ints, total: Ints, num_tokens: Ints) -> None:
        """Key every full block below min(total, num_tokens), group 0 first."""
        if self.book is None:
            return
        known = np.minimum(total, num_tokens)
        for group in self.keyed_groups:
            if group.deferred_keys:
                continue
            at = (known >= group.key_due[rows]).nonzero()[0]
            if len(at):
                self.book.give(group, rows[at], known[at] // group.block_size)

    def give_deferred_keys(self, rows: Ints, computed: Ints) -> None:
        """Key recurrent states of steps that are over."""
        if self.book is None:
            return
        for group in self.keyed_groups:
            if not group.deferred_keys:
                continue
            due = group.states_due(rows, computed)
            if due.any():
                at = np.flatnonzero(due)
                self.book.give(group, rows[at], computed[at] // group.block_size)

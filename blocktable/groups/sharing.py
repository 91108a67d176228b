"""Rows shared, moved, and sent to host memory: the part of the manager that schedules nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from blocktable.core.errors import ConfigError, RowError
from blocktable.core.pool import BlockPool
from blocktable.core.table import HostTable
from blocktable.core.types import BlockIds, Counts, RowIds, TokenIds
from blocktable.groups.base import Group, Ints
from blocktable.groups.growth import Copies, Growth
from blocktable.groups.swap import SwappedRow, SwapPlan, host_layout, refill
from blocktable.prefix.keys import KeyHasher
from blocktable.prefix.rows import RowKeys
from blocktable.prefix.sequence import TokenSequence


class RowSharing(ABC):
    """Operations on whole rows, over the arrays that `KVCacheManager` sets up."""

    pool: BlockPool
    host_pool: BlockPool | None
    groups: tuple[Group, ...]
    tables: tuple[HostTable, ...]
    growth: Growth
    row_keys: RowKeys | None
    keying: KeyHasher | None
    hash_block_size: int
    tokens: TokenIds
    num_tokens: Counts
    num_computed: Counts
    _invalidations: int

    @abstractmethod
    def release(self, rows: Ints) -> BlockIds:
        """Empty the rows; see KVCacheManager."""

    # -- sharing and moving ---------------------------------------------------------------------

    def fork(self, row: int, new_rows: RowIds) -> None:
        """``new_rows`` (empty) become copies of ``row`` with all its computed blocks shared. The
        first write into a shared block (in `allocate`) takes a fresh one and leaves a pair for
        `take_copies`. Takes no block, so it cannot fail for lack of them."""
        new_rows = np.asarray(new_rows)
        if self.num_tokens[new_rows].any() or not self.num_tokens[row]:
            raise RowError(f"rows {new_rows.tolist()} must be empty and row {row} in use")
        computed, n = int(self.num_computed[row]), int(self.num_tokens[row])
        self.growth.share_row(row, new_rows, computed)
        self.tokens[new_rows, :n] = self.tokens[row, :n]
        self.num_tokens[new_rows] = n
        self.num_computed[new_rows] = computed
        if self.row_keys is not None:
            self.row_keys.copy(row, new_rows)

    def take_copies(self) -> Copies:
        """Copy-on-write pairs since the last call, in order."""
        return self.growth.take_copies()

    def move_rows(self, src: RowIds, dst: RowIds) -> None:
        """Rows move with all that belongs to them; sources that are no destination are empty
        afterwards, destinations that are no source must be empty. O(tokens moved)."""
        src, dst = np.asarray(src), np.asarray(dst)
        lost = np.setdiff1d(dst, src)
        if self.num_tokens[lost].any():
            raise RowError(f"rows {lost[self.num_tokens[lost] > 0].tolist()} are in use")
        n = int(self.num_tokens[src].max(initial=0))
        self.tokens[dst, :n] = self.tokens[src, :n]
        for table in self.tables:
            table.move_rows(src, dst)
        arrays = [self.num_tokens, self.num_computed, self.growth.shares_tail]
        arrays += [a for g in self.groups for a in g.row_arrays()]
        gone = np.setdiff1d(src, dst)
        for array in arrays:
            array[dst] = array[src]
        for array in arrays[:3]:
            array[gone] = 0
        self.growth.due[dst] = 0
        for group in self.groups:
            group.clear(gone)
        if self.row_keys is not None:
            self.row_keys.move(src, dst)

    # -- swap -----------------------------------------------------------------------------------

    def swap_out(self, row: int) -> SwappedRow:
        """Move a request's blocks to host memory and empty its row. The copies of ``plan`` must
        be done before its device blocks are written again. Raises OutOfBlocks (host pool)."""
        if self.host_pool is None:
            raise ConfigError("this manager has no host pool (host_blocks=0)")
        owner, column, blocks, counts = host_layout(self.groups, row)
        host = self.host_pool.take(len(blocks), request=row)
        n = int(self.num_tokens[row])
        tokens = self.tokens[row, :n].copy()
        sequence = self.row_sequence(row)
        computed = int(self.num_computed[row])
        cleared = -1 if self.groups[0].keys_stopped[row] else self._invalidations
        self.release(np.array([row]))
        plan = SwapPlan(owner, blocks, host)
        return SwappedRow(plan, column, counts, sequence, tokens, computed, cleared)

    def swap_in(self, row: int, swapped: SwappedRow, *, request: object = None) -> SwapPlan:
        """Bring a request back into an empty row; its host blocks are free again once the next
        step is over. Full computed blocks get their keys. Raises OutOfBlocks, RowError."""
        if self.host_pool is None or self.num_tokens[row]:
            raise RowError(f"row {row} is in use, or there is no host pool")
        plan = refill(self.groups, self.pool, row, swapped, row if request is None else request)
        n = len(swapped.tokens)
        self.tokens[row, :n] = swapped.tokens
        self.num_tokens[row], self.num_computed[row] = n, swapped.num_computed
        if self.row_keys is not None:
            self.row_keys.load(row, swapped.sequence)
        rows = np.array([row])
        if swapped.cleared != self._invalidations:  # computed with other weights
            self.growth.stop_keys(rows)
        self.growth.give_keys(rows, self.num_computed[rows], self.num_tokens[rows])
        self.host_pool.release(swapped.plan.host)
        return plan

    def drop_swapped(self, swapped: SwappedRow) -> None:
        """The request was aborted while in host memory: its host blocks are free."""
        if self.host_pool is not None:
            self.host_pool.release(swapped.plan.host)

    def row_sequence(self, row: int) -> TokenSequence:
        """The row's tokens now, as a sequence with the row's root and media."""
        tokens = self.tokens[row, : int(self.num_tokens[row])]
        made = TokenSequence(tokens, self.keying, self.hash_block_size)
        if self.row_keys is not None:
            made.root, made.media = self.row_keys.roots[row], self.row_keys.media[row]
            made.source = self.row_keys.sources[row]
        return made

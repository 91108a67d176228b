"""Whether a request fits, and putting it into its row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blocktable.core.errors import BlockStateError, OutOfBlocks
from blocktable.core.pool import EVICTABLE, BlockPool, PoolCounts
from blocktable.core.types import BlockIds
from blocktable.groups.base import Group
from blocktable.groups.growth import Growth
from blocktable.groups.keybook import KeyBook
from blocktable.prefix.index import PrefixIndex
from blocktable.prefix.sequence import TokenSequence


class Hit(NamedTuple):
    """``num_tokens`` leading tokens are computed already; ``blocks`` has for each group the
    row's first entries (null where the group skips). Goes stale when blocks are evicted."""

    num_tokens: int
    blocks: tuple[BlockIds, ...]
    sequence: TokenSequence
    version: int = -1  # of the cache when it was found; unchanged means not stale


class CacheStats(NamedTuple):
    """Counters since construction (queries and hits once a request) and the pool's counts now."""

    requests: int
    query_tokens: int
    hit_tokens: int
    stored_blocks: int
    removed_blocks: int
    cleared: int
    cached_blocks: int  # blocks carrying a key
    cached_keys: int  # distinct keys among them
    free_cached: int  # cached blocks nobody holds
    pool: PoolCounts
    usage: float  # used and fenced / usable


class AdmissionPlan(NamedTuple):
    """Row entries from the hit (skipped ones null), and new entries and blocks, by group."""

    entries: list[BlockIds]
    new_entries: list[int]
    new_blocks: list[int]


class Admission:
    """Checks and fills empty rows; keeps the hit statistics."""

    def __init__(
        self, pool: BlockPool, groups: tuple[Group, ...], growth: Growth, book: KeyBook | None
    ) -> None:
        self.pool, self.groups, self.growth, self.book = pool, groups, growth, book
        self.index: PrefixIndex | None = None if book is None else book.index
        self._empty = tuple(np.zeros(0, np.int32) for _ in groups)
        self.requests = self.query_tokens = self.hit_tokens = self.cleared = 0

    def no_hit(self, sequence: TokenSequence) -> Hit:
        """A hit of no tokens."""
        return Hit(0, self._empty, sequence)

    def plan(
        self, hit: Hit, limit: int, reserve: int, full_sequence: bool, request: object
    ) -> AdmissionPlan:
        """What admission will do, or OutOfBlocks: hit blocks nobody holds count as needed, since
        they leave the pool's available blocks. No side effects."""
        done, room = hit.num_tokens, self.pool.available - reserve
        entries, news, blocks, waking, whole = [], [], [], 0, 0
        for group, found in zip(self.groups, hit.blocks, strict=True):
            skip = int(group.skipped_for(np.int64(done)))
            kept = found.copy()
            kept[group.kept_head : skip] = 0
            live = kept[kept != 0]
            if live.size:
                if hit.version < 0 or self.book is None or hit.version != self.book.version:
                    self._check_hit(hit.sequence, group, kept)
                waking += int(np.count_nonzero(self.pool.state[live] == EVICTABLE))
            new = max(0, int(group.entries_for(np.int64(limit))) - max(skip, len(kept)))
            entries.append(kept)
            news.append(new)
            blocks.append(int(group.blocks_among(np.int64(new))))
            if full_sequence:
                cap = group.admission_cap(min(len(hit.sequence), group.max_model_len))
                whole += max(0, cap - max(skip, len(kept)))
        needed = waking + max(sum(blocks), whole)
        if needed > room:
            raise OutOfBlocks(
                request, held=0, needed=needed + reserve, available=self.pool.available,
                fenced=self.pool.fenced,
            )  # fmt: skip
        return AdmissionPlan(entries, news, blocks)

    def _check_hit(self, sequence: TokenSequence, group: Group, entries: BlockIds) -> None:
        """The blocks still carry the keys they were found under."""
        if self.index is None:
            raise BlockStateError("a hit was given, but prefix caching is off")
        at = np.flatnonzero(entries)
        blocks = entries[at]
        ratio = group.block_size // sequence.block_size
        keys = sequence.keys()[(at + 1) * ratio - 1]
        good = self.pool.keyed[blocks] & self.index.carries(blocks, keys, group.group_id)
        if not good.all():
            raise BlockStateError(
                f"block {blocks[~good][0]} of a hit no longer has the content it was found for"
            )

    def fill(self, row: int, plan: AdmissionPlan) -> None:
        """Touch the hit's blocks, take the new ones, and put both into the empty row."""
        for entries in plan.entries:
            self.pool.touch(entries)
        ids = self.pool.take(sum(plan.new_blocks))
        rows, used = np.array([row]), 0
        for group, entries, new, count in zip(
            self.groups, plan.entries, plan.new_entries, plan.new_blocks, strict=True
        ):
            fresh = np.zeros(new, np.int32)
            fresh[new - count :] = ids[used : used + count]
            used += count
            whole = np.concatenate([entries, fresh])
            group.table.append(rows, len(whole), whole)
            group.keyed[row] = len(entries)
            group.skipped[row] = group.skipped_in(entries)
            group.sync(rows)

    def count(self, sequence: TokenSequence, hit_tokens: int, resumed: bool) -> None:
        """Enter an admission into the hit statistics; once a request."""
        if not resumed:
            self.requests += 1
            self.query_tokens += len(sequence)
            self.hit_tokens += hit_tokens

    def stats(self, book: KeyBook | None) -> CacheStats:
        """Counters and pool counts now."""
        counts = self.pool.counts()
        stored, removed, cleared, cached, distinct = 0, 0, self.cleared, 0, 0
        if book is not None:
            stored, removed, cleared = book.stored, book.removed, book.cleared
            cached = len(book.index)
            distinct = book.index.num_distinct(np.flatnonzero(self.pool.keyed))
        return CacheStats(
            self.requests, self.query_tokens, self.hit_tokens, stored, removed, cleared, cached,
            distinct, counts.evictable, counts, 1 - counts.available / counts.usable,
        )  # fmt: skip

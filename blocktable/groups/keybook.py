"""Giving keys to blocks and taking them back: the one place that keeps pool and index in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds, Counts, Keys, RowIds, TokenIds
from blocktable.groups.base import Group, Ints
from blocktable.prefix.index import PrefixIndex
from blocktable.prefix.keys import KeySource
from blocktable.prefix.rows import RowKeys
from blocktable.prefix.sequence import TokenSequence


class StoredBlocks(NamedTuple):
    """Blocks that got a key. ``columns`` are block numbers in the rows' sequences; ``parents``
    uint8 [n, key_bytes] is the key of the block before (meaningless where the column is 0);
    ``tokens`` int32 [n, block_size]; ``sources`` what else each key depends on, None = nothing."""

    group: int
    rows: RowIds
    columns: Counts
    blocks: BlockIds
    keys: Keys
    parents: Keys
    tokens: TokenIds
    sources: Sequence[KeySource | None] = ()


class RemovedBlocks(NamedTuple):
    """Blocks that lost their key, with the key and the group each had."""

    groups: Counts
    blocks: BlockIds
    keys: Keys


class CacheSink(Protocol):
    """Who wants to know what the prefix cache holds. Called in bulk, in the order of changes."""

    def stored(self, event: StoredBlocks) -> None:
        """These blocks can be hit from now on."""
        ...

    def removed(self, event: RemovedBlocks) -> None:
        """These blocks cannot be hit any more (each copy of a key counts)."""
        ...

    def cleared(self) -> None:
        """All keys are gone."""
        ...


STORED, REMOVED, CLEARED, VERSION = range(4)


def spread(rows: Ints, start: Ints, spans: Ints) -> tuple[Ints, Ints]:
    """Rows and columns, one entry a block, of the intervals start[i] .. start[i] + spans[i]."""
    offset = np.cumsum(spans) - spans - start
    return np.repeat(rows, spans), np.arange(int(spans.sum())) - np.repeat(offset, spans)


class KeyBook:
    """Keys of cached blocks, and how many were given and taken since construction."""

    def __init__(
        self, pool: BlockPool, index: PrefixIndex, rows: RowKeys, sink: CacheSink | None
    ) -> None:
        self.pool, self.index, self.rows, self.sink = pool, index, rows, sink
        self.counters = np.zeros(4, np.int64)

    @property
    def stored(self) -> int:
        """Blocks that were given a key."""
        return int(self.counters[STORED])

    @property
    def removed(self) -> int:
        """Blocks whose key was taken away, one by one."""
        return int(self.counters[REMOVED])

    @property
    def cleared(self) -> int:
        """Times all keys went at once."""
        return int(self.counters[CLEARED])

    @property
    def version(self) -> int:
        """Changes whenever a key is taken away."""
        return int(self.counters[VERSION])

    def give(self, group: Group, rows: Ints, upto: Ints) -> None:
        """Key the blocks keyed[row] .. upto[i] of each row; upto must be above keyed."""
        start = group.keyed[rows]
        ratio = group.block_size // self.rows.block_size
        self.rows.hash_upto(rows, upto if ratio == 1 else upto * ratio)
        spans = upto - start
        if spans.max() == 1:
            owner, column = rows, start
        else:
            owner, column = spread(rows, start, spans)
        group.keyed[rows] = upto
        group.key_due[rows] = (upto + 1) * group.block_size
        blocks = group.table.rows[owner, column]
        real = (blocks != 0) & ~self.pool.keyed[blocks]  # forks share blocks: keyed once
        if np.count_nonzero(self.pool.ref[blocks] > 1):
            real &= np.isin(np.arange(len(blocks)), np.unique(blocks, return_index=True)[1])
        if np.count_nonzero(real) < len(real):
            owner, column, blocks = owner[real], column[real], blocks[real]
        if blocks.size == 0:
            return
        last = column if ratio == 1 else (column + 1) * ratio - 1
        keys = self.rows.flat[owner.astype(np.int64) * self.rows.max_blocks + last]
        self.index.insert(blocks, keys, group.group_id)
        self.pool.keyed[blocks] = True
        self.counters[STORED] += len(blocks)
        if self.sink is not None:
            self._report(self.sink, group, owner, column, blocks, keys)

    def give_row(self, group: Group, row: int, upto: int) -> None:
        """`give` for one row."""
        start, rows = int(group.keyed[row]), self.rows
        plain = group.block_size == rows.block_size and self.sink is None
        if upto - start != 1 or not plain or not rows.hash_row_upto(row, upto):
            self.give(group, np.array([row]), np.array([upto]))
            return
        group.keyed[row] = upto
        group.key_due[row] = (upto + 1) * group.block_size
        block = int(group.table.rows[row, start])
        if block and not self.pool.keyed[block]:
            self.index.insert_one(block, rows.keys[row, start], group.group_id)
            self.pool.keyed[block] = True
            self.counters[STORED] += 1

    def _report(
        self, sink: CacheSink, group: Group, owner: Ints, column: Ints, blocks: BlockIds,
        keys: Keys,
    ) -> None:  # fmt: skip
        size, ratio = group.block_size, group.block_size // self.rows.block_size
        before = np.maximum(column * ratio - 1, 0)
        parents = self.rows.keys[owner, before]
        tokens = self.rows.tokens[owner[:, None], column[:, None] * size + np.arange(size)]
        sources = [self.rows.sources[row] for row in owner.tolist()]
        sink.stored(
            StoredBlocks(group.group_id, owner, column, blocks, keys, parents, tokens, sources)
        )

    def report_steps(self, given: bytes, taken: bytes, groups: tuple[Group, ...]) -> None:
        """Tell the sink what compiled steps did: their ``heard()``."""
        if self.sink is None:
            return
        if taken:
            told = np.frombuffer(taken, np.int32).reshape(-1, 2 + self.rows.keys.shape[2] // 4)
            words = told[:, 2:].copy().view(np.uint64)
            words[:, -1] ^= told[:, 1].astype(np.uint64)
            self.sink.removed(RemovedBlocks(told[:, 1], told[:, 0], words.view(np.uint8)))
        told = np.frombuffer(given, np.int32).reshape(-1, 4)
        for group in groups if len(told) else ():
            _, owner, column, blocks = told[told[:, 0] == group.group_id].T
            if len(blocks):
                ratio = group.block_size // self.rows.block_size
                keys = self.rows.keys[owner, (column + 1) * ratio - 1]
                self._report(self.sink, group, owner, column, blocks, keys)

    def adopt(self, group: Group, sequence: TokenSequence, first: int, blocks: BlockIds) -> None:
        """Key owned blocks whose KV was computed elsewhere: blocks first, first + 1, ... of a
        sequence, in a group whose block size is the hashing's."""
        keys, size, stop = sequence.keys(), group.block_size, first + len(blocks)
        self.index.insert(blocks, keys[first:stop], group.group_id)
        self.pool.mark_keyed(blocks)
        self.counters[STORED] += len(blocks)
        if self.sink is not None:
            columns = np.arange(first, stop, dtype=np.int32)
            parents = keys[np.maximum(columns - 1, 0)]
            tokens = sequence.tokens[first * size : stop * size].reshape(-1, size)
            rows = np.full(len(blocks), -1, np.int32)
            event = StoredBlocks(
                group.group_id, rows, columns, blocks, keys[first:stop], parents, tokens,
                [sequence.source] * len(blocks),
            )  # fmt: skip
            self.sink.stored(event)

    def withdraw(self, group: Group, rows: Ints, keep: Ints) -> BlockIds:
        """Take back the keys of each row's blocks from keep[i] on. Returns those that another
        request holds too: it was admitted on content that does not exist."""
        last = group.keyed[rows]
        some = last > keep
        if not some.any():
            return rows[:0]
        rows, keep, last = rows[some], keep[some], last[some]
        spans = last - keep
        owner, column = spread(rows, keep, spans)
        blocks = group.table.rows[owner, column]
        group.keyed[rows] = keep
        group.key_due[rows] = (keep + 1) * group.block_size
        group.due[rows] = 0
        blocks = np.unique(blocks[self.pool.keyed[blocks]])
        self.drop(blocks)
        return blocks[self.pool.ref[blocks] > 1]

    def drop(self, blocks: BlockIds) -> None:
        """Take these (distinct, keyed) blocks' keys away; cached ones become free."""
        if blocks.size:
            self.forget(blocks)
            self.pool.unkey(blocks)

    def forget(self, blocks: BlockIds) -> None:
        """The blocks are being evicted: nobody finds them from now on. (The pool calls this.)"""
        if self.sink is not None:
            groups = self.index.group[blocks].astype(np.int32)
            self.sink.removed(RemovedBlocks(groups, blocks, self.index.keys_of(blocks)))
        self.index.remove(blocks)
        self.counters[REMOVED] += len(blocks)
        self.counters[VERSION] += 1

    def clear(self) -> None:
        """All keys go; cached blocks become free."""
        self.index.clear()
        self.pool.forget_keys()
        self.counters[CLEARED] += 1
        self.counters[VERSION] += 1
        if self.sink is not None:
            self.sink.cleared()

"""One checker for everything that must always hold between pool, tables, index and rows.

It recounts every reference, walks every chain and hashes every row again: O(blocks + tokens).
Meant for tests, soak runs and replays, after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from blocktable.core.errors import BlockStateError
from blocktable.core.pool import EVICTABLE, FENCED, FREE, FRESH, OWNED, TOP, BlockPool


def check(manager: Any) -> None:
    """Raise BlockStateError that lists every broken invariant of a `KVCacheManager`."""
    found = violations(manager)
    if found:
        raise BlockStateError("; ".join(found))


def violations(manager: Any) -> list[str]:
    """All broken invariants, in words; empty when there are none."""
    found = [*_pool(manager.pool), *_rows(manager), *_references(manager)]
    if manager.book is not None:
        found += [*_index(manager), *_keys(manager)]
    if manager.host_pool is not None:
        found += [f"host pool: {text}" for text in _pool(manager.host_pool)]
    return found


def _pool(pool: BlockPool) -> Iterator[str]:
    state, ref, top, fresh = pool.state, pool.ref, int(pool.scalars[TOP]), int(pool.scalars[FRESH])
    if ref[0] or pool.keyed[0] or state[0] != FREE:
        yield "the null block is in use"
    if ((state == OWNED) != (ref > 0)).any() or (ref < 0).any():
        yield f"blocks {np.flatnonzero((state == OWNED) != (ref > 0))} are owned without reference"
    stack = pool.stack[:top]
    free = np.concatenate([stack, np.arange(fresh, pool.num_blocks)])
    if len(np.unique(free)) != len(free) or (free == 0).any():
        yield "the free stack names a block twice, or the null block"
    if not np.array_equal(np.sort(free), np.flatnonzero(state == FREE)[1:]):
        yield "the free stack is not the set of free blocks"
    if pool.keyed[state == FREE].any():
        yield f"free blocks {np.flatnonzero(pool.keyed & (state == FREE))} carry a key"
    order = pool.eviction.order()
    evictable = np.flatnonzero(state == EVICTABLE)
    if not np.array_equal(np.sort(order), evictable) or len(order) != len(pool.eviction):
        yield "the eviction order is not the set of evictable blocks"
    if not pool.keyed[evictable].all():
        yield "an evictable block carries no key"
    counts = pool.counts()
    if counts.fenced != np.count_nonzero(state == FENCED):
        yield f"{counts.fenced} fenced are counted, {np.count_nonzero(state == FENCED)} are fenced"
    owned = np.count_nonzero(state == OWNED) - pool.num_static
    if counts.used != owned:
        yield f"{counts.used} used are counted, {owned} are owned by requests"
    if counts.used + counts.available + counts.fenced != counts.usable:
        yield f"used + available + fenced is not usable: {counts}"
    if counts.available != pool.available:
        yield f"available is {pool.available}, free + evictable is {counts.available}"
    if counts.fenced and not pool.steps_in_flight:
        yield f"{counts.fenced} blocks are fenced, but no step is in flight"


def _rows(manager: Any) -> Iterator[str]:
    used = manager.num_tokens > 0
    if (manager.num_computed > manager.num_tokens + manager.max_model_len).any():
        yield "more tokens are computed than can be"
    for group in manager.groups:
        table, name = group.table, f"group {group.group_id}"
        beyond = np.arange(table.max_blocks_per_row) >= table.counts[:, None]
        if table.rows[beyond].any():
            yield f"{name}: entries past the count are not null"
        if table.counts[~used].any() or group.keyed[~used].any() or group.skipped[~used].any():
            yield f"{name}: rows not in use have entries"
        computed = manager.num_computed
        if (used & (group.capacity < np.minimum(computed, group.max_model_len))).any():
            yield f"{name}: computed tokens lie beyond the row's blocks"
        want = np.minimum(group.capacity_of(table.counts), np.iinfo(np.int32).max)
        if not np.array_equal(group.capacity, want):
            yield f"{name}: capacity is not that of the entries"
        column = np.arange(table.max_blocks_per_row)
        due = group.due_at(np.arange(len(used)))
        if (used & (group.due > np.minimum(due, group.max_model_len + 1))).any():
            yield f"{name}: a row that will need something is not looked at in time"
        before = (column >= group.kept_head) & (column < group.skipped[:, None])
        if table.rows[before].any():
            yield f"{name}: skipped entries are not null"


def _references(manager: Any) -> Iterator[str]:
    pool, counted = manager.pool, np.zeros(manager.pool.num_blocks, np.int64)
    for group in manager.groups:
        counted[group.static_blocks] += 1
        for row in np.flatnonzero(group.table.counts):
            ids = group.table.rows[row, : group.table.counts[row]]
            live = ids[ids != 0]
            if len(np.unique(live)) != len(live):
                yield f"group {group.group_id}, row {row} names a block twice"
            counted[live] += 1
    wrong = np.flatnonzero(counted != pool.ref)
    if wrong.size:
        yield f"blocks {wrong} have {pool.ref[wrong]} references, rows hold {counted[wrong]}"
    growth = manager.growth
    for group in manager.groups:
        rows = np.flatnonzero((group.table.counts > 0) & ~growth.shares_tail)
        column = group.tail_column(manager.num_computed[rows])
        inside = (column >= 0) & (column < group.table.counts[rows])
        tails = group.table.rows[rows[inside], column[inside]]
        if (pool.ref[tails] > 1).any():
            yield f"partly filled blocks {tails[pool.ref[tails] > 1]} are shared, unmarked"


def _index(manager: Any) -> Iterator[str]:
    index, pool = manager.index, manager.pool
    seen: list[int] = []
    for bucket in np.flatnonzero(index.links[: index.num_blocks]):
        block = int(index.links[bucket])
        while block and len(seen) <= index.num_blocks:
            seen.append(block)
            if index._buckets(index.words[block : block + 1, 0])[0] != bucket:
                yield f"block {block} stands in a chain that is not its key's"
            block = int(index.links[index.num_blocks + block])
    if sorted(seen) != np.flatnonzero(pool.keyed).tolist() or len(seen) != len(index):
        yield "the index does not hold exactly the keyed blocks"


def _keys(manager: Any) -> Iterator[str]:
    book, pool = manager.row_keys, manager.pool
    for row in np.flatnonzero(manager.num_tokens):
        fresh = manager.row_sequence(row).keys()
        known = int(book.num_hashed[row])
        if known > len(fresh) or not np.array_equal(book.keys[row, :known], fresh[:known]):
            yield f"row {row}: its keys are not those of its tokens"
            continue
        for group in manager.groups:
            ratio = group.block_size // manager.hash_block_size
            ids = group.table.rows[row, : group.table.counts[row]]
            at = np.flatnonzero(pool.keyed[ids])
            # a truncated row's blocks keep content and key of what they held until written again
            at = at[(at + 1) * group.block_size <= manager.num_computed[row]]
            at = at[(at + 1) * ratio <= len(fresh)]
            keys = fresh[(at + 1) * ratio - 1]
            if not manager.index.carries(ids[at], keys, group.group_id).all():
                yield f"group {group.group_id}, row {row}: a block carries another content's key"

"""Hands the arrays of one manager to the compiled helper."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from blocktable.core.eviction import LRUQueue
from blocktable.core.pool import BlockPool
from blocktable.core.types import Counts, TokenIds
from blocktable.groups.base import Group
from blocktable.groups.keybook import KeyBook
from blocktable.groups.state import StateGroup


def make_core(
    native: ModuleType,
    pool: BlockPool,
    groups: tuple[Group, ...],
    book: KeyBook | None,
    tokens: TokenIds,
    num_tokens: Counts,
    num_computed: Counts,
) -> Any:
    """A ``_native.Core`` over the arrays of a manager, which must not be replaced afterwards."""
    queue = pool.eviction
    rings = (queue.ring, queue.state) if isinstance(queue, LRUQueue) else None
    index = keys = None
    if book is not None:
        table, rows = book.index, book.rows
        index = (table.links, table.words, table.group, table.size)
        keys = (rows.keys, rows.num_hashed, book.counters, rows.block_size)
    views = tuple(_group_views(g, rows.block_size if keys else g.block_size) for g in groups)
    return native.Core(
        (pool.ref, pool.state, pool.keyed, pool.place, pool.stack, pool.scalars),
        rings, index, (tokens, num_tokens, num_computed, *(keys or ())), views,
    )  # fmt: skip


def _group_views(group: Group, hash_size: int) -> tuple[Any, ...]:
    table, rule = group.table, group.skip_rule()
    aligned = isinstance(group, StateGroup) and group.aligned
    return (
        *table.record_arrays, group.capacity, group.keyed, group.key_due, group.skipped,
        group.block_size, max(1, group.block_size // hash_size), rule.back, rule.chunk,
        group.kept_head, int(type(group).entries_for is Group.entries_for),
        int(group.deferred_keys), int(aligned),
    )  # fmt: skip

"""Requests whose blocks lie in host memory while they wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds, Counts, TokenIds
from blocktable.groups.base import Group
from blocktable.prefix.sequence import TokenSequence


class SwapPlan(NamedTuple):
    """Block copies between device and host memory, device[i] <-> host[i], for the layers of
    group[i]. Out: to be done before the blocks are written again. In: before the step reads."""

    group: Counts
    device: BlockIds
    host: BlockIds


class SwappedRow(NamedTuple):
    """A request in host memory. ``columns`` are where ``plan.host`` belong in the rows; the
    other entries of each group's ``counts[g]`` were null. ``cleared`` counts the cache's
    invalidations when its KV was computed; -1 if keys must never be given."""

    plan: SwapPlan
    columns: Counts
    counts: Counts
    sequence: TokenSequence
    tokens: TokenIds
    num_computed: int
    cleared: int


def host_layout(groups: tuple[Group, ...], row: int) -> tuple[Counts, Counts, BlockIds, Counts]:
    """Group, column and block id of each real entry of a row, and each group's entry count."""
    counts = np.array([g.table.counts[row] for g in groups], np.int32)
    owner, column, blocks = [], [], []
    for group, count in zip(groups, counts.tolist(), strict=True):
        ids = group.table.rows[row, :count]
        at = np.flatnonzero(ids).astype(np.int32)
        owner.append(np.full(len(at), group.group_id, np.int32))
        column.append(at)
        blocks.append(ids[at])
    return np.concatenate(owner), np.concatenate(column), np.concatenate(blocks), counts


def refill(
    groups: tuple[Group, ...], pool: BlockPool, row: int, swapped: SwappedRow, request: object
) -> SwapPlan:
    """Take device blocks for a swapped request and put them into an empty row; OutOfBlocks."""
    plan = swapped.plan
    ids = pool.take(len(plan.host), request=request, held=0)
    for group, count in zip(groups, swapped.counts.tolist(), strict=True):
        mine = plan.group == group.group_id
        entries = np.zeros(count, np.int32)
        entries[swapped.columns[mine]] = ids[mine]
        where = np.array([row])
        group.table.append(where, count, entries)
        group.skipped[row] = group.skipped_in(entries)
        group.sync(where)
    return SwapPlan(plan.group, ids, plan.host)

"""Shared prefixes, found in the block table itself.

Rows that begin with the same block ids read the same keys and values. They form a tree::

    blocks   0 .......... 7 8 ......... 11 12 ...
    row 0    a b c d e f g h  i j k l      m          node A: rows 0-3, blocks 0-8
    row 1    a b c d e f g h  i j k l      n          node B: rows 0-1, blocks 8-12 (child of A)
    row 2    a b c d e f g h  o p                     rows 2 and 3 own the rest alone
    row 3    a b c d e f g h  q

A kernel reads a node's pages once for all its rows instead of once per row. Nobody declares the
sharing: beams, parallel samples, cached system prompts all show in the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


class SharedNode(NamedTuple):
    """Rows that agree in their block ids from block ``start`` to block ``end`` (and before)."""

    rows: Int64s
    start: int
    end: int


def _first_difference(table: Int32s, rows: Int64s, start: int, limits: Int64s) -> Int64s:
    """For each row, the first block from ``start`` on that differs from rows[0]; at most its limit.

    Compares in widening strides, so that a short agreement costs little on a wide table.
    """
    found = np.full(rows.size, -1, dtype=np.int64)
    width, stride = int(limits.max()), 64
    leader, undecided = int(rows[0]), np.arange(rows.size)
    while undecided.size and start < width:
        end = min(start + stride, width)
        unlike = table[rows[undecided], start:end] != table[leader, start:end]
        differs = unlike.any(axis=1)
        decided = undecided[differs]
        found[decided] = start + unlike[differs].argmax(axis=1)
        undecided = undecided[~differs & (limits[undecided] > end)]
        start, stride = end, stride * 4
    found[found < 0] = width
    return np.minimum(found, limits)


def find_shared(
    table: Int32s, shareable: Int64s, rows: Int64s, *, min_blocks: int, min_saved: int
) -> list[SharedNode]:
    """The tree of shared prefixes among ``rows``, parents before children.

    table: int32 [n, W]. shareable: int64 [n], number of leading blocks of a row that may be read in
    common (full blocks, without the row's last token). A node is kept when it spans at least
    ``min_blocks`` and saves at least ``min_saved`` block reads, (rows - 1) * blocks; where it does
    not, its blocks stay with its children. Cost: one comparison per row and shared block.
    """
    nodes: list[SharedNode] = []
    pending: list[tuple[Int64s, int, int]] = [(rows[shareable[rows] > 0], 0, 0)]
    while pending:
        members, depth, start = pending.pop()
        if members.size < 2:
            continue
        heads = table[members, depth]
        order = np.argsort(heads, kind="stable")
        members, heads = members[order], heads[order]
        for group in np.split(members, np.flatnonzero(heads[1:] != heads[:-1]) + 1):
            if group.size < 2:
                continue
            agree = _first_difference(table, group, depth + 1, shareable[group])
            end = int(agree.min())
            span = end - start
            keep = span >= min_blocks and (group.size - 1) * span >= min_saved
            if keep:
                nodes.append(SharedNode(group, start, end))
            pending.append((group[shareable[group] > end], end, end if keep else start))
    return nodes

"""The items of a plan as int32 arrays: layout of an item, and how rows, prefixes and idle tokens
become items. All of it is vector code over rows; see :mod:`blocktable.attention.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.attention.sharing import SharedNode

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ITEM_FIELDS: Final = (
    "table_row",  # row of the block table
    "kv_start",  # first key position
    "kv_end",  # one past the last key position
    "query_start",  # first query token; of a gathered item, first entry of ``tokens``
    "packed_start",  # first packed row (token * group + head), counted from query_start
    "packed_rows",  # live packed rows; 0 = nothing to do
    "position",  # position of the token query_start
    "gathered",  # 1: query tokens come from ``tokens``
    "slot",  # first partial slot of the token query_start; -1 = write the result itself
    "slot_stride",  # partial slots of a token, shared pieces first
    "piece",  # which of these this item writes
    "own_pieces",  # items that finish before the result is merged; 0 = never merge here
    "counter",  # which counter they count on
)
ITEM_WIDTH: Final = 16
"""int32 words of an item: one 64-byte line."""
TOKEN_WIDTH: Final = 4
"""int32 words of a gathered token: query token, first slot of the node, position, unused."""
_FIELD: Final = {name: i for i, name in enumerate(ITEM_FIELDS)}


class RowSet(NamedTuple):
    """Live rows of one item class, an entry per row."""

    row: Int64s
    query_start: Int64s
    query_len: Int64s
    seq_len: Int64s
    kv_start: Int64s  # first key that the row reads alone
    piece_keys: Int64s  # keys in a piece
    own: Int64s  # pieces of its own keys
    shared: Int64s  # pieces of shared keys
    slot: Int64s  # first partial slot, -1 without
    counter: Int64s  # first counter of its packed tiles


class NodeItems(NamedTuple):
    """Items of shared prefixes and the tokens they gather."""

    items: Int32s
    tokens: Int32s


def make_items(count: int, **fields: Int64s | int) -> Int32s:
    """``count`` items with the given fields, zero elsewhere."""
    items = np.zeros((count, ITEM_WIDTH), dtype=np.int32)
    for name, values in fields.items():
        items[:, _FIELD[name]] = values
    return items


def field(items: Int32s, name: str) -> Int32s:
    """One field of all items, a view."""
    return items[:, _FIELD[name]]


def longest_first(items: Int32s) -> Int32s:
    """Items by falling number of keys: the hardware hands them out in order, so the last to start
    are short."""
    keys = field(items, "kv_end") - field(items, "kv_start")
    return items[np.argsort(-keys, kind="stable")]


def _spread(counts: Int64s) -> tuple[Int64s, Int64s]:
    """For counts [2, 3]: which = [0, 0, 1, 1, 1] and nth = [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(counts.size), counts)
    return which, np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)


def own_items(
    rows: RowSet, group: int, block_m: int, *, causal: bool, window: int | None, chunk: int | None
) -> Int32s:
    """One item per row, packed tile and piece; keys that no query of the tile sees are left out."""
    packed = rows.query_len * group
    which, nth = _spread(-(-packed // block_m) * rows.own)
    tile, piece = nth // rows.own[which], nth % rows.own[which]
    packed_start = tile * block_m
    packed_rows = np.minimum(packed[which] - packed_start, block_m)
    position = (rows.seq_len - rows.query_len)[which]
    first_query = position + packed_start // group
    last_query = position + (packed_start + packed_rows - 1) // group
    first, end = visible_keys(first_query, last_query, rows.seq_len[which], causal, window, chunk)
    begin = rows.kv_start[which] + piece * rows.piece_keys[which]
    stop = np.minimum(begin + rows.piece_keys[which], end)
    begin = np.maximum(begin, first)
    return make_items(
        which.size, table_row=rows.row[which], kv_start=begin, kv_end=np.maximum(begin, stop),
        query_start=rows.query_start[which], packed_start=packed_start, packed_rows=packed_rows,
        position=position, slot=rows.slot[which], slot_stride=(rows.own + rows.shared)[which],
        piece=rows.shared[which] + piece, own_pieces=np.where(rows.shared == 0, rows.own, 0)[which],
        counter=rows.counter[which] + tile,
    )  # fmt: skip


def visible_keys(
    first_query: Int64s, last_query: Int64s, seq_len: Int64s, causal: bool, window: int | None,
    chunk: int | None,
) -> tuple[Int64s, Int64s]:  # fmt: skip
    """First and one past the last key that any query from first to last position sees."""
    first, end = np.zeros_like(first_query), seq_len
    if causal:
        end = np.minimum(end, last_query + 1)
    if window is not None:
        first = np.maximum(first, first_query - window + 1)
        end = np.minimum(end, last_query + window)
    if chunk is not None:
        first = np.maximum(first, first_query // chunk * chunk)
        end = np.minimum(end, (last_query // chunk + 1) * chunk)
    return first, end


def idle_items(tokens: Int64s, group: int, block_m: int) -> Int32s:
    """Items without keys for query tokens that no row uses: they write zeros and lse -inf.

    tokens: rising token indices. Neighbours share an item.
    """
    if tokens.size == 0:
        return make_items(0)
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    starts = tokens[np.concatenate(([0], breaks))]
    lengths = np.diff(np.concatenate(([0], breaks, [tokens.size])))
    packed = lengths * group
    which, nth = _spread(-(-packed // block_m))
    return make_items(
        which.size, query_start=starts[which], packed_start=nth * block_m,
        packed_rows=np.minimum(packed[which] - nth * block_m, block_m), slot=-1,
    )  # fmt: skip


def node_items(
    nodes: Sequence[SharedNode], pieces: Int64s, block_size: int, group: int, block_m: int,
    query_start: Int64s, seq_lens: Int64s, slots: Int64s,
) -> NodeItems:  # fmt: skip
    """Items that read each node's keys once for all its rows, as many rows in a tile as fit.

    pieces: pieces of each node. slots: first partial slot of every row.
    """
    taken = slots.copy()  # next free slot of a row
    parts, tokens, count = [], [], 0
    for node, number in zip(nodes, pieces.tolist(), strict=True):
        rows = node.rows
        gathered = np.zeros((rows.size, TOKEN_WIDTH), dtype=np.int32)
        gathered[:, 0], gathered[:, 1] = query_start[rows], taken[rows]
        gathered[:, 2] = seq_lens[rows] - 1
        tokens.append(gathered)
        taken[rows] += number
        packed = rows.size * group
        nth = np.arange(-(-packed // block_m) * number)
        packed_start, piece = nth // number * block_m, nth % number
        step = -(-(node.end - node.start) // number)
        begin = np.minimum(node.start + piece * step, node.end)
        parts.append(make_items(
            nth.size, table_row=int(rows[0]), kv_start=begin * block_size,
            kv_end=np.minimum(begin + step, node.end) * block_size, query_start=count,
            packed_start=packed_start, packed_rows=np.minimum(packed - packed_start, block_m),
            gathered=1, slot=0, piece=piece,
        ))  # fmt: skip
        count += rows.size
    if not nodes:
        return NodeItems(make_items(0), np.zeros((0, TOKEN_WIDTH), dtype=np.int32))
    return NodeItems(np.concatenate(parts), np.concatenate(tokens))

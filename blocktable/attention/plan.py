"""Who reads which keys: the work of one attention call, cut into items on the host.

An item is what one program of the kernel does for one KV head: up to ``tile`` packed query rows
(query token x query heads of the KV head) against one range of key positions. Everything is known
on the host (lengths and the block table), so planning never waits for the device::

    decode row, 9000 keys    -> items [0, 3008) [3008, 6016) [6016, 9000), merged by the last to end
    4 rows behind a prefix   -> a tile item reads the prefix once for all four (partial results);
                                one small item each reads the row's own keys; then both merge
    prefill chunk of 512     -> tile items of 128 packed rows, longest first

Small items (at most 16 packed rows) and tile items go to two launches that overlap. A token read in
several pieces has one partial slot per piece, shared pieces first. They are merged by their
log-sum-exp: by the item of the token that ends last, or, behind a shared prefix, by a third launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.attention.plan_cut import CutKernel, cut_rows
from blocktable.attention.plan_items import (
    TOKEN_WIDTH,
    Int32s,
    Int64s,
    NodeItems,
    RowSet,
    field,
    idle_items,
    longest_first,
    node_items,
    own_items,
    visible_keys,
)
from blocktable.attention.sharing import SharedNode, find_shared
from blocktable.core.errors import ConfigError

SMALL_M: Final = 16
"""Packed rows of a small item: the height of one tensor-core fragment."""
_FEW_ITEMS: Final = 64
"""Rows x KV heads up to which a graph is made for few keys."""
_OVERLAP: Final = 220
"""A tile item may take as many keys as it multiplies in 0.6 of the time of the small items beside
it: their keys x KV heads over this number (an H200 reads 8400 of them a us and multiplies 64)."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Shape of a layer and of the machine; checked once.

    num_workers, num_few_workers, num_tile_workers: programs that the machine runs at once: small
        items, the same in the kernel for few keys, and tile items.
    min_piece, min_tile_piece: keys below which splitting a row costs more than it gives.
    share: look for shared prefixes. min_shared_tokens: length from which a node pays;
        min_saved_tokens: (rows - 1) * length from which it does.
    few: take the kernel for few keys; None: decide by the keys of each plan.
    tile_sizes: packed rows that a tile item may have, rising; the smallest that holds the widest
        row or node is taken. One size keeps every plan to one compiled kernel.
    """

    num_q_heads: int
    num_kv_heads: int
    block_size: int
    causal: bool = True
    sliding_window: int | None = None
    chunk: int | None = None
    num_workers: int = 528
    num_few_workers: int = 396
    num_tile_workers: int = 132
    min_piece: int = 128
    min_tile_piece: int = 512
    share: bool = True
    min_shared_tokens: int = 128
    min_saved_tokens: int = 1024
    tile_sizes: tuple[int, ...] = (128,)
    few: bool | None = None

    def __post_init__(self) -> None:
        if self.num_q_heads < 1 or self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_q_heads} query heads are no multiple of {self.num_kv_heads} KV heads"
            )
        if self.block_size < 1:
            raise ConfigError(f"block size must be at least 1, got {self.block_size}")
        if not self.tile_sizes or any(size < SMALL_M for size in self.tile_sizes):
            raise ConfigError(f"tiles hold at least {SMALL_M} packed rows, got {self.tile_sizes}")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    def for_graph(self, num_rows: int) -> PlanConfig:
        """This configuration with the kernel settled by the batch size, as a captured graph needs
        it: below one small item per multiprocessor latency counts."""
        if self.few is not None:
            return self
        return replace(self, few=num_rows * self.num_kv_heads <= _FEW_ITEMS)

    def slots(self, workers: int) -> int:
        """Items that run at once for each KV head."""
        return max(workers // self.num_kv_heads, 1)

    def tile_rows(self, packed: int) -> int:
        """Packed rows of a tile for at most ``packed`` live ones."""
        return next((size for size in self.tile_sizes if size >= packed), self.tile_sizes[-1])

    @property
    def may_share(self) -> bool:
        """Whether rows may be read together: every query sees its whole prefix, and a row's own
        keys are small items, which run after the tiles."""
        unbounded = self.sliding_window is None and self.chunk is None
        return self.share and unbounded and self.group <= SMALL_M


class AttentionPlan(NamedTuple):
    """Items of one attention call; valid while lengths, rows and table entries stay as they are.

    small: int32 [s, 16] and tile: int32 [t, 16], see plan_items.ITEM_FIELDS. tokens: int32 [k, 4],
    query tokens that tiles gather. merges: int32 [m, 4], tokens behind shared prefixes with their
    first slot and number of pieces, merged by a launch of its own.
    tile_m: packed rows of a tile item. num_tokens: query tokens covered.
    num_slots, num_counters: partial slots and counters in use. nodes: shared prefixes found. few:
    the small items are for the kernel for few keys.
    """

    small: Int32s
    tile: Int32s
    tokens: Int32s
    merges: Int32s
    tile_m: int
    num_tokens: int
    num_slots: int
    num_counters: int
    nodes: tuple[SharedNode, ...]
    few: bool

    @property
    def tile_merges(self) -> bool:
        """Whether some tile items are pieces that merge among themselves."""
        return bool((field(self.tile, "own_pieces") * (field(self.tile, "slot") >= 0)).any())

    @property
    def shares(self) -> bool:
        """Whether some pages are read once for several rows."""
        return bool(self.nodes)


class _Sharing(NamedTuple):
    """Shared prefixes of a batch: pieces per node; first own key and shared pieces per row."""

    nodes: list[SharedNode]
    pieces: Int64s
    own_start: Int64s
    row_pieces: Int64s
    tile_m: int


class _RowSets(NamedTuple):
    small: RowSet
    tile: RowSet
    num_slots: int
    num_counters: int
    few: bool


class _SmallCut(NamedTuple):
    keys: Int64s
    few: bool


def plan_attention(
    config: PlanConfig,
    query_start_loc: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    block_table: NDArray[np.int32] | None = None,
    *,
    num_tokens: int | None = None,
) -> AttentionPlan:
    """The items of one call, from host arrays alone.

    query_start_loc [n + 1], seq_lens [n]: as in ``attention.paged_attention``. block_table: int32
    [n, W] on the host; without it nothing is shared. num_tokens: rows of the query tensor, those
    behind the last row get zeros. Raises ConfigError for arrays that do not fit. Cost: vector
    operations over rows and items, and one comparison per row and shared block.
    """
    starts = np.asarray(query_start_loc, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_tokens = int(starts[-1]) if num_tokens is None else num_tokens
    query_len = _checked_query_lengths(starts, lens, num_tokens)
    live = (query_len > 0) & (lens > 0)
    sharing = _share(config, block_table, np.flatnonzero(live & (query_len == 1)), lens)
    packed = query_len * config.group
    small, tile = live & (packed <= SMALL_M), live & (packed > SMALL_M)
    tile_m = max(sharing.tile_m, config.tile_rows(int(packed[tile].max(initial=0))))
    sets = _row_sets(config, small, tile, starts, lens, sharing, tile_m)
    shared = _shared_items(config, sharing, sets.small, starts, lens, tile_m)
    idle = idle_items(_idle_tokens(starts, live, num_tokens), config.group, SMALL_M)
    return AttentionPlan(
        np.concatenate((longest_first(_own(config, sets.small, SMALL_M)), idle)),
        longest_first(np.concatenate((_own(config, sets.tile, tile_m), shared.items))),
        shared.tokens, _merges(sets.small), tile_m, num_tokens, sets.num_slots, sets.num_counters,
        tuple(sharing.nodes), sets.few,
    )  # fmt: skip


def _checked_query_lengths(starts: Int64s, lens: Int64s, num_tokens: int) -> Int64s:
    if starts.size != lens.size + 1:
        raise ConfigError(f"{lens.size} rows need {lens.size + 1} starts, got {starts.size}")
    query_len = starts[1:] - starts[:-1]
    if query_len.size and query_len.min() < 0:
        row = int(query_len.argmin())
        raise ConfigError(f"row {row} has {query_len[row]} query tokens")
    if starts[-1] > num_tokens:
        raise ConfigError(f"rows hold {starts[-1]} query tokens, the query {num_tokens}")
    too_long = np.flatnonzero((lens > 0) & (query_len > lens))
    if too_long.size:
        row = int(too_long[0])
        raise ConfigError(f"row {row} has {query_len[row]} query tokens but length {lens[row]}")
    return query_len


def _share(
    config: PlanConfig, table: NDArray[np.int32] | None, rows: Int64s, lens: Int64s
) -> _Sharing:
    """Shared prefixes of decoding ``rows``; the block of a row's last token is never shared."""
    own_start, row_pieces = np.zeros(lens.size, np.int64), np.zeros(lens.size, np.int64)
    nodes: list[SharedNode] = []
    if table is not None and config.may_share and rows.size > 1:
        nodes = find_shared(
            table, np.maximum(lens - 1, 0) // config.block_size, rows,
            min_blocks=-(-config.min_shared_tokens // config.block_size),
            min_saved=-(-config.min_saved_tokens // config.block_size),
        )  # fmt: skip
    rows_of_node = np.array([node.rows.size for node in nodes], np.int64)
    tile_m = config.tile_rows(int(rows_of_node.max(initial=0)) * config.group)
    keys = np.array([(node.end - node.start) * config.block_size for node in nodes], np.int64)
    tiles = -(-rows_of_node * config.group // tile_m)
    work = int((keys * tiles).sum()) * config.num_kv_heads
    for node in nodes:
        own_start[node.rows] = node.end * config.block_size
    beside = int((lens - own_start)[rows].sum()) * config.num_kv_heads
    balanced = work / max(config.num_tile_workers, 1)
    piece = max(config.min_tile_piece, balanced, beside / _OVERLAP)
    pieces = np.maximum(np.rint(keys / piece).astype(np.int64), 1)
    for node, number in zip(nodes, pieces.tolist(), strict=True):
        row_pieces[node.rows] += number
    return _Sharing(nodes, pieces, own_start, row_pieces, tile_m if nodes else 0)


def _cut_small(config: PlanConfig, sharing: _Sharing, own_keys: Int64s, tiles: Int64s) -> _SmallCut:
    """The cut of small items, and the kernel it is for: whichever of the two should end first."""
    free = 1 - _taken(config, sharing)
    many = CutKernel(config.slots(int(config.num_workers * free)), 1.0, 0.35)
    few = CutKernel(config.slots(int(config.num_few_workers * free)), 1.04, 0.6)
    if config.few is not None:
        kernel = few if config.few else many
        return _SmallCut(cut_rows(own_keys, tiles, kernel, config.min_piece).keys, config.few)
    one = cut_rows(own_keys, tiles, many, config.min_piece)
    two = cut_rows(own_keys, tiles, few, config.min_piece)
    return _SmallCut(two.keys, True) if two.time <= one.time else _SmallCut(one.keys, False)


def _taken(config: PlanConfig, sharing: _Sharing) -> float:
    """Part of the multiprocessors that tiles of shared prefixes keep while small items run. A tile
    takes a whole one; a full round of tiles is over before most small items start."""
    rows = np.array([node.rows.size for node in sharing.nodes], np.int64)
    tiles = -(-rows * config.group // max(sharing.tile_m, 1)) * sharing.pieces
    taken = int(tiles.sum()) * config.num_kv_heads / max(config.num_tile_workers, 1)
    return taken if taken < 0.5 else 0.0


def _row_sets(
    config: PlanConfig, small: NDArray[np.bool_], tile: NDArray[np.bool_], starts: Int64s,
    lens: Int64s, sharing: _Sharing, tile_m: int,
) -> _RowSets:  # fmt: skip
    """Rows of both launches with their pieces; slots and counters run through both."""
    made: list[RowSet] = []
    slots = counters = 0
    few = bool(config.few)
    for mask, block_m in ((small, SMALL_M), (tile, tile_m)):
        rows = np.flatnonzero(mask)
        query_len, seq_len = (starts[1:] - starts[:-1])[rows], lens[rows]
        first, _ = visible_keys(
            seq_len - query_len, seq_len - 1, seq_len,
            config.causal, config.sliding_window, config.chunk,
        )  # fmt: skip
        kv_start = np.maximum(sharing.own_start[rows], first)
        own_keys, tiles = seq_len - kv_start, -(-query_len * config.group // block_m)
        if mask is small:
            piece, few = _cut_small(config, sharing, own_keys, tiles)
        else:
            kernel = CutKernel(config.slots(config.num_tile_workers), 1.0, 0.35)
            piece = cut_rows(own_keys, tiles, kernel, config.min_tile_piece).keys
        own, shared = np.maximum(-(-own_keys // piece), 1), sharing.row_pieces[rows]
        split = own + shared > 1
        row_slots = np.where(split, (own + shared) * query_len, 0)
        row_counters = tiles * (split & (shared == 0))  # behind a prefix, the merge launch counts
        made.append(RowSet(
            rows, starts[:-1][rows], query_len, seq_len, kv_start, piece, own, shared,
            np.where(split, slots + np.cumsum(row_slots) - row_slots, -1),
            counters + np.cumsum(row_counters) - row_counters,
        ))  # fmt: skip
        slots, counters = slots + int(row_slots.sum()), counters + int(row_counters.sum())
    return _RowSets(made[0], made[1], slots, counters, few)


def _own(config: PlanConfig, rows: RowSet, block_m: int) -> Int32s:
    return own_items(
        rows, config.group, block_m,
        causal=config.causal, window=config.sliding_window, chunk=config.chunk,
    )  # fmt: skip


def _merges(rows: RowSet) -> Int32s:
    """Token, first slot and pieces of every row behind a shared prefix."""
    behind = rows.shared > 0
    merges = np.zeros((int(behind.sum()), TOKEN_WIDTH), dtype=np.int32)
    merges[:, 0], merges[:, 1] = rows.query_start[behind], rows.slot[behind]
    merges[:, 2] = (rows.own + rows.shared)[behind]
    return merges


def _shared_items(
    config: PlanConfig, sharing: _Sharing, small: RowSet, starts: Int64s, lens: Int64s, tile_m: int
) -> NodeItems:
    slots = np.zeros(lens.size, dtype=np.int64)
    slots[small.row] = small.slot
    return node_items(
        sharing.nodes, sharing.pieces, config.block_size, config.group, tile_m,
        starts[:-1], lens, slots,
    )  # fmt: skip


def _idle_tokens(starts: Int64s, live: NDArray[np.bool_], num_tokens: int) -> Int64s:
    """Query tokens that belong to no live row."""
    if live.all() and starts[-1] == num_tokens:
        return np.zeros(0, dtype=np.int64)
    used = np.zeros(num_tokens, dtype=bool)
    used[: starts[-1]] = np.repeat(live, starts[1:] - starts[:-1])
    return np.flatnonzero(~used)

"""`KVCacheManager`: one front over the block pool, the prefix index and the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from blocktable.core.pool import BlockPool, PoolCounts
from blocktable.core.specs import KVCacheConfig
from blocktable.core.table import HostTable
from blocktable.core.types import BlockIds, Counts, RowIds, StepId, TokenIds


class MediaItem(NamedTuple):
    """Placeholder tokens offset .. offset + length stand for a media item; ``identity`` is the
    whole content digest (bytes or str)."""

    offset: int
    length: int
    identity: bytes | str


class TokenSequence:
    """A request's tokens with everything else its KV depends on, and (once asked for) the keys of
    its complete blocks. Belongs to the request, outlives its rows; `extend` hashes only what is
    new. ``tokens`` int32 [n]; ``keys`` uint8 [complete blocks, key_bytes]."""

    tokens: TokenIds

    def __len__(self) -> int: ...
    def extend(self, tokens: ArrayLike) -> None:
        """Append tokens (a preempted request's generated ones)."""


class Hit(NamedTuple):
    """What `KVCacheManager.find_hit` found: ``num_tokens`` leading tokens are computed already;
    ``blocks`` has for each group the row's first entries (null where the group skips)."""

    num_tokens: int
    blocks: tuple[BlockIds, ...]
    sequence: TokenSequence


class Copies(NamedTuple):
    """Block copies the device must do before the step's writes: dst[i] takes src[i], per group."""

    group: np.ndarray
    src: BlockIds
    dst: BlockIds


class SwapPlan(NamedTuple):
    """Block moves between device and host memory: device[i] <-> host[i], in groups group[i]."""

    group: np.ndarray
    device: BlockIds
    host: BlockIds


class CacheStats(NamedTuple):
    """Counters since construction (queries and hits once a request) and the pool's counts now."""

    query_tokens: int
    hit_tokens: int
    requests: int
    stored_blocks: int
    removed_blocks: int
    cleared: int
    cached_blocks: int  # blocks carrying a key
    cached_keys: int  # distinct keys
    free_cached: int  # cached blocks nobody holds
    pool: PoolCounts
    usage: float  # 1 - available / usable


class KVCacheManager:
    """All arrays of rows; a request is a row number, the same in every table and on the device.

    Attributes for readers: ``pool``, ``host_pool`` (or None), ``index``, ``groups``, ``tables``
    (one HostTable a group), ``tokens`` int32 [max_num_rows, max_model_len], ``num_tokens``,
    ``num_computed`` int32 [max_num_rows]: computed, or scheduled by the last `allocate`.
    """

    pool: BlockPool
    tables: tuple[HostTable, ...]
    tokens: np.ndarray
    num_tokens: Counts
    num_computed: Counts

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_rows: int,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        hash_algo: str = "sha256",
        seed: bytes | str | int | None = None,
        eviction: str = "lru",
        host_blocks: int = 0,
        sink: object = None,
    ) -> None:
        """``max_num_batched_tokens`` caps what a window group needs in the full-sequence check.
        ``host_blocks`` > 0 makes a second pool for swapping. ``sink`` gets the cache events."""

    # -- sequences and hits
    def sequence(
        self, tokens: ArrayLike, *, salt: str | bytes | None = None,
        adapter: str | bytes | None = None, media: Sequence[MediaItem] = (),
    ) -> TokenSequence:  # fmt: skip
        """Make a TokenSequence (validates ids: integers 0 .. 2**31 - 1; RequestError)."""

    def find_hit(self, sequence: TokenSequence) -> Hit:
        """Longest computed prefix all groups agree on, at most len - 1 tokens. No side effects."""

    # -- scheduling
    def admit(
        self, row: int, hit: Hit, num_new_tokens: int, *, lookahead: int = 0,
        reserve_blocks: int = 0, full_sequence: bool = False, resumed: bool = False,
        request: object = None,
    ) -> None:  # fmt: skip
        """Put a request into an empty row: tokens, hit blocks, blocks for num_new_tokens
        (+ lookahead), keys of the blocks they complete; num_computed = hit + num_new_tokens.
        ``reserve_blocks`` (watermark) must stay available; ``full_sequence`` also demands room
        for the whole sequence. ``resumed`` requests do not enter the hit statistics. Raises
        OutOfBlocks, nothing changed."""

    def allocate(
        self, rows: RowIds, num_new_tokens: ArrayLike, *, lookahead: ArrayLike = 0,
        partial: bool = False,
    ) -> int:  # fmt: skip
        """Blocks and keys for num_new_tokens more tokens of each running row, in row order;
        num_computed += num_new_tokens. Returns len(rows). If they do not all fit: raises
        OutOfBlocks with nothing changed, or with ``partial`` serves the longest leading part that
        fits and returns its length (window groups have then also released what row number
        <returned> had outside its window, as in SEMANTICS rule 7)."""

    def append_tokens(self, rows: RowIds, token_ids: ArrayLike) -> None:
        """One sampled token for each row."""

    def append_token_lists(self, rows: RowIds, counts: Counts, token_ids: ArrayLike) -> None:
        """counts[i] tokens for rows[i], concatenated (accepted drafts)."""

    def rollback(self, rows: RowIds, num_computed: ArrayLike) -> None:
        """Rejected drafts or a step that did not run: num_computed falls to the given values,
        blocks stay, keys of blocks beyond them are withdrawn."""

    def truncate(self, rows: RowIds, num_tokens: ArrayLike) -> None:
        """Shorten sequences: tokens, computed count, blocks and keys beyond num_tokens go."""

    def release(
        self, rows: RowIds, *, num_computed: ArrayLike | None = None, request: object = None
    ) -> None:
        """Empty the rows, blocks released tail first. With ``num_computed`` (tokens whose KV was
        really computed, when less than scheduled) later keys are withdrawn first."""

    # -- sharing
    def fork(self, row: int, new_rows: RowIds) -> None:
        """new_rows become copies of row, all blocks shared; the first write into a shared block
        (in allocate) takes a fresh one and leaves a pair for `take_copies`."""

    def take_copies(self) -> Copies:
        """Copy-on-write pairs since the last call."""

    def move_rows(self, src: RowIds, dst: RowIds) -> None:
        """Rows move, with all their arrays, in every table (condense)."""

    # -- swap
    def swap_out(self, rows: RowIds) -> list[SwapPlan]:
        """Move rows to the host pool (a plan for each row). Raises OutOfBlocks."""

    def swap_in(self, row: int, plan: SwapPlan) -> SwapPlan: ...

    # -- steps and cache
    def begin_step(self) -> StepId:
        """The step is launched: blocks released from now on are fenced until it ends."""

    def end_step(self, step: int) -> None:
        """The step is done."""

    def reset_prefix_cache(self) -> bool:
        """Drop all keys; refused (False) while any block is in use or fenced."""

    def stats(self) -> CacheStats:
        """Counters and pool counts."""

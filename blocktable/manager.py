"""`KVCacheManager`: one front over the block pool, the prefix index and the groups.

Life of a request::

    seq = manager.sequence(tokens, salt=...)            it belongs to the request
    hit = manager.find_hit(seq)                         no side effects
    manager.admit(row, hit, n)                          blocks for hit + n tokens, keys of full ones
    manager.allocate(rows, counts)                      every later step, all running rows at once
    manager.append_tokens(rows, sampled)                one new token each
    manager.release(rows)                               finished, aborted or preempted

Keys of the blocks a step completes are given in the call that schedules it, so that requests
admitted in the same step share them. A caller whose step does not run for a row passes the
tokens really computed to `release` or `rollback`, and the keys are taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from blocktable.core.errors import ConfigError, RequestError, RowError
from blocktable.core.native import load
from blocktable.core.pool import BlockPool
from blocktable.core.runs import Runs, block_runs
from blocktable.core.specs import KVCacheConfig
from blocktable.core.types import BlockIds, RowIds, StepId
from blocktable.groups import group_class
from blocktable.groups.admission import Admission, CacheStats, Hit
from blocktable.groups.base import Group, Ints
from blocktable.groups.growth import Copies, Growth
from blocktable.groups.hits import common_hit
from blocktable.groups.keybook import CacheSink, KeyBook, RemovedBlocks, StoredBlocks, spread
from blocktable.groups.native import make_core
from blocktable.groups.retaining import Retaining
from blocktable.groups.sharing import RowSharing
from blocktable.groups.swap import SwappedRow, SwapPlan
from blocktable.prefix.eviction import make_policy
from blocktable.prefix.index import PrefixIndex
from blocktable.prefix.keys import KeyHasher, MediaItem, Seed
from blocktable.prefix.rows import RowKeys
from blocktable.prefix.sequence import TokenSequence

__all__ = [
    "CacheSink", "CacheStats", "Copies", "Hit", "KVCacheManager", "MediaItem", "RemovedBlocks",
    "StoredBlocks", "SwapPlan", "SwappedRow", "TokenSequence",
]  # fmt: skip


def _check_size(name: str, value: object, least: int = 1) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (whole and least <= value <= 2**31 - 1):  # pyright: ignore[reportOperatorIssue]
        raise ConfigError(f"{name} must be an integer in [{least}, 2**31 - 1], got {value!r}")


class KVCacheManager(RowSharing, Retaining):
    """The paged KV cache of one engine, in arrays of rows; a request is a row number, the same in
    every group's table and on the device. A call that raises has changed nothing.

    Attributes for readers: ``pool``, ``host_pool`` (None without swapping), ``index`` (None with
    caching off), ``groups``, ``tables`` (one HostTable a group), ``tokens`` int32 [max_num_rows,
    max_model_len], ``num_tokens`` and ``num_computed`` int32 [max_num_rows]: tokens known, and
    tokens computed or scheduled by the last `allocate`.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_rows: int,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        hash_algo: str = "sha256",
        seed: Seed = None,
        eviction: str = "lru",
        retain_share: float = 0.5,
        host_blocks: int = 0,
        cp_world: int = 1,
        sink: CacheSink | None = None,
    ) -> None:
        """``max_num_batched_tokens`` caps what a window group needs in the full-sequence check;
        ``host_blocks`` > 0 makes a second pool for swapping (its block 0 is reserved too);
        ``cp_world`` ranks share each block's positions; ``sink`` hears of cache changes;
        hints (`pin`, `retain`) keep at most ``retain_share`` of the usable blocks."""
        number = isinstance(retain_share, (int, float, np.number))
        if not (number and 0.0 <= retain_share <= 1.0):
            raise ConfigError(f"retain_share must lie in 0 .. 1, got {retain_share!r}")
        self.retain_share = retain_share
        _check_size("max_num_rows", max_num_rows)
        _check_size("max_model_len", max_model_len)
        _check_size("host_blocks", host_blocks, least=0)
        if max_num_batched_tokens is not None:
            _check_size("max_num_batched_tokens", max_num_batched_tokens)
        self.config, self.max_num_rows, self.max_model_len = config, max_num_rows, max_model_len
        step = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        specs = [g.kv_cache_spec for g in config.kv_cache_groups]
        self.groups = tuple(
            group_class(spec)(i, spec, max_num_rows, max_model_len, step, enable_caching, cp_world)
            for i, spec in enumerate(specs)
        )
        if cp_world > 1 and any(spec.static_blocks for spec in specs):
            raise ConfigError("context-parallel ranks cannot share out a group with static sinks")
        self.tables = tuple(g.table for g in self.groups)
        self.tokens = np.zeros((max_num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_rows, np.int32)
        self.num_computed = np.zeros(max_num_rows, np.int32)
        self.pool = BlockPool(config.num_blocks)
        for group in self.groups:
            group.static_blocks = self.pool.hold_static(group.spec.static_blocks)
        self.host_pool = BlockPool(host_blocks) if host_blocks else None
        sizes = [g.block_size for g in self.groups if g.row_width() > 0] or [1]
        self.hash_block_size = gcd(*sizes)
        self.keying: KeyHasher | None = None
        self.index: PrefixIndex | None = None
        self.book: KeyBook | None = None
        self.row_keys: RowKeys | None = None
        if enable_caching and any(g.caching for g in self.groups):
            self.keying = KeyHasher(hash_algo, seed, [self.hash_block_size, *sizes])
            self.index = PrefixIndex(config.num_blocks, self.keying.key_bytes)
            self.row_keys = RowKeys(self.tokens, self.keying, self.hash_block_size)
            self.book = KeyBook(self.pool, self.index, self.row_keys, sink)
            self.pool.on_evict = self.book.forget
        self.pool.eviction = make_policy(eviction, self.pool, self.index)
        self._invalidations = 0
        self.growth = Growth(
            self.pool, self.groups, self.book, self.num_tokens, self.num_computed, max_model_len
        )
        self._native = self._attach_native(sink)
        self.admission = Admission(self.pool, self.groups, self.growth, self.book)

    def _attach_native(self, sink: CacheSink | None) -> Any:
        """The compiled helper over this manager's arrays, where it can stand in for the NumPy
        code: with SHA-256. Where a sink listens it does whole steps only, and notes what it did;
        not where keys are given before blocks are taken."""
        native = load()
        if native is None:
            return None
        core = make_core(
            native, self.pool, self.groups, self.book,
            self.tokens, self.num_tokens, self.num_computed,
        )  # fmt: skip
        if sink is not None:
            core.listen()
            self.pool.native = None
            if any(group.deferred_keys for group in self.groups):
                return None
        else:
            self.pool.native = core
            if self.index is not None:
                self.index.native = core
        hashed = self.keying is None or self.keying.algorithm == "sha256"
        return core if hashed else None

    # -- sequences and hits ---------------------------------------------------------------------

    def sequence(
        self,
        tokens: ArrayLike,
        *,
        salt: bytes | str | None = None,
        adapter: bytes | str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> TokenSequence:
        """A request's tokens and what else its KV depends on. RequestError for ids that are not
        integers 0 .. 2**31 - 1, no tokens, or more than max_model_len."""
        made = TokenSequence(
            tokens, self.keying, self.hash_block_size, salt=salt, adapter=adapter, media=media
        )
        if not 1 <= len(made) <= self.max_model_len:
            raise RequestError(
                f"a sequence of {len(made)} tokens; 1 to {self.max_model_len} are possible"
            )
        return made

    def find_hit(self, sequence: TokenSequence) -> Hit:
        """The longest prefix whose KV every group still has: whole blocks, at most len - 1
        tokens. No side effects; hashes the sequence's new blocks once. O(blocks)."""
        index = self.index
        if index is None or len(index) == 0 or len(sequence) < 2:
            return self.admission.no_hit(sequence)
        keys = sequence.keys()

        def find(group: Group, num_blocks: int) -> BlockIds:
            ratio = group.block_size // self.hash_block_size
            wanted = keys[: num_blocks * ratio] if ratio == 1 else keys[ratio - 1 :: ratio]
            look = index.find_prefix if group.prefix_closed else index.find
            return look(wanted[:num_blocks], group.group_id)

        common = common_hit(self.groups, find, len(sequence) - 1)
        version = -1 if self.book is None else self.book.version
        return Hit(common.num_tokens, common.entries, sequence, version)

    # -- scheduling -----------------------------------------------------------------------------

    def admit(
        self,
        row: int,
        hit: Hit,
        num_new_tokens: int,
        *,
        lookahead: int = 0,
        reserve_blocks: int = 0,
        full_sequence: bool = False,
        resumed: bool = False,
        request: object = None,
    ) -> None:
        """Put a request into an empty row: its tokens, the hit's blocks, blocks for
        ``num_new_tokens`` more (and ``lookahead``), keys of the blocks these complete; num_computed
        is hit + num_new_tokens afterwards.

        ``reserve_blocks`` must stay available (a watermark); ``full_sequence`` also demands room
        for the whole sequence. Resumed requests do not enter the hit statistics. Raises
        OutOfBlocks, RowError (row in use), BlockStateError (the hit's blocks are gone).
        """
        sequence, done = hit.sequence, hit.num_tokens
        if not 0 <= row < self.max_num_rows or self.num_tokens[row]:
            raise RowError(f"row {row} is in use or outside 0 .. {self.max_num_rows - 1}")
        if num_new_tokens < 1 or done + num_new_tokens > self.max_model_len:
            raise RequestError(
                f"{num_new_tokens} tokens after {done} are outside 1 .. {self.max_model_len}"
            )
        limit = min(done + num_new_tokens + lookahead, self.max_model_len)
        plan = self.admission.plan(
            hit, limit, reserve_blocks, full_sequence, row if request is None else request
        )
        n = len(sequence)
        self.tokens[row, :n] = sequence.tokens
        self.num_tokens[row] = n
        self.num_computed[row] = done + num_new_tokens
        if self.row_keys is not None:
            self.row_keys.load(row, sequence)
        self.admission.fill(row, plan)
        rows = np.array([row])
        self.growth.give_keys(rows, self.num_computed[rows], self.num_tokens[rows])
        self.admission.count(sequence, done, resumed)

    def allocate(
        self,
        rows: RowIds,
        num_new_tokens: int | Ints = 1,
        *,
        lookahead: int | Ints = 0,
        partial: bool = False,
    ) -> int:
        """Blocks and keys for ``num_new_tokens`` more tokens of each running row, in row order;
        num_computed rises by them. Returns len(rows).

        ``lookahead`` positions more get blocks but no keys (drafts). If not all rows fit: raises
        OutOfBlocks with nothing changed, or, with ``partial``, serves the longest leading part
        that fits and returns its length (then the first row that did not fit has released what
        lies outside its window, see oracle rule 7).
        """
        native, book = self._native, self.row_keys
        if native is not None and not self.growth.num_sharing:
            hashers = None if book is None else book.hashers
            plain = book is None or not book.num_media
            fences = self.pool.fencing
            if plain and native.grow(rows, num_new_tokens, lookahead, hashers, fences):
                if self.book is not None and self.book.sink is not None:
                    given, taken = native.heard()
                    self.book.report_steps(given, taken, self.groups)
                return len(rows)
        computed = self.num_computed[rows]
        total = computed + num_new_tokens
        reach = total if type(lookahead) is int and lookahead == 0 else total + lookahead
        at = (reach >= self.growth.due[rows]).nonzero()[0]
        served = len(at)
        if served:
            served = self.growth.serve(rows[at], computed[at], total[at], reach[at], partial)
        if served == len(at):
            self.num_computed[rows] = total
            return len(rows)
        done = int(at[served])
        self.num_computed[rows[:done]] = total[:done]
        return done

    def append_tokens(self, rows: RowIds, token_ids: ArrayLike) -> None:
        """One sampled token for each row. RowError when a row is at max_model_len."""
        if self._native is not None and self._native.append(rows, token_ids):
            return
        at = self.num_tokens[rows]
        try:  # NumPy looks at every index before it writes
            self.tokens[rows, at] = token_ids
        except IndexError:
            raise RowError(
                f"row {rows[int(np.argmax(at))]} already has {self.max_model_len} tokens"
            ) from None
        self.num_tokens[rows] = at + 1

    def append_token_lists(self, rows: RowIds, counts: ArrayLike, token_ids: ArrayLike) -> None:
        """counts[i] tokens for rows[i], concatenated (accepted drafts)."""
        counts, ids = np.asarray(counts, np.int64), np.asarray(token_ids, np.int32)
        at = self.num_tokens[rows]
        if counts.size and ((at + counts).max() > self.max_model_len or counts.min() < 0):
            row = rows[int(np.argmax(at + counts))]
            raise RowError(f"row {row} would have more than {self.max_model_len} tokens")
        if int(counts.sum()) != len(ids):
            raise RowError(f"{len(ids)} tokens cannot be shared out as {counts.tolist()}")
        owner, position = spread(rows, at, counts)
        self.tokens[owner, position] = ids
        self.num_tokens[rows] = at + counts

    def rollback(self, rows: RowIds, num_computed: ArrayLike) -> BlockIds:
        """Rejected drafts, or a step that did not run: num_computed falls to the given values.
        Blocks stay; keys of blocks beyond are withdrawn. Returns blocks whose key was withdrawn
        although another request holds them (admitted on it in the same step)."""
        rows = np.asarray(rows)
        computed = np.broadcast_to(np.asarray(num_computed, np.int32), rows.shape)
        if computed.size and ((computed < 0) | (computed > self.num_computed[rows])).any():
            raise RowError(f"cannot roll back to {computed.tolist()} computed tokens")
        self.num_computed[rows] = computed
        return self.growth.roll_back(rows, computed)

    def truncate(self, rows: RowIds, num_tokens: ArrayLike) -> None:
        """Shorten sequences to ``num_tokens`` (not more than they have). Blocks beyond are
        released with the keys they have (their content stays right); a later write into a shared
        or keyed last block takes a copy or drops the key first."""
        rows = np.asarray(rows)
        keep = np.broadcast_to(np.asarray(num_tokens, np.int32), rows.shape)
        if keep.size and ((keep < 1) | (keep > self.num_tokens[rows])).any():
            raise RowError(f"cannot truncate rows {rows.tolist()} to {keep.tolist()} tokens")
        self.num_tokens[rows] = keep
        self.num_computed[rows] = computed = np.minimum(self.num_computed[rows], keep)
        self.growth.cut(rows, computed)
        if self.row_keys is not None:
            for row, count in zip(rows.tolist(), keep.tolist(), strict=True):
                self.row_keys.truncate(row, count)
        self.growth.share_tails(rows)

    def release(
        self, rows: RowIds, *, num_computed: ArrayLike | None = None, request: object = None
    ) -> BlockIds:
        """Empty the rows; each row's blocks are released tail first, group by group.

        ``num_computed`` are the tokens whose KV was really computed, where the last step
        scheduled did not run: keys beyond are withdrawn first (returned as in `rollback`).
        """
        rows = np.asarray(rows)
        orphans = rows[:0].astype(np.int32)
        if num_computed is not None:
            orphans = self.rollback(rows, num_computed)
        self.growth.give_deferred_keys(rows, self.num_computed[rows])
        self.growth.release_rows(rows, request)
        if self.row_keys is not None:
            self.row_keys.clear(rows)
        self.num_tokens[rows] = 0
        self.num_computed[rows] = 0
        return orphans

    # -- steps, cache, figures ------------------------------------------------------------------

    def begin_step(self) -> StepId:
        """The step is launched: blocks released from now on are fenced until it has ended."""
        if self.host_pool is not None:
            self.host_pool.begin_step()
        self._settle()
        return self.pool.begin_step()

    def end_step(self, step: int) -> None:
        """The step is done on the device."""
        self.pool.end_step(step)
        if self.host_pool is not None:
            self.host_pool.end_step(step)

    def import_blocks(
        self, sequence: TokenSequence, group: int, first: int, blocks: BlockIds
    ) -> None:
        """Blocks taken from the pool got the KV of blocks ``first``, ``first + 1``, ... of a
        sequence from elsewhere (block transfer): they can be hit from now on. The caller still owns
        them. ConfigError without the prefix cache or for another block size than the hashing's."""
        target = self.groups[group]
        if self.book is None or target.block_size != self.hash_block_size:
            raise ConfigError(f"group {group} cannot take blocks that were computed elsewhere")
        if len(blocks):
            self.book.adopt(target, sequence, first, blocks)

    def reset_prefix_cache(self) -> bool:
        """Drop all keys. Refused (False) while any block is in use or fenced."""
        if self.pool.available != self.pool.usable:
            return False
        if self.book is not None:
            self.book.clear()
        else:
            self.admission.cleared += 1
        return True

    def invalidate_prefix_cache(self) -> None:
        """Weights changed: all keys go at once, and rows running now get no further ones."""
        self._invalidations += 1
        if self.book is not None:
            self.book.clear()
            self.growth.stop_keys(np.flatnonzero(self.num_tokens))

    def block_runs(self, row: int, group: int = 0) -> Runs:
        """How contiguous a row's blocks are (nulls included as runs of their own)."""
        table = self.tables[group]
        return block_runs(table.rows[row, : table.counts[row]])

    def stats(self) -> CacheStats:
        """Counters and pool counts. O(cached blocks), for the distinct keys."""
        return self.admission.stats(self.book)

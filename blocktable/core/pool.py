"""The block pool: who owns each block, and the only place where that changes.

::

    free ----take----> owned (ref >= 1) ----release, ref 0----> fenced (while steps are in flight)
     ^                  ^        ^                                |            |
     |                  |        +------------- touch -----------+            |
     |                  +---- touch (a hit) ---- evictable <---- it has a key -+
     +------------- its key is taken away -------+ |                          |
     +---------------------------------------------|------ it has no key -----+
                        take (eviction: the key is dropped first) -> owned

``available`` = free + evictable, and used + available + fenced = usable = num_blocks - 1.

Everything is an array over block ids, in pages the system hands out when they are first touched:
building a pool of four million blocks costs no more than asking for address space. Blocks never
used are kept as one number (all ids from ``fresh`` on); returned ones lie on a stack whose top is
sorted when many are taken at a time, so that a prompt's ids come out in ascending runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from blocktable.core.errors import BlockStateError, ConfigError, OutOfBlocks
from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.types import NULL_BLOCK, BlockIds, StepId

FREE, OWNED, FENCED, EVICTABLE = 0, 1, 2, 3
STATE_NAMES = ("free", "owned", "fenced", "evictable")
TOP, FRESH, USED, FENCED_COUNT, PUSHED = range(5)
SORT_FROM = 32  # taking fewer blocks than this at a time never sorts the free stack
_NO_BLOCKS = np.zeros(0, np.int32)
_INT32_MAX = 2**31 - 1


def _block_ids(blocks: ArrayLike) -> BlockIds:
    """Block ids as int32 [n]; BlockStateError for what would become another block by rounding or
    by wrapping round. The array itself where it is one."""
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.int32:
        return blocks if blocks.ndim == 1 and blocks.flags.c_contiguous else blocks.ravel()
    found = np.asarray(blocks).reshape(-1)
    if found.size == 0:
        return _NO_BLOCKS
    if found.dtype.kind not in "iu":
        raise BlockStateError(f"block ids must be integers, got {found[0]!r}")
    if found.min() < 0 or found.max() > _INT32_MAX:
        bad = found[(found < 0) | (found > _INT32_MAX)][0]
        raise BlockStateError(f"block {bad} is outside of every pool")
    return found.astype(np.int32)


def _number_of_blocks(count: object) -> int:
    """``count`` where it is a NumPy integer >= 0; BlockStateError for anything else."""
    if isinstance(count, np.integer) and count >= 0:
        return int(count)
    raise BlockStateError(f"the number of blocks must be an integer >= 0, got {count!r}")


class PoolCounts(NamedTuple):
    """Blocks in each state; used + available + fenced = usable, available = free + evictable."""

    usable: int
    used: int
    free: int
    evictable: int
    fenced: int

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return self.free + self.evictable


class BlockPool:
    """Ownership of ``num_blocks`` blocks, block 0 (null) reserved.

    Taking, touching and releasing k blocks costs O(k) with vector operations, amortised. A call
    that raises has changed nothing. Null entries in a list are skipped. A block listed twice in
    one call counts twice.

    ``eviction`` orders the cached blocks nobody holds (`LRUQueue` by default); ``on_evict`` is
    called with the blocks whose keys must be dropped before they are handed out.

    Arrays for readers: ``ref`` int32, ``state`` uint8 (FREE, OWNED, FENCED, EVICTABLE), ``keyed``
    bool, each [num_blocks].
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        eviction: EvictionPolicy | None = None,
        on_evict: Callable[[BlockIds], None] | None = None,
    ) -> None:
        whole = isinstance(num_blocks, (int, np.integer)) and not isinstance(num_blocks, bool)
        if not (whole and 2 <= num_blocks <= _INT32_MAX):
            raise ConfigError(f"num_blocks is {num_blocks!r}; a pool has 2 to 2**31 - 1 blocks")
        self.num_blocks = int(num_blocks)
        self.ref = np.zeros(num_blocks, np.int32)
        self.state = np.zeros(num_blocks, np.uint8)
        self.keyed = np.zeros(num_blocks, np.bool_)
        self.place = np.zeros(num_blocks, np.int32)  # queue slot, or -2 - epoch of a fence
        self.stack = np.zeros(num_blocks, np.int32)  # returned blocks; the top is handed out first
        self.scalars = np.zeros(5, np.int64)
        self.scalars[FRESH] = 1
        self.eviction: EvictionPolicy = (
            LRUQueue(num_blocks, self.place) if eviction is None else eviction
        )
        self.on_evict = on_evict
        self.num_static = 0  # blocks held for good, see hold_static
        self.native: Any = None  # compiled helper over these arrays, when there is one
        self._last_step = 0
        self._in_flight: deque[int] = deque()
        self._fences: deque[tuple[int, BlockIds]] = deque()

    # -- counts ---------------------------------------------------------------------------------

    @property
    def usable(self) -> int:
        """Blocks that requests can have: all but the null block and static ones."""
        return self.num_blocks - 1 - self.num_static

    @property
    def used(self) -> int:
        """Blocks with a reference, static ones left out."""
        return int(self.scalars[USED]) - self.num_static

    @property
    def fenced(self) -> int:
        """Released blocks that a step in flight may still touch."""
        return int(self.scalars[FENCED_COUNT])

    @property
    def evictable(self) -> int:
        """Cached blocks nobody holds."""
        return len(self.eviction)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now (free + evictable)."""
        s = self.scalars
        return self.num_blocks - 1 - int(s[USED]) - int(s[FENCED_COUNT])

    @property
    def free(self) -> int:
        """Available blocks without a key."""
        return int(self.scalars[TOP]) + self.num_blocks - int(self.scalars[FRESH])

    def counts(self) -> PoolCounts:
        """All counts at one moment."""
        return PoolCounts(self.usable, self.used, self.free, self.evictable, self.fenced)

    def hold_static(self, count: int) -> BlockIds:
        """Take blocks that stay owned for good and count as neither usable nor used (the KV of
        attention sinks, which is the model's own). Raises OutOfBlocks."""
        blocks = self.take(count, request="attention sinks")
        self.num_static += count
        return blocks

    # -- take -----------------------------------------------------------------------------------

    def take(self, count: int, *, request: object = None, held: int = 0) -> BlockIds:
        """Hand out ``count`` blocks, each with one reference: returned ones first, then never
        used ones, then evicted ones. Raises OutOfBlocks (``request`` and ``held`` go into it), and
        BlockStateError for what is no number of blocks."""
        if count.__class__ is not int or count < 0:
            count = _number_of_blocks(count)
        if count > self.available:
            raise OutOfBlocks(
                request, held=held, needed=count, available=self.available, fenced=self.fenced
            )
        if count == 0:
            return _NO_BLOCKS
        if self.native is not None:
            taken = np.empty(count, np.int32)
            if self.native.take(taken):
                return taken
        blocks = self._take_unkeyed(count)
        if len(blocks) < count:
            victims = self._evict(count - len(blocks))
            blocks = victims if len(blocks) == 0 else np.concatenate([blocks, victims])
        self.state[blocks] = OWNED
        self.ref[blocks] = 1
        self.scalars[USED] += count
        return blocks

    def _take_unkeyed(self, count: int) -> BlockIds:
        top, fresh = int(self.scalars[TOP]), int(self.scalars[FRESH])
        if count >= SORT_FROM and self.scalars[PUSHED] >= SORT_FROM:
            self._sort_top(count)
        old = min(top, count)
        new = min(count - old, self.num_blocks - fresh)
        if old:
            self.scalars[TOP] = top - old
            blocks = self.stack[top - old : top][::-1].copy()
            if new == 0:
                return blocks
        else:
            blocks = _NO_BLOCKS
        if new == 0:
            return blocks
        self.scalars[FRESH] = fresh + new
        unused = np.arange(fresh, fresh + new, dtype=np.int32)
        return unused if old == 0 else np.concatenate([blocks, unused])

    def _sort_top(self, count: int) -> None:
        """Put the top of the stack in order, in proportion to what was pushed and is taken."""
        top = int(self.scalars[TOP])
        window = self.stack[max(0, top - 2 * (int(self.scalars[PUSHED]) + count)) : top]
        window[::-1].sort()  # descending upwards: the smallest id is handed out first
        self.scalars[PUSHED] = 0

    def _evict(self, count: int) -> BlockIds:
        victims = self.eviction.pop(count)
        if self.on_evict is not None:
            self.on_evict(victims)
        self.keyed[victims] = False
        return victims

    # -- touch and release ----------------------------------------------------------------------

    def touch(self, blocks: BlockIds) -> None:
        """Add one reference to each block; a cached block nobody holds becomes owned, a fenced
        one with a key too. Raises BlockStateError for a block that is free."""
        blocks = _block_ids(blocks)
        if self.native is not None and self.native.touch(blocks):
            return
        blocks = self._live_ids(blocks)
        if blocks.size == 0:
            return
        state = self.state[blocks]
        idle = state != OWNED
        if np.count_nonzero(idle):
            self._check_touch(blocks, state)
        refs = self.ref[blocks]
        order = np.arange(len(blocks), dtype=np.int32)
        self.ref[blocks] = order  # each block holds its own number, unless it is named twice
        repeats = bool(np.count_nonzero(self.ref[blocks] != order))
        self.ref[blocks] = refs
        if np.count_nonzero(idle):
            waking = blocks[idle]
            if repeats:
                waking = np.unique(waking)
            fenced = self.state[waking] == FENCED
            queued = waking[~fenced]
            self.eviction.remove(queued)
            self.place[waking[fenced]] = -1
            self.scalars[FENCED_COUNT] -= len(waking) - len(queued)
            self.scalars[USED] += len(waking)
            self.state[waking] = OWNED
        if repeats:
            np.add.at(self.ref, blocks, 1)
        else:
            self.ref[blocks] = refs + 1

    def _check_touch(self, blocks: BlockIds, state: np.ndarray) -> None:
        bad = (state == FREE) | (state == FENCED) & ~self.keyed[blocks]
        if bad.any():
            at = int(np.argmax(bad))
            raise BlockStateError(
                f"block {blocks[at]} is {STATE_NAMES[state[at]]}: it has no content to share"
            )

    def _live_ids(self, blocks: BlockIds) -> BlockIds:
        blocks = _block_ids(blocks)
        if blocks.size and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            bad = blocks[(blocks < 0) | (blocks >= self.num_blocks)][0]
            raise BlockStateError(f"block {bad} is outside a pool of {self.num_blocks} blocks")
        live = blocks != NULL_BLOCK
        return blocks if live.all() else blocks[live]

    def release(self, blocks: BlockIds, *, request: object = None) -> None:
        """Drop one reference of each block, in this order (a request's tail first).

        Those that reach zero wait for the steps in flight, then join the eviction order if they
        have a key, else the free stack. Raises BlockStateError on a double release.
        """
        blocks = _block_ids(blocks)
        if self.native is not None and not self._in_flight and self.native.release(blocks):
            return
        blocks = self._live_ids(blocks)
        if blocks.size == 0:
            return
        if (self.state[blocks] != OWNED).any():
            bad = blocks[self.state[blocks] != OWNED][0]
            raise self._double(int(bad), request)
        order = np.arange(len(blocks), dtype=np.int32)
        self.place[blocks] = order  # owned blocks have no place: room to find repeats
        repeats = bool((self.place[blocks] != order).any())
        self.place[blocks] = -1
        if repeats:
            blocks = self._release_repeats(blocks, request)
        else:
            left = self.ref[blocks] - 1
            self.ref[blocks] = left
            if left.any():
                blocks = blocks[left == 0]
        self.scalars[USED] -= len(blocks)
        self._retire(blocks)

    def _release_repeats(self, blocks: BlockIds, request: object) -> BlockIds:
        # A block goes when it is named last: rows that share it release it one after another.
        ids, from_end, times = np.unique(blocks[::-1], return_index=True, return_counts=True)
        if (times > self.ref[ids]).any():
            raise self._double(int(ids[times > self.ref[ids]][0]), request)
        self.ref[ids] -= times.astype(np.int32)
        gone = self.ref[ids] == 0
        return blocks[np.sort(len(blocks) - 1 - from_end[gone])]

    def _double(self, block: int, request: object) -> BlockStateError:
        holder = "" if request is None else f" by request {request!r}"
        return BlockStateError(
            f"block {block} is released{holder} more often than it is held "
            f"(it is {STATE_NAMES[self.state[block]]} with {self.ref[block]} references)"
        )

    def _retire(self, blocks: BlockIds) -> None:
        """Blocks whose last reference went: behind the fence, or straight back."""
        if blocks.size == 0:
            return
        if self._in_flight:
            epoch = self._in_flight[-1]
            self.state[blocks] = FENCED
            self.place[blocks] = -2 - epoch % (1 << 30)
            self.scalars[FENCED_COUNT] += len(blocks)
            self._fences.append((epoch, blocks))
        else:
            self._recycle(blocks)

    def _recycle(self, blocks: BlockIds) -> None:
        keyed = self.keyed[blocks]
        if keyed.all():
            self.state[blocks] = EVICTABLE
            self.eviction.push(blocks)
            return
        if keyed.any():
            cached = blocks[keyed]
            self.state[cached] = EVICTABLE
            self.eviction.push(cached)
            blocks = blocks[~keyed]
        self.state[blocks] = FREE
        self._push_free(blocks)

    def _push_free(self, blocks: BlockIds) -> None:
        top, count = int(self.scalars[TOP]), len(blocks)
        self.stack[top : top + count] = blocks
        self.scalars[TOP] = top = top + count
        self.scalars[PUSHED] += count

    # -- keys -----------------------------------------------------------------------------------

    def mark_keyed(self, blocks: BlockIds) -> None:
        """These owned blocks now carry a key (the index has it)."""
        self.keyed[blocks] = True

    def unkey(self, blocks: BlockIds) -> None:
        """These blocks' keys were taken out of the index; cached ones become free."""
        blocks = self._live_ids(blocks)
        idle = blocks[self.state[blocks] == EVICTABLE]
        self.keyed[blocks] = False
        if idle.size:
            self.eviction.forget(idle)
            self.state[idle] = FREE
            self._push_free(idle[::-1])

    def forget_keys(self) -> None:
        """No block carries a key any more: cached blocks become free, in their order. O(N)."""
        idle = self.eviction.order()
        self.eviction.forget(idle)
        self.keyed.fill(False)
        self.state[idle] = FREE
        self._push_free(idle[::-1])

    # -- fences ---------------------------------------------------------------------------------

    def begin_step(self) -> StepId:
        """A step is launched: blocks released from now on wait until it has ended."""
        self._last_step += 1
        self._in_flight.append(self._last_step)
        return StepId(self._last_step)

    def end_step(self, step: int) -> None:
        """The step is done on the device. Blocks whose every step in flight is done come back, in
        the order they were released. Raises BlockStateError for a step not in flight."""
        if step not in self._in_flight:
            raise BlockStateError(
                f"step {step} is not in flight (in flight: {list(self._in_flight)})"
            )
        self._in_flight.remove(step)
        oldest = self._in_flight[0] if self._in_flight else self._last_step + 1
        while self._fences and self._fences[0][0] < oldest:
            epoch, blocks = self._fences.popleft()
            blocks = blocks[self.place[blocks] == -2 - epoch % (1 << 30)]
            blocks = blocks[self.state[blocks] == FENCED]
            self.place[blocks] = -1
            self.scalars[FENCED_COUNT] -= len(blocks)
            if blocks.size:
                self._recycle(blocks)

    @property
    def steps_begun(self) -> int:
        """Steps begun since construction."""
        return self._last_step

    @property
    def fencing(self) -> bool:
        """Whether released blocks must wait for a step in flight."""
        return bool(self._in_flight)

    @property
    def steps_in_flight(self) -> tuple[int, ...]:
        """Steps begun and not ended, oldest first."""
        return tuple(self._in_flight)

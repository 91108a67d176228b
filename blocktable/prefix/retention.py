"""Hints that some cached prefixes will be needed again, or will not.

::

    given up first                                                    last
    expired by the caller | the policy's own order | priority 1 | ... | 4

A hint only moves a block in the order of eviction: every cached block nobody holds can still be
given up, so hints cannot keep a request out. Kept blocks are bounded by a share of the pool.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.types import BlockIds
from blocktable.prefix.index import PrefixIndex

PRIORITIES = 4
EXPIRED, PLAIN = 0, -1

Deadlines = list[tuple[float, int, BlockIds]]


class RetainingQueue:
    """An eviction order around another one. O(1) a block, amortised; one small object a hint.

    A hint belongs to a block's content: it goes with the key. ``limit`` blocks can be kept.
    ``keyed`` bool [num_blocks] are the pool's blocks with a key; ``steps`` tells how many steps
    have begun, ``clock`` the time in seconds.
    """

    def __init__(
        self,
        inner: EvictionPolicy,
        index: PrefixIndex,
        keyed: NDArray[np.bool_],
        limit: int,
        steps: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        count = index.num_blocks
        self.inner, self.limit = inner, limit
        self._index, self._keyed, self._now = index, keyed, (clock, steps)
        self._queues = [LRUQueue(count) for _ in range(PRIORITIES + 1)]
        self._of = np.full(count, PLAIN, np.int8)  # the queue of each block that stands in one
        self._word = np.zeros(count, np.uint64)  # of the key the hint is for; 0 = no hint
        self._priority = np.zeros(count, np.uint8)
        self._ticket = np.zeros(count, np.int64)  # of the block's last hint
        self._until = np.zeros(count)  # seconds on the clock at which a kept block's hint ends
        self._deadlines: tuple[Deadlines, Deadlines] = ([], [])  # heaps: seconds, steps
        self._tickets = 0
        self._hints = self._kept = 0

    def __len__(self) -> int:
        return len(self.inner) + sum(map(len, self._queues))

    # -- the policy's calls ---------------------------------------------------------------------

    def push(self, blocks: BlockIds) -> None:
        """These blocks became evictable, in this order."""
        hinted = self._word[blocks] != 0
        if hinted.any():
            self._drop(blocks[hinted & ~self._holds(blocks)])
            hinted = self._word[blocks] != 0
        self._stand(blocks[~hinted], PLAIN)
        for level in np.unique(self._priority[blocks[hinted]]).tolist():
            self._stand(blocks[hinted & (self._priority[blocks] == level)], level)

    def remove(self, blocks: BlockIds) -> None:
        """These blocks were hit: they stay kept, and are not expired any more."""
        plain = self._take_out(blocks)
        self._drop(blocks[self._priority[blocks] == 0])
        if plain.size:
            self.inner.remove(plain)

    def forget(self, blocks: BlockIds) -> None:
        """These blocks lost their key, and their hints with it."""
        plain = self._take_out(blocks)
        if plain.size:
            self.inner.forget(plain)
        self._drop(blocks)

    def pop(self, count: int) -> BlockIds:
        """Give up ``count`` blocks, kept ones when nothing else is left."""
        self.sweep()
        parts: list[BlockIds] = [np.zeros(0, np.int32)]
        for queue in (self._queues[EXPIRED], self.inner, *self._queues[1:]):
            some = min(count, len(queue))
            if some:
                parts.append(queue.pop(some))
                count -= some
        victims = np.concatenate(parts)
        self._of[victims] = PLAIN
        self._drop(victims)
        return victims

    def order(self) -> BlockIds:
        """All blocks in the order they would be given up, hints due ignored. O(size)."""
        queues = (self._queues[EXPIRED], self.inner, *self._queues[1:])
        return np.concatenate([queue.order() for queue in queues])

    # -- hints ----------------------------------------------------------------------------------

    @property
    def kept(self) -> int:
        """Blocks with a priority, in use or not. O(N)."""
        self.sweep()
        self._recount()
        return self._kept

    @property
    def idle(self) -> bool:
        """No hint is left: the inner order is the whole order."""
        self.sweep()
        return self._hints == 0

    def keep(self, blocks: BlockIds, priority: int, seconds: float | None, steps: int | None,
             waiting: BlockIds) -> int:  # fmt: skip
        """Keep these keyed blocks (the first of them where there is not room for all) until the
        first deadline; those in ``waiting`` are evictable. Returns how many."""
        self.sweep()
        fresh = ~(self._holds(blocks) & (self._priority[blocks] > 0))
        if self._kept + np.count_nonzero(fresh) > self.limit:
            self._recount()
        room = self.limit - self._kept
        blocks = blocks[np.cumsum(fresh) <= room]
        idle = blocks[np.isin(blocks, waiting)][::-1]  # the end of a chain goes first
        self._withdraw(idle)
        self._drop(blocks)
        self._word[blocks], self._priority[blocks] = self._index.words[blocks, 0], priority
        self._kept += len(blocks)
        self._hints += len(blocks)
        self._tickets += 1
        self._ticket[blocks] = self._tickets
        self._until[blocks] = np.inf if seconds is None else self._now[0]() + seconds
        self._stand(idle, priority)
        for heap, now, lasts in zip(self._deadlines, self._now, (seconds, steps), strict=True):
            if lasts is not None and len(blocks):
                heapq.heappush(heap, (now() + lasts, self._tickets, blocks))
                self._shorten(heap)
        return len(blocks)

    def stronger(self, blocks: BlockIds, priority: int, seconds: float) -> NDArray[np.bool_]:
        """Which blocks are kept already at a higher priority, or at this one for longer."""
        self.sweep()
        kept = self._holds(blocks) & (self._priority[blocks] > 0)
        own = self._priority[blocks]
        longer = self._until[blocks] >= self._now[0]() + seconds
        return kept & ((own > priority) | (own == priority) & longer)

    def loosen(self, blocks: BlockIds, waiting: BlockIds) -> int:
        """Take these blocks' hints away; they join the inner order as if released now."""
        had = blocks[self._holds(blocks)]
        idle = had[np.isin(had, waiting) & (self._of[had] != PLAIN)][::-1]
        self._withdraw(idle)
        self._drop(had)
        self._stand(idle, PLAIN)
        return len(had)

    def expire(self, blocks: BlockIds, waiting: BlockIds) -> int:
        """These blocks are not needed again: they go first, now or when they are released."""
        idle = blocks[np.isin(blocks, waiting)][::-1]
        self._withdraw(idle)
        self._drop(blocks)
        self._word[blocks] = self._index.words[blocks, 0]  # with priority 0
        self._hints += len(blocks)
        self._stand(idle, EXPIRED)
        return len(blocks)

    def sweep(self) -> None:
        """Loosen what is due."""
        for heap, now in zip(self._deadlines, self._now, strict=True):
            while heap and heap[0][0] <= now():
                _, ticket, blocks = heapq.heappop(heap)
                blocks = blocks[self._ticket[blocks] == ticket]
                self.loosen(blocks, blocks[self._of[blocks] != PLAIN])

    # -- inside ---------------------------------------------------------------------------------

    def _shorten(self, heap: Deadlines) -> None:
        """Drop deadlines that later hints replaced, where they have become many: no more are kept
        than twice the kept blocks. O(1) a hint, amortised."""
        if len(heap) <= 2 * self._kept + 64:
            return
        heap[:] = [entry for entry in heap if (self._ticket[entry[2]] == entry[1]).any()]
        heapq.heapify(heap)

    def _holds(self, blocks: BlockIds) -> NDArray[np.bool_]:
        """Which blocks carry a hint for the content they have now."""
        word = self._word[blocks]
        return (word != 0) & (word == self._index.words[blocks, 0]) & self._keyed[blocks]

    def _stand(self, blocks: BlockIds, level: int) -> None:
        if blocks.size:
            (self.inner if level == PLAIN else self._queues[level]).push(blocks)
            self._of[blocks] = level

    def _take_out(self, blocks: BlockIds) -> BlockIds:
        """Take queued blocks out of this order's own queues; returns those of the inner one."""
        at = self._of[blocks]
        for level in np.unique(at[at != PLAIN]).tolist():
            self._queues[level].remove(blocks[at == level])
        self._of[blocks] = PLAIN
        return blocks[at == PLAIN]

    def _withdraw(self, blocks: BlockIds) -> None:
        plain = self._take_out(blocks)
        if plain.size:
            self.inner.forget(plain)

    def _drop(self, blocks: BlockIds) -> None:
        had = self._word[blocks] != 0
        self._hints -= int(np.count_nonzero(had))
        self._kept -= int(np.count_nonzero(had & (self._priority[blocks] > 0)))
        self._word[blocks] = 0
        self._priority[blocks] = 0
        self._ticket[blocks] = 0

    def _recount(self) -> None:
        """Drop hints whose content is gone (its key was taken while the block was in use). O(N)."""
        hinted = np.flatnonzero(self._word).astype(np.int32)
        self._drop(hinted[~self._holds(hinted)])

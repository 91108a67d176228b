"""Eviction orders other than plain least recently used, and their names.

`ReuseQueue` ("reuse") learns from the traffic what a cached block is worth. Blocks fall into
classes: were they hit before, and how much of the prompt they were last used in was a hit (a
conversation that went on once mostly goes on again; one that only shares a system prompt with
others often does not). Within a class the oldest goes first, as in LRU; between classes, the one
whose oldest block has the lowest hit density (``density.py``) gives up a block. Evicted keys are
remembered for a while (``ghosts.py``), so that the policy sees hits it missed by evicting too
early: that is what LRU cannot see when a conversation's next turn comes just after its blocks are
gone. Where LRU would have had more of the recent hits, LRU it is (``duel.py``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds
from blocktable.prefix.density import HitDensity
from blocktable.prefix.ghosts import Ghosts, GhostTable
from blocktable.prefix.index import PrefixIndex

POLICIES = ("lru", "reuse")
HIT_SHARES = np.array([0.3, 0.75])  # of a prompt, where the next class begins
SHARES = len(HIT_SHARES) + 1
SPENT = 2 * SHARES  # the class of old copies
RUN = 16  # blocks given up between two comparisons of the classes


def make_policy(name: str, pool: BlockPool, index: PrefixIndex | None) -> EvictionPolicy:
    """The policy of this name for a pool; ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    if name == "reuse" and index is not None:
        return ReuseQueue(pool.num_blocks, index)
    return LRUQueue(pool.num_blocks, pool.place)


class ReuseQueue:
    """Least hit density first. About 400 bytes a block, ghosts included; O(1) a block, amortised.

    Time is counted in blocks released. All state is in arrays; equal calls give equal orders.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._queues = [LRUQueue(num_blocks) for _ in range(SPENT + 1)]
        self._of = np.full(num_blocks, -1, np.int8)  # class each queued block stands in
        self._hits = np.zeros(num_blocks, np.uint8)
        self._known = np.zeros(num_blocks, np.bool_)  # was queued with its present content
        self._born = np.zeros(num_blocks, np.int64)
        self._ghosts = GhostTable(num_blocks)
        self._density = HitDensity(SPENT, num_blocks)
        self._sample = 4 if num_blocks >= 4096 else 1  # of the blocks, what a ranking looks at
        self._period = max(256, num_blocks // 8)
        self._clock, self._next_rank = 0, self._period

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    # -- the policy's calls ---------------------------------------------------------------------

    def push(self, blocks: BlockIds) -> None:
        """These blocks became evictable, in this order."""
        fresh = blocks[~self._known[blocks]]
        if fresh.size:
            self._meet_ghosts(fresh)
            self._meet_copies(fresh)
        self._known[blocks] = True
        self._born[blocks] = self._clock + np.arange(len(blocks))
        self._clock += len(blocks)
        which = class_of(self._hits[blocks])
        self._of[blocks] = which
        for number, queue in enumerate(self._queues[:SPENT]):
            mine = blocks[which == number]
            if mine.size:
                queue.push(mine)
        if self._clock >= self._next_rank:
            self._rank()
            self._next_rank = self._clock + self._period

    def remove(self, blocks: BlockIds) -> None:
        """These blocks were hit."""
        self._learn_hits(blocks)
        self._take_out(blocks)

    def forget(self, blocks: BlockIds) -> None:
        """These blocks lost their key: what is known of their content goes too."""
        self._take_out(blocks)
        self._known[blocks] = False

    def pop(self, count: int) -> BlockIds:
        """Give up ``count`` blocks."""
        parts: list[BlockIds] = [np.zeros(0, np.int32)]
        while count:
            number = self._cheapest()
            queue = self._queues[number]
            some = queue.pop(min(count, RUN, len(queue)))
            if number != SPENT:
                self._remember(some)
            self._known[some] = False
            self._of[some] = -1
            parts.append(some)
            count -= len(some)
        return np.concatenate(parts)

    def order(self) -> BlockIds:
        """All blocks, class by class, oldest first. O(size)."""
        return np.concatenate([queue.order() for queue in self._queues])

    # -- what it knows --------------------------------------------------------------------------

    def _take_out(self, blocks: BlockIds) -> None:
        which = self._of[blocks]
        for number, queue in enumerate(self._queues):
            mine = blocks[which == number]
            if mine.size:
                queue.remove(mine)
        self._of[blocks] = -1

    def _cheapest(self) -> int:
        if len(self._queues[SPENT]):
            return SPENT
        best, lowest, lru = 0, np.inf, self._density.duel.lru
        for number, queue in enumerate(self._queues[:SPENT]):
            if len(queue):
                born = int(self._born[queue.peek()])
                worth = born if lru else self._density.of(number, self._clock - born)
                if worth < lowest:
                    best, lowest = number, worth
        return best

    def _learn_hits(self, blocks: BlockIds) -> None:
        which, hits = self._of[blocks], self._hits[blocks]
        used = which < SPENT
        self._density.learn_hits(which[used], self._clock - self._born[blocks[used]])
        self._hits[blocks] = hits + (hits < 255)

    def _remember(self, blocks: BlockIds) -> None:
        known = Ghosts(self._born[blocks], self._of[blocks], self._hits[blocks])
        lost = self._ghosts.remember(self._index.words[blocks, 0], known)
        self._density.learn_lost(lost.kind, self._clock - lost.born)

    def _meet_ghosts(self, blocks: BlockIds) -> None:
        """New content that was here before: a hit that was missed."""
        met, known = self._ghosts.meet(self._index.words[blocks, 0])
        self._density.learn_hits(known.kind, self._clock - known.born)
        self._hits[blocks] = 0
        self._hits[blocks[met]] = known.hits + (known.hits < 255)

    def _meet_copies(self, blocks: BlockIds) -> None:
        """New copies of content that is still queued (its chain was broken before it): the old
        copy was hit in all but name, and is the next to be given up."""
        keys = self._index.keys_of(blocks)
        old = np.zeros(len(blocks), np.int32)
        groups = self._index.group[blocks]
        for group in np.unique(groups):
            mine = groups == group
            old[mine] = self._index.find(keys[mine], int(group))
        copied = (old != blocks) & (self._of[old] >= 0) & (self._of[old] < SPENT)
        blocks, (old, first) = blocks[copied], np.unique(old[copied], return_index=True)
        self._learn_hits(old)
        self._hits[blocks[first]] = self._hits[old]
        self._take_out(old)
        self._of[old] = SPENT
        self._queues[SPENT].push(old)

    def _rank(self) -> None:
        every = self._sample
        some = np.arange(self._clock % every, len(self._of), every)
        queued = some[(self._of[some] >= 0) & (self._of[some] < SPENT)]
        ghosts = self._ghosts.sample(every)
        kinds = np.concatenate([self._of[queued], ghosts.kind])
        born = np.concatenate([self._born[queued], ghosts.born])
        self._density.rank(kinds, self._clock - born, len(queued), every)


def class_of(hits: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Class of each block of some rows, released tail first one row after another, by how often
    they were hit: (hit before) x (share of the row's blocks that were). Where blocks never hit
    follow ones that were, another row begins."""
    was_hit = hits > 0
    starts = np.concatenate([[False], was_hit[:-1] & ~was_hit[1:]])
    row = np.cumsum(starts)
    share = np.bincount(row, was_hit) / np.bincount(row)
    part = np.searchsorted(HIT_SHARES, share[row], side="right")
    return (was_hit * SHARES + part).astype(np.int8)

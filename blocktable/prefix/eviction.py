"""Eviction orders other than plain least recently used, and their names.

`ReuseQueue` ("reuse") learns from the traffic what a cached block is worth. Blocks fall into
classes: were they hit before, and how much of the prompt they were last used in was a hit (a
conversation that went on once mostly goes on again; one that only shares a system prompt with
others often does not). Within a class the oldest goes first, as in LRU; between classes, the one
whose oldest block has the lowest hit density (``density.py``) gives up a block. Evicted keys are
remembered for a while (``ghosts.py``), so that the policy sees hits it missed by evicting too
early: that is what LRU cannot see when a conversation's next turn comes just after its blocks are
gone. All this decides only while it has more hits than LRU would have (``duel.py``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds
from blocktable.prefix.classes import NOBODY, ClassQueues
from blocktable.prefix.density import HitDensity
from blocktable.prefix.duel import RUN, Duel
from blocktable.prefix.ghosts import Ghosts, GhostTable
from blocktable.prefix.imagined import Used
from blocktable.prefix.index import PrefixIndex

POLICIES = ("lru", "reuse")
HIT_SHARES = np.array([0.3, 0.75])  # of a prompt, where the next class begins
SHARES = len(HIT_SHARES) + 1
CLASSES = 2 * SHARES


def make_policy(name: str, pool: BlockPool, index: PrefixIndex | None) -> EvictionPolicy:
    """The policy of this name for a pool; ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    if name == "reuse" and index is not None:
        return ReuseQueue(pool.num_blocks, index)
    return LRUQueue(pool.num_blocks, pool.place)


class ReuseQueue:
    """Least hit density first, where that beats LRU. About 400 bytes a block, ghosts included,
    beside the duel's; O(1) a block, amortised.

    Time is counted in blocks released. All state is in arrays; equal calls give equal orders.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._queues = ClassQueues(num_blocks, CLASSES)
        self._spent = LRUQueue(num_blocks)  # old copies: they go first
        self._hits = np.zeros(num_blocks, np.uint8)
        self._known = np.zeros(num_blocks, np.bool_)  # was queued with its present content
        self._ghosts = GhostTable(num_blocks)
        self._density = HitDensity(CLASSES, num_blocks)
        self._duel = Duel(num_blocks, CLASSES)
        self._room = num_blocks  # for the blocks here when the last ones were taken
        self._sample = 4 if num_blocks >= 4096 else 1  # of the blocks, what a ranking looks at
        self._period = max(256, num_blocks // 8)
        self._clock, self._next_rank = 0, self._period

    def __len__(self) -> int:
        return len(self._queues) + len(self._spent)

    # -- the policy's calls ---------------------------------------------------------------------

    def push(self, blocks: BlockIds) -> None:
        """These blocks became evictable, in this order."""
        fresh = blocks[~self._known[blocks]]
        if fresh.size:
            self._meet_ghosts(fresh)
            self._meet_copies(fresh)
        self._known[blocks] = True
        born = self._clock + np.arange(len(blocks))
        self._clock += len(blocks)
        row, kind = classify(self._hits[blocks])
        self._queues.push(blocks, kind, born)
        used = Used(self._index.words[blocks, -1], row, kind, born)
        self._duel.use(used, self._room, self._worth)
        self._room = len(self._hits)
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
        parts = [self._spent.pop(min(count, len(self._spent)))]
        count -= len(parts[0])
        worth, run = (None, count) if self._duel.lru else (self._worth, RUN)
        while count:
            some = self._queues.pop(min(count, run), worth)
            self._remember(some)
            self._queues.of[some] = NOBODY
            parts.append(some)
            count -= len(some)
        gone = np.concatenate(parts)
        self._known[gone] = False
        self._room = min(self._room, len(self))
        return gone

    def order(self) -> BlockIds:
        """All blocks, as they would go if LRU were followed. O(size)."""
        return np.concatenate([self._spent.order(), self._queues.order()])

    # -- what it knows --------------------------------------------------------------------------

    def _worth(self, number: int, born: int) -> float:
        return self._density.of(number, self._clock - born)

    def _take_out(self, blocks: BlockIds) -> None:
        waits = self._queues.of[blocks] != NOBODY
        self._queues.remove(blocks[waits])
        self._spent.remove(blocks[~waits])
        self._queues.of[blocks] = NOBODY

    def _learn_hits(self, blocks: BlockIds) -> None:
        kind, born, hits = self._queues.of[blocks], self._queues.born[blocks], self._hits[blocks]
        waits = kind != NOBODY
        self._density.learn_hits(kind[waits], self._clock - born[waits])
        self._hits[blocks] = hits + (hits < 255)

    def _remember(self, blocks: BlockIds) -> None:
        known = Ghosts(self._queues.born[blocks], self._queues.of[blocks], self._hits[blocks])
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
        copied = (old != blocks) & (self._queues.of[old] != NOBODY)
        blocks, (old, first) = blocks[copied], np.unique(old[copied], return_index=True)
        self._learn_hits(old)
        self._hits[blocks[first]] = self._hits[old]
        self._take_out(old)
        self._spent.push(old)

    def _rank(self) -> None:
        every, of, born = self._sample, self._queues.of, self._queues.born
        some = np.arange(self._clock % every, len(of), every)
        queued = some[of[some] != NOBODY]
        ghosts = self._ghosts.sample(every)
        kinds = np.concatenate([of[queued], ghosts.kind])
        age = self._clock - np.concatenate([born[queued], ghosts.born])
        self._density.rank(kinds, age, every)


def classify(hits: NDArray[np.uint8]) -> tuple[NDArray[np.intp], NDArray[np.int8]]:
    """Row and class of each block of some rows, released tail first one row after another. Classes
    go by how often blocks were hit: (hit before) x (share of the row's blocks that were). Where
    blocks never hit follow ones that were, another row begins."""
    was_hit = hits > 0
    starts = np.concatenate([[False], was_hit[:-1] & ~was_hit[1:]])
    row = np.cumsum(starts)
    share = np.bincount(row, was_hit) / np.bincount(row)
    part = np.searchsorted(HIT_SHARES, share[row], side="right")
    return row, (was_hit * SHARES + part).astype(np.int8)

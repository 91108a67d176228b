"""Eviction orders other than plain least recently used, and their names.

`ReuseQueue` ("reuse") learns from the traffic what a cached block is worth. Blocks fall into
classes by how often they were hit; within a class the oldest goes first, as in LRU. Between
classes, the one whose oldest block has the lowest *hit density* gives up a block: expected hits
per unit of room and time, if it were kept until the best moment to give it up. The densities come
from what happened to blocks of each class and age so far, those already evicted included: a table
of ghosts remembers evicted keys, so that the policy sees hits it missed by evicting too early.
That is what LRU cannot see when a conversation's next turn comes just after its blocks are gone.

Idea: hit density from LHD (Beckmann, Chen, Cidon, NSDI 2018), with ghosts for ages beyond the pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.pool import BlockPool
from blocktable.core.types import BlockIds
from blocktable.prefix.index import PrefixIndex

POLICIES = ("lru", "reuse")
HIT_CLASSES = np.array([1, 2])  # hits from which a block belongs to class 1, 2
SPENT = len(HIT_CLASSES) + 1  # the class of old copies
BINS, GROWTH = 24, 1.35  # ages are binned geometrically up to 25 times the pool
DECAY = 0.98  # of what was learnt, at each re-ranking
GHOSTS = 4  # remembered evictions, times the pool
RUN = 64  # blocks given up between two comparisons of the classes


def make_policy(name: str, pool: BlockPool, index: PrefixIndex | None) -> EvictionPolicy:
    """The policy of this name for a pool; ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    if name == "reuse" and index is not None:
        return ReuseQueue(pool.num_blocks, index)
    return LRUQueue(pool.num_blocks, pool.place)


class ReuseQueue:
    """Least hit density first. About 170 bytes a block, ghosts included; O(1) a block.

    Time is counted in blocks released. All state is in arrays; equal calls give equal orders.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self._index = index
        self._queues = [LRUQueue(num_blocks) for _ in range(SPENT + 1)]
        self._of = np.full(num_blocks, -1, np.int8)  # class each queued block stands in
        self._hits = np.zeros(num_blocks, np.uint8)
        self._known = np.zeros(num_blocks, np.bool_)  # was queued with its present content
        self._born = np.zeros(num_blocks, np.int64)
        places = 2 * GHOSTS * num_blocks
        self._ghost_tag = np.zeros(places, np.uint32)  # 0 = nobody
        self._ghost_born = np.zeros(places, np.int64)
        self._ghost_hits = np.zeros(places, np.uint8)
        self._ghost_ring = np.zeros(GHOSTS * num_blocks, np.int64)  # places, oldest eviction first
        self._ring_born = np.zeros(GHOSTS * num_blocks, np.int64)
        self._num_ghosts = 0
        unit = max(8.0, num_blocks / 40)
        self._edges = np.concatenate([[0.0], unit * GROWTH ** np.arange(BINS)])
        shape = (SPENT, BINS)
        self._hit, self._dead = np.full(shape, 0.5), np.ones(shape)
        self._density = np.ones(shape)
        self._clock, self._next_rank = 0, 0
        self._period = max(256, num_blocks // 1)

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
        which = self._class_of(self._hits[blocks])
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
        which = self._of[blocks]
        used = which < SPENT
        self._learn(self._hit, which[used], self._clock - self._born[blocks[used]])
        hits = self._hits[blocks]
        self._hits[blocks] = hits + (hits < 255)
        self._take_out(blocks, which)

    def forget(self, blocks: BlockIds) -> None:
        """These blocks lost their key: what is known of their content goes too."""
        self._take_out(blocks, self._of[blocks])
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

    def _take_out(self, blocks: BlockIds, which: NDArray[np.int8]) -> None:
        for number, queue in enumerate(self._queues):
            mine = blocks[which == number]
            if mine.size:
                queue.remove(mine)
        self._of[blocks] = -1

    def _class_of(self, hits: NDArray[np.uint8]) -> NDArray[np.int8]:
        return np.searchsorted(HIT_CLASSES, hits, side="right").astype(np.int8)

    def _bin_of(self, ages: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.minimum(np.searchsorted(self._edges, ages, side="right") - 1, BINS - 1)

    def _learn(self, table: NDArray, which: NDArray, ages: NDArray[np.int64]) -> None:
        np.add.at(table, (which, self._bin_of(ages)), 1.0)

    def _cheapest(self) -> int:
        if len(self._queues[SPENT]):
            return SPENT
        best, lowest = 0, np.inf
        for number, queue in enumerate(self._queues[:SPENT]):
            if len(queue) == 0:
                continue
            age = self._clock - self._born[queue.peek()]
            density = self._density[number, int(self._bin_of(age))]
            if density < lowest:
                best, lowest = number, density
        return best

    def _tags(self, blocks: BlockIds) -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
        words = self._index.words[blocks, 0]
        scaled = (words >> np.uint64(32)) * np.uint64(len(self._ghost_tag)) >> np.uint64(32)
        return words.astype(np.uint32) | np.uint32(1), scaled.astype(np.intp)

    def _remember(self, blocks: BlockIds) -> None:
        """Evicted blocks become ghosts; the oldest ghosts are dead for good."""
        tags, places = self._tags(blocks)
        turn = (self._num_ghosts + np.arange(len(blocks))) % len(self._ghost_ring)
        if self._num_ghosts >= len(self._ghost_ring):
            self._bury(self._ghost_ring[turn], self._ring_born[turn])
        self._ghost_ring[turn], self._ring_born[turn] = places, self._born[blocks]
        self._num_ghosts += len(blocks)
        self._ghost_tag[places] = tags
        self._ghost_born[places] = self._born[blocks]
        self._ghost_hits[places] = self._hits[blocks]

    def _bury(self, places: NDArray[np.int64], born: NDArray[np.int64]) -> None:
        """These ghosts were never met again (those pushed out by another are not counted)."""
        dead = places[(self._ghost_tag[places] != 0) & (self._ghost_born[places] == born)]
        self._learn(
            self._dead, self._class_of(self._ghost_hits[dead]), self._clock - self._ghost_born[dead]
        )
        self._ghost_tag[dead] = 0

    def _meet_ghosts(self, blocks: BlockIds) -> None:
        """New content that was here before: a hit that was missed."""
        tags, places = self._tags(blocks)
        met = self._ghost_tag[places] == tags
        found = places[met]
        hits = self._ghost_hits[found]
        self._learn(self._hit, self._class_of(hits), self._clock - self._ghost_born[found])
        self._hits[blocks] = 0
        self._hits[blocks[met]] = hits + (hits < 255)
        self._ghost_tag[found] = 0

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
        blocks = blocks[first]
        which, hits = self._of[old], self._hits[old]
        self._learn(self._hit, which, self._clock - self._born[old])
        self._hits[blocks] = hits + (hits < 255)
        self._take_out(old, which)
        self._of[old] = SPENT
        self._queues[SPENT].push(old)

    def _rank(self) -> None:
        """Hit density of each class and age: the best ratio of hits to time over all moments at
        which a block of that age could be given up."""
        widths = np.diff(np.append(self._edges, self._edges[-1] * GROWTH))[:BINS]
        ends = self._hit + self._dead
        for age in range(BINS):
            hits = np.cumsum(self._hit[:, age:], axis=1)
            alive = ends[:, age:].sum(axis=1, keepdims=True) - np.cumsum(ends[:, age:], axis=1)
            alive += ends[:, age:]  # still there when the bin begins
            time = np.cumsum(alive * widths[age:], axis=1)
            self._density[:, age] = (hits / time).max(axis=1)
        self._hit *= DECAY
        self._dead *= DECAY

"""Cached blocks nobody holds: in classes, and in the plain order of their release."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blocktable.core.eviction import LRUQueue
from blocktable.core.types import BlockIds

NOBODY = -1
Worth = Callable[[int, int], float]
"""What the oldest block of a class is worth: called with the class and when it was released."""


class ClassQueues:
    """One `LRUQueue` for all blocks and one a class, so that either order can be followed.
    ``of`` int8 [num_blocks] is the class a block waits in (-1: none), ``born`` int64 [num_blocks]
    when it was released last. O(1) a block, amortised; 19 bytes a block and 10 a class."""

    def __init__(self, num_blocks: int, num_classes: int) -> None:
        self._all = LRUQueue(num_blocks)
        self._queues = [LRUQueue(num_blocks) for _ in range(num_classes)]
        self.of = np.full(num_blocks, NOBODY, np.int8)
        self.born = np.zeros(num_blocks, np.int64)

    def __len__(self) -> int:
        return len(self._all)

    def push(self, blocks: BlockIds, which: NDArray[np.int8], born: NDArray[np.int64]) -> None:
        """These blocks wait from now on."""
        self.of[blocks], self.born[blocks] = which, born
        self._all.push(blocks)
        for number, queue in enumerate(self._queues):
            mine = blocks[which == number]
            if mine.size:
                queue.push(mine)

    def remove(self, blocks: BlockIds) -> None:
        """These blocks wait no longer."""
        if blocks.size:
            self._all.remove(blocks)
            self._leave_classes(blocks)

    def pop(self, count: int, worth: Worth | None) -> BlockIds:
        """At most ``count`` blocks: of the class whose oldest block is worth least, or of all in
        the order of release. At least one must wait. ``of`` and ``born`` still tell of them."""
        if worth is None:
            gone = self._all.pop(min(count, len(self)))
            self._leave_classes(gone)
            return gone
        queue = self._queues[self._cheapest(worth)]
        gone = queue.pop(min(count, len(queue)))
        self._all.remove(gone)
        return gone

    def order(self) -> BlockIds:
        """All blocks, least recently released first. O(size)."""
        return self._all.order()

    def _cheapest(self, worth: Worth) -> int:
        best, lowest = 0, np.inf
        for number, queue in enumerate(self._queues):
            if len(queue):
                value = worth(number, int(self.born[queue.peek()]))
                if value < lowest:
                    best, lowest = number, value
        return best

    def _leave_classes(self, blocks: BlockIds) -> None:
        which = self.of[blocks]
        for number, queue in enumerate(self._queues):
            mine = blocks[which == number]
            if mine.size:
                queue.remove(mine)

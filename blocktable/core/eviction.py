"""The order in which cached blocks nobody holds are given up.

The pool hands every block that was released with a key to an `EvictionPolicy` and asks it for
victims. `LRUQueue` is the default; ``prefix/eviction.py`` has others.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlockStateError
from blocktable.core.types import BlockIds


class EvictionPolicy(Protocol):
    """What the pool needs of an eviction order. Blocks in one call are distinct."""

    def push(self, blocks: BlockIds) -> None:
        """These blocks became evictable, in this order."""
        ...

    def remove(self, blocks: BlockIds) -> None:
        """These evictable blocks were taken by a hit."""
        ...

    def forget(self, blocks: BlockIds) -> None:
        """These evictable blocks lost their key and are free now."""
        ...

    def pop(self, count: int) -> BlockIds:
        """Give up exactly ``count`` blocks; the caller made sure that there are as many."""
        ...

    def order(self) -> BlockIds:
        """All blocks in the order they would be given up if nothing else happened. O(size)."""
        ...

    def __len__(self) -> int: ...


HEAD, TAIL, LIVE = 0, 1, 2
GONE = -1


class LRUQueue:
    """Least recently released first, in O(1) a block with vector operations.

    ::

        ring      ... | 4 | 8 | 3 | 2 | 8 | ...      place[8] = 6: the entry at 4 is stale
        slot            3   4   5   6...             and is skipped when the head passes it
                        ^head               ^tail

    A block taken out of the middle leaves its entry behind (``place`` no longer points there), so
    nothing is shifted. Each entry is passed once; when the ring is full, stale entries are
    squeezed out, which at a capacity of 1.5 N costs O(1) a push, amortised.

    ``place`` int32 [num_blocks] may be shared with the pool, which writes negative values only.
    """

    def __init__(self, num_blocks: int, place: NDArray[np.int32] | None = None) -> None:
        self.place = np.zeros(num_blocks, np.int32) if place is None else place
        self.ring = np.zeros(num_blocks + num_blocks // 2 + 16, np.int32)
        self.state = np.zeros(3, np.int64)  # head and tail (they only rise), live entries

    def __len__(self) -> int:
        return int(self.state[LIVE])

    def push(self, blocks: BlockIds) -> None:
        """Append in order; O(len(blocks)) amortised."""
        count, size = len(blocks), len(self.ring)
        if self.state[TAIL] - self.state[HEAD] + count > size:
            self._squeeze()
        tail = int(self.state[TAIL])
        first = tail % size
        if first + count <= size:
            self.ring[first : first + count] = blocks
            self.place[blocks] = np.arange(first, first + count, dtype=np.int32)
        else:
            slots = np.arange(tail, tail + count) % size
            self.ring[slots] = blocks
            self.place[blocks] = slots
        self.state[TAIL] = tail + count
        self.state[LIVE] += count

    def remove(self, blocks: BlockIds) -> None:
        """Forget blocks that are in the queue; O(len(blocks))."""
        self.place[blocks] = GONE
        self.state[LIVE] -= len(blocks)

    forget = remove

    def peek(self) -> int:
        """The oldest block, without taking it; the queue must not be empty."""
        while True:
            slot = int(self.state[HEAD]) % len(self.ring)
            block = int(self.ring[slot])
            if self.place[block] == slot:
                return block
            self.state[HEAD] += 1

    def pop(self, count: int) -> BlockIds:
        """The ``count`` oldest; O(count + stale entries passed)."""
        if count == 1:
            return self._pop_one()
        parts: list[BlockIds] = []
        missing = count
        while missing:
            head, tail = int(self.state[HEAD]), int(self.state[TAIL])
            if head == tail:
                raise BlockStateError(f"{missing} blocks more were to be evicted than are queued")
            span = min(tail - head, missing + (missing >> 1) + 8)
            found, at = self._live(head, head + span)
            if len(found) >= missing:
                self.state[HEAD] = head + int(at[missing - 1]) + 1
                found = found[:missing]
            else:
                self.state[HEAD] = head + span
            missing -= len(found)
            parts.append(found)
        taken = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.int32)])
        self.remove(taken)
        return taken

    def _pop_one(self) -> BlockIds:
        if not self.state[LIVE]:
            raise BlockStateError("1 block more was to be evicted than are queued")
        block = self.peek()
        self.state[HEAD] += 1
        self.place[block] = GONE
        self.state[LIVE] -= 1
        return np.array([block], np.int32)

    def _live(self, head: int, stop: int) -> tuple[BlockIds, NDArray[np.int64]]:
        size = len(self.ring)
        first = head % size
        if first + stop - head <= size:
            blocks = self.ring[first : first + stop - head]
            at = np.flatnonzero(self.place[blocks] == np.arange(first, first + stop - head))
        else:
            slots = np.arange(head, stop) % size
            blocks = self.ring[slots]
            at = np.flatnonzero(self.place[blocks] == slots)
        return blocks[at], at

    def order(self) -> BlockIds:
        """Oldest first, without changing anything."""
        return self._live(int(self.state[HEAD]), int(self.state[TAIL]))[0]

    def _squeeze(self) -> None:
        live = self.order()
        self.ring[: len(live)] = live
        self.place[live] = np.arange(len(live), dtype=np.int32)
        self.state[HEAD], self.state[TAIL] = 0, len(live)

"""A cache of keys alone, to see how many hits an eviction order would have."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import BlockIds
from blocktable.prefix.classes import ClassQueues, Worth
from blocktable.prefix.index import PrefixIndex

_WORD = 8  # bytes that tell keys apart here; a mistaken one costs a worse guess, never a wrong hit


class Used(NamedTuple):
    """Blocks as they are released, each [k], tail first one row after another."""

    keys: NDArray[np.uint64]  # the last word of each
    row: NDArray[np.intp]  # ascending
    kind: NDArray[np.int8]  # class
    born: NDArray[np.int64]  # when they are released

    def sample(self, every: int) -> Used:
        """One in ``every`` (a power of two) of all keys, always the same ones, each once."""
        some = np.flatnonzero(self.keys & np.uint64(every - 1) == 0)
        first = np.unique(self.keys[some], return_index=True)[1]
        some = some[np.sort(first)]
        return Used(self.keys[some], self.row[some], self.kind[some], self.born[some])


class ImaginedCache:
    """Which keys would be cached under an order of eviction. O(1) a key, amortised; about 40 bytes
    a slot and 10 a slot and class."""

    def __init__(self, num_slots: int, num_classes: int, run: int) -> None:
        self._index = PrefixIndex(num_slots + 1, _WORD)
        self._queues = ClassQueues(num_slots + 1, num_classes)
        self._free = np.arange(num_slots, 0, -1, dtype=np.int32)  # a stack
        self._num_free = num_slots
        self._run = run  # given up between two comparisons of the classes

    def use(self, used: Used, room: float, worth: Worth | None) -> int:
        """Distinct keys were looked up when the others had ``room``, and are released; ``worth``
        orders those that go, None = LRU. Returns how many were hits: keys that were here, and with
        them all before them in their row."""
        keys = used.keys.view(np.uint8).reshape(-1, _WORD)
        slots = self._index.find(keys)
        here = slots > 0
        self._queues.remove(slots[here])
        self._shrink(min(room, len(self._free) - len(keys)), worth)
        new = np.flatnonzero(~here)
        new = new[max(0, len(new) - self._num_free) :]  # the rest is more than fits at all
        slots[new] = self._take(len(new))
        self._index.insert(slots[new], keys[new])
        kept = slots > 0
        self._queues.push(slots[kept], used.kind[kept], used.born[kept])
        return int(np.count_nonzero(unbroken(here, used.row)))

    def _shrink(self, room: float, worth: Worth | None) -> None:
        excess = min(math.ceil(len(self._queues) - room), len(self._queues))
        while excess > 0:
            gone = self._queues.pop(min(excess, self._run), worth)
            self._index.remove(gone)
            self._free[self._num_free : self._num_free + len(gone)] = gone
            self._num_free += len(gone)
            excess -= len(gone)

    def _take(self, count: int) -> BlockIds:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()


def unbroken(here: NDArray[np.bool_], row: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which keys of some rows, tail first, are here with all before them in their row."""
    missing = np.flatnonzero(~here)
    last = np.full(int(row[-1]) + 1, -1) if len(row) else np.zeros(0, np.intp)
    last[row[missing]] = missing
    return here & (np.arange(len(here)) > last[row])

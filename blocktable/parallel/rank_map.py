"""A rank's own block pool: which of its blocks stands for which block of the scheduler's.

The scheduler hands out the ids of one pool. A rank's pool may be ordered differently (or partly in
use), so it takes a block of its own when it first sees an id, and keeps it for as long as the id
may hold something::

    scheduler's id     0   1   2   3   4  ...
    this rank's block  0   9   4   -   7          0 is null on both sides; - is not mapped
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blocktable.core.errors import ConfigError, OutOfBlocks, RankError
from blocktable.core.types import BlockIds
from blocktable.parallel.digest import mix

_UNMAPPED = np.int32(-1)
_SHIFT = np.uint64(32)
_MASK64 = (1 << 64) - 1


class BlockMap:
    """The map of one rank. ``num_blocks`` counts the scheduler's ids, the null block included;
    ``free_ids`` are this rank's blocks in the order in which it takes them (by default 1, 2, ...).

    `digest` is a rolling 64-bit digest of the map. All operations cost O(ids given).
    """

    def __init__(self, num_blocks: int, free_ids: ArrayLike | None = None) -> None:
        free = np.arange(1, num_blocks) if free_ids is None else np.asarray(free_ids)
        free = free.astype(np.int32)
        if len(np.unique(free)) != len(free) or (len(free) and free.min() < 1):
            raise ConfigError("a rank's free blocks must be distinct ids above 0")
        self.own = np.full(num_blocks, _UNMAPPED, np.int32)
        self.own[0] = 0
        self._free = free[::-1].copy()  # taken from the end
        self._num_free = len(free)
        self._digest = 0

    @property
    def available(self) -> int:
        """Blocks this rank can still map."""
        return self._num_free

    @property
    def digest(self) -> int:
        """Digest of all pairs of the map; independent of the order in which they came."""
        return self._digest

    def unmapped(self, ids: BlockIds) -> BlockIds:
        """The distinct ids among ``ids`` that are not mapped yet. RankError names a foreign id."""
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(self.own)):
            bad = ids[(ids < 0) | (ids >= len(self.own))][0]
            raise RankError(f"block {bad} is outside the {len(self.own)} blocks agreed at start")
        missing = ids[self.own[ids] == _UNMAPPED]
        return np.unique(missing) if len(missing) > 1 else missing

    def take(self, ids: BlockIds) -> None:
        """Map distinct unmapped ``ids``; OutOfBlocks, nothing changed, when the pool is short."""
        count = len(ids)
        if count > self._num_free:
            raise OutOfBlocks("rank", held=0, needed=count, available=self._num_free)
        taken = self._free[self._num_free - count : self._num_free][::-1]
        self._num_free -= count
        self.own[ids] = taken
        self._digest = self._digest + _pairs(ids, taken) & _MASK64

    def drop(self, ids: BlockIds) -> None:
        """Give back the blocks of distinct ``ids``; those that are not mapped are skipped."""
        ids = ids[(ids > 0) & (self.own[ids] != _UNMAPPED)]
        own = self.own[ids]
        self._digest = self._digest - _pairs(ids, own) & _MASK64
        self._free[self._num_free : self._num_free + len(ids)] = own[::-1]
        self._num_free += len(ids)
        self.own[ids] = _UNMAPPED

    def __getitem__(self, ids: BlockIds) -> BlockIds:
        """This rank's blocks for mapped ids (null stays null)."""
        return self.own[ids]

    def is_sound(self) -> bool:
        """Whether the map's memory still says what its operations said. O(num_blocks)."""
        ids = np.flatnonzero(self.own != _UNMAPPED)[1:]
        return self.own[0] == 0 and self._digest == _pairs(ids, self.own[ids])


def _pairs(ids: NDArray, own: NDArray) -> int:
    """Sum of the digests of pairs, modulo 2**64."""
    return int(np.add.reduce(mix(ids.astype(np.uint64) << _SHIFT | own.astype(np.uint64))))

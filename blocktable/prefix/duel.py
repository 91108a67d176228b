"""Which of two orders would have kept the blocks that were hit: the learned one, or LRU?

Every hit says of what class and age its block was, whether it was cached or already evicted (a
ghost). That is enough to ask both orders about it, without running either: LRU keeps blocks up to
an age, the learned order those whose density was never below a level; age and level are those at
which what they keep fills the cache. The level comes from densities learnt *before* the hits it
is judged by. The order that would have had more of the recent hits decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DECAY = 0.97
"""Of the score, at each comparison; they come every eighth of a cache of blocks released."""


class Duel:
    """``lru`` says whether LRU was the better one lately; True until something is known."""

    def __init__(self) -> None:
        self.lru = True
        self._kept: NDArray[np.float64] | None = None  # [classes, bins] by the learned order
        self._horizon = np.inf  # age up to which LRU keeps blocks
        self._score = 0.0

    def judge(self, classes: NDArray, bins: NDArray[np.intp], ages: NDArray[np.int64]) -> None:
        """Blocks of these classes were hit at these ages (and age bins). O(blocks)."""
        if self._kept is not None:
            learned = self._kept[classes, bins].sum()
            self._score += float(learned - np.count_nonzero(ages < self._horizon))

    def renew(
        self, density: NDArray[np.float64], waiting: NDArray[Any],
        ages: NDArray[np.int64], room: float,
    ) -> None:  # fmt: skip
        """New densities [classes, bins]. ``waiting`` counts blocks in all cells, present or
        remembered, ``ages`` are theirs; ``room`` of them fit into the cache."""
        if self._kept is not None:
            self._score *= DECAY
        self.lru = self._score < 0
        room_left = min(int(room), len(ages) - 1)
        full = 0 <= room_left < len(ages) - 1
        self._horizon = float(np.partition(ages, room_left)[room_left]) if full else np.inf
        lowest = np.minimum.accumulate(density, axis=1).ravel()
        order = np.argsort(-lowest, kind="stable")
        counts = waiting.ravel()[order]
        filled = np.cumsum(counts) - counts
        kept = np.empty(len(order))
        kept[order] = np.clip((room - filled) / np.maximum(counts, 1.0), 0.0, 1.0)
        self._kept = kept.reshape(density.shape)

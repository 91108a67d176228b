"""Keys of blocks that were evicted, and what was known of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

REMEMBERED = 4  # evictions remembered, times the pool
_ROOM = 4  # places a remembered eviction


class Ghosts(NamedTuple):
    """What is known of some evicted blocks, each [k]: when they became evictable, their class,
    and how often they were hit."""

    born: NDArray[np.int64]
    kind: NDArray[np.int8]
    hits: NDArray[np.uint8]


class GhostTable:
    """The last evictions by key, in arrays: a table in which each key has two possible places,
    and a ring of the places taken in the order of eviction. Where both are taken the older ghost
    is lost (about one in thirty by the end of its time). 32 bits of the key tell ghosts apart; a
    mistaken one costs a worse guess, never a wrong hit. About 290 bytes a block of the pool,
    touched when used."""

    def __init__(self, num_blocks: int) -> None:
        places, turns = _ROOM * REMEMBERED * num_blocks, REMEMBERED * num_blocks
        self._tag = np.zeros(places, np.uint32)  # 0 = nobody
        self._born = np.zeros(places, np.int64)
        self._kind = np.zeros(places, np.int8)
        self._hits = np.zeros(places, np.uint8)
        self._ring = np.zeros(turns, np.int64)
        self._ring_born = np.zeros(turns, np.int64)
        self._count = 0

    def remember(self, words: NDArray[np.uint64], ghosts: Ghosts) -> Ghosts:
        """Blocks with these (first words of) keys are evicted. Returns the ghosts that make
        room for them, never met again. O(k)."""
        turn = (self._count + np.arange(len(words))) % len(self._ring)
        old = self._ring[turn], self._ring_born[turn]
        gone = self._take(old[0][self._alive(*old)])
        tags, first, second = self._find(words)
        worse = self._born[second] * (self._tag[second] != 0)  # 0 = free
        places = np.where((self._tag[first] == 0) | (self._born[first] < worse), first, second)
        self._ring[turn], self._ring_born[turn] = places, ghosts.born
        self._count += len(words)
        self._tag[places] = tags
        self._born[places], self._kind[places] = ghosts.born, ghosts.kind
        self._hits[places] = ghosts.hits
        return gone

    def meet(self, words: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], Ghosts]:
        """Which of these keys were evicted not long ago, and what was known of them; they are
        ghosts no longer. O(k)."""
        tags, first, second = self._find(words)
        places = np.where(self._tag[first] == tags, first, second)
        met = self._tag[places] == tags
        return met, self._take(places[met])

    def sample(self, every: int) -> Ghosts:
        """The ghosts among each ``every``-th of the evictions remembered. O(evictions / every)."""
        used = min(self._count, len(self._ring))
        places = self._ring[:used:every]
        return self._read(places[self._alive(places, self._ring_born[:used:every])])

    def _find(
        self, words: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
        """Tags and both places of keys."""
        high, size = words >> np.uint64(32), np.uint64(len(self._tag))
        other = (high * np.uint64(0x9E3779B1) + words) & np.uint64(0xFFFFFFFF)
        places = (high * size >> np.uint64(32), other * size >> np.uint64(32))
        tags = words.astype(np.uint32) | np.uint32(1)
        return tags, places[0].astype(np.int64), places[1].astype(np.int64)

    def _alive(self, places: NDArray, born: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (self._tag[places] != 0) & (self._born[places] == born)

    def _read(self, places: NDArray[np.int64]) -> Ghosts:
        return Ghosts(self._born[places], self._kind[places], self._hits[places])

    def _take(self, places: NDArray[np.int64]) -> Ghosts:
        known = self._read(places)
        self._tag[places] = 0
        return known

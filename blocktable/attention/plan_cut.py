"""Into how many pieces rows are cut, so that the last program ends as early as can be."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from blocktable.attention.plan_items import Int64s

_KEY_STEP: Final = 64
"""Pieces are multiples of this many keys, the kernels' usual tile."""
_START_KEYS: Final = 32
"""What starting an item costs, in keys it could have read."""
_MERGE_KEYS: Final = 64
"""What writing and merging a piece costs, likewise."""


class CutKernel(NamedTuple):
    """A kernel as the plan sees it: items per KV head at once, time of a key with all of them busy
    (relative), and the part of that time that falls when fewer are."""

    slots: int
    key_time: float
    elastic: float


class Cut(NamedTuple):
    keys: Int64s  # keys of a piece, by row
    time: float


def _end(lengths: Int64s, kernel: CutKernel) -> float:
    """When the last of items of falling length ends, longest started first.

    Item r * slots is the (r + 1)-th of some slot, none of them shorter: rounds. A last round that
    is not full takes less of the memory's time but no less of its latency. After three rounds items
    are out of step and the edges of rounds blur.
    """
    number = -(-lengths.size // kernel.slots)
    rounds = (lengths[:: kernel.slots] * np.arange(1, number + 1)).astype(np.float64)
    full = ((lengths.size - 1) % kernel.slots + 1) / kernel.slots
    rounds[-1] -= lengths[-1] * kernel.elastic * (1 - full)
    even = int(lengths.sum()) / kernel.slots
    sharp = min(1.0, (3 / number) ** 2)
    time = even + max(float(rounds.max()) - even, 0.0) * sharp
    return time * kernel.slots * kernel.key_time


def cut_rows(own_keys: Int64s, tiles: Int64s, kernel: CutKernel, least: int) -> Cut:
    """Pieces for each row, equal within a row, that should end first.

    Cutting adds at most ``slots`` items. A few numbers of pieces of the longest row are tried. (On
    an H200, 16 rows of 32768 keys in 4, 5 and 8 pieces took 495, 694 and 612 us: one full round, a
    second one nearly empty, a third one nearly empty.)
    """
    longest = int(own_keys.max(initial=0))
    if longest <= least:
        keys = np.full(own_keys.size, max(longest, _KEY_STEP))
        return Cut(keys, float(own_keys.size * (longest + _START_KEYS)) * kernel.key_time)
    ideal = longest * kernel.slots / int((own_keys * tiles).sum())
    tries = {max(int(ideal * rounds) + up, 1) for rounds in (1, 2, 3) for up in (0, 1)} | {1}
    best = Cut(own_keys, float("inf"))
    for count in sorted({min(number, longest // least) for number in tries}):
        pieces = np.maximum(-(-own_keys // -(-longest // count)), 1)
        if count > 1 and int((pieces * tiles).sum()) > int(tiles.sum()) + kernel.slots:
            break
        keys = -(-own_keys // (pieces * _KEY_STEP)) * _KEY_STEP
        lengths = np.repeat(keys + _START_KEYS + _MERGE_KEYS * (pieces > 1), pieces * tiles)
        lengths.sort()
        time = _end(lengths[::-1], kernel)
        if time < best.time:
            best = Cut(np.maximum(keys, _KEY_STEP), time)
    return best

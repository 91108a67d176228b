"""Which order has more hits: LRU, or the learned one?

Both are tried at all times, each in an imagined cache of its own: keys alone, one in two to
sixteen of them (chosen by their own bits: the same ones for both), in as much less room. What the
real cache keeps has no part in it, so each order is judged by what it does where it always
decides, its outlay included: blocks kept long cost hits before they bring any.

The real cache begins with LRU. It follows the learned order once that leads over a long and a
short window, and goes back as soon as the lead is gone; a trial that lost doubles the lead the next
must show. So where LRU is the better order, the imagined cache has the losses, and the real one
what a lead proven before can lose again in a short window, a few times at most.
"""

from __future__ import annotations

import math

from blocktable.prefix.classes import Worth
from blocktable.prefix.imagined import ImaginedCache, Used

SLOTS, MOST = 2048, 16
"""An imagined cache has SLOTS blocks or more, where the real one has; and 1/MOST of it or more."""
RUN = 16  # real blocks given up between two comparisons of the classes
SHORT, LONG = 3, 8  # windows, in pools of blocks released
LEAST = 65536  # of the long one, in blocks: small pools tell less
LEAD, HIGHEST = 0.005, 0.05  # to show at first and at most, in hits a block released
LOST = -0.003  # over the short window ends a trial; over the long one anything below 0 does


class Window:
    """Hits more than LRU, a block released, over about the last ``length`` blocks."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._gain = self._weight = 0.0

    def add(self, gain: int, count: int) -> float:
        """The lead with these ``count`` blocks and ``gain`` hits."""
        keep = math.exp(-count / self._length)
        self._gain, self._weight = self._gain * keep + gain, self._weight * keep + count
        return self._gain / self._weight


class Decision:
    """``lru`` says which order to follow, given the leads; True at first."""

    def __init__(self) -> None:
        self.lru = True
        self.demand = LEAD
        self._won = 0

    def take(self, gain: int, short: float, long: float) -> None:
        """The learned order had ``gain`` hits more just now and leads by ``short`` and ``long``."""
        if self.lru:
            if min(short, long) > self.demand:
                self.lru, self._won = False, 0
            return
        self._won += gain
        if short < LOST or long < 0:
            self.lru = True
            if self._won < 0:
                self.demand = min(2 * self.demand, HIGHEST)


class Duel:
    """The two imagined caches and what follows from them. About 280 bytes a block of a pool below
    4,096 blocks, half of that for each doubling, 18 from 32,768 on."""

    def __init__(self, num_blocks: int, num_classes: int) -> None:
        self._every = min(MOST, 1 << max(0, (num_blocks // SLOTS).bit_length() - 1))
        pool = num_blocks / self._every
        slots = math.ceil(2 * pool) + 64
        self._learned = ImaginedCache(slots, num_classes, max(2, RUN // self._every))
        self._plain = ImaginedCache(slots, 0, slots)
        self._short = Window(SHORT * pool)
        self._long = Window(max(LONG * pool, LEAST / self._every))
        self._until_warm = pool
        self._decision = Decision()

    @property
    def lru(self) -> bool:
        """Whether to follow LRU."""
        return self._decision.lru

    def use(self, used: Used, room: int, worth: Worth) -> None:
        """Blocks are released; when they were looked up, others had ``room``. O(k)."""
        used = used.sample(self._every)
        count = len(used.keys)
        if not count:
            return
        share = room / self._every
        gain = self._learned.use(used, share, worth) - self._plain.use(used, share, None)
        short, long = self._short.add(gain, count), self._long.add(gain, count)
        self._until_warm -= count
        if self._until_warm < 0:
            self._decision.take(gain, short, long)

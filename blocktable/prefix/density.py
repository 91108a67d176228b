"""What a cached block is worth: expected hits for the room and time it would still take.

Blocks of one class are alike; what happened to those of each age tells how likely a hit is at that
age (the hazard). Blocks still waiting count as well, as not yet hit: without them the estimate
would see only the short waits for as long as the cache is younger than the long ones (Kaplan and
Meier, 1958). The worth is the *hit density* of LHD (Beckmann, Chen, Cidon, NSDI 2018): the best
ratio, over all moments at which the block could be given up, of hits until then to time until then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS, GROWTH = 24, 1.35  # ages are binned geometrically, up to 25 times the pool
FIRST_BIN = 40  # the first bin ends at 1/40 of the pool
DECAY = 0.98  # of what was learnt, at each ranking
PRIOR = 0.02  # weight of the hazard of all classes, as waits a block of the pool


class HitDensity:
    """Hazards and densities, [num_classes, BINS]; ages are counted in blocks released."""

    def __init__(self, num_classes: int, num_blocks: int) -> None:
        unit = max(8.0, num_blocks / FIRST_BIN)
        self.edges = np.concatenate([[0.0], unit * GROWTH ** np.arange(BINS)])
        self._widths = np.diff(self.edges)
        self._prior = max(10.0, PRIOR * num_blocks)
        self._hits = np.zeros((num_classes, BINS))  # waits that ended with a hit
        self._lost = np.zeros((num_classes, BINS))  # waits nobody follows any more
        self.density = np.ones((num_classes, BINS))

    def learn_hits(self, classes: NDArray, ages: NDArray[np.int64]) -> None:
        """Blocks of these classes were hit at these ages."""
        if len(ages):
            bins = self._bins_of(ages)
            np.add.at(self._hits, (classes, bins), 1.0)

    def learn_lost(self, classes: NDArray, ages: NDArray[np.int64]) -> None:
        """Blocks of these classes were not hit up to these ages; the rest will not be known."""
        np.add.at(self._lost, (classes, self._bins_of(ages)), 1.0)

    def of(self, number: int, age: int) -> float:
        """Density of a block of class ``number`` at this age."""
        at = int(np.searchsorted(self.edges, age, side="right")) - 1
        return float(self.density[number, min(at, BINS - 1)])

    def rank(self, classes: NDArray, ages: NDArray[np.int64], weight: float = 1.0) -> None:
        """Learn the densities anew; ``classes`` and ``ages`` are those of blocks, present or
        remembered, that still wait: all of them, or a sample in which each stands for ``weight``.
        O(len(classes))."""
        flat = classes.astype(np.int64) * BINS + self._bins_of(ages)
        waiting = np.bincount(flat, minlength=self._hits.size).reshape(self._hits.shape) * weight
        censored = self._lost + waiting
        exposed = np.cumsum((self._hits + censored)[:, ::-1], axis=1)[:, ::-1] - censored / 2
        usual = (self._hits.sum(axis=0) + 0.1) / (exposed.sum(axis=0) + 1.0)
        hazard = (self._hits + usual * self._prior) / (exposed + self._prior)
        np.minimum(hazard, 1.0, out=hazard)
        kept = np.cumprod(1.0 - hazard, axis=1)
        kept = np.concatenate([np.ones((len(kept), 1)), kept[:, :-1]], axis=1)
        gain, time = kept * hazard, kept * (1.0 - hazard / 2) * self._widths
        for age in range(BINS):
            hits, spent = np.cumsum(gain[:, age:], axis=1), np.cumsum(time[:, age:], axis=1)
            self.density[:, age] = (hits / np.maximum(spent, 1e-12)).max(axis=1)
        self._hits *= DECAY
        self._lost *= DECAY

    def _bins_of(self, ages: NDArray[np.int64]) -> NDArray[np.intp]:
        return np.minimum(np.searchsorted(self.edges, ages, side="right") - 1, BINS - 1)

"""What a step needs before it may run, in numbers: nothing here changes anything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import BlockIds, Counts
from blocktable.groups.base import Group, Ints


class Copies(NamedTuple):
    """Block copies the device must do before the step's writes: dst[i] takes src[i], for the
    layers of group[i]."""

    group: Counts
    src: BlockIds
    dst: BlockIds


class Need(NamedTuple):
    """What one group must add: ``entries[i]`` row entries for rows[at[i]], the last
    ``blocks[i]`` of them real; ``count`` blocks in all."""

    group: Group
    at: NDArray[np.intp]
    entries: Ints
    blocks: Ints
    count: int


class TailCopy(NamedTuple):
    """Copy-on-write in one group: rows[at[i]] writes into column[i] and needs its own block."""

    group: Group
    at: NDArray[np.intp]
    column: Ints


class Demand(NamedTuple):
    """All that a call needs; ``blocks`` in total."""

    needs: list[Need]
    copies: list[TailCopy]
    blocks: int

    def per_row(self, num_rows: int) -> NDArray[np.int64]:
        """Blocks needed by each row of the call."""
        total = np.zeros(num_rows, np.int64)
        for need in self.needs:
            total[need.at] += need.blocks
        for copy in self.copies:
            total[copy.at] += 1
        return total

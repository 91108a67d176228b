"""How contiguous a row is: maximal runs of ascending block ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import BlockIds


class Runs(NamedTuple):
    """Maximal runs ``first, first+1, ... first+length-1``; ``column`` is where each starts."""

    column: NDArray[np.int64]
    first: BlockIds
    length: NDArray[np.int64]


def block_runs(block_ids: BlockIds) -> Runs:
    """The runs of a row's ids, in order. A transfer needs one descriptor a run. O(n)."""
    ids = np.asarray(block_ids, np.int32)
    if ids.size == 0:
        return Runs(np.zeros(0, np.int64), ids, np.zeros(0, np.int64))
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ids.astype(np.int64)) != 1) + 1])
    return Runs(starts, ids[starts], np.diff(np.append(starts, len(ids))))

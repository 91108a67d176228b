"""Where a device table's rows come from: a host table of kernel blocks, or a manager's table
whose blocks are split into smaller kernel blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.geometry import SlotGeometry
from blocktable.core.table import HostTable, TableDelta
from blocktable.core.types import NULL_BLOCK, BlockIds, RowIds
from blocktable.device.upload_plan import spans


class SplitRows:
    """A manager's table seen in kernel blocks: entry b becomes k entries b*k .. b*k + k - 1.

    ``rows`` int32 [max_rows, k * width] shows the manager's table as of the last ``drain``;
    ``counts`` follow it. Entries past a row's count stay null, a null block is k null entries.
    """

    def __init__(self, manager: HostTable, geometry: SlotGeometry) -> None:
        self._manager, self._geometry = manager, geometry
        self._split = geometry.blocks_per_kv_block
        self.rows = np.zeros((manager.max_rows, manager.max_blocks_per_row * self._split), np.int32)
        self.flat = self.rows.reshape(-1)
        self.counts = np.zeros(manager.max_rows, np.int32)

    @property
    def is_dirty(self) -> bool:
        """Whether the manager's table changed since the last drain."""
        return self._manager.is_dirty

    def drain(self) -> TableDelta:
        """The manager's changes in kernel blocks; ``rows`` and ``counts`` follow. O(changes)."""
        delta = self._manager.drain()
        k, width = self._split, self._manager.max_blocks_per_row
        self._rebuild(delta.copy_dst)
        for row, start, stop in (
            (delta.fill_row, delta.fill_start, delta.fill_stop),
            (delta.write_row, delta.write_start, delta.write_stop),
        ):
            cells = spans(row.astype(np.int64) * width + start, stop - start)
            value = self._split_ids(self._manager.flat[cells])
            value[cells % width >= self._manager.counts[cells // width]] = NULL_BLOCK
            self.flat.reshape(-1, k)[cells] = value
        self.counts[delta.rows] = self._manager.counts[delta.rows] * k
        return delta._replace(
            copy_len=delta.copy_len * k,
            fill_start=delta.fill_start * k, fill_stop=delta.fill_stop * k,
            write_start=delta.write_start * k, write_stop=delta.write_stop * k,
        )  # fmt: skip

    def _rebuild(self, rows: RowIds) -> None:
        """Whole rows anew: those that another row's content was moved to."""
        if not len(rows):
            return
        counts = self._manager.counts[rows]
        longest = max(int(counts.max()), int(self.counts[rows].max()) // self._split)
        value = self._split_ids(self._manager.rows[rows, :longest].reshape(-1))
        value[(np.arange(longest) >= counts[:, None]).reshape(-1)] = NULL_BLOCK
        self.rows[rows, : longest * self._split] = value.reshape(len(rows), -1)

    def _split_ids(self, ids: BlockIds) -> NDArray[np.int32]:
        """[n] -> [n, k]; a null block becomes null entries."""
        parts = np.arange(self._split, dtype=np.int32)
        return (ids[:, None] * np.int32(self._split) + parts) * (ids[:, None] != NULL_BLOCK)

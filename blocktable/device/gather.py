"""Table rows in batch order: what kernels read when a request's row is not its place in the batch.

::

    table rows      0: 7 8 .   1: . . .   2: 9 . .        batch [2, 0, padded]
    gathered        0: 9 .     1: 7 8     2: . .          fixed address, one launch for all groups
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blocktable.core.errors import RowError
from blocktable.device.upload import DeviceTables


class RowGather:
    """A second set of tables, in batch order, at fixed addresses (made on first use).

    ``gather`` runs inside a CUDA graph when ``widths`` is left out: every entry of a row is copied
    then, whatever the batch.
    """

    def __init__(self, tables: DeviceTables) -> None:
        self._tables = tables
        self._arena = torch.zeros_like(tables.arena)
        self._views = tuple(
            self._arena[base : base + tables.num_rows * width].view(tables.num_rows, width)
            for base, width in zip(tables.bases, tables.widths, strict=True)
        )
        self._layout = self._layout_of(tables.widths)

    def _layout_of(self, widths: Sequence[int]) -> torch.Tensor:
        fields = list(zip(self._tables.bases, self._tables.widths, widths, strict=True))
        return torch.tensor(fields, dtype=torch.int64).to(self._tables.device, non_blocking=True)

    def gather(
        self, rows: torch.Tensor, widths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Rows ``rows`` (int32 [n], -1 a null row, on the device) of every group's table, int32
        [n, width]: views of fixed buffers, overwritten by the next call.

        widths: entries to copy, one a group (the longest row of the batch, at least 1); all by
        default. Raises RowError for more rows than the table has.
        """
        n, tables = rows.shape[0], self._tables
        if n > tables.num_rows:
            raise RowError(f"{n} rows, but the table has {tables.num_rows}")
        cut = tables.widths if widths is None else tuple(widths)
        if n and tables.backend == "triton":
            from blocktable.device import gather_kernel

            layout = self._layout if widths is None else self._layout_of(cut)
            gather_kernel.launch(tables.arena, self._arena, rows, layout, tables.num_rows, max(cut))
        elif n:
            index = rows.clamp(min=0).to(torch.int64)
            for table, view, width in zip(tables.tables, self._views, cut, strict=True):
                view[:n, :width] = table[:, :width][index]
                view[:n, :width][rows < 0] = 0
        return tuple(view[:n, :width] for view, width in zip(self._views, cut, strict=True))

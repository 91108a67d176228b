"""The block table of one KV cache group, on the host and on the device.

::

    add_row([3, 7], row=1) ----> host rows          commit_block_table     device table
    append_row([9], row=1)       1: 3 7 9 . .  ----------------------->    1: 3 7 9 . .
                                 (NumPy)        only what changed          (fixed address)

Names and meanings follow vLLM's classes of the same names; what differs is said where it does.
Rows, ``num_blocks_per_row`` and ``truncate_row`` count kernel blocks; block ids passed in, and
``max_num_blocks_per_req``, are the manager's. A call that raises has changed nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from blocktable.core.errors import ConfigError, RowError
from blocktable.core.geometry import SlotGeometry
from blocktable.core.table import HostTable, whole_numbers
from blocktable.core.types import BlockIds
from blocktable.device.row_sources import SplitRows
from blocktable.device.slot_mapping import SlotMapper
from blocktable.device.staging import pin_array
from blocktable.device.upload import CommitStats, DeviceTables

_PIN_UP_TO_BYTES = 64 * 1024 * 1024
_INT32_MAX = 2**31 - 1


class PreparedRows(NamedTuple):
    """Checked arguments of a bulk append, in kernel blocks."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    block_ids: BlockIds


class BlockTable:
    """One group's table: a host table and a device tensor at a fixed address.

    Args:
        block_size: positions in a manager block.
        max_num_reqs: rows.
        max_num_blocks_per_req: manager blocks in a row.
        max_num_batched_tokens: length of ``slot_mapping``.
        device: where the device tensor and the slot mapping live ("cpu" works).
        kernel_block_size: positions in a kernel block; must divide ``block_size`` (the default).
        cp_world_size, cp_rank, cp_interleave: context parallelism, prefill and decode groups
            combined (`slot_mapping.context_parallel_rank`); a replicated group has world 1.
        pin_memory: page-lock the host rows (for readers that copy them themselves: commits go
            through staging memory of their own). None: on CUDA, for tables up to 64 MiB.

    Raises ConfigError (a ValueError) for sizes that do not fit each other.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        kernel_block_size: int | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        pin_memory: bool | None = None,
    ) -> None:
        geometry = SlotGeometry(
            block_size, kernel_block_size, cp_world_size, cp_rank, cp_interleave
        )
        width = max_num_blocks_per_req * geometry.blocks_per_kv_block
        _check_room(max_num_reqs, width)
        tables = DeviceTables(max_num_reqs, [width], device)
        mapper = SlotMapper(tables, [geometry], max_num_batched_tokens)
        self._bind(own_rows(max_num_reqs, width, tables.device, pin_memory), 0, tables, mapper)

    def _bind(
        self, source: HostTable | SplitRows, group: int, tables: DeviceTables, mapper: SlotMapper
    ) -> None:
        self._source, self._group, self._tables, self._mapper = source, group, tables, mapper
        self.geometry = mapper.geometries[group]
        self.device = tables.device
        self.max_num_reqs, self.max_num_blocks_per_req = tables.num_rows, tables.widths[group]
        self.max_num_batched_tokens = mapper.max_num_batched_tokens
        self.slot_mapping = mapper.slots[group]
        self._mark = np.zeros(self.max_num_reqs, np.int64)

    @classmethod
    def _member(
        cls, source: HostTable | SplitRows, group: int, tables: DeviceTables, mapper: SlotMapper
    ) -> BlockTable:
        table = cls.__new__(cls)
        table._bind(source, group, tables, mapper)
        return table

    # -- facts ----------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        """Positions in one entry, that is in a kernel block (as in vLLM)."""
        return self.geometry.kernel_size

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel blocks in a manager block."""
        return self.geometry.blocks_per_kv_block

    @property
    def num_blocks_per_row(self) -> NDArray[np.int32]:
        """int32 [max_num_reqs]: entries (kernel blocks) in each row. Read only."""
        return self._source.counts

    def block_ids(self, row: int) -> BlockIds:
        """Manager blocks of a row, in order, null entries left out."""
        k = self.blocks_per_kv_block
        first = self.get_numpy_array()[row, : self.num_blocks_per_row[row] : k]
        return first[first != 0] // k

    @property
    def host_rows(self) -> HostTable:
        """The host table behind it, for bulk operations without checks of their own; RowError
        where a manager's table is split into smaller kernel blocks."""
        return self._own()

    def map_to_kernel_blocks(self, block_ids: ArrayLike) -> BlockIds:
        """Manager block ids [n] -> kernel block ids int32 [n * blocks_per_kv_block].

        Raises RowError for an id whose kernel blocks are no non-negative int32.
        """
        ids = np.asarray(block_ids)
        if ids.size == 0:
            return np.zeros(0, np.int32)
        most = (_INT32_MAX - self.blocks_per_kv_block + 1) // self.blocks_per_kv_block
        if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > most:
            raise RowError(
                f"block ids must be integers in 0 .. {most}, got {_first_bad(ids, most)}"
            )
        return self.geometry.to_kernel_blocks(ids)

    # -- row operations -------------------------------------------------------------------------

    def append_row(self, block_ids: ArrayLike, row: int) -> None:
        """Append manager blocks to a row; an empty list changes nothing."""
        self.append_rows([row], [np.asarray(block_ids).size], block_ids)

    def append_rows(self, rows: ArrayLike, counts: ArrayLike, block_ids: ArrayLike) -> None:
        """Append to many rows: the first ``counts[0]`` of the manager's ``block_ids`` to
        ``rows[0]``, and so on. Rows must be distinct. RowError where one would overflow."""
        self._append(self._prepare(rows, counts, block_ids, replace=False))

    def add_row(self, block_ids: ArrayLike, row: int) -> None:
        """Make a row hold exactly these manager blocks, whatever it held before."""
        self.add_rows([row], [np.asarray(block_ids).size], block_ids)

    def add_rows(self, rows: ArrayLike, counts: ArrayLike, block_ids: ArrayLike) -> None:
        """Bulk `add_row`."""
        self._replace(self._prepare(rows, counts, block_ids, replace=True))

    def clear_row(self, row: int) -> None:
        """Empty a row."""
        self.clear_rows([row])

    def clear_rows(self, rows: ArrayLike) -> None:
        """Bulk `clear_row`."""
        self._own().clear(rows)

    def truncate_row(self, row: int, num_blocks: int) -> None:
        """Keep the first ``num_blocks`` kernel blocks of a row; shorter rows stay as they are."""
        self.truncate_rows([row], [num_blocks])

    def truncate_rows(self, rows: ArrayLike, num_blocks: ArrayLike) -> None:
        """Bulk `truncate_row`."""
        self._own().truncate(rows, num_blocks)

    def move_row(self, src: int, tgt: int) -> None:
        """Row ``tgt`` becomes row ``src``, which is empty afterwards (vLLM leaves it as it was).
        On the device this is a row copy, never an upload."""
        self.move_rows([src], [tgt])

    def move_rows(self, src: ArrayLike, tgt: ArrayLike) -> None:
        """Bulk `move_row`: all sources are read before any target is written, so any permutation
        may be given. Sources that are no target are empty afterwards."""
        self._own().move_rows(src, tgt)

    def swap_row(self, a: int, b: int) -> None:
        """Exchange two rows (or leave a row as it is); a row copy on the device."""
        self._own().swap(a, b)

    def swap_rows(self, a: ArrayLike, b: ArrayLike) -> None:
        """Bulk `swap_row`; no row may be named twice."""
        self._own().move_rows(*exchange(a, b))

    def clear(self) -> None:
        """Empty every row, counts included, on the host and on the device."""
        self._own().clear()
        self._commit()

    # -- device side ----------------------------------------------------------------------------

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the device tensor up to date: uploads what changed since the last commit, in any
        row (so ``num_reqs`` is only checked). One kernel at most, on the current stream."""
        self._check_num_reqs(num_reqs)
        self._commit()

    def _commit(self) -> CommitStats:
        return self._tables.commit([self._source], [self._group])

    def get_device_tensor(self, num_reqs: int | None = None) -> torch.Tensor:
        """int32 [num_reqs, width] on the device, a view at the table's fixed address."""
        if num_reqs is None:
            return self._tables.tables[self._group]
        self._check_num_reqs(num_reqs)
        return self._tables.tables[self._group][:num_reqs]

    def get_cpu_tensor(self) -> torch.Tensor:
        """int32 [max_num_reqs, width]: the host rows themselves, no copy."""
        return torch.from_numpy(self._source.rows)

    def get_numpy_array(self) -> NDArray[np.int32]:
        """int32 [max_num_reqs, width]: the host rows themselves. Writing to it bypasses the record
        of changes: use the row operations. Over a manager's table with smaller kernel blocks it
        shows the last commit."""
        return self._source.rows

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Fill ``slot_mapping`` from the device table (`slot_mapping.SlotMapper.compute`)."""
        self._mapper.compute(num_reqs, query_start_loc, positions, rows, groups=[self._group])

    # -- inside ---------------------------------------------------------------------------------

    def _own(self) -> HostTable:
        if isinstance(self._source, SplitRows):
            raise RowError("rows that a manager's table is split into are changed by the manager")
        return self._source

    def _check_num_reqs(self, num_reqs: int) -> None:
        if not 0 <= num_reqs <= self.max_num_reqs:
            raise RowError(f"{num_reqs} requests, but the table has {self.max_num_reqs} rows")

    def _prepare(
        self, rows: ArrayLike, counts: ArrayLike, block_ids: ArrayLike, *, replace: bool
    ) -> PreparedRows:
        """Check a bulk append or replacement without changing anything."""
        where = whole_numbers("row numbers", rows)
        shares = whole_numbers("numbers of blocks", counts) * self.blocks_per_kv_block
        ids = self.map_to_kernel_blocks(np.asarray(block_ids).reshape(-1))
        if len(shares) != len(where) or shares.min(initial=0) < 0 or int(shares.sum()) != len(ids):
            raise RowError(
                f"{np.asarray(block_ids).size} block ids cannot be shared out as "
                f"{np.asarray(counts).tolist()} to {len(where)} rows"
            )
        self._check_rows(where)
        wanted = shares if replace else shares + self._own().counts[where]
        if wanted.max(initial=0) > self.max_num_blocks_per_req:
            worst = int(np.argmax(wanted))
            raise RowError(
                f"row {where[worst]} would hold {wanted[worst]} blocks, "
                f"but a row has room for {self.max_num_blocks_per_req}"
            )
        return PreparedRows(where, shares, ids)

    def _check_rows(self, rows: NDArray[np.int64]) -> None:
        outside = (rows < 0) | (rows >= self.max_num_reqs)
        if outside.any():
            raise RowError(f"row {rows[outside][0]} is outside a table of {self.max_num_reqs} rows")
        order = np.arange(len(rows))
        self._mark[rows] = order
        if (self._mark[rows] != order).any():
            raise RowError(f"rows must be distinct, got {rows.tolist()}")

    def _append(self, prepared: PreparedRows) -> None:
        if len(prepared.block_ids):
            self._own().append(*prepared)

    def _replace(self, prepared: PreparedRows) -> None:
        self._own().set(*prepared)


def _first_bad(ids: NDArray, most: int) -> object:
    flat = ids.reshape(-1)
    if ids.dtype.kind not in "iu":
        return flat.tolist()[0]
    return flat[(flat < 0) | (flat > most)][0].item()


def _check_room(max_num_reqs: int, width: int) -> None:
    for name, value in (("max_num_reqs", max_num_reqs), ("blocks in a row", width)):
        if not hasattr(value, "__index__") or value < 1:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def exchange(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sources and targets of the moves that exchange rows ``a[i]`` and ``b[i]``; RowError for
    lists of unequal length, which would send rows round in a ring."""
    first, second = whole_numbers("row numbers", a), whole_numbers("row numbers", b)
    if len(first) != len(second):
        raise RowError(f"rows {first.tolist()} cannot be exchanged with {second.tolist()}")
    return np.concatenate([first, second]), np.concatenate([second, first])


def own_rows(
    max_num_reqs: int, width: int, device: torch.device, pin_memory: bool | None
) -> HostTable:
    """A host table for `BlockTable`, page-locked as its ``pin_memory`` says."""
    _check_room(max_num_reqs, width)
    host = HostTable(max_num_reqs, width)
    pin = host.rows.nbytes <= _PIN_UP_TO_BYTES if pin_memory is None else pin_memory
    if pin and device.type == "cuda":
        pin_array(host.rows)
    return host

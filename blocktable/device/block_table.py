"""The block tables of all KV cache groups: `MultiGroupBlockTable`, and `BlockTable` for one.

The groups' device tables lie in one allocation, so that a commit is one staging write and one
kernel for all of them, and a slot mapping is one kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from blocktable.core.errors import RowError
from blocktable.core.geometry import SlotGeometry
from blocktable.core.table import HostTable, whole_numbers
from blocktable.core.types import BlockIds
from blocktable.device.gather import RowGather
from blocktable.device.group_table import BlockTable, PreparedRows, exchange, own_rows
from blocktable.device.row_sources import SplitRows
from blocktable.device.slot_mapping import SlotMapper
from blocktable.device.upload import CommitStats, DeviceTables

__all__ = ["BlockTable", "MultiGroupBlockTable", "group_geometries"]


class MultiGroupBlockTable:
    """The tables of all KV cache groups: every row operation goes to each of them, every commit
    and slot mapping is one launch for all.

    Block ids come as a sequence with one list for each group. ``table[g]`` is group g.

    Args beyond `BlockTable`'s:
        max_model_len: longest sequence, in positions; sets the groups' widths.
        block_sizes, kernel_block_sizes: one for each group.
        max_num_blocks: manager blocks in a row, one for each group, instead of the width that
            ``max_model_len`` needs. Both are rounded up to a multiple of 128 // block_size
            where the block size is at most 128 (some kernels read rows in such units).
        replicated: groups whose KV every context-parallel rank keeps whole (their world is 1).

    Raises ValueError where the lists have different lengths.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        max_num_blocks: Sequence[int] | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        pin_memory: bool | None = None,
        replicated: Sequence[bool] | None = None,
    ) -> None:
        geometries = group_geometries(
            block_sizes, kernel_block_sizes, cp_world_size, cp_rank, cp_interleave, replicated
        )
        _same_length("max_num_blocks", max_num_blocks, block_sizes)
        widths = []
        for g, geometry in enumerate(geometries):
            columns = (
                geometry.row_width(max_model_len)
                if max_num_blocks is None
                else geometry.row_width(max_num_blocks[g] * geometry.span)
            )
            widths.append(columns * geometry.blocks_per_kv_block)
        on = torch.device(device)
        self._bind(
            [own_rows(max_num_reqs, width, on, pin_memory) for width in widths],
            geometries, max_num_batched_tokens, on,
        )  # fmt: skip

    @classmethod
    def over(
        cls,
        host_tables: Sequence[HostTable],
        max_num_batched_tokens: int,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        replicated: Sequence[bool] | None = None,
    ) -> MultiGroupBlockTable:
        """Device tables over a manager's host tables (``KVCacheManager.tables``), zero copy: the
        manager changes rows, ``commit_block_table`` uploads them. Where a kernel block is smaller
        than the manager's, ids are split on commit. One device table a host table: it drains
        the record of changes."""
        geometries = group_geometries(
            block_sizes, kernel_block_sizes, cp_world_size, cp_rank, cp_interleave, replicated
        )
        _same_length("host_tables", host_tables, block_sizes)
        sources = [
            host if geometry.blocks_per_kv_block == 1 else SplitRows(host, geometry)
            for host, geometry in zip(host_tables, geometries, strict=True)
        ]
        table = cls.__new__(cls)
        table._bind(sources, geometries, max_num_batched_tokens, torch.device(device))
        return table

    def _bind(
        self,
        sources: Sequence[HostTable | SplitRows],
        geometries: Sequence[SlotGeometry],
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        rows = {source.rows.shape[0] for source in sources}
        if len(rows) != 1:
            raise ValueError(f"the groups' tables have different numbers of rows: {sorted(rows)}")
        widths = [source.rows.shape[1] for source in sources]
        self._sources = tuple(sources)
        self.device_tables = DeviceTables(rows.pop(), widths, device)
        self.slot_mapper = SlotMapper(self.device_tables, geometries, max_num_batched_tokens)
        self.block_tables = tuple(
            BlockTable._member(source, g, self.device_tables, self.slot_mapper)
            for g, source in enumerate(sources)
        )
        self._gather: RowGather | None = None
        self.device, self.max_num_reqs = device, self.device_tables.num_rows

    def __getitem__(self, group: int) -> BlockTable:
        """Group ``group``'s table; RowError where there is none."""
        if not 0 <= group < len(self.block_tables):
            raise RowError(f"group {group} of {len(self.block_tables)} groups")
        return self.block_tables[group]

    def __len__(self) -> int:
        return len(self.block_tables)

    # -- row operations: all groups, or none ------------------------------------------------------

    def append_row(self, block_ids: Sequence[ArrayLike], row: int) -> None:
        """`BlockTable.append_row` in each group."""
        shares = [[np.asarray(ids).size] for ids in self._each(block_ids)]
        self.append_rows([row], shares, block_ids)

    def append_rows(
        self, rows: ArrayLike, counts: Sequence[ArrayLike], block_ids: Sequence[ArrayLike]
    ) -> None:
        """`BlockTable.append_rows` in each group: ``counts`` and ``block_ids`` one a group."""
        prepared = self._prepare(rows, counts, block_ids, replace=False)
        for table, checked in zip(self.block_tables, prepared, strict=True):
            table._append(checked)

    def add_row(self, block_ids: Sequence[ArrayLike], row: int) -> None:
        """`BlockTable.add_row` in each group."""
        shares = [[np.asarray(ids).size] for ids in self._each(block_ids)]
        self.add_rows([row], shares, block_ids)

    def add_rows(
        self, rows: ArrayLike, counts: Sequence[ArrayLike], block_ids: Sequence[ArrayLike]
    ) -> None:
        """`BlockTable.add_rows` in each group."""
        prepared = self._prepare(rows, counts, block_ids, replace=True)
        for table, checked in zip(self.block_tables, prepared, strict=True):
            table._replace(checked)

    def clear_row(self, row: int) -> None:
        """`BlockTable.clear_row` in each group."""
        self.clear_rows([row])

    def clear_rows(self, rows: ArrayLike) -> None:
        """Bulk `clear_row`."""
        for host in self._hosts():
            host.clear(rows)

    def truncate_row(self, row: int, num_blocks: Sequence[int]) -> None:
        """`BlockTable.truncate_row` in each group: one count of kernel blocks a group."""
        keep = np.asarray(self._each(num_blocks))
        if keep.dtype.kind not in "iu" or keep.min() < 0:
            raise RowError(f"a row cannot be cut to {list(num_blocks)} blocks")
        for host, count in zip(self._hosts(), keep.tolist(), strict=True):
            host.truncate([row], [count])

    def move_row(self, src: int, tgt: int) -> None:
        """`BlockTable.move_row` in each group."""
        self.move_rows([src], [tgt])

    def move_rows(self, src: ArrayLike, tgt: ArrayLike) -> None:
        """Bulk `move_row`."""
        for host in self._hosts():
            host.move_rows(src, tgt)

    def swap_row(self, a: int, b: int) -> None:
        """`BlockTable.swap_row` in each group."""
        for host in self._hosts():
            host.swap(a, b)

    def swap_rows(self, a: ArrayLike, b: ArrayLike) -> None:
        """Bulk `swap_row`; no row may be named twice."""
        self.move_rows(*exchange(a, b))

    def clear(self) -> None:
        """Empty every row of every group, on the host and on the device."""
        for host in self._hosts():
            host.clear()
        self._commit()

    # -- what a pool is asked for and given back --------------------------------------------------

    def blocks_needed(self, rows: ArrayLike, num_tokens: ArrayLike) -> list[NDArray[np.int64]]:
        """Manager blocks that each of ``rows`` lacks to hold ``num_tokens[i]`` tokens, [n],
        one array a group (what `append_rows` takes as counts). RowError for what is no row."""
        where, tokens = np.asarray(rows), np.asarray(num_tokens)
        self.block_tables[0]._check_rows(whole_numbers("row numbers", where))
        missing = []
        for table in self.block_tables:
            held = table.num_blocks_per_row[where] // table.blocks_per_kv_block
            missing.append(np.maximum(-(-tokens // table.geometry.span) - held, 0))
        return missing

    def held_blocks(self, rows: ArrayLike) -> list[BlockIds]:
        """Manager blocks of these rows, null entries left out, one array a group: row by row, each
        row's last block first, as `BlockPool.release` wants them. RowError for what is no row."""
        where = whole_numbers("row numbers", rows)
        self.block_tables[0]._check_rows(where)
        none = [np.zeros(0, np.int32)]
        return [
            np.concatenate(none + [table.block_ids(row)[::-1] for row in where.tolist()])
            for table in self.block_tables
        ]

    # -- device side ----------------------------------------------------------------------------

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring every group's device table up to date: one staging write and one kernel."""
        self.block_tables[0]._check_num_reqs(num_reqs)
        self._commit()

    def _commit(self) -> CommitStats:
        return self.device_tables.commit(self._sources)

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Fill every group's ``slot_mapping``: one launch (`slot_mapping.SlotMapper.compute`)."""
        self.slot_mapper.compute(num_reqs, query_start_loc, positions, rows)

    def gather_rows(
        self, rows: torch.Tensor, rows_cpu: NDArray[np.int32] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Every group's rows in batch order, int32 [n, width] (`gather.RowGather.gather`).

        ``rows`` int32 [n] on the device, -1 padded. With ``rows_cpu``, the same on the host,
        rows are copied as far as the longest of them only; leave it out inside a CUDA graph.
        """
        if self._gather is None:
            self._gather = RowGather(self.device_tables)
        if rows_cpu is None:
            return self._gather.gather(rows)
        live = rows_cpu[rows_cpu >= 0]
        widths = [
            max(1, int(table.num_blocks_per_row[live].max(initial=0)))
            for table in self.block_tables
        ]
        return self._gather.gather(rows, widths)

    # -- inside ---------------------------------------------------------------------------------

    def _hosts(self) -> list[HostTable]:
        """All groups' own host tables, or RowError before any of them is changed."""
        return [table._own() for table in self.block_tables]

    def _each(self, per_group: Sequence) -> Sequence:
        if len(per_group) != len(self.block_tables):
            raise ValueError(f"{len(per_group)} lists for {len(self.block_tables)} groups")
        return per_group

    def _prepare(
        self,
        rows: ArrayLike,
        counts: Sequence[ArrayLike],
        block_ids: Sequence[ArrayLike],
        *,
        replace: bool,
    ) -> list[PreparedRows]:
        return [
            table._prepare(rows, shares, ids, replace=replace)
            for table, shares, ids in zip(
                self.block_tables, self._each(counts), self._each(block_ids), strict=True
            )
        ]


def group_geometries(
    block_sizes: Sequence[int],
    kernel_block_sizes: Sequence[int] | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    replicated: Sequence[bool] | None = None,
) -> list[SlotGeometry]:
    """One geometry for each group; ValueError where the lists differ in length."""
    if not block_sizes:
        raise ValueError("a block table needs at least one group")
    _same_length("kernel_block_sizes", kernel_block_sizes, block_sizes)
    _same_length("replicated", replicated, block_sizes)
    kernels = kernel_block_sizes or [None] * len(block_sizes)
    whole = replicated or [False] * len(block_sizes)
    return [
        SlotGeometry(size, kernel)
        if alone
        else SlotGeometry(size, kernel, cp_world_size, cp_rank, cp_interleave)
        for size, kernel, alone in zip(block_sizes, kernels, whole, strict=True)
    ]


def _same_length(name: str, values: Sequence | None, block_sizes: Sequence[int]) -> None:
    if values is not None and len(values) != len(block_sizes):
        raise ValueError(f"{name} has length {len(values)}, block_sizes {len(block_sizes)}")

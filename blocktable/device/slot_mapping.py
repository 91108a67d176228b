"""Slots of a step's tokens, for all groups at once.

The formula is `core.geometry.SlotGeometry`. On a GPU one kernel maps every token of every group
(`slot_kernel`); on a CPU the NumPy form of the same formula runs. A step with more or fewer
tokens compiles nothing new, and both work inside a captured CUDA graph: the token count is read
from ``query_start_loc`` on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blocktable.core.errors import ConfigError
from blocktable.core.geometry import SlotGeometry
from blocktable.core.types import PAD_SLOT
from blocktable.device.upload import DeviceTables

_LARGEST_POSITION = 2**31 - 1


def context_parallel_rank(
    pcp_world: int = 1, pcp_rank: int = 0, dcp_world: int = 1, dcp_rank: int = 0
) -> tuple[int, int]:
    """(world, rank) of prefill and decode context-parallel groups taken together.

    world = pcp * dcp, rank = pcp_rank * dcp_world + dcp_rank. A group that does not exist has
    world 1, rank 0. Raises ConfigError for a rank outside its group.
    """
    for name, rank, world in (("pcp", pcp_rank, pcp_world), ("dcp", dcp_rank, dcp_world)):
        if not 0 <= rank < world:
            raise ConfigError(f"{name} rank {rank} is not below its world {world}")
    return pcp_world * dcp_world, pcp_rank * dcp_world + dcp_rank


class SlotMapper:
    """Fills one slot mapping for each group; fixed addresses.

    Attribute ``slots``: int64 [groups, max_num_batched_tokens], -1 behind the last token, for
    tokens another rank owns, for positions beyond a row and where the row's entry is null.
    """

    def __init__(
        self,
        tables: DeviceTables,
        geometries: Sequence[SlotGeometry],
        max_num_batched_tokens: int,
    ) -> None:
        if len(geometries) != len(tables.widths):
            raise ValueError(f"{len(geometries)} geometries for {len(tables.widths)} tables")
        if not hasattr(max_num_batched_tokens, "__index__") or max_num_batched_tokens < 1:
            raise ConfigError(
                f"max_num_batched_tokens must be a positive integer, got {max_num_batched_tokens!r}"
            )
        self._tables, self.geometries = tables, tuple(geometries)
        self.max_num_batched_tokens = max_num_batched_tokens
        padded = -(-max_num_batched_tokens // 16) * 16  # every group's mapping is aligned alike
        self._padded = torch.full(
            (len(geometries), padded), PAD_SLOT, dtype=torch.int64, device=tables.device
        )
        self.slots = self._padded[:, :max_num_batched_tokens]
        self._fields = torch.tensor(
            [
                _geometry_fields(geometry, width, base)
                for geometry, width, base in zip(
                    geometries, tables.widths, tables.bases, strict=True
                )
            ],
            dtype=torch.int64,
            device=tables.device,
        )

    def compute(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
        *,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Map a ragged batch: the tokens of request i are ``query_start_loc[i] ..
        query_start_loc[i + 1] - 1``, their positions beside them in ``positions``.

        query_start_loc: int32 [>= num_reqs + 1]; padded requests repeat the last value.
        positions: int64 [>= tokens]. rows: int32 [>= num_reqs], the table row of each request
        (-1 a padded one); without it request i has row i. groups: a run of neighbours, all by
        default.

        One kernel launch for all groups, no device sync. Raises ValueError when the arrays are
        shorter than ``num_reqs`` says, or hold more tokens than the mapping; on a CPU, where it can
        be seen, also when ``query_start_loc`` shares out other tokens than there are positions.
        """
        self._check(num_reqs, query_start_loc, positions, rows)
        if self._tables.backend == "triton":
            from blocktable.device import slot_kernel

            fields, slots = self._fields, self._padded
            if groups is not None:
                first, last = groups[0], groups[-1] + 1
                fields, slots = fields[first:last], slots[first:last]
            slot_kernel.launch(
                self._tables.arena, fields, query_start_loc, positions, rows, slots, num_reqs,
                self._tables.num_rows,
            )  # fmt: skip
            return
        for group in range(len(self.geometries)) if groups is None else groups:
            self._map_on_host(group, num_reqs, query_start_loc, positions, rows)

    def _check(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        if not 0 <= num_reqs < query_start_loc.shape[0]:
            raise ValueError(
                f"query_start_loc of length {query_start_loc.shape[0]} cannot hold "
                f"{num_reqs} requests"
            )
        if positions.shape[0] > self.max_num_batched_tokens:
            raise ValueError(
                f"{positions.shape[0]} positions, but a slot mapping holds "
                f"{self.max_num_batched_tokens}"
            )
        limit = self._tables.num_rows if rows is None else rows.shape[0]
        if num_reqs > limit:
            raise ValueError(f"{num_reqs} requests, but there are {limit} rows")

    def _map_on_host(
        self,
        group: int,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> None:
        starts = query_start_loc[: num_reqs + 1].numpy()
        tokens, counts = int(starts[-1]), np.diff(starts)
        if starts[0] != 0 or counts.min(initial=0) < 0 or tokens > positions.shape[0]:
            raise ValueError(
                f"query_start_loc {starts.tolist()} does not share out {positions.shape[0]} "
                "positions: it must begin at 0, never fall, and end at their number at most"
            )
        row = np.repeat(np.arange(num_reqs), counts)
        if rows is not None:
            row = rows.numpy()[row]
        where = positions[:tokens].numpy()
        if rows is not None:  # a padded row has no position
            live = (row >= 0) & (row < self._tables.num_rows)
            row, where = np.where(live, row, 0), np.where(live, where, -1)
        out = self.slots[group].numpy()
        table = self._tables.tables[group].numpy()
        out[:tokens] = self.geometries[group].slots(table, row, where)
        out[tokens:] = PAD_SLOT


def _geometry_fields(geometry: SlotGeometry, width: int, base: int) -> list[int]:
    """What ``slot_kernel`` reads for a group (`slot_kernel.GEOMETRY_FIELDS`)."""
    split = geometry.blocks_per_kv_block
    limit = min(width // split * geometry.span, _LARGEST_POSITION)
    return [
        base, width, limit, geometry.kernel_size, split,
        geometry.cp_world, geometry.cp_rank, geometry.cp_interleave,
    ]  # fmt: skip

"""Device tables at fixed addresses, and the commits that keep them equal to the host's.

One int32 allocation, the *arena*, holds every group's table, so one kernel can write them all.
A commit drains each host table's record of changes, plans (`upload_plan`), packs the plan into a
pinned staging buffer that no step in flight can see change, and launches one kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.table import HostTable, TableDelta
from blocktable.device.staging import StagingRing
from blocktable.device.upload_plan import GroupDelta, UploadPlan, entries_plan, plan_upload, spans

Backend = Literal["triton", "numpy"]

_FIRST_STAGING_BYTES = 64 * 1024
_MAX_CELLS = 2**31 - 1
_MOST_ENTRIES = 4096  # longer changes are cheaper as spans: 4 bytes an entry instead of 8

try:
    from blocktable.device._commit import take_entries
except ImportError:  # not built: the same plans in NumPy
    take_entries = None


class Source(Protocol):
    """A host table in kernel blocks that records its changes."""

    @property
    def flat(self) -> NDArray[np.int32]:
        """The rows, flattened."""
        ...

    @property
    def is_dirty(self) -> bool:
        """Whether there is anything to drain."""
        ...

    def drain(self) -> TableDelta:
        """Changes since the last drain."""
        ...


class CommitStats(NamedTuple):
    """What a commit moved."""

    entries: int
    operations: int
    bytes: int


_NOTHING = CommitStats(0, 0, 0)


def default_backend(device: torch.device) -> Backend:
    """NumPy where tables live in CPU memory, Triton elsewhere."""
    return "numpy" if device.type == "cpu" else "triton"


class DeviceTables:
    """The tables of all groups on one device; ``tables[g]`` is int32 [rows, widths[g]].

    Their addresses never change. Starts null, as host tables do. ``commit`` works on the current
    stream; a table is read by kernels enqueued on that stream afterwards.
    """

    def __init__(
        self,
        num_rows: int,
        widths: Sequence[int],
        device: torch.device | str,
        *,
        backend: Backend | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.backend: Backend = backend or default_backend(self.device)
        cells = num_rows * sum(widths)
        if cells > _MAX_CELLS:
            raise ConfigError(
                f"{num_rows} rows of {sum(widths)} entries are {cells} table entries; "
                f"at most {_MAX_CELLS} are addressable"
            )
        self.num_rows, self.widths = num_rows, tuple(widths)
        self.arena = torch.zeros(cells, dtype=torch.int32, device=self.device)
        self.bases = tuple(num_rows * sum(widths[:g]) for g in range(len(widths)))
        self.tables = tuple(
            self.arena[base : base + num_rows * width].view(num_rows, width)
            for base, width in zip(self.bases, widths, strict=True)
        )
        self._ring = StagingRing(_FIRST_STAGING_BYTES, self.device)
        self._cells = np.zeros(max(_MOST_ENTRIES, 2 * num_rows * len(widths)), np.int32)
        self._values = np.zeros_like(self._cells)
        self._host = self.arena.numpy() if self.device.type == "cpu" else None
        self.last_commit = _NOTHING

    def commit(self, sources: Sequence[Source], groups: Sequence[int] | None = None) -> CommitStats:
        """Bring the tables of ``groups`` (all by default) up to date with their ``sources``.

        At most one staging write and one kernel, with bytes in proportion to the entries changed.
        """
        which = range(len(self.widths)) if groups is None else groups
        dirty = [(g, source) for g, source in zip(which, sources, strict=True) if source.is_dirty]
        if not dirty:
            self.last_commit = _NOTHING
        elif self.backend == "triton":
            self.last_commit = self._launch(self.plan(dirty))
        else:
            self.last_commit = self._scatter(dirty)
        return self.last_commit

    def plan(self, dirty: Sequence[tuple[int, Source]]) -> UploadPlan:
        """Drain the sources of these groups: what to upload. Single entries are found by the
        compiled helper where it is built; they lie in buffers that the next call overwrites."""
        used, rest = self._take_entries(dirty)
        entries = self._cells[:used], self._values[:used]
        if not rest:
            return entries_plan(*entries)
        return plan_upload([self._drained(g, source) for g, source in rest], entries)

    def _drained(self, group: int, source: Source) -> GroupDelta:
        return GroupDelta(source.drain(), source.flat, self.widths[group], self.bases[group])

    def _take_entries(
        self, dirty: Sequence[tuple[int, Source]]
    ) -> tuple[int, list[tuple[int, Source]]]:
        """Entries put into the buffers, and the groups whose changes are more than entries."""
        used, rest = 0, []
        for g, source in dirty:
            found = -1
            if take_entries is not None and isinstance(source, HostTable):
                found = take_entries(
                    *source.record, source.flat, self._cells, self._values,
                    self.widths[g], self.bases[g], used,
                )  # fmt: skip
            if found < 0:
                rest.append((g, source))
            else:
                used = found
        return used, rest

    def _launch(self, plan: UploadPlan) -> CommitStats:
        from blocktable.device import upload_kernel

        size, operations = 4 * plan.num_ints, len(plan.operations)
        if size == 0:
            return _NOTHING
        with self._ring.next(size) as slot:
            plan.pack(slot.ints)
            upload_kernel.launch(
                self.arena, slot.int_tensor, len(plan.cells), len(plan.cells),
                plan.num_chains, operations, plan.max_stop,
            )  # fmt: skip
        return CommitStats(len(plan.cells), operations, size)

    def _scatter(self, dirty: Sequence[tuple[int, Source]]) -> CommitStats:
        if self._host is None:
            raise ConfigError(f"the numpy backend cannot write tables on {self.device}")
        written, rest = self._take_entries(dirty)
        self._host[self._cells[:written]] = self._values[:written]
        operations = 0
        for g, source in rest:
            group = self._drained(g, source)
            rows = self._host[group.base :][: self.num_rows * group.width]
            written += _apply(group, rows)
            operations += len(group.delta.copy_dst) + len(group.delta.fill_row)
        return CommitStats(written, operations, 8 * written + 20 * operations)


def _apply(group: GroupDelta, target: NDArray[np.int32]) -> int:
    """Carry out one group's delta on CPU memory (``target`` flat); entries written."""
    delta, width = group.delta, group.width
    if len(delta.copy_dst):
        lengths = delta.copy_len
        origin = target[spans(delta.copy_src.astype(np.int64) * width, lengths)]
        target[spans(delta.copy_dst.astype(np.int64) * width, lengths)] = origin
    written = 0
    for row, start, stop in (
        (delta.fill_row, delta.fill_start, delta.fill_stop),
        (delta.write_row, delta.write_start, delta.write_stop),
    ):
        if len(row):
            cells = spans(row.astype(np.int64) * width + start, stop - start)
            target[cells] = group.flat[cells]
            written += len(cells)
    return written

"""One rank of an engine: it turns step messages into changes of its own tables.

A rank keeps the tables twice: with the scheduler's block ids (to check the digest) and with its own
(what its kernels read). Both change by the same delta, and both are re-read a part at a time, so
that a bit that flips in either is found within a stated number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from blocktable.core.errors import OutOfBlocks, RankError, RowError
from blocktable.core.specs import KVCacheConfig
from blocktable.core.table import HostTable
from blocktable.core.types import BlockIds, Counts, RowIds
from blocktable.parallel.bounds import check_bounds
from blocktable.parallel.mirror import MirrorTable, combined_digest
from blocktable.parallel.rank_map import BlockMap
from blocktable.parallel.wire import GroupDelta, StepMessage

NO_ROW = -1


class RankStep(NamedTuple):
    """What a rank runs: the message with this rank's own block ids, and its batch. All int32."""

    message: StepMessage
    rows: RowIds  # [n]
    num_scheduled: Counts  # [n]
    num_computed: Counts  # [n]
    sample_index: Counts  # [m]
    copies: BlockIds  # [c, 2]
    swap_out: BlockIds  # [o, 2] device, host
    swap_in: BlockIds  # [i, 2] host, device


class RankState:
    """Tables, tokens and positions of one rank.

    ``tables`` (one `HostTable` a group, this rank's ids) and ``tokens`` int32 [max_num_rows,
    max_model_len] are what a runner reads. ``check_entries`` table entries are re-read each step:
    a changed bit is found after at most ceil((entries + rows) / check_entries) steps.

    `prepare` and `apply` cost O(changes) plus the check.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        rank: int,
        max_num_rows: int,
        max_model_len: int,
        widths: Sequence[int] | None = None,
        free_ids: BlockIds | None = None,
        check_entries: int = 4096,
    ) -> None:
        self.rank, self._check_entries = rank, check_entries
        if widths is None:
            specs = (group.kv_cache_spec for group in config.kv_cache_groups)
            widths = [max(1, spec.max_blocks_per_request(max_model_len)) for spec in specs]
        self._widths = list(widths)
        self.mirrors = [MirrorTable(max_num_rows, width) for width in widths]
        self.tables = tuple(HostTable(max_num_rows, width) for width in widths)
        self.blocks = BlockMap(config.num_blocks, free_ids)
        self.tokens = np.zeros((max_num_rows, max_model_len), np.int32)
        self.next_position = np.zeros(max_num_rows, np.int32)
        self._expected = 0  # sequence number of the next message
        self._mapped = 0  # digest of the map as its operations left it

    @property
    def digest(self) -> int:
        """Digest of the tables with the scheduler's ids."""
        return combined_digest(self.mirrors)

    def needed(self, message: StepMessage) -> BlockIds:
        """The scheduler's ids in the message that this rank has to map."""
        parts = [message.copy_to, message.copy_from, message.swap_in_device]
        for delta in message.groups:
            parts += [delta.append_ids, delta.set_ids]
        parts = [part for part in parts if len(part)]
        if not parts:
            return np.zeros(0, np.int32)
        return self.blocks.unmapped(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def check(self, message: StepMessage) -> int:
        """Whether the message can be applied; changes nothing. Returns the blocks it needs.

        Raises RankError for another order of messages, numbers outside the tables, or a shortage,
        naming rank, blocks needed and available."""
        if message.sequence != self._expected & 0xFFFFFFFF:
            raise RankError(
                f"rank {self.rank} expected message {self._expected} and got message "
                f"{message.sequence} (step {message.step})"
            )
        if len(message.groups) != len(self.tables):
            raise RankError(
                f"rank {self.rank} has {len(self.tables)} groups, but step {message.step} "
                f"has {len(message.groups)}"
            )
        try:
            check_bounds(message, self._widths, *self.tokens.shape)
        except RankError as error:
            raise RankError(f"rank {self.rank}: {error}") from None
        needed = len(self.needed(message))
        freed = len(message.dropped_ids)
        if needed > self.blocks.available + freed:
            raise RankError(
                f"rank {self.rank} needs {needed} blocks for step {message.step}, "
                f"but {self.blocks.available} are available"
            )
        return needed

    def apply(self, message: StepMessage) -> RankStep:
        """Take the step. Raises RankError, naming rank, step and first bad row, when this rank's
        tables disagree with the driver's or with what they were told."""
        self.check(message)
        try:
            step = self._apply(message)
        except (RowError, OutOfBlocks, IndexError, ValueError) as error:
            raise RankError(
                f"rank {self.rank} cannot apply step {message.step}: {error}"
            ) from error
        self._expected += 1
        if self.digest != message.digest:
            raise RankError(
                f"rank {self.rank} diverged at step {message.step}: its tables have digest "
                f"{self.digest:#018x}, the driver's {message.digest:#018x}"
            )
        bad = self.first_bad_row()
        if bad != NO_ROW:
            raise RankError(
                f"rank {self.rank}, step {message.step}: row {bad} of its block table changed "
                "without being told"
            )
        return step

    def _apply(self, message: StepMessage) -> RankStep:
        if len(message.dropped_ids):
            self.blocks.drop(np.unique(message.dropped_ids))
        self.blocks.take(self.needed(message))
        for mirror, table, delta in zip(self.mirrors, self.tables, message.groups, strict=True):
            mirror.apply(delta)
            self._apply_own(table, delta)
        num_computed = self._advance(message)
        own = self.blocks
        return RankStep(
            message, message.rows, message.num_scheduled, num_computed, _samples(message),
            _pairs(own[message.copy_from], own[message.copy_to]),
            _pairs(own[message.swap_out_device], message.swap_out_host),
            _pairs(message.swap_in_host, own[message.swap_in_device]),
        )  # fmt: skip

    def _apply_own(self, table: HostTable, delta: GroupDelta) -> None:
        """The delta with this rank's ids. The order is `GroupDelta`'s."""
        if len(delta.move_from):
            table.move_rows(delta.move_from, delta.move_to)
        if len(delta.truncate_rows):
            table.truncate(delta.truncate_rows, delta.truncate_counts)
        if len(delta.null_rows):
            table.null(delta.null_rows, delta.null_starts, delta.null_stops)
        if len(delta.set_rows):
            table.write(delta.set_rows, delta.set_columns, self.blocks[delta.set_ids])
        if len(delta.append_rows):
            table.append(delta.append_rows, delta.append_counts, self.blocks[delta.append_ids])

    def _advance(self, message: StepMessage) -> Counts:
        """First positions of the batch's rows; tokens are stored, positions move on."""
        self.next_position[message.start_rows] = message.start_positions
        rows, counts = message.rows, message.num_scheduled
        first = self.next_position[rows]
        if len(message.token_ids):
            if len(rows) == len(message.token_ids):
                self.tokens[rows, first] = message.token_ids
            else:
                index = np.repeat(np.arange(len(rows)), counts)
                offset = np.cumsum(counts) - counts
                columns = np.arange(len(index)) + (first - offset)[index]
                self.tokens[rows[index], columns] = message.token_ids
        self.next_position[rows] = first + counts
        return first

    def first_bad_row(self) -> int:
        """Re-read the next part of the tables; the first row whose memory is wrong, or NO_ROW."""
        budget = max(1, self._check_entries // len(self.tables))
        for mirror, table in zip(self.mirrors, self.tables, strict=True):
            rows = mirror.digest.next_rows(mirror.table.counts, budget)
            wrong = mirror.digest.recompute(mirror.table.rows, mirror.table.counts, rows)
            bad = wrong != mirror.digest.rows[rows]
            width = int(mirror.table.counts[rows].max(initial=0))
            expected = self.blocks[
                mirror.table.rows[rows, :width].clip(0, len(self.blocks.own) - 1)
            ]
            bad |= (expected != table.rows[rows, :width]).any(axis=1)
            bad |= mirror.table.counts[rows] != table.counts[rows]
            if bad.any():
                return int(rows[bad].min())
        return NO_ROW


def _samples(message: StepMessage) -> Counts:
    if len(message.sample_index) == 0:
        return np.arange(len(message.rows), dtype=np.int32)
    if message.sample_index[0] == -1:
        return np.zeros(0, np.int32)
    return message.sample_index


def _pairs(first: BlockIds, second: BlockIds) -> BlockIds:
    return np.stack([first, second], axis=1) if len(first) else np.zeros((0, 2), np.int32)


def apply_on_all(states: Sequence[RankState], message: StepMessage) -> list[RankStep]:
    """Apply a step on ranks that live in one process: all are checked before any allocates.

    Raises RankError for the first rank that is short or out of order; no rank has changed then.
    """
    for state in states:
        state.check(message)
    return [state.apply(message) for state in states]

"""The driver's side of a step: from the scheduler's decision to the message for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import RankError
from blocktable.core.table import HostTable
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.parallel.mirror import MirrorTable, combined_digest, group_delta
from blocktable.parallel.wire import EMPTY, StepMessage

_NO_SAMPLES = np.array([-1], np.int32)


class StepDecision(Protocol):
    """The part of the scheduler's ``SchedulerOutput`` that ranks need."""

    @property
    def step_id(self) -> int: ...
    @property
    def rows(self) -> RowIds: ...
    @property
    def num_scheduled(self) -> Counts: ...
    @property
    def num_computed(self) -> Counts: ...
    @property
    def sample_index(self) -> Counts: ...
    @property
    def pending(self) -> NDArray[np.bool_] | None: ...
    @property
    def released(self) -> RowIds: ...
    @property
    def forked(self) -> Sequence[Any]: ...
    @property
    def copies(self) -> NDArray[np.int32]: ...
    @property
    def swap_out(self) -> NDArray[np.int32]: ...
    @property
    def swap_in(self) -> NDArray[np.int32]: ...


class StepWriter:
    """Makes the message of each step, in order.

    ``tables`` are the manager's; ``capacities`` the blocks (null included) of each rank's pool.
    With ``drains`` the writer forgets the tables' records of changes; leave it False where a device
    table drains them after `write` in every step. Cost: O(changes) and a compare of the counts.
    """

    def __init__(
        self,
        tables: Sequence[HostTable],
        capacities: Sequence[int],
        *,
        drains: bool = True,
    ) -> None:
        self._tables, self._drains = tuple(tables), drains
        self.mirrors = [MirrorTable(t.max_rows, t.max_blocks_per_row) for t in tables]
        self._next = np.full(tables[0].max_rows, -1, np.int32)
        self._sequence = 0
        self._capacities = np.asarray(capacities, np.int64)
        self._mapped = np.zeros(int(self._capacities.min()), np.bool_)
        self._mapped[0] = True
        self._num_mapped = 1

    @property
    def sequence(self) -> int:
        """Number of the next message."""
        return self._sequence

    def write(self, decision: StepDecision, tokens: TokenIds) -> StepMessage:
        """The message of a step; ``tokens`` is the manager's [rows, max_model_len].

        Raises RankError, naming rank, needed and available, when a rank's pool is short: nothing
        was sent then.
        """
        released = np.asarray(decision.released, np.int32)
        deltas = []
        for table, mirror in zip(self._tables, self.mirrors, strict=True):
            deltas.append(group_delta(table, table.peek(), mirror, released))
        self._reserve(decision, deltas)
        for table, mirror, delta in zip(self._tables, self.mirrors, deltas, strict=True):
            mirror.apply(delta)
            if self._drains:
                table.drain()
        start_rows, start_positions = self._starts(decision)
        rows, counts = decision.rows, decision.num_scheduled
        message = StepMessage(
            step=int(decision.step_id),
            sequence=self._sequence,
            digest=combined_digest(self.mirrors),
            groups=tuple(deltas),
            rows=rows,
            num_scheduled=counts,
            start_rows=start_rows,
            start_positions=start_positions,
            token_ids=_step_tokens(decision, tokens),
            sample_index=_sample_index(decision),
            released=released,
            fork_rows=np.array([fork.row for fork in decision.forked], np.int32),
            fork_parents=np.array([fork.parent_row for fork in decision.forked], np.int32),
            copy_from=decision.copies[:, 0],
            copy_to=decision.copies[:, 1],
            swap_out_device=decision.swap_out[:, 0],
            swap_out_host=decision.swap_out[:, 1],
            swap_in_host=decision.swap_in[:, 0],
            swap_in_device=decision.swap_in[:, 1],
            user=_pending(decision),
        )
        self._sequence += 1
        return message

    def _reserve(self, decision: StepDecision, deltas: Sequence[Any]) -> None:
        """All ranks are checked before any of them allocates: each maps the ids it has not seen."""
        parts = [decision.copies.ravel(), decision.swap_in[:, 1]]
        for delta in deltas:
            parts += [delta.append_ids, delta.set_ids]
        ids = np.concatenate(parts)
        if not len(ids):
            return
        if int(ids.max()) >= len(self._mapped):
            raise RankError(
                f"step {decision.step_id} uses block {int(ids.max())}, but the smallest rank has "
                f"{len(self._mapped)} blocks"
            )
        fresh = np.unique(ids[~self._mapped[ids]])
        left = self._capacities - self._num_mapped
        short = np.flatnonzero(left < len(fresh))
        if len(short):
            rank = int(short[0])
            raise RankError(
                f"rank {rank} needs {len(fresh)} blocks for step {decision.step_id}, "
                f"but {int(left[rank])} are available"
            )
        self._mapped[fresh] = True
        self._num_mapped += len(fresh)

    def _starts(self, decision: StepDecision) -> tuple[RowIds, Counts]:
        """Rows whose position a rank cannot know: new ones, and those that were rolled back."""
        rows, computed = decision.rows, decision.num_computed
        unknown = self._next[rows] != computed
        self._next[rows] = computed + decision.num_scheduled
        return rows[unknown], computed[unknown]


def _step_tokens(decision: StepDecision, tokens: TokenIds) -> TokenIds:
    rows, counts, first = decision.rows, decision.num_scheduled, decision.num_computed
    if not len(rows):
        return EMPTY
    total = int(counts.sum())
    if total == len(rows):
        return tokens[rows, first]
    index = np.repeat(np.arange(len(rows)), counts)
    offset = np.cumsum(counts) - counts
    return tokens[rows[index], np.arange(total) + (first - offset)[index]]


def _pending(decision: StepDecision) -> Counts:
    """Batch entries whose last input token is one that the step in flight draws."""
    if decision.pending is None:
        return EMPTY
    return np.flatnonzero(decision.pending).astype(np.int32)


def _sample_index(decision: StepDecision) -> Counts:
    index = np.asarray(decision.sample_index, np.int32)
    if len(index) == 0:
        return _NO_SAMPLES if len(decision.rows) else EMPTY
    if len(index) == len(decision.rows) and bool((index == np.arange(len(index))).all()):
        return EMPTY
    return index

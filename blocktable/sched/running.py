"""First half of a step: what the running requests compute, and who must go when blocks run out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlockStateError, OutOfBlocks
from blocktable.core.types import Counts, RowIds
from blocktable.sched.draft import DraftProposer
from blocktable.sched.state import SchedulerState

_NONE = np.zeros(0, np.int32)


class Batch(NamedTuple):
    """Batch entries decided so far; int32 [n] each. ``drafts`` None = no row has any."""

    rows: RowIds
    num_computed: Counts
    num_new: Counts
    drafts: Counts | None
    draft_tokens: Counts

    @property
    def total(self) -> int:
        """Tokens to compute, drafts included."""
        drafts = 0 if self.drafts is None else int(self.drafts.sum())
        return int(self.num_new.sum()) + drafts


EMPTY_BATCH = Batch(_NONE, _NONE, _NONE, None, _NONE)


def schedule_running(state: SchedulerState, proposer: DraftProposer | None) -> Batch:
    """Allocate what running requests need, in running order, within the token budget.

    One allocation for all rows where the blocks suffice. Where they do not, victims leave from
    the end of the order until the row in question fits or is itself the last one.
    """
    rows = state.order
    if not len(rows):
        return EMPTY_BATCH
    if proposer is not None:  # any row may compute more than one token
        state.steady = False
    elif state.steady and _still_steady(state):
        computed = state.manager.num_computed[rows]
        new = state.ones[: len(rows)]
        batch = Batch(rows, computed, new, None, _NONE)
        served = state.manager.allocate(rows, new, partial=True)
        return batch if served == len(rows) else _finish(state, batch, served)
    batch = _wanted(state, proposer)
    if not len(batch.rows):
        return batch
    served = _allocate(state, batch)
    if served == len(batch.rows):
        return batch
    if batch.drafts is not None:  # rather no drafts than a preemption
        return _finish(state, _without_drafts(batch, served), served)
    return _finish(state, batch, served)


def _still_steady(state: SchedulerState) -> bool:
    budget = state.config.max_num_batched_tokens
    return len(state.order) <= budget and state.left > len(state.in_flight)


def _wanted(state: SchedulerState, proposer: DraftProposer | None) -> Batch:
    """How many tokens each running row should compute, by need, chunk size and budget."""
    manager, config, rows = state.manager, state.config, state.order
    computed = manager.num_computed[rows]
    known = manager.num_tokens[rows]
    pending = state.pending[rows]
    target = known + pending
    new = np.where((pending > 0) & (target >= state.limit[rows]), 0, target - computed)
    if config.max_prefill_chunk:
        new = np.minimum(new, config.max_prefill_chunk)
    drafts, tokens = None, _NONE
    if proposer is not None:
        ready = (target - computed == 1) & (new == 1) & (pending == 0)
        drafts, tokens = _propose(state, proposer, rows, known, ready)
    total = new if drafts is None else new + drafts
    before = np.cumsum(total) - total
    room = np.clip(config.max_num_batched_tokens - before, 0, None)
    new = np.minimum(new, room).astype(np.int32)
    if drafts is not None:
        drafts, tokens = _cut_drafts(drafts, tokens, np.minimum(drafts, room - new))
    keep = new > 0
    if not keep.all():
        if drafts is not None:
            drafts, tokens = drafts[keep], tokens  # a row without tokens has no drafts either
        rows, computed, new = rows[keep], computed[keep], new[keep]
    if drafts is not None and not drafts.any():
        drafts = None
    return Batch(rows, computed, new, drafts, tokens)


def _propose(
    state: SchedulerState, proposer: DraftProposer, rows: RowIds, known: Counts,
    ready: NDArray[np.bool_],
) -> tuple[Counts, Counts]:  # fmt: skip
    """Drafts of the ``ready`` rows, fewer where a request could not take them all."""
    ready &= state.may_draft[rows]
    if state.forking:  # children draw their first tokens from these rows, and no drafts
        ready &= ~np.isin(rows, list(state.forking))
    room = np.minimum(state.config.num_draft_tokens, state.limit[rows] - known - 1)
    most = np.where(ready, room, 0).astype(np.int32)
    drafts, tokens = proposer.propose(rows, state.manager.tokens, known, most)
    return _cut_drafts(drafts, tokens, np.minimum(drafts, most))


def _cut_drafts(have: Counts, tokens: Counts, keep: Counts) -> tuple[Counts, Counts]:
    """The first ``keep[i]`` of each row's ``have[i]`` concatenated drafts."""
    if (have == keep).all():
        return have, tokens
    offset = np.arange(int(have.sum())) - np.repeat(np.cumsum(have) - have, have)
    return keep.astype(np.int32), tokens[offset < np.repeat(keep, have)]


def _allocate(state: SchedulerState, batch: Batch) -> int:
    lookahead = 0 if batch.drafts is None else batch.drafts
    return state.manager.allocate(batch.rows, batch.num_new, lookahead=lookahead, partial=True)


def _without_drafts(batch: Batch, served: int) -> Batch:
    """Rows from ``served`` on lose their drafts."""
    if batch.drafts is None:
        return batch
    drafts = batch.drafts.copy()
    kept = int(drafts[:served].sum())
    drafts[served:] = 0
    return batch._replace(drafts=drafts if kept else None, draft_tokens=batch.draft_tokens[:kept])


def _finish(state: SchedulerState, batch: Batch, served: int) -> Batch:
    """Serve the rows from number ``served`` on, preempting from the end of the order."""
    rows = batch.rows
    end = len(rows)
    while served < end:
        served += state.manager.allocate(rows[served:end], batch.num_new[served:end], partial=True)
        this = slice(served, served + 1)
        if served == end or _wait_for_fences(state, rows[this], batch.num_new[this]):
            break
        victim = int(state.order[-1])
        state.preempt(victim)
        if victim == rows[end - 1]:
            end -= 1
    return _first(batch, served)


def _wait_for_fences(state: SchedulerState, row: RowIds, num_new: Counts) -> bool:
    """Enough released blocks come back when the steps in flight end: preempt nobody."""
    if not state.in_flight or not state.manager.pool.fenced:
        return False
    try:
        state.manager.allocate(row, num_new)
    except OutOfBlocks as short:
        return short.needed <= short.available + short.fenced
    raise BlockStateError(f"row {row[0]} was refused blocks and then given them")


def _first(batch: Batch, count: int) -> Batch:
    drafts = None if batch.drafts is None else batch.drafts[:count]
    tokens = _NONE if drafts is None else batch.draft_tokens[: int(drafts.sum())]
    return Batch(
        batch.rows[:count], batch.num_computed[:count], batch.num_new[:count], drafts, tokens
    )

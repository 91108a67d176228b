"""From a decided batch to a ``SchedulerOutput``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import BlockIds, Counts, RowIds
from blocktable.sched.admission import Admitted, Blocked, fork_children
from blocktable.sched.output import NO_PAIRS, SchedulerOutput
from blocktable.sched.running import Batch
from blocktable.sched.state import InFlight, SchedulerState


def extend(batch: Batch, came: Admitted) -> Batch:
    """The batch with the requests that were admitted behind it."""
    drafts = batch.drafts
    if drafts is not None:
        drafts = np.concatenate([drafts, np.zeros(len(came.rows), np.int32)])
    return Batch(
        np.concatenate([batch.rows, np.array(came.rows, np.int32)]),
        np.concatenate([batch.num_computed, np.array(came.num_computed, np.int32)]),
        np.concatenate([batch.num_new, np.array(came.num_new, np.int32)]),
        drafts,
        batch.draft_tokens,
    )


def emit(
    state: SchedulerState, batch: Batch, total: int, blocked: Blocked | None
) -> SchedulerOutput:
    """Note what the step samples, begin it, and say everything in one output."""
    manager, rows = state.manager, batch.rows
    if state.steady:
        sample_rows, index = rows, state.range[: len(rows)]
    else:
        sample_rows, index = _samples(state, batch)
    pending = None
    if state.config.max_steps_in_flight > 1:
        waits = state.pending[rows] > 0
        pending = waits if waits.any() else None
        state.pending[sample_rows] += 1
    num_scheduled = batch.num_new
    if batch.drafts is not None:
        num_scheduled = num_scheduled + batch.drafts
        _write_drafts(state, batch, batch.drafts)
    copies = manager.take_copies() if state.ever_forked else None
    output = SchedulerOutput(
        manager.begin_step(), rows, num_scheduled, batch.num_computed, total, sample_rows,
        index, pending, batch.drafts,
    )  # fmt: skip
    if state.noted or blocked is not None or copies is not None:
        output = output._replace(
            admitted=tuple(state.admitted), forked=tuple(state.forked),
            preempted=tuple(state.preempted), released=np.array(state.released, np.int32),
            copies=NO_PAIRS if copies is None else _pairs([(copies.src, copies.dst)]),
            swap_out=_pairs([(plan.device, plan.host) for plan in state.swap_out]),
            swap_in=_pairs([(plan.host, plan.device) for plan in state.swap_in]),
            blocked=blocked.request if blocked else None,
            blocked_hit=blocked.hit if blocked else 0,
        )  # fmt: skip
        plans = state.swap_out
        state.clear_notes()
        state.in_flight.append(InFlight(output, [], plans))
    else:
        state.in_flight.append(InFlight(output, [], []))
    state.stats.steps += 1
    state.stats.scheduled_tokens += total
    return output


def _pairs(moves: list[tuple[BlockIds, BlockIds]]) -> NDArray[np.int32]:
    """[k, 2] all (source, target) pairs of some moves; block ids are unique over all groups."""
    moves = [move for move in moves if len(move[0])]
    if not moves:
        return NO_PAIRS
    return np.concatenate([np.stack(move, axis=1) for move in moves]).astype(np.int32)


def _samples(state: SchedulerState, batch: Batch) -> tuple[RowIds, Counts]:
    """Rows whose step reaches their last token, children that fork off now included; decides
    whether the next step is a steady one."""
    rows = batch.rows
    known = state.manager.num_tokens[rows]
    reached = batch.num_computed + batch.num_new >= known + state.pending[rows]
    if len(rows) and reached.all() and not state.forking:
        if rows is state.order and batch.drafts is None:
            state.steady = True
            state.left = int((state.limit[rows] - known).min())
            state.steady_stops = bool((state.stops[rows] >= 0).any())
            state.steady_at = 0.0
        return rows, state.range[: len(rows)]
    index = np.flatnonzero(reached).astype(np.int32)
    sample_rows = rows[index]
    pairs = fork_children(state, set(sample_rows.tolist())) if state.forking else []
    if pairs:
        place = {row: i for i, row in enumerate(rows.tolist())}
        more = np.array([place[parent] for parent, _ in pairs], np.int32)
        index = np.concatenate([index, more])
        sample_rows = np.concatenate([sample_rows, np.array([c for _, c in pairs], np.int32)])
    return sample_rows, index


def _write_drafts(state: SchedulerState, batch: Batch, drafts: Counts) -> None:
    """Put drafts behind the known tokens, where the engine reads its input ids."""
    manager, rows = state.manager, batch.rows
    start = np.cumsum(drafts) - drafts
    offset = np.arange(len(batch.draft_tokens)) - np.repeat(start, drafts)
    known = np.repeat(manager.num_tokens[rows], drafts)
    manager.tokens[np.repeat(rows, drafts), known + offset] = batch.draft_tokens
    state.stats.drafted_tokens += len(batch.draft_tokens)

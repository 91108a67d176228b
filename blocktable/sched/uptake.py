"""A step comes back: its tokens are taken, or it is cancelled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlocktableError, RequestError
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.sched.admission import forget_host_copy
from blocktable.sched.output import NO_INTS, SchedulerOutput, StepResult
from blocktable.sched.request import FinishReason, Request, RequestStatus
from blocktable.sched.state import InFlight, SchedulerState
from blocktable.sched.tokens import (
    check_tokens,
    conclude,
    end_rows,
    record_times,
    take_late,
    take_many,
    take_one_each,
)


def take_step(
    state: SchedulerState,
    output: SchedulerOutput,
    sampled: TokenIds | NDArray[np.int64] | None,
    counts: NDArray[np.integer] | None,
) -> StepResult:
    """See ``Scheduler.update``."""
    if not state.in_flight or state.in_flight[0].output is not output:
        raise BlocktableError(f"step {output.step_id} is not the oldest step in flight")
    rows = output.sample_rows
    if counts is not None:
        counts = _check_counts(output, counts)
    tokens = NO_INTS if sampled is None else check_tokens(sampled, len(rows), counts)
    step = state.in_flight.popleft()
    state.manager.end_step(output.step_id)
    index = state.range[: len(rows)]
    late: list[Request] = []
    if step.stale:
        stale = np.isin(rows, step.stale)
        if sampled is not None:
            late = _take_stale(state, step, stale, tokens, counts)
            keep = ~stale if counts is None else np.repeat(~stale, counts)
            tokens = tokens[keep]
        index = np.flatnonzero(~stale).astype(np.int32)
        rows = rows[index]
        counts = None if counts is None else counts[index]
    if state.config.max_steps_in_flight > 1:
        state.pending[rows] -= 1
    if sampled is None:
        state.steady = False
        return StepResult(NO_INTS, NO_INTS, NO_INTS, NO_INTS, state.requests[:0])
    result = take(state, rows, index, tokens, counts)
    if output.num_drafts is not None:
        _settle_drafts(state, output.num_drafts[output.sample_index[index]], result)
    return result._replace(finished=(*result.finished, *late)) if late else result


def _check_counts(output: SchedulerOutput, counts: NDArray[np.integer]) -> Counts:
    counts = np.asarray(counts, np.int32)
    drafts = output.num_drafts
    most = 1 if drafts is None else 1 + drafts[output.sample_index]
    if counts.shape != output.sample_rows.shape or ((counts < 1) | (counts > most)).any():
        raise RequestError(
            f"step {output.step_id}: counts {counts.tolist()} must be 1 + accepted drafts "
            f"for each of {len(output.sample_rows)} rows, at most {np.asarray(most).tolist()}"
        )
    return counts


def take(
    state: SchedulerState, rows: RowIds, index: Counts, tokens: TokenIds, counts: Counts | None
) -> StepResult:
    """Append tokens to rows and end what is done with them."""
    whole = rows is state.order
    if counts is None:
        taken = take_one_each(state, rows, tokens, state.ones[: len(rows)])
    else:
        taken = take_many(state, rows, counts, tokens)
        state.steady = False
    record_times(state, rows, taken.counts, whole)
    requests = state.requests[rows]
    finished: tuple[Request, ...] = ()
    if len(taken.ended):
        reasons: list[FinishReason] = ["stop" if s else "length" for s in taken.stopped.tolist()]
        finished = tuple(end_rows(state, taken.ended, reasons))
        for request in finished:
            if request.finish_reason == "stop":
                request.stop_token = int(request.tokens[-1])
    return StepResult(rows, index, taken.counts, taken.token_ids, requests, finished)


def _take_stale(
    state: SchedulerState,
    step: InFlight,
    stale: NDArray[np.bool_],
    tokens: TokenIds,
    counts: Counts | None,
) -> list[Request]:
    """Tokens of rows that changed hands: a preempted request keeps its own, the rest is dropped.
    Returns requests that ended by them. Loops over these rows only."""
    ended: list[Request] = []
    share = state.ones[: len(stale)] if counts is None else counts
    start = np.cumsum(share) - share
    for j in np.flatnonzero(stale).tolist():
        row = int(step.output.sample_rows[j])
        request = state.late.pop((step.output.step_id, row), None)
        if request is None or request.status == RequestStatus.FINISHED:
            continue
        request.late -= 1
        for token in tokens[start[j] : start[j] + share[j]].tolist():
            reason = take_late(state, request, token)
            if reason is not None:
                forget_host_copy(state, request)
                conclude(state, request, reason)
                state.waiting.forget(request)
                ended.append(request)
                break
    return ended


def _settle_drafts(state: SchedulerState, drafts: Counts, result: StepResult) -> None:
    """Accepted drafts count as computed (and complete blocks get keys); blocks that only
    rejected ones needed are given back."""
    manager, rows = state.manager, result.rows
    accepted = result.counts - 1
    state.stats.accepted_tokens += int(accepted.sum())
    alive = state.requests[rows].astype(np.bool_)  # a released row holds None
    more = alive & (accepted > 0)
    if more.any():
        manager.allocate(rows[more], accepted[more])
    less = alive & (accepted < drafts)
    if less.any():
        manager.truncate(rows[less], manager.num_tokens[rows[less]])


def cancel_step(state: SchedulerState, output: SchedulerOutput) -> None:
    """See ``Scheduler.cancel``."""
    if not state.in_flight or state.in_flight[-1].output is not output:
        raise BlocktableError(f"step {output.step_id} is not the newest step in flight")
    step = state.in_flight.pop()
    state.manager.end_step(output.step_id)
    for key in [key for key in state.late if key[0] == output.step_id]:
        request = state.late.pop(key)
        request.late -= 1
        forget_host_copy(state, request)  # it holds KV that the step was to compute
    if step.stale:  # rows that left since have kept keys of this step: which ones, nobody knows
        state.manager.invalidate_prefix_cache()
    restored = {entry.row for entry in output.admitted} if len(output.swap_in) else set()
    gone = set(step.stale)
    starts = dict(zip(output.rows.tolist(), output.num_computed.tolist(), strict=True))
    children = [entry.row for entry in output.forked]
    for row in dict.fromkeys([*children, *reversed(starts)]):
        if row not in gone:
            start = 0 if row in restored else starts.get(row)
            state.preempt(row, allow_swap=False, really_computed=start)
    plans = {id(plan) for plan in step.swap_out}
    for request in output.preempted:
        if (
            request.swap is not None and id(request.swap.plan) in plans
        ):  # the copy to the host was never made
            forget_host_copy(state, request)

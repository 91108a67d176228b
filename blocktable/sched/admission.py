"""Second half of a step: who comes in from the waiting queue, and forks of who just came."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blocktable.core.errors import OutOfBlocks
from blocktable.manager import Hit
from blocktable.sched.output import Admission, Fork
from blocktable.sched.request import Request, RequestStatus
from blocktable.sched.state import SchedulerState


class Admitted(NamedTuple):
    """Batch entries of requests that got a row."""

    rows: list[int]
    num_computed: list[int]
    num_new: list[int]


class Blocked(NamedTuple):
    """The head of the queue did not fit; ``hit`` = its prefix hit in tokens."""

    request: Request
    hit: int


def admit_waiting(state: SchedulerState, budget: int) -> tuple[Admitted, Blocked | None]:
    """Admit from the front of the queue while rows, blocks and ``budget`` tokens last.

    A request that does not fit stops the loop, unless the look-ahead lets up to
    ``config.lookahead`` requests behind it try, which it does until the head has been passed over
    in ``config.lookahead_patience`` steps.
    """
    done = Admitted([], [], [])
    blocked: Blocked | None = None
    skip, passed = 0, False
    while budget > 0:
        request = state.waiting.peek(skip)
        if request is None or not _has_rows(state, request):
            break
        fit = _admit(state, request, budget)
        if isinstance(fit, int):
            budget -= fit
            passed = passed or skip > 0
            if fit:
                row = request.row
                done.rows.append(row)
                done.num_new.append(fit)
                done.num_computed.append(int(state.manager.num_computed[row]) - fit)
            continue
        if fit is None:  # its whole prompt must run in one step, and this step has no room left
            break
        blocked = blocked or fit
        head = blocked.request
        skip += 1
        if skip > state.config.lookahead or head.passed_over >= state.config.lookahead_patience:
            break
    if blocked is not None and passed:
        blocked.request.passed_over += 1
    return done, blocked


def _has_rows(state: SchedulerState, request: Request) -> bool:
    """A free row for it, and for the children it will fork into."""
    return rows_to_spare(state) >= (request.n if not request.forked else 1)


def rows_to_spare(state: SchedulerState) -> int:
    """Free rows that no running request needs for children still to come."""
    return len(state.free_rows) - sum(state.requests[row].n - 1 for row in state.forking)


def _admit(state: SchedulerState, request: Request, budget: int) -> int | Blocked | None:
    """Tokens scheduled; Blocked if it does not fit; None if the budget is too small."""
    if request.late:  # a step in flight still owes it a token
        return Blocked(request, 0)
    if request.swap is not None:
        return _swap_in(state, request, budget)
    sequence = request.sequence
    if sequence is None:
        sequence = request.sequence = state.manager.sequence(
            request.tokens, salt=request.salt, adapter=request.adapter, media=request.media
        )
    elif len(sequence) < len(request.tokens):
        sequence.extend(request.tokens[len(sequence) :])
    hit = state.manager.find_hit(sequence)
    need = len(request.tokens) - hit.num_tokens
    new = min(need, budget, state.config.max_prefill_chunk or budget)
    if new < need and not state.config.chunked_prefill:
        return None
    row = state.free_rows[-1]
    try:
        state.manager.admit(
            row, hit, new, reserve_blocks=_reserve(state), request=request.request_id,
            full_sequence=state.config.full_sequence_must_fit,
            resumed=request.num_cached_tokens >= 0,
        )  # fmt: skip
    except OutOfBlocks:
        return Blocked(request, hit.num_tokens)
    _enter(state, request, row, hit.num_tokens)
    _count(state, request, hit)
    return new


def _reserve(state: SchedulerState) -> int:
    return state.watermark_blocks if len(state.order) else 0


def _enter(state: SchedulerState, request: Request, row: int, num_cached: int) -> None:
    state.free_rows.pop()
    state.waiting.take(request)
    state.enter(request, row)
    state.admitted.append(Admission(request, row, num_cached, len(request.tokens)))


def _count(state: SchedulerState, request: Request, hit: Hit) -> None:
    """Statistics of a first admission; resumes add nothing (case B40)."""
    if request.num_cached_tokens >= 0:
        return
    now = state.clock()
    request.num_cached_tokens = hit.num_tokens
    request.scheduled_at = now
    stats = state.stats
    stats.admitted += 1
    stats.query_tokens += request.num_prompt_tokens
    stats.hit_tokens += hit.num_tokens
    stats.queue_time.add(max(0.0, now - request.arrival))


def _swap_in(state: SchedulerState, request: Request, budget: int) -> int | Blocked | None:
    """Bring a swapped request's blocks back and go on where it was."""
    swapped = request.swap
    row = state.free_rows[-1]
    manager = state.manager
    if swapped is None:
        return None
    if len(swapped.plan.host) + _reserve(state) > manager.pool.available:
        return Blocked(request, 0)
    back = manager.swap_in(row, swapped, request=request.request_id)
    request.swap = None
    known = int(manager.num_tokens[row])
    if known < len(request.tokens):  # tokens that came after it had left
        late = request.tokens[known:]
        one = np.array([row], np.int32)
        manager.append_token_lists(one, np.array([len(late)], np.int32), late)
    computed = int(manager.num_computed[row])
    state.swap_in.append(back)
    state.stats.swapped_in_blocks += len(back.device)
    new = min(len(request.tokens) - computed, budget, state.config.max_prefill_chunk or budget)
    one = np.array([row], np.int32)
    try:
        manager.allocate(one, np.array([new], np.int32))
    except OutOfBlocks:
        new = 0  # it is back, and runs when a block is free
    _enter(state, request, row, computed)
    return new


def fork_children(state: SchedulerState, sampled: set[int]) -> list[tuple[int, int]]:
    """(parent row, child row) of requests with ``n`` > 1 whose prompt is computed in this step.

    Children share all blocks of their parent and draw their first token from its logits. Loops
    over rows that fork now only.
    """
    pairs: list[tuple[int, int]] = []
    for parent_row in sorted(state.forking & sampled):
        parent: Request = state.requests[parent_row]
        parent.forked = state.ever_forked = True
        state.forking.discard(parent_row)
        for index in range(1, parent.n):
            child = make_child(parent, f"{parent.request_id}#{index}", index)
            row = state.free_rows.pop()
            state.manager.fork(parent_row, np.array([row], np.int32))
            enter_fork(state, child, row, parent_row)
            pairs.append((parent_row, row))
            state.families.setdefault(parent.request_id, []).append(child.request_id)
    return pairs


def make_child(parent: Request, request_id: str, index: int) -> Request:
    """A request that goes on from where its parent is."""
    child = Request(
        request_id=request_id, prompt_token_ids=parent.prompt_token_ids,
        max_tokens=parent.max_tokens, min_tokens=parent.min_tokens,
        eos_token_id=parent.eos_token_id, stop_token_ids=parent.stop_token_ids,
        ignore_eos=parent.ignore_eos, priority=parent.priority, salt=parent.salt,
        adapter=parent.adapter, media=parent.media, drafts=parent.drafts,
        retention=parent.retention, arrival=parent.arrival,
        params=parent.params, parent=parent.request_id, index=index,
    )  # fmt: skip
    child.order, child.forked = parent.order, True
    child.num_cached_tokens = parent.num_cached_tokens
    child.scheduled_at = parent.scheduled_at
    child.first_token_at, child.last_token_at = parent.first_token_at, parent.last_token_at
    return child


def enter_fork(state: SchedulerState, child: Request, row: int, parent_row: int) -> None:
    """The manager has copied parent_row into ``row``: let the child run in it."""
    state.by_id[child.request_id] = child
    state.enter(child, row)
    state.last_at[row] = state.last_at[parent_row]
    source = state.origin.get(parent_row, parent_row)
    state.origin[row] = source
    state.forked.append(Fork(child, row, source))


def forget_host_copy(state: SchedulerState, request: Request) -> None:
    """Give a swapped request's host blocks back."""
    swapped = request.swap
    if swapped is not None:
        request.swap = None
        state.manager.drop_swapped(swapped)
        state.swap_out = [plan for plan in state.swap_out if plan is not swapped.plan]
        if request.status == RequestStatus.SWAPPED:
            request.status = RequestStatus.PREEMPTED

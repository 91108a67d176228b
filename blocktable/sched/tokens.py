"""What a step's tokens do: they are appended, and requests that reached their end leave."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import RequestError
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.prefix.hints import Retention
from blocktable.prefix.sequence import TokenSequence
from blocktable.sched.request import FinishReason, Request, RequestStatus
from blocktable.sched.retention import leave_hint
from blocktable.sched.state import SchedulerState


class Taken(NamedTuple):
    """Tokens that rows really took (those behind a stop are cut), and the rows that end."""

    counts: Counts  # [k]
    token_ids: TokenIds  # [sum of counts]
    ended: RowIds  # rows that are done
    stopped: NDArray[np.bool_]  # [len(ended)] by a stop id (its last token), else by length


_NO_ROWS = np.zeros(0, np.int32)
_NO_FLAGS = np.zeros(0, np.bool_)


def take_one_each(state: SchedulerState, rows: RowIds, tokens: TokenIds, ones: Counts) -> Taken:
    """Append one token to each row. A fixed number of array calls, fewest while steady."""
    manager = state.manager
    manager.append_tokens(rows, tokens)
    state.left -= 1  # every row gains one at most, so this stays a lower bound
    safe = state.steady and rows is state.order and state.left > 0
    if safe and not (state.steady_stops and _any_stop(state, rows, tokens)):
        return Taken(ones, tokens, _NO_ROWS, _NO_FLAGS)
    known = manager.num_tokens[rows]
    stop = (state.stops[rows] == tokens[:, None]).any(axis=1) & (known >= state.floor[rows])
    done = stop | (known >= state.limit[rows])
    return Taken(ones, tokens, rows[done], stop[done])


def _any_stop(state: SchedulerState, rows: RowIds, tokens: TokenIds) -> bool:
    return bool((state.stops[rows] == tokens[:, None]).any())


def take_many(state: SchedulerState, rows: RowIds, counts: Counts, tokens: TokenIds) -> Taken:
    """Append ``counts[i]`` tokens to rows[i], up to the first that ends the request."""
    manager = state.manager
    start = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(rows)), counts)
    offset = np.arange(len(tokens)) - start[owner]
    length = manager.num_tokens[rows][owner] + offset + 1  # tokens of the row with this one
    of = rows[owner]
    stop = (state.stops[of] == tokens[:, None]).any(axis=1) & (length >= state.floor[of])
    ends = stop | (length >= state.limit[of])
    first = counts.astype(np.int64)  # index of the first ending token, else counts
    np.minimum.at(first, owner[ends], offset[ends])
    kept = np.minimum(first + 1, counts).astype(np.int32)
    keep = offset < kept[owner]
    manager.append_token_lists(rows, kept, tokens[keep])
    done = first < counts
    return Taken(kept, tokens[keep], rows[done], stop[start[done] + first[done]])


def record_times(state: SchedulerState, rows: RowIds, counts: Counts, whole: bool) -> None:
    """Times to first and between tokens; a step's tokens of a row share the time between them."""
    now, stats = state.clock(), state.stats
    if whole and state.steady:
        stats.generated_tokens += len(rows)
        if state.steady_at:
            stats.inter_token_time.add(now - state.steady_at, len(rows))
            state.last_at[rows] = now
            state.steady_at = now
            return
    else:
        stats.generated_tokens += int(counts.sum())
    last = state.last_at[rows]
    fresh = np.isnan(last)
    if fresh.any():
        for request in state.requests[rows[fresh]].tolist():
            request.first_token_at = now
            stats.time_to_first_token.add(max(0.0, now - request.arrival))
    gained = np.maximum(counts, 1)
    stats.inter_token_time.add_many(((now - last) / gained)[~fresh])
    state.last_at[rows] = now
    state.steady_at = now if whole else 0.0


def end_rows(
    state: SchedulerState, rows: RowIds, reasons: list[FinishReason], unsure: bool = False
) -> list[Request]:
    """Finish requests in ``rows`` and release them in one call. ``unsure``: the steps in flight
    may not run for them, so keys given for those are withdrawn. Loops over these rows only."""
    if not len(rows):
        return []
    ended: list[Request] = []
    hints: list[tuple[Request, Retention, TokenSequence | None]] = []
    for request, reason in zip(state.requests[rows].tolist(), reasons, strict=True):
        state.save_tokens(request)
        if request.retention is not None:
            hints.append((request, request.retention, request.sequence))
        conclude(state, request, reason)
        ended.append(request)
    if unsure and state.in_flight:
        computed = np.array([state.really_computed(row) for row in rows.tolist()], np.int32)
        state.manager.release(rows, num_computed=computed)
    else:
        state.manager.release(rows)
    state.leave(rows)
    for request, hint, sequence in hints:
        leave_hint(state.manager, request, hint, sequence)
    return ended


def conclude(state: SchedulerState, request: Request, reason: FinishReason) -> None:
    """A request has ended: note why and when, and forget its id."""
    request.status, request.finish_reason = RequestStatus.FINISHED, reason
    request.finished_at = state.clock()
    request.sequence = None
    del state.by_id[request.request_id]
    family = state.families.get(request.parent or "")
    if family is not None and request.request_id in family:
        family.remove(request.request_id)
        if not family:
            del state.families[request.parent or ""]
    if reason == "abort":
        state.stats.aborted += 1
    else:
        state.stats.finished += 1


def take_late(state: SchedulerState, request: Request, token: int) -> FinishReason | None:
    """A token came for a request that was preempted meanwhile: keep it. The reason if it is the
    request's last."""
    request.tokens = np.append(request.tokens, np.int32(token))
    state.stats.generated_tokens += 1
    made = len(request.tokens) - request.num_prompt_tokens
    if token in request.stop_set and made >= request.min_tokens:
        request.stop_token = token
        return "stop"
    if made >= request.max_tokens or len(request.tokens) >= state.capacity:
        return "length"
    return None


def check_tokens(sampled: object, expected: int, counts: Counts | None) -> TokenIds:
    """Sampled tokens as int32 [expected, or sum of counts]; RequestError for another length."""
    tokens = np.asarray(sampled)
    need = expected if counts is None else int(counts.sum())
    if tokens.shape != (need,):
        raise RequestError(f"a step of {need} sampled tokens was given shape {tokens.shape}")
    return tokens if tokens.dtype == np.int32 else tokens.astype(np.int32)

"""Continuous batching: which requests compute how many tokens in the next step.

Pure host decisions over arrays of rows. A plain decode step costs a fixed number of NumPy calls,
whatever the number of requests; Python loops run only over requests that are admitted, preempted
or finished in the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlocktableError, ConfigError, RequestError
from blocktable.core.specs import MambaSpec
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.manager import KVCacheManager
from blocktable.sched.admission import (
    admit_waiting,
    enter_fork,
    forget_host_copy,
    make_child,
    rows_to_spare,
)
from blocktable.sched.capacity import longest_request
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.draft import DraftProposer, NgramProposer
from blocktable.sched.emission import emit, extend
from blocktable.sched.output import SchedulerOutput, StepResult
from blocktable.sched.request import FinishReason, Request, RequestStatus
from blocktable.sched.running import schedule_running
from blocktable.sched.state import SchedulerState
from blocktable.sched.stats import Load, SchedulerStats
from blocktable.sched.tokens import check_tokens, conclude, end_rows
from blocktable.sched.uptake import cancel_step, take, take_step


class Scheduler:
    """Decides each step for the requests it was given; see ``SchedulerConfig`` for the policies.

    The loop of an engine::

        scheduler.add(request)
        while scheduler.has_work:
            output = scheduler.schedule()
            tokens = run(output)                     # swaps, copies, forward, sample
            result = scheduler.update(output, tokens)

    With ``max_steps_in_flight=2`` ``schedule`` may be called once more before ``update``: rows
    whose next input token is still on the device are marked in ``SchedulerOutput.pending``.
    Outputs must be updated in the order in which they were scheduled, each exactly once, the
    empty ones too. Not thread safe.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        *,
        proposer: DraftProposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``proposer`` drafts tokens where ``config.num_draft_tokens`` > 0; by default n-gram
        prompt lookup. Raises ConfigError where config and manager do not go together."""
        self.config, self.manager = config, manager
        self._state = SchedulerState(config, manager, clock)
        self._state.capacity = _check_fit(config, manager)
        self._proposer = (proposer or NgramProposer()) if config.num_draft_tokens else None

    # -- what a caller may read -----------------------------------------------------------------

    @property
    def stats(self) -> SchedulerStats:
        """Running counts and times; read only."""
        return self._state.stats

    @property
    def requests(self) -> NDArray[np.object_]:
        """[max_num_seqs] the Request in each row, None where the row is free; read only."""
        return self._state.requests

    @property
    def has_work(self) -> bool:
        """Some request waits or runs, or a step is in flight."""
        return bool(self._state.by_id or self._state.in_flight)

    @property
    def has_requests(self) -> bool:
        """Some request waits or runs: a step may be worth scheduling."""
        return bool(self._state.by_id)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet updated."""
        return len(self._state.in_flight)

    @property
    def running_rows(self) -> RowIds:
        """int32: rows in running order; read only."""
        return self._state.order

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row; O(1)."""
        return len(self._state.waiting)

    @property
    def waiting(self) -> list[Request]:
        """The waiting queue in order; O(waiting)."""
        return list(self._state.waiting)

    @property
    def capacity(self) -> int:
        """Most tokens of one request: ``max_model_len``, or less where the pool is smaller."""
        return self._state.capacity

    def find(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return self._state.by_id.get(request_id)

    def load(self) -> Load:
        """How many requests run and wait, and how full the pool is."""
        pool = self.manager.pool
        return Load(
            running=len(self._state.order), waiting=len(self._state.waiting), usable=pool.usable,
            used=pool.used, available=pool.available, fenced=pool.fenced,
        )  # fmt: skip

    def lift_capacity(self) -> None:
        """Let requests grow to ``max_model_len`` though the pool is too small for one (replay of
        foreign scripts): such a request is preempted again and again."""
        self._state.capacity = self.manager.max_model_len

    def forget_notes(self) -> None:
        """Leave preemptions and releases since the last output out of the next one. For callers
        that keep no state by rows; swaps still pending are lost with them."""
        self._state.clear_notes()

    # -- requests come and go -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. O(log waiting).

        Raises RequestError at once, changing nothing, for an id in use, or a prompt that can
        never be served: longer than ``capacity - 1`` tokens."""
        ids = [request.request_id, *(f"{request.request_id}#{i}" for i in range(1, request.n))]
        for request_id in ids:
            if request_id in self._state.by_id:
                raise RequestError(f"request id {request_id!r} is in use")
        if request.status != RequestStatus.WAITING or request.sequence is not None:
            raise RequestError(f"request {request.request_id!r} was added before")
        if request.num_prompt_tokens >= self.capacity:
            what = "the model" if self.capacity == self.manager.max_model_len else "the block pool"
            raise RequestError(
                f"request {request.request_id!r}: a prompt of {request.num_prompt_tokens} tokens "
                f"is too long: {what} holds {self.capacity}, one of them for the answer"
            )
        if request.n > self.config.max_num_seqs:
            raise RequestError(
                f"request {request.request_id!r}: n {request.n} is above "
                f"max_num_seqs {self.config.max_num_seqs}"
            )
        self._state.by_id[request.request_id] = request
        self._state.waiting.append(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """End requests and all their continuations (``n`` > 1) with reason "abort"."""
        ids = list(request_ids)
        families = self._state.families
        children = [child for request_id in ids for child in families.get(request_id, ())]
        return self.finish([*ids, *children], "abort")

    def finish(self, request_ids: Iterable[str], reason: FinishReason = "stop") -> list[Request]:
        """End requests now, at any moment of their lives: their blocks are released (fenced while
        a step in flight may touch them), tokens still to come are dropped. Unknown and finished
        ids are skipped. Returns those ended; O(1) each, and one bulk release."""
        state = self._state
        rows: list[int] = []
        ended: list[Request] = []
        for request_id in dict.fromkeys(request_ids):
            request = state.by_id.get(request_id)
            if request is None:
                continue
            if request.row >= 0:
                rows.append(request.row)
            else:
                ended.append(self._end_waiting(request, reason))
        gone = np.array(rows, np.int32)
        return ended + end_rows(state, gone, [reason] * len(rows), unsure=reason != "stop")

    def _end_waiting(self, request: Request, reason: FinishReason) -> Request:
        forget_host_copy(self._state, request)
        conclude(self._state, request, reason)
        self._state.waiting.forget(request)
        return request

    def fork(
        self,
        request_id: str,
        child_ids: Sequence[str],
        last_token_ids: Sequence[int] | None = None,
    ) -> list[Request]:
        """Copies of a running request that share its blocks (beam search); copy on write.

        ``last_token_ids[i]`` replaces the last token of child i. Raises RequestError, changing
        nothing, if the request does not run, an id is in use, no row is free for a child, or a
        step is in flight."""
        state, manager = self._state, self.manager
        parent = state.by_id.get(request_id)
        if parent is None or parent.row < 0 or state.in_flight:
            raise RequestError(
                f"request {request_id!r} cannot be forked: it does not run, or a step is in flight"
            )
        taken = [child for child in child_ids if child in state.by_id]
        if taken or len(set(child_ids)) < len(child_ids):
            raise RequestError(f"fork of {request_id!r}: child ids {taken or child_ids} are in use")
        if len(child_ids) > rows_to_spare(state):
            raise RequestError(
                f"fork of {request_id!r} needs {len(child_ids)} rows, "
                f"{rows_to_spare(state)} are free"
            )
        state.ever_forked = True
        children: list[Request] = []
        for index, child_id in enumerate(child_ids):
            child = make_child(parent, child_id, parent.index)
            row = state.free_rows.pop()
            manager.fork(parent.row, np.array([row], np.int32))
            enter_fork(state, child, row, parent.row)
            if last_token_ids is not None:
                at = np.array([row], np.int32)
                manager.truncate(at, manager.num_tokens[at] - 1)
                manager.append_tokens(at, np.array([last_token_ids[index]], np.int32))
            children.append(child)
        return children

    def preempt(self, request_ids: Iterable[str]) -> list[Request]:
        """Take running requests off their blocks and put them in front of the queue, the last
        named foremost. Ids that do not run are skipped."""
        found = [self._state.by_id.get(request_id) for request_id in request_ids]
        return [self._state.preempt(r.row) for r in found if r is not None and r.row >= 0]

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; refused (False) while any block is in use."""
        return self.manager.reset_prefix_cache()

    def drop_cache(self) -> None:
        """For weight updates and sleep: preempt everything by recompute, drop host copies, then
        drop the prefix cache, so that no KV of the old weights is hit. Raises BlocktableError
        while a step is in flight."""
        state = self._state
        if state.in_flight:
            raise BlocktableError(f"{len(state.in_flight)} steps are in flight: update them first")
        for row in state.order[::-1].tolist():
            state.preempt(row, allow_swap=False)
        for request in state.waiting:
            forget_host_copy(state, request)
        if not self.manager.reset_prefix_cache():
            raise BlocktableError("the prefix cache is held by blocks that no request owns")

    # -- steps ----------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and allocate its blocks.

        ``output.is_empty`` when nothing can run now. Raises BlocktableError when as many steps
        are in flight as the configuration allows."""
        state = self._state
        if len(state.in_flight) >= self.config.max_steps_in_flight:
            raise BlocktableError(
                f"{len(state.in_flight)} steps are in flight, the most allowed: update first"
            )
        before = len(state.preempted)
        batch = schedule_running(state, self._proposer)
        total = len(batch.rows) if state.steady else batch.total
        blocked = None
        if len(state.waiting) and len(state.preempted) == before:
            came, blocked = admit_waiting(state, self.config.max_num_batched_tokens - total)
            if came.rows:
                batch = extend(batch, came)
                total += sum(came.num_new)
        return emit(state, batch, total, blocked)

    def update(
        self,
        output: SchedulerOutput,
        sampled: TokenIds | NDArray[np.int64] | None,
        counts: NDArray[np.integer] | None = None,
    ) -> StepResult:
        """Take the tokens of a step, oldest step first, and end what is done.

        sampled: [m] in the order of ``output.sample_rows``; with drafts, all tokens each row
            gained (accepted drafts, then the one sampled after them), concatenated. None: the
            step ran, its tokens come by ``feed``.
        counts: [m] tokens each row gained, with drafts only; 1 + accepted drafts.

        Raises RequestError for tokens of the wrong shape and BlocktableError for a step that is
        not the oldest in flight; neither changes anything."""
        return take_step(self._state, output, sampled, counts)

    def feed(self, rows: RowIds, token_ids: TokenIds, counts: Counts | None = None) -> StepResult:
        """Give caught-up running rows tokens from outside a step, as ``update`` does."""
        self._state.steady = False
        tokens = check_tokens(token_ids, len(rows), counts)
        return take(self._state, rows, np.arange(len(rows), dtype=np.int32), tokens, counts)

    def cancel(self, output: SchedulerOutput) -> None:
        """Take back a step that did not run (the device failed): its keys are withdrawn and its
        requests wait to be computed again. With more steps in flight the newest goes first, and
        all must go. Raises BlocktableError for a step that is not the newest in flight."""
        cancel_step(self._state, output)


def _check_fit(config: SchedulerConfig, manager: KVCacheManager) -> int:
    """``Scheduler.capacity``; ConfigError where config and manager do not go together."""
    length, budget = manager.max_model_len, config.max_num_batched_tokens
    if config.max_num_seqs > manager.max_num_rows:
        raise ConfigError(
            f"max_num_seqs {config.max_num_seqs} is above the manager's {manager.max_num_rows} rows"
        )
    if not config.chunked_prefill and (budget < length or config.max_prefill_chunk):
        raise ConfigError(
            f"without chunked prefill max_num_batched_tokens ({budget}) must reach max_model_len "
            f"({length}) and max_prefill_chunk ({config.max_prefill_chunk}) must be 0"
        )
    if config.preemption == "swap" and manager.host_pool is None:
        raise ConfigError("preemption 'swap' needs a manager with host_blocks > 0")
    specs = [group.kv_cache_spec for group in manager.config.kv_cache_groups]
    if config.num_draft_tokens and any(isinstance(spec, MambaSpec) for spec in specs):
        raise ConfigError("num_draft_tokens must be 0: a recurrent state cannot be rolled back")
    capacity = longest_request(specs, manager.pool.usable, length, budget)
    if capacity < length and config.max_model_len_must_fit:
        raise ConfigError(
            f"a request of max_model_len {length} tokens does not fit into {manager.pool.usable} "
            f"usable blocks (block 0 is reserved); they hold {capacity} tokens of one request"
        )
    if capacity < 2:
        raise ConfigError(f"{manager.pool.usable} usable blocks hold no request of 2 tokens")
    return capacity

"""What the scheduler remembers: arrays over rows, the running order, the queue, steps in flight.

One fact, one place: token counts and blocks are the manager's; here is only what decides when a
row runs and when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import OutOfBlocks
from blocktable.core.types import RowIds
from blocktable.groups.swap import SwappedRow, SwapPlan
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.output import Admission, Fork, SchedulerOutput
from blocktable.sched.queue import WaitingQueue
from blocktable.sched.request import Request, RequestStatus
from blocktable.sched.stats import SchedulerStats


def _constant(array: NDArray[np.int32]) -> NDArray[np.int32]:
    array.flags.writeable = False
    return array


class InFlight(NamedTuple):
    """A step that was scheduled and not yet updated."""

    output: SchedulerOutput
    stale: list[int]
    """Rows of it that changed hands since: their tokens are not taken."""
    swap_out: list[SwapPlan]
    """Copies to host memory that the step makes."""


class SchedulerState:
    """Arrays have one entry a row.

    ``limit``: tokens at which the request ends by length. ``floor``: tokens below which a stop id
    does not end it. ``pending``: tokens that steps in flight sample for it. ``stops`` int32
    [rows, K]: ids that end it, padded with -1. ``may_draft``: ``Request.drafts``.

    ``steady`` says that every running row needs exactly one token next time; ``left`` is then the
    smallest number of tokens any of them may still gain. Whatever changes who runs unsets it.

    ``origin``: for rows forked since the last output, the row of that output whose content they
    have. ``families``: live continuations of each request with ``n`` > 1. ``late``: (step, row)
    whose token belongs to a request that was preempted meanwhile. ``ones`` and ``range`` are
    constant, so that a steady step makes no arrays of its own.
    """

    def __init__(
        self, config: SchedulerConfig, manager: KVCacheManager, clock: Callable[[], float]
    ) -> None:
        rows = config.max_num_seqs
        self.config, self.manager, self.clock = config, manager, clock
        self.stats = SchedulerStats()
        self.waiting = WaitingQueue(config)
        self.by_id: dict[str, Request] = {}
        self.requests: NDArray[np.object_] = np.full(rows, None, object)
        self.order: RowIds = np.zeros(0, np.int32)
        self.rank = np.zeros((rows, 3))  # Request.order of each row, for the priority policy
        self.limit = np.zeros(rows, np.int32)
        self.floor = np.zeros(rows, np.int32)
        self.prompt = np.zeros(rows, np.int32)
        self.pending = np.zeros(rows, np.int32)
        self.stops = np.full((rows, 1), -1, np.int32)
        self.may_draft = np.zeros(rows, np.bool_)
        self.last_at = np.full(rows, np.nan)
        self.free_rows = list(range(rows - 1, -1, -1))
        self.forking: set[int] = set()
        self.in_flight: deque[InFlight] = deque()
        self.late: dict[tuple[int, int], Request] = {}
        self.families: dict[str, list[str]] = {}
        self.ever_forked = False
        self.steady = False
        self.left = 0
        self.steady_at = 0.0
        self.steady_stops = False
        self.watermark_blocks = int(config.watermark * manager.pool.num_blocks)
        self.ones = _constant(np.ones(rows, np.int32))
        self.range = _constant(np.arange(rows, dtype=np.int32))
        self.capacity = manager.max_model_len
        self.clear_notes()

    def clear_notes(self) -> None:
        """Forget what the last output told."""
        self.released: list[int] = []
        self.preempted: list[Request] = []
        self.swap_out: list[SwapPlan] = []
        self.swap_in: list[SwapPlan] = []
        self.admitted: list[Admission] = []
        self.forked: list[Fork] = []
        self.origin: dict[int, int] = {}
        self.noted = False

    # -- rows -----------------------------------------------------------------------------------

    def enter(self, request: Request, row: int) -> None:
        """A request was given ``row`` by the manager: fill its arrays and let it run."""
        self.noted, self.steady = True, False
        request.row, request.status = row, RequestStatus.RUNNING
        self.requests[row] = request
        self.rank[row] = request.order
        self.prompt[row] = request.num_prompt_tokens
        self.limit[row] = min(request.num_prompt_tokens + request.max_tokens, self.capacity)
        self.floor[row] = request.num_prompt_tokens + request.min_tokens
        self.pending[row] = 0
        self.may_draft[row] = request.drafts
        self.last_at[row] = request.last_token_at
        self._set_stops(row, request.stop_set)
        if request.n > 1 and not request.forked:
            self.forking.add(row)
        where = self._place(request)
        self.order = np.insert(self.order, where, row)

    def _place(self, request: Request) -> int:
        if self.config.policy == "fcfs":
            return len(self.order)
        rank = self.rank[self.order]
        first, second, third = request.order
        later = rank[:, 0] > first
        same = rank[:, 0] == first
        later |= same & (rank[:, 1] > second)
        later |= same & (rank[:, 1] == second) & (rank[:, 2] > third)
        return int(later.argmax()) if later.any() else len(self.order)

    def _set_stops(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stops.shape[1]
        if len(ids) > width:
            wider = np.full((len(self.stops), max(len(ids), 2 * width)), -1, np.int32)
            wider[:, :width] = self.stops
            self.stops = wider
        self.stops[row] = -1
        self.stops[row, : len(ids)] = ids

    def leave(self, rows: RowIds) -> None:
        """These rows are empty now; the manager has released them."""
        self.noted, self.steady = True, False
        self.order = self.order[~np.isin(self.order, rows)]
        gone = rows.tolist()
        for request in self.requests[rows].tolist():
            request.row = -1
        self.requests[rows] = None
        self.pending[rows] = 0
        self.free_rows.extend(gone)
        self.released.extend(gone)
        self.forking.difference_update(gone)
        if self.forked:  # children that end before the device heard of them
            self.forked = [fork for fork in self.forked if fork.row not in gone]
            for row in gone:
                self.origin.pop(row, None)
        for step in self.in_flight:
            step.stale.extend(gone)

    def save_tokens(self, request: Request) -> None:
        """Copy a row's tokens back into its request, before the row is given up."""
        row, manager = request.row, self.manager
        request.tokens = manager.tokens[row, : manager.num_tokens[row]].copy()
        request.last_token_at = float(self.last_at[row])

    def really_computed(self, row: int) -> int:
        """Tokens of a row whose KV is there whether or not the steps in flight run for it."""
        for step in self.in_flight:
            found = np.flatnonzero(step.output.rows == row)
            if found.size and row not in step.stale:
                return int(step.output.num_computed[found[0]])
        return int(self.manager.num_computed[row])

    # -- preemption -----------------------------------------------------------------------------

    def preempt(
        self, row: int, allow_swap: bool = True, really_computed: int | None = None
    ) -> Request:
        """Take a running request off its blocks and put it in front of the queue. With
        ``really_computed`` keys of later tokens are withdrawn."""
        request: Request = self.requests[row]
        self.save_tokens(request)
        self._expect_late(request)
        one = np.array([row], np.int32)
        swapped = self._swap_out(row) if allow_swap and self.config.preemption == "swap" else None
        if swapped is None:
            self.manager.release(one, num_computed=really_computed, request=request.request_id)
            request.status = RequestStatus.PREEMPTED
        else:
            request.swap, request.status = swapped, RequestStatus.SWAPPED
            self.swap_out.append(swapped.plan)
            self.stats.swapped_out_blocks += len(swapped.plan.host)
        self.leave(one)
        self.waiting.put_back(request)
        request.num_preemptions += 1
        self.stats.preemptions += 1
        self.preempted.append(request)
        return request

    def _swap_out(self, row: int) -> SwappedRow | None:
        """None where host memory has no room: the victim is recomputed then."""
        try:
            return self.manager.swap_out(row)
        except OutOfBlocks:
            return None

    def _expect_late(self, request: Request) -> None:
        """Tokens that steps in flight sample for a victim are added to it when they come."""
        row = request.row
        for step in self.in_flight:
            if row not in step.stale and row in step.output.sample_rows:
                self.late[step.output.step_id, row] = request
                request.late += 1

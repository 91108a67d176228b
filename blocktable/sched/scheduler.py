"""Continuous batching: which requests compute how many tokens in the next step.

Pure host decisions over arrays of rows. A plain decode step costs a fixed number of NumPy calls,
whatever the number of requests; Python loops run only over requests that are admitted, preempted
or finished in the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import RowIds, TokenIds
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.draft import DraftProposer
from blocktable.sched.output import SchedulerOutput, StepResult
from blocktable.sched.request import FinishReason, Request
from blocktable.sched.stats import Load, SchedulerStats

if TYPE_CHECKING:
    from blocktable.manager import KVCacheManager


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
    Outputs must be updated in the order in which they were scheduled, each exactly once.
    """

    requests: NDArray[np.object_]
    """[max_num_seqs] the Request in each row, None where the row is free."""
    stats: SchedulerStats
    config: SchedulerConfig

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

    @property
    def has_work(self) -> bool:
        """Some request waits or runs, or a step is in flight."""

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet updated."""

    def add(self, request: Request) -> None:
        """Queue a request. O(log waiting).

        Raises RequestError at once, changing nothing, for an id in use, or a prompt that can
        never be served: longer than ``max_model_len - 1``, or than the whole pool."""

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """``finish(request_ids, "abort")``."""

    def finish(
        self, request_ids: Iterable[str], reason: FinishReason = "stop"
    ) -> list[Request]:
        """End requests now, at any moment of their lives: their blocks are released (fenced while
        a step in flight may touch them), tokens still to come are dropped. Unknown and finished
        ids are skipped. Returns those ended; O(1) each, and one bulk release."""

    def fork(
        self,
        request_id: str,
        child_ids: Sequence[str],
        last_token_ids: Sequence[int] | None = None,
    ) -> list[Request]:
        """Copies of a running request that share its blocks (beam search); copy on write.

        ``last_token_ids[i]`` replaces the last token of child i. A child for which there is no
        free row waits in front of the queue and takes the shared blocks through the prefix cache.
        Raises RequestError if the request does not run or a step is in flight for it."""

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and allocate its blocks.

        ``output.is_empty`` when nothing can run now. Raises BlocktableError when as many steps
        are in flight as the configuration allows."""

    def update(
        self,
        output: SchedulerOutput,
        sampled: TokenIds | NDArray[np.int64],
        counts: NDArray[np.integer] | None = None,
    ) -> StepResult:
        """Take the tokens of a step, oldest step first, and end what is done.

        sampled: [m] in the order of ``output.sample_rows``; with drafts, all tokens each row
            gained (accepted drafts, then the one sampled after them), concatenated.
        counts: [m] tokens each row gained, with drafts only; 1 + accepted drafts.
        """

    def cancel(self, output: SchedulerOutput) -> None:
        """Take a step back that did not run (the device failed): its keys are withdrawn and every
        row of it is computed again. All steps in flight must be cancelled, the newest first."""

    def preempt(self, request_ids: Iterable[str]) -> list[Request]:
        """Take running requests off their blocks and put them in front of the queue."""

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; refused (False) while any block is in use."""

    def drop_cache(self) -> None:
        """For weight updates and sleep: preempt everything by recompute, drop host copies, then
        drop the prefix cache, so that no KV of the old weights is hit. No step may be in flight."""

    def load(self) -> Load:
        """How many requests run and wait, and how full the pool is."""

    @property
    def running_rows(self) -> RowIds:
        """int32: rows in running order; do not write."""

    @property
    def waiting(self) -> list[Request]:
        """The waiting queue in order; O(waiting log waiting)."""

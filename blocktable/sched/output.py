"""What a step is to do, and what came of it.

A step, in the order in which the device must do it::

    swap_out    device block -> host block      (victims leave, before their blocks are reused)
    copies      device block -> device block    (copy on write, before anything is written)
    swap_in     host block   -> device block    (victims come back)
    forward     rows[i] computes positions num_computed[i] .. num_computed[i] + num_scheduled[i] - 1
    sample      sample_rows[j] draws a token from the last logits of batch entry sample_index[j]

Without forks ``sample_rows`` is ``rows[samples]``. A request with ``n`` > 1 draws its ``n`` first
tokens from one row of logits: its own and those of the children that ``forked`` names.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import Counts, RowIds, StepId, TokenIds
from blocktable.sched.request import Request

NO_PAIRS: NDArray[np.int32] = np.zeros((0, 2), np.int32)
NO_PAIRS.flags.writeable = False
NO_INTS: NDArray[np.int32] = np.zeros(0, np.int32)
NO_INTS.flags.writeable = False


class Admission(NamedTuple):
    """A request that got a row in this step: new, resumed or swapped back in.

    Its tokens so far are ``manager.tokens[row, :num_tokens]``; ``num_cached`` of them need not be
    computed (prefix hit, or restored from host memory)."""

    request: Request
    row: int
    num_cached: int
    num_tokens: int


class Fork(NamedTuple):
    """``request`` starts as a copy of the request in ``parent_row`` and shares its blocks.

    What else the device keeps by rows is copied from ``parent_row`` as it was before this output:
    the parent may have left it since (and is in ``released`` then), and others may be in it. Only
    a row that this step draws a token for and does not run (``n`` > 1) copies what its parent is
    after the step."""

    request: Request
    row: int
    parent_row: int


class SchedulerOutput(NamedTuple):
    """One scheduled step; arrays are in batch order and must not be written to.

    ``n`` batch entries, ``m`` sampled tokens. Rows index every block table and the device batch.
    """

    step_id: StepId
    rows: RowIds  # [n]
    num_scheduled: Counts  # [n] tokens to compute, drafts included; >= 1
    num_computed: Counts  # [n] position of the first of them
    num_total: int  # sum of num_scheduled
    sample_rows: RowIds  # [m]
    sample_index: Counts  # [m] batch entry whose last logits row j draws from
    pending: NDArray[np.bool_] | None = None
    # [n]: the last input token is one the step in flight samples; it is on the device, not in
    # manager.tokens. None = no row waits for one.
    num_drafts: Counts | None = None
    # [n]: of num_scheduled, the last num_drafts are draft tokens, readable in manager.tokens;
    # logits are needed for them and the token before. None = no drafts in this step.
    admitted: tuple[Admission, ...] = ()
    forked: tuple[Fork, ...] = ()
    preempted: tuple[Request, ...] = ()
    released: RowIds = NO_INTS  # rows given up since the last output, before admissions
    copies: NDArray[np.int32] = NO_PAIRS  # [k, 2] device block -> device block
    swap_out: NDArray[np.int32] = NO_PAIRS  # [k, 2] device block -> host block
    swap_in: NDArray[np.int32] = NO_PAIRS  # [k, 2] host block -> device block
    blocked: Request | None = None  # head of the queue, if it did not fit
    blocked_hit: int = 0  # its prefix hit, tokens

    @property
    def samples(self) -> NDArray[np.bool_]:
        """bool [n]: entries whose step reaches their last token, so that a token is drawn."""
        mask = np.zeros(len(self.rows), np.bool_)
        mask[self.sample_index] = True
        return mask

    @property
    def query_start_loc(self) -> Counts:
        """int32 [n + 1]: where each entry's tokens begin in the flattened batch."""
        out = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.num_scheduled, out=out[1:])
        return out

    @property
    def seq_lens(self) -> Counts:
        """int32 [n]: tokens of each entry once this step ran, drafts included."""
        return self.num_computed + self.num_scheduled

    @property
    def is_empty(self) -> bool:
        """Nothing to compute (copies and swaps may still be due)."""
        return not len(self.rows)


class StepResult(NamedTuple):
    """What ``Scheduler.update`` made of a step's tokens.

    Rows of requests that ended or were preempted or aborted meanwhile are left out: ``rows[j]``
    took ``counts[j]`` tokens, ``token_ids`` holds them one row after the other. ``index[j]`` is
    their place in the output's ``sample_rows``. ``requests[j]`` is the request, which may be in
    ``finished`` too.
    """

    rows: RowIds  # [k]
    index: Counts  # [k]
    counts: Counts  # [k]
    token_ids: TokenIds  # [sum of counts]
    requests: NDArray[np.object_]  # [k]
    finished: tuple[Request, ...] = ()

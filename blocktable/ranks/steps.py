"""A step on rank 0, which tells the others of it, and on the others, which run what they are told.

With two steps in flight the tokens of one are not known on the host when the next is told. Rank 0
then sends them from its device to the others' as soon as they are drawn, and the next message says
which rows begin with one of them (the message's ``user`` column).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from blocktable.core.errors import RankError
from blocktable.core.protocols import Communicator
from blocktable.core.types import RowIds, StepId
from blocktable.engine.runner import ModelRunner
from blocktable.parallel.channel import DriverChannel
from blocktable.parallel.driver import StepWriter
from blocktable.parallel.rank import RankStep
from blocktable.parallel.wire import encode_step
from blocktable.parallel.worker import is_left_alone
from blocktable.sched.output import Fork, SchedulerOutput

_LAST_WORD_SECONDS = 1.0


class LeadingRunner:
    """Rank 0's runner: tells the other ranks of a step, then runs its own part of it.

    Raises RankError when a rank died, diverged or stayed silent; the engine is of no more use then.
    """

    def __init__(
        self, runner: ModelRunner, writer: StepWriter, channel: DriverChannel,
        communicator: Communicator,
    ) -> None:  # fmt: skip
        self._runner, self._writer, self._channel = runner, writer, channel
        self._communicator = communicator
        self.scores_prompts = False  # the other ranks draw no further lines of logits
        self._released: list[np.ndarray] = []
        self._told = 0, 0, 0  # sequence, step and digest of the last message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, output: SchedulerOutput) -> torch.Tensor | None:
        """See `ModelRunner.execute`."""
        moves = len(output.copies) + len(output.swap_in) + len(output.swap_out)
        if output.is_empty and not moves:
            self._released.append(output.released)  # told with the next step that runs
            return self._runner.execute(output)
        if self._released:
            rows = np.unique(np.concatenate([*self._released, output.released]))
            output = output._replace(released=rows.astype(np.int32))
            self._released.clear()
        message = self._writer.write(output, self._runner.manager.tokens)
        self._told = message.sequence, message.step, message.digest
        self._channel.publish(encode_step(message))
        with self._naming_ranks():
            logits = self._runner.execute(output)
        self._channel.confirm(message.sequence, message.step, message.digest)
        return logits

    def remember(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """See `ModelRunner.remember`: on all ranks."""
        with self._naming_ranks():
            tokens = self._communicator.broadcast(token_ids.contiguous())
        self._runner.remember(rows, tokens)

    def download(self, token_ids: torch.Tensor) -> Callable[[], np.ndarray]:
        """See `ModelRunner.download`. A device waits for a rank that is gone without end, so the
        ranks are looked after in the meantime."""
        tokens, step = self._runner.download(token_ids), self._told[1]
        is_there = getattr(tokens, "is_there", None)
        if is_there is None:
            return tokens

        def wait() -> np.ndarray:
            self._channel.watch(step, is_there)
            return tokens()

        return wait

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        """A collective fails here as soon as a rank is gone. Which one, its process or its own last
        word tells moments later, or that it has not taken the step."""
        try:
            yield
        except (RuntimeError, RankError) as error:
            deadline = time.monotonic() + _LAST_WORD_SECONDS
            while time.monotonic() < deadline:
                self._channel.check(self._told[1])
                time.sleep(0.02)
            self._channel.confirm(*self._told)
            if is_left_alone(error):
                self._channel.blame(self._told[1])
            raise

    def warm_up(self) -> int:
        """Graphs are captured when they are first needed, on all ranks in the same step."""
        return 0


class FollowingRunner:
    """Runs steps on another rank. ``steps_in_flight`` is the engine's."""

    def __init__(
        self, runner: ModelRunner, communicator: Communicator, steps_in_flight: int
    ) -> None:
        self._runner, self._communicator = runner, communicator
        self._takes_tokens = steps_in_flight > 1

    def run(self, step: RankStep) -> None:
        """Run a step whose tables are in place."""
        output = _as_output(step)
        self._runner.execute(output)
        if self._takes_tokens and len(output.sample_rows):
            tokens = torch.empty(
                len(output.sample_rows), dtype=torch.int64, device=self._runner.device
            )
            self._runner.remember(output.sample_rows, self._communicator.broadcast(tokens))


def _as_output(step: RankStep) -> SchedulerOutput:
    message, pending = step.message, None
    if len(message.user):
        pending = np.zeros(len(step.rows), np.bool_)
        pending[message.user] = True
    forks = zip(message.fork_rows.tolist(), message.fork_parents.tolist(), strict=True)
    nobody: Any = SimpleNamespace(request_id=None)
    return SchedulerOutput(
        step_id=StepId(message.step),
        rows=step.rows,
        num_scheduled=step.num_scheduled,
        num_computed=step.num_computed,
        num_total=int(step.num_scheduled.sum()),
        sample_rows=_sample_rows(step),
        sample_index=step.sample_index,
        pending=pending,
        forked=tuple(Fork(nobody, row, parent) for row, parent in forks),
        released=message.released,
        copies=step.copies,
        swap_out=step.swap_out,
        swap_in=step.swap_in,
    )


def _sample_rows(step: RankStep) -> RowIds:
    """Row of each drawn token. Requests that fork off now stand behind the others, whose entries
    ascend, and are the last that the message names as copies."""
    rows = step.rows[step.sample_index]
    falls = np.flatnonzero(np.diff(step.sample_index) <= 0)
    if len(falls):
        first = int(falls[0]) + 1
        rows[first:] = step.message.fork_rows[first - len(rows) :]
    return rows

"""Log probabilities of a prompt's own tokens: the logits of a position score the token behind it.

::

    prompt      t0   t1   t2   t3
    computed    [t0   t1]  [t2   t3]          in chunks, as the step's budget allows
    scored           t1    t2   t3            t3 by the logits of t2; those of t3 draw the output

A position found in the prefix cache is not computed, so it has no logits: a request that asks is
given a salt of its own, and finds nothing but what it computed itself before it was preempted. The
logits of a whole chunk exist at once: ``max_num_batched_tokens`` * V, as long as the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.engine.tracking import Tracked, logprobs_by_line
from blocktable.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from blocktable.engine.detokenize import Detokenizer
    from blocktable.engine.sampling import BatchLogprobs

_LINES_AT_ONCE = 256  # the float32 copy of the logits is [256, V]


class Chunk(NamedTuple):
    """Consecutive positions of one prompt, ``start`` to ``start + count - 1``, being scored."""

    tracked: Tracked
    start: int
    count: int


class PromptLines(NamedTuple):
    """What a step scores: lines of logits beside those it draws from."""

    at: NDArray[np.int64]  # [k] place in the flattened batch of the token before each
    chunks: tuple[Chunk, ...]  # k positions in all, in the order of the lines

    @property
    def targets(self) -> NDArray[np.int64]:
        """[k] the token at each position."""
        ids = [c.tracked.prompt_token_ids[c.start : c.start + c.count] for c in self.chunks]
        return np.concatenate([np.array(part, np.int64) for part in ids])

    @property
    def num_top(self) -> NDArray[np.int32]:
        """[k] most likely tokens asked for at each position."""
        asked = [c.tracked.params.prompt_logprobs or 0 for c in self.chunks]
        return np.repeat(np.array(asked, np.int32), [c.count for c in self.chunks])


def prompt_lines(output: SchedulerOutput, requests: Sequence[object]) -> PromptLines | None:
    """The positions that this step can score; ``requests[i]`` is in batch entry i. A loop over the
    batch: called only while some request asks."""
    starts = output.query_start_loc
    at, chunks = [], []
    for i, request in enumerate(requests):
        tracked: Tracked = request.params  # type: ignore[attr-defined]
        if tracked.prompt_logprobs is None:
            continue
        first = int(output.num_computed[i])
        end = min(first + int(output.num_scheduled[i]), len(tracked.prompt_token_ids) - 1)
        if end > first:
            begin = int(starts[i])
            at.append(np.arange(begin, begin + end - first, dtype=np.int64))
            chunks.append(Chunk(tracked, first + 1, end - first))
    return PromptLines(np.concatenate(at), tuple(chunks)) if chunks else None


class PromptScores(NamedTuple):
    """A step's scores on the device, slice by slice."""

    lines: PromptLines
    parts: tuple[BatchLogprobs, ...]

    def hand_out(self, detokenizer: Detokenizer | None) -> None:
        """Wait for them and put them into their requests."""
        targets, done = self.lines.targets, 0
        found = []
        for part in self.parts:
            count = len(part.batch_index)
            by_line = logprobs_by_line(part, targets[done : done + count], detokenizer)
            found += [by_line[i] for i in range(count)]
            done += count
        for chunk in self.lines.chunks:
            scores = chunk.tracked.prompt_logprobs
            if scores is not None:
                scores[chunk.start : chunk.start + chunk.count] = found[: chunk.count]
            del found[: chunk.count]


def score(logits: torch.Tensor, lines: PromptLines) -> PromptScores:
    """Log probabilities from ``logits`` [k, V] of the step's prompt lines. Does not wait."""
    from blocktable.engine.sampling.sampler import batch_logprobs

    targets, num_top = torch.from_numpy(lines.targets).to(logits.device), lines.num_top
    parts = []
    for begin in range(0, len(num_top), _LINES_AT_ONCE):
        cut = slice(begin, begin + _LINES_AT_ONCE)
        index = np.arange(len(num_top[cut]))
        parts.append(batch_logprobs(logits[cut], targets[cut], index, num_top[cut]))
    return PromptScores(lines, tuple(parts))

"""What the engine remembers of each request beside the scheduler: its text, its logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blocktable.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from blocktable.engine.params import SamplingParams
from blocktable.sched.request import Request

if TYPE_CHECKING:
    from blocktable.engine.detokenize import Detokenizer, TextStream
    from blocktable.engine.sampling import BatchLogprobs


class Times(NamedTuple):
    """What is left of a scheduler's request that has ended."""

    scheduled_at: float | None
    first_token_at: float | None
    finished_at: float | None
    num_preemptions: int


@dataclass(slots=True)
class Completion:
    """One of a request's continuations while it grows.

    ``output`` is what the caller sees. ``shown`` counts tokens already pushed into ``stream``.
    Of a ``request`` that has ended only its ``times`` stay once that was told: the request leads
    back here, and Python looks for such circles so seldom that texts and scores of thousands of
    requests would wait for it.
    """

    output: CompletionOutput
    stream: TextStream | None
    shown: int = 0
    request: Request | None = None
    times: Times | None = None

    def let_go(self) -> None:
        """Keep a request's times alone if it has ended."""
        request = self.request
        if request is not None and request.finish_reason is not None:
            self.request = None
            self.times = Times(
                request.scheduled_at, request.first_token_at, request.finished_at,
                request.num_preemptions,
            )  # fmt: skip


@dataclass(slots=True)
class Tracked:
    """A request of the caller with its ``n`` completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    streaming: bool
    arrival: float
    completions: list[Completion] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return len(self.completions) == self.params.n and all(
            completion.output.finished for completion in self.completions
        )

    def start(self, index: int, detokenizer: Detokenizer | None, request: Request) -> Completion:
        """The completion that this index grows; made when it is first seen."""
        while len(self.completions) <= index:
            stream = None
            if detokenizer is not None:
                stream = detokenizer.stream(self.params, self.prompt_token_ids)
            made = Completion(CompletionOutput(len(self.completions)), stream)
            if self.params.logprobs is not None:
                made.output.logprobs, made.output.cumulative_logprob = [], 0.0
            self.completions.append(made)
        self.completions[index].request = request
        return self.completions[index]

    def to_output(self) -> RequestOutput:
        """What the caller is shown. Token lists are the live ones: they grow while it runs."""
        done, metrics = self.finished, self._metrics()
        for completion in self.completions:
            completion.let_go()
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids,
            [completion.output for completion in self.completions],
            finished=done, metrics=metrics, num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )  # fmt: skip

    def _metrics(self) -> RequestMetrics:
        known = [c.request or c.times for c in self.completions]
        requests = [times for times in known if times is not None]
        if not requests:
            return RequestMetrics(arrival=self.arrival)
        first = requests[0]
        ends = [r.finished_at for r in requests if r.finished_at is not None]
        return RequestMetrics(
            arrival=self.arrival, first_scheduled=first.scheduled_at,
            first_token=first.first_token_at,
            last_token=max(ends, default=None), finished=max(ends, default=None),
            num_preemptions=sum(r.num_preemptions for r in requests),
        )  # fmt: skip


def logprobs_by_line(
    batch: BatchLogprobs, token_ids: np.ndarray, detokenizer: Detokenizer | None
) -> dict[int, TokenLogprobs]:
    """A step's log probabilities by line of the sampled batch, of at most the whole vocabulary;
    O(lines that asked)."""
    chosen, ranks = batch.chosen.tolist(), batch.rank.tolist()
    ids, values = batch.top_ids.tolist(), batch.top_logprobs.tolist()

    def text(token: int) -> str:
        return "" if detokenizer is None else detokenizer.token_text(token)

    found = {}
    for j, line in enumerate(batch.batch_index.tolist()):
        token = int(token_ids[line])
        count = min(int(batch.num_top[j]), len(ids[j]))
        top = [Logprob(ids[j][k], values[j][k], k + 1, text(ids[j][k])) for k in range(count)]
        found[line] = TokenLogprobs(Logprob(token, chosen[j], ranks[j], text(token)), top)
    return found

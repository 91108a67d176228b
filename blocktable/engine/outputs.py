"""What a request gives back: text, token ids, log probabilities, and how it went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position, of the model's own distribution.

    ``rank`` counts from 1 (the most likely token); ``text`` is the token alone, decoded.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""


@dataclass(slots=True)
class TokenLogprobs:
    """The chosen token at one position and the most likely ones, most likely first."""

    chosen: Logprob
    top: list[Logprob] = field(default_factory=list)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's ``n`` completions so far.

    ``finish_reason`` is None while it runs: "stop" (end of sequence, stop token or stop string;
    ``stop_reason`` is the token id or the string, None for the model's own end of sequence),
    "length", "abort", or "error" (a guide could not be followed any further; ``stop_reason`` says
    why).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of ``time.monotonic()``, and what the cache did for the request."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(slots=True)
class RequestOutput:
    """A request after a step. ``outputs`` are in the order of their index.

    ``num_cached_tokens`` counts prompt tokens that were found in the prefix cache.
    ``prompt_logprobs`` has an entry for each token of the prompt, None for the first and for those
    not computed yet; None where ``SamplingParams.prompt_logprobs`` did not ask.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

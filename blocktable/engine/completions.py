"""What a step's tokens do to the completions they belong to: text, stop strings, reasons to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from blocktable.engine.outputs import FinishReason, TokenLogprobs
from blocktable.engine.tracking import Completion, Tracked
from blocktable.sched.output import StepResult
from blocktable.sched.request import Request, RequestStatus


def gained(
    result: StepResult, first_line: np.ndarray | None
) -> list[tuple[int, Request, list[int]]]:
    """(first line of the logits, request, new tokens) of every row that took tokens. With drafts
    ``first_line`` says where each sampled row's lines begin."""
    token_ids, start = result.token_ids.tolist(), 0
    gains = []
    index = result.index if first_line is None else first_line[result.index]
    columns = (index.tolist(), result.requests.tolist(), result.counts.tolist())
    for line, request, count in zip(*columns, strict=True):
        gains.append((line, request, token_ids[start : start + count]))
        start += count
    return gains


def taken_late(requests: np.ndarray, result: StepResult) -> Iterator[tuple[int, Request]]:
    """Lines whose request was preempted after the step was launched, and took its token all the
    same: the scheduler has put it behind the request's own tokens."""
    if len(result.index) == len(requests):
        return
    who: list[Request] = requests.tolist()
    for line in np.setdiff1d(np.arange(len(who)), result.index).tolist():
        request = who[line]
        if request.row < 0 and request.status == RequestStatus.PREEMPTED:
            yield line, request


def grow(completion: Completion, request: Request, new: list[int], eos: Sequence[int]) -> bool:
    """Give a completion its new tokens. True if a stop string ended it just now."""
    tracked: Tracked = request.params
    output, stream = completion.output, completion.stream
    output.token_ids += new
    if stream is not None and (tracked.streaming or tracked.params.stop_strings):
        stop = stream.push(_visible(completion, request))
        output.text = stream.text
        if stop is not None:
            del output.token_ids[stream.num_tokens :]  # accepted drafts behind it
            output.finish_reason, output.stop_reason = "stop", stop
            return request.finish_reason is None
    if request.finish_reason is not None:
        finish(completion, request.finish_reason, request.stop_token, eos)
    return False


def finish(
    completion: Completion, reason: FinishReason, stop_token: int | None = None,
    eos: Sequence[int] = (),
) -> None:  # fmt: skip
    """End a completion: the rest of its text, and why. A stop token is named unless it is an end
    of sequence."""
    output, request = completion.output, completion.request
    if completion.stream is not None and request is not None:
        stop = completion.stream.push(_visible(completion, request))
        output.text = completion.stream.text if stop else completion.stream.finish()
    output.finish_reason = reason
    if stop_token is not None and stop_token not in eos:
        output.stop_reason = stop_token


def add_logprobs(completion: Completion, logprobs: TokenLogprobs) -> None:
    """Append the log probabilities of one token, where the request wants them."""
    output = completion.output
    if output.logprobs is not None:
        output.logprobs.append(logprobs)
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs.chosen.logprob


def _visible(completion: Completion, request: Request) -> list[int]:
    """Tokens not pushed yet; a stop token is shown only where the request asks for it."""
    tracked: Tracked = request.params
    ids = completion.output.token_ids
    end = len(ids)
    if request.stop_token is not None and not tracked.params.include_stop_str_in_output:
        end -= 1
    new, completion.shown = ids[completion.shown : end], end
    return new

"""The engine loop: schedule, run, sample, take the tokens, tell the callers.

::

    add_request --> scheduler.add
    step:  launch   schedule --> runner.execute --> sampler.sample      (device work is queued)
           collect  scheduler.update --> text, stop strings, logprobs --> RequestOutput

With two steps in flight the next step is launched before the last one is collected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blocktable.core.errors import RequestError
from blocktable.engine.completions import add_logprobs, finish, gained, grow, taken_late
from blocktable.engine.detokenize import Detokenizer
from blocktable.engine.drafts import draws, may_draft, verify
from blocktable.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from blocktable.engine.params import SamplingParams, check_prompt_ids
from blocktable.engine.prompt_scores import PromptLines, PromptScores, prompt_lines, score
from blocktable.engine.sampling import Sampler, SamplerOutput
from blocktable.engine.tracking import Tracked, logprobs_by_line
from blocktable.sched.output import SchedulerOutput, StepResult
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from torch import Tensor

    from blocktable.engine.kv_layout import KVLayout
    from blocktable.engine.runner import ModelRunner

_NO_TOKENS = np.zeros(0, np.int64)


class ModelLimits(NamedTuple):
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Launched(NamedTuple):
    """A step whose device work is queued and whose tokens have not been taken."""

    output: SchedulerOutput
    sampled: SamplerOutput | None
    requests: np.ndarray | None = None
    """[m] who draws, with several steps in flight: a row may have changed hands when it ends."""
    tokens: Callable[[], np.ndarray] | None = None
    """Waits for the sampled tokens and returns them, int64 [m]."""
    scores: PromptScores | None = None


class Engine:
    """Serves requests over one model. Not thread-safe: one thread calls it.

    ``runner`` has ``execute(output) -> logits or None`` and ``remember(rows, token_ids)``; the
    scheduler's manager holds the block tables that the runner reads.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sampler: Sampler,
        limits: ModelLimits,
        *,
        tokenizer: Any | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self.runner, self.scheduler, self.sampler = runner, scheduler, sampler
        self.limits, self.tokenizer, self.layout = limits, tokenizer, layout
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._tracked: dict[str, Tracked] = {}
        self._launched: deque[Launched] = deque()
        self.on_schedule: Callable[[SchedulerOutput], None] | None = None
        self._aborted: list[Tracked] = []
        self._num_scored = 0  # requests ever added that want log probabilities of their prompt
        self._scoring: set[str] = set()
        self._depth = scheduler.config.max_steps_in_flight

    @property
    def manager(self) -> Any:
        """The KV cache manager behind the scheduler."""
        return self.runner.manager

    @property
    def has_unfinished(self) -> bool:
        """Some request has not been told to be finished yet."""
        return bool(self._tracked) or bool(self._launched) or bool(self._aborted)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self.limits.max_model_len

    @property
    def block_size(self) -> int:
        """Positions in one block (of the first group), on all context-parallel ranks."""
        return 0 if self.layout is None else self.layout.groups[0].kv_cache_spec.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool over all layers that share it."""
        return 0 if self.layout is None else self.layout.bytes_per_block

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        streaming: bool = True,
        priority: int = 0,
        salt: str | None = None,
        arrival: float | None = None,
    ) -> None:
        """Queue a request. ``prompt`` is a text or token ids; without ``streaming`` it is reported
        once, when it is finished. Raises RequestError, and holds nothing then, for what can never
        be served: ids outside the vocabulary, a prompt longer than model or pool, an id in use."""
        if not isinstance(request_id, str):
            raise RequestError(f"a request id must be a string, got {request_id!r}")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters must be SamplingParams, got {params!r}")
        if request_id in self._tracked:
            raise RequestError(f"request id {request_id!r} is in use")
        text = prompt if isinstance(prompt, str) else None
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = check_prompt_ids(ids, self.limits.vocab_size, self.limits.max_model_len)
        params.check_model(self.limits.vocab_size)
        self.sampler.check(params)
        arrival = time.monotonic() if arrival is None else arrival
        seed = self.sampler.fresh_seed() if params.seed is None else params.seed
        tracked = Tracked(request_id, text, tokens, params, seed, streaming, arrival)
        if params.prompt_logprobs is not None:
            salt = self._score_prompt(tracked, salt)
        self.scheduler.add(self._request(tracked, priority, salt))
        self._tracked[request_id] = tracked

    def _score_prompt(self, tracked: Tracked, salt: str | None) -> str:
        """Collect the prompt's log probabilities; returns a salt that no other request has."""
        if not getattr(self.runner, "scores_prompts", True):
            raise RequestError("prompt_logprobs is not available with several ranks")
        none: list[TokenLogprobs | None] = [None]
        tracked.prompt_logprobs = none * len(tracked.prompt_token_ids)
        self._num_scored += 1
        self._scoring.add(tracked.request_id)
        return f"{salt or ''}\0prompt_logprobs {self._num_scored} {tracked.seed}"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; RequestError where the model has no tokenizer."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as token ids")
        return self.tokenizer(text)["input_ids"]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with all their completions; each is reported once more, as aborted."""
        for request_id in request_ids:
            self._end(request_id, "abort", None)

    def _end(self, request_id: str, reason: FinishReason, why: str | None) -> None:
        """End what is left of a request; it is reported by the next step."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        self._scoring.discard(request_id)
        names = [request_id, *(f"{request_id}#{i}" for i in range(1, tracked.params.n))]
        self.scheduler.finish(names, reason)
        for completion in tracked.completions:
            if not completion.output.finished:
                finish(completion, reason)
                completion.output.stop_reason = why
        self._aborted.append(tracked)

    def _end_failed(self) -> None:
        """End the requests whose guide could not be followed in the step just launched."""
        failed = self.sampler.failed_rows
        for row, why in failed.items():
            request: Request | None = self.scheduler.requests[row]
            if request is None:  # ended just now, with another of its completions
                continue
            tracked: Tracked = request.params
            tracked.start(request.index, self.detokenizer, request)
            guide = tracked.params.guide
            kind = "the guide" if guide is None else guide.kind
            self._end(tracked.request_id, "error", f"{kind} cannot be followed: {why}")
        failed.clear()

    def _request(self, tracked: Tracked, priority: int, salt: str | None) -> Request:
        params, eos = tracked.params, self.limits.eos_token_ids
        room = self.limits.max_model_len - len(tracked.prompt_token_ids)
        more = () if params.ignore_eos else eos[1:]
        return Request(
            request_id=tracked.request_id,
            prompt_token_ids=np.asarray(tracked.prompt_token_ids, np.int32),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=params.min_tokens, eos_token_id=eos[0] if eos else None,
            stop_token_ids=(*params.stop_token_ids, *more), ignore_eos=params.ignore_eos,
            n=params.n, priority=priority, salt=salt, drafts=may_draft(params),
            arrival=tracked.arrival, params=tracked,
            # a prompt computed for its scores has a salt of its own: nobody can hit it
            retention=None if params.prompt_logprobs is not None else params.retention,
        )  # fmt: skip

    # --- steps ---

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that gained tokens (streaming ones) or ended."""
        while len(self._launched) < self._depth and self._may_launch():
            self._launch()
            if self.sampler.failed_rows:
                self._end_failed()
        outputs = [tracked.to_output() for tracked in self._aborted]
        self._aborted.clear()
        if self._launched:
            outputs += self._collect(self._launched.popleft())
        return outputs

    def _may_launch(self) -> bool:
        """Something is left to schedule. Behind an empty step nothing is: it waits for blocks that
        come back when a step in flight has been collected."""
        if self._launched and (not self._tracked or self._launched[-1].output.is_empty):
            return False
        return self.scheduler.has_work

    def _launch(self) -> None:
        """Schedule a step and queue its device work. An exception takes the step back."""
        output = self.scheduler.schedule()
        if self.on_schedule is not None:
            self.on_schedule(output)
        try:
            self._place_rows(output)
            scores = sampled = tokens = None
            lines = self._prompt_lines(output)
            if lines is None:
                logits = self.runner.execute(output)
            else:
                logits, scores = self._run_scoring(output, lines)
            if logits is not None:
                rows, positions = draws(output)
                sampled = self.sampler.sample(logits, rows, positions)
                tokens = self.runner.download(sampled.token_ids)
                if self._depth > 1:
                    self.runner.remember(output.sample_rows, sampled.token_ids)
        except BaseException:
            self._take_back([*self._launched, Launched(output, None)])
            raise
        who = self.scheduler.requests[output.sample_rows] if self._depth > 1 else None
        self._launched.append(Launched(output, sampled, who, tokens, scores))

    def _prompt_lines(self, output: SchedulerOutput) -> PromptLines | None:
        if not self._scoring:
            return None
        return prompt_lines(output, self.scheduler.requests[output.rows].tolist())

    def _run_scoring(
        self, output: SchedulerOutput, lines: PromptLines
    ) -> tuple[Tensor | None, PromptScores]:
        """The step's logits to draw from, and the scores of prompt tokens."""
        logits = self.runner.execute(output, lines.at)
        count = len(logits) - len(lines.at)  # type: ignore[arg-type]
        scores = score(logits[count:], lines)  # type: ignore[index]
        return (logits[:count] if count else None), scores  # type: ignore[index]

    def _place_rows(self, output: SchedulerOutput) -> None:
        """Tell the sampler who is in which row."""
        self.sampler.clear_rows(output.released)
        for admission in output.admitted:
            self._place(admission.request, admission.row, admission.request.tokens)
            if admission.request.num_preemptions == 0:
                tracked: Tracked = admission.request.params
                tracked.num_cached_tokens = admission.num_cached
        for fork in output.forked:
            known = int(self.manager.num_tokens[fork.row])
            self._place(fork.request, fork.row, self.manager.tokens[fork.row, :known])

    def _place(self, request: Request, row: int, tokens: np.ndarray) -> None:
        tracked: Tracked = request.params
        self.sampler.add_row(
            row, tracked.params, tracked.prompt_token_ids,
            output_token_ids=tokens[request.num_prompt_tokens :].tolist(),
            index=request.index, seed=tracked.seed,
        )  # fmt: skip

    def _take_back(self, steps: list[Launched]) -> None:
        """Cancel the steps in flight, oldest first in ``steps``: their requests wait again."""
        for launched in reversed(steps):
            self.scheduler.cancel(launched.output)
        self._launched.clear()

    def _collect(self, launched: Launched) -> list[RequestOutput]:
        """Wait for a step's tokens and hand them out. An exception on the way takes it back."""
        sampled, logprobs = launched.sampled, None
        try:
            if launched.scores is not None:
                launched.scores.hand_out(self.detokenizer)
            tokens = _NO_TOKENS if launched.tokens is None else launched.tokens()
            if sampled is not None and sampled.logprobs is not None:
                logprobs = logprobs_by_line(sampled.logprobs, tokens, self.detokenizer)
        except BaseException:
            self._take_back([launched, *self._launched])
            raise
        first = None
        if launched.output.num_drafts is None:
            result = self.scheduler.update(launched.output, tokens)
        else:
            verdict = verify(launched.output, tokens, self.manager.tokens)
            first = verdict.first_line
            result = self.scheduler.update(launched.output, verdict.token_ids, verdict.counts)
        late = () if launched.requests is None else taken_late(launched.requests, result)
        return self._hand_out(result, logprobs, late, first)

    def _hand_out(
        self,
        result: StepResult,
        logprobs: dict[int, TokenLogprobs] | None,
        late: Iterable[tuple[int, Request]],
        first_line: np.ndarray | None = None,
    ) -> list[RequestOutput]:
        """Give a step's tokens to their completions and report what changed. With drafts
        ``first_line`` says where each sampled row's lines begin."""
        touched: dict[str, Tracked] = {}
        stopped: list[str] = []
        gains = gained(result, first_line)
        for line, request in late:
            grown = request.params.start(request.index, self.detokenizer, request)
            known = len(grown.output.token_ids)
            gains.append((line, request, request.output_token_ids[known:].tolist()))
        for line, request, new in gains:
            tracked: Tracked = request.params
            completion = tracked.start(request.index, self.detokenizer, request)
            known = len(completion.output.token_ids)
            if grow(completion, request, new, self.limits.eos_token_ids):
                stopped.append(request.request_id)
            if logprobs is not None and line in logprobs:
                for k in range(len(completion.output.token_ids) - known):
                    add_logprobs(completion, logprobs[line + k])
            if tracked.streaming or completion.output.finish_reason is not None:
                touched[tracked.request_id] = tracked
        for request in result.finished:
            tracked = request.params
            completion = tracked.start(request.index, self.detokenizer, request)
            if not completion.output.finished:
                finish(completion, request.finish_reason or "length")
            touched[tracked.request_id] = tracked
        if stopped:
            self.scheduler.finish(stopped, "stop")
        return self._report(touched)

    def _report(self, touched: dict[str, Tracked]) -> list[RequestOutput]:
        outputs = []
        for request_id, tracked in touched.items():
            if request_id not in self._tracked:  # aborted meanwhile
                continue
            done = tracked.finished
            if done:
                del self._tracked[request_id]
                self._scoring.discard(request_id)
            if done or tracked.streaming:
                outputs.append(tracked.to_output())
        return outputs

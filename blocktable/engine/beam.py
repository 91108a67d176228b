"""Beam search through scheduler forks: beams share their common blocks and copy on write.

::

    prompt  [B0][B1][B2]          one row until the first tokens are chosen
    beam 0  [B0][B1][B2'] t5      the winners of a step go on: the first child of a beam takes its
    beam 1  [B0][B1][B2 ] t9      row, the others are forks of it; a beam without children is
                                  released with the blocks that it alone held

In each step every live beam offers its likeliest tokens. Of all candidates of a prompt, those
among the ``beam_width`` best that end the text are kept as hypotheses, and the ``beam_width``
best that do not end it live on. A hypothesis is worth its log probability over
``length ** length_penalty``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.errors import RequestError
from blocktable.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from blocktable.engine.params import SamplingParams, check_prompt_ids
from blocktable.sched.request import Request

if TYPE_CHECKING:
    from blocktable.engine.engine import Engine


_MAX_PENALTY = 20  # a length to this power is still a float


class BeamOptions(NamedTuple):
    """``length_penalty`` > 0 favours long hypotheses; ``ignore_eos`` ends none before
    ``max_tokens``."""

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def checked(self, max_num_seqs: int) -> BeamOptions:
        """Raises RequestError, naming the value and its limit."""
        for name, most in (("beam_width", max_num_seqs), ("max_tokens", None)):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if wrong or (most is not None and value > most):
                limit = "" if most is None else f" and at most max_num_seqs ({most})"
                raise RequestError(f"{name} must be an integer >= 1{limit}, got {value!r}")
        penalty: Any = self.length_penalty
        number = isinstance(penalty, (int, float, np.number)) and not isinstance(penalty, bool)
        if not (number and -_MAX_PENALTY <= penalty <= _MAX_PENALTY):
            limits = f"[-{_MAX_PENALTY}, {_MAX_PENALTY}]"
            raise RequestError(f"length_penalty must be a number in {limits}, got {penalty!r}")
        return self


class Hypothesis(NamedTuple):
    """A text that ended, or that was cut at its length."""

    score: float
    total: float
    token_ids: list[int]
    ended: bool


class Candidates(NamedTuple):
    """A beam's likeliest next tokens, most likely first."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


class Beam(NamedTuple):
    """A live continuation; ``request`` holds its row and blocks."""

    request: Request
    total: float
    token_ids: list[int]


@dataclass
class Search:
    """The beams of one prompt."""

    index: int
    prompt: str | None
    root: Request
    limit: int
    """Most tokens to generate."""
    live: list[Beam] = field(default_factory=list)
    found: list[Hypothesis] = field(default_factory=list)
    num_forks: int = 0


class BeamSearch:
    """One search over some prompts, on an engine that serves nothing else meanwhile."""

    def __init__(self, engine: Engine, options: BeamOptions) -> None:
        """Raises RequestError for options that cannot work, or if requests are unfinished."""
        self.engine, self.scheduler = engine, engine.scheduler
        self.options = options.checked(self.scheduler.config.max_num_seqs)
        if engine.has_unfinished:
            raise RequestError("beam search needs the engine alone: other requests are unfinished")
        self._ends = () if options.ignore_eos else engine.limits.eos_token_ids
        self._offers: dict[str, Candidates] = {}

    def run(self, prompts: Sequence[str | Sequence[int]]) -> list[RequestOutput]:
        """``beam_width`` completions of each prompt, best first. Raises RequestError, and holds
        nothing then, for a prompt that cannot be served or a pool too small for its beams."""
        searches = [self._search(i, prompt) for i, prompt in enumerate(prompts)]
        waiting = searches[::-1]
        running: list[Search] = []
        try:
            while waiting or running:
                while waiting and self._has_room(running, waiting[-1]):
                    running.append(waiting.pop())
                    self.scheduler.add(running[-1].root)
                self._step(running)
                running = [search for search in running if search.live]
        except BaseException:
            everyone = [*self.scheduler.requests.tolist(), *self.scheduler.waiting]
            self.scheduler.finish([r.request_id for r in everyone if r is not None], "abort")
            raise
        return [self._output(search) for search in searches]

    def _search(self, index: int, prompt: str | Sequence[int]) -> Search:
        limits, engine = self.engine.limits, self.engine
        ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = check_prompt_ids(ids, limits.vocab_size, limits.max_model_len)
        limit = min(self.options.max_tokens, self.scheduler.capacity - len(tokens))
        if limit < 1:
            raise RequestError(
                f"a prompt of {len(tokens)} tokens is too long: the block pool holds "
                f"{self.scheduler.capacity}, one of them for the answer"
            )
        root = Request(
            request_id=f"beam-{index}", prompt_token_ids=np.asarray(tokens, np.int32),
            max_tokens=limit, ignore_eos=True, drafts=False,
        )  # fmt: skip
        text = prompt if isinstance(prompt, str) else None
        return Search(index, text, root, limit, [Beam(root, 0.0, [])])

    def _has_room(self, running: list[Search], new: Search) -> bool:
        """Rows and blocks for all beams of these prompts, should they share nothing."""
        searches, width = [*running, new], self.options.beam_width
        layout = self.engine.layout
        if not running or layout is None:
            return not running
        lengths = [s.root.num_prompt_tokens + s.limit for s in searches]
        blocks = width * sum(layout.blocks_for(length) for length in lengths)
        rows = width * len(searches)
        manager = self.engine.manager
        return blocks <= manager.pool.usable and rows <= self.scheduler.config.max_num_seqs

    # -- one step -------------------------------------------------------------------------------

    def _step(self, running: list[Search]) -> None:
        """Compute what the beams still lack, then go on with those that lack nothing."""
        computed = self._compute()
        ready = [search for search in running if all(map(self._is_ready, search.live))]
        for search in ready:
            self._choose(search)
        if not computed and not ready:
            raise RequestError(
                f"beam search of width {self.options.beam_width} needs more blocks than the "
                f"{self.engine.manager.pool.usable} of the pool, for prompts of "
                f"{[search.root.num_prompt_tokens for search in running]} tokens"
            )

    def _compute(self) -> bool:
        """Run one scheduled step and keep each sampled row's candidates; False if it was empty."""
        engine, scheduler = self.engine, self.scheduler
        output = scheduler.schedule()
        if engine.on_schedule is not None:
            engine.on_schedule(output)
        engine.sampler.clear_rows(output.released)
        try:
            logits = engine.runner.execute(output)
            if logits is not None:
                self._keep_offers(logits, scheduler.requests[output.sample_rows].tolist())
        except BaseException:
            scheduler.cancel(output)
            raise
        scheduler.update(output, None)
        return not output.is_empty

    @torch.inference_mode()
    def _keep_offers(self, logits: torch.Tensor, requests: list[Request]) -> None:
        """The tokens that can be among the best of a prompt, of logits [m, V]."""
        count = min(self.options.beam_width + len(self._ends), logits.shape[-1])
        logprobs, ids = logits.float().log_softmax(-1).topk(count, dim=-1)
        values = logprobs.double().cpu().numpy()
        for request, own, value in zip(requests, ids.cpu().numpy(), values, strict=True):
            self._offers[request.request_id] = Candidates(own, value)

    def _is_ready(self, beam: Beam) -> bool:
        """It runs, all its tokens are computed, and its candidates are known. (A beam that was
        preempted is computed once more; what it offers stays the same.)"""
        row, manager = beam.request.row, self.engine.manager
        if row < 0 or beam.request.request_id not in self._offers:
            return False
        return bool(manager.num_computed[row] == manager.num_tokens[row])

    # -- choosing -------------------------------------------------------------------------------

    def _choose(self, search: Search) -> None:
        """End the candidates that end, and let the best of the others live on."""
        live = search.live
        offers = [self._offers.pop(beam.request.request_id) for beam in live]
        totals = np.concatenate([b.total + o.logprobs for b, o in zip(live, offers, strict=True)])
        tokens = np.concatenate([offer.ids for offer in offers])
        owner = np.repeat(np.arange(len(live)), [len(offer.ids) for offer in offers])
        order = np.lexsort((tokens, owner, -totals))
        chosen: list[tuple[int, int, float]] = []  # beam, token, total
        for rank, i in enumerate(order[np.isfinite(totals[order])].tolist()):
            beam, token, total = int(owner[i]), int(tokens[i]), float(totals[i])
            if token not in self._ends:
                chosen.append((beam, token, total))
            elif rank < self.options.beam_width:
                self._found(search, total, [*live[beam].token_ids, token], True)
            if len(chosen) == self.options.beam_width:
                break
        length = len(live[0].token_ids) + 1
        if length == search.limit:
            for beam, token, total in chosen:
                self._found(search, total, [*live[beam].token_ids, token], False)
            chosen = []
        elif self._is_decided(search, max((c[2] for c in chosen), default=-np.inf), length):
            chosen = []
        self._go_on(search, chosen)

    def _found(self, search: Search, total: float, token_ids: list[int], ended: bool) -> None:
        score = total / len(token_ids) ** self.options.length_penalty
        search.found.append(Hypothesis(score, total, token_ids, ended))

    def _is_decided(self, search: Search, best: float, length: int) -> bool:
        """No live beam, the best of which has the log probability ``best`` at ``length``, can still
        get among the best hypotheses: log probabilities only fall."""
        width, penalty = self.options.beam_width, self.options.length_penalty
        if len(search.found) < width:
            return False
        worst = sorted(h.score for h in search.found)[-width]
        return worst > best / (search.limit if penalty > 0 else length + 1) ** penalty

    def _go_on(self, search: Search, chosen: list[tuple[int, int, float]]) -> None:
        """Release the losers first, so that rows and blocks are free for the forks."""
        old, scheduler = search.live, self.scheduler
        kept = dict.fromkeys(beam for beam, _, _ in chosen)
        scheduler.finish([b.request.request_id for i, b in enumerate(old) if i not in kept])
        first = {beam: place for place, (beam, _, _) in reversed(list(enumerate(chosen)))}
        places = sorted(first.values())
        rows = np.array([old[chosen[place][0]].request.row for place in places], np.int32)
        if len(rows):
            scheduler.feed(rows, np.array([chosen[place][1] for place in places], np.int32))
        search.live = []
        for place, (beam, token, total) in enumerate(chosen):
            request = old[beam].request
            if first[beam] != place:
                search.num_forks += 1
                name = f"{search.root.request_id}/{search.num_forks}"
                request = scheduler.fork(request.request_id, [name], [token])[0]
            search.live.append(Beam(request, total, [*old[beam].token_ids, token]))

    # -- what comes of it -----------------------------------------------------------------------

    def _output(self, search: Search) -> RequestOutput:
        best = sorted(search.found, key=lambda h: -h.score)[: self.options.beam_width]
        prompt_ids = search.root.prompt_token_ids.tolist()
        root = search.root
        return RequestOutput(
            root.request_id, search.prompt, prompt_ids,
            [
                CompletionOutput(
                    i, self._text(h, prompt_ids), h.token_ids, cumulative_logprob=h.total,
                    finish_reason="stop" if h.ended else "length",
                )
                for i, h in enumerate(best)
            ],
            finished=True, num_cached_tokens=max(0, root.num_cached_tokens),
            metrics=RequestMetrics(
                arrival=root.arrival, first_scheduled=root.scheduled_at,
                first_token=root.first_token_at, finished=time.monotonic(),
            ),
        )  # fmt: skip

    def _text(self, hypothesis: Hypothesis, prompt_ids: list[int]) -> str:
        if self.engine.detokenizer is None:
            return ""
        stream: Any = self.engine.detokenizer.stream(SamplingParams(), prompt_ids)
        stream.push(hypothesis.token_ids[:-1] if hypothesis.ended else hypothesis.token_ids)
        return stream.finish()

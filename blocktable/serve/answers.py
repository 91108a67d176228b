"""Answers in OpenAI's form: whole, and chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from blocktable.engine.detokenize import Detokenizer
from blocktable.engine.outputs import Logprob, TokenLogprobs
from blocktable.serve.bridge import Part, Update
from blocktable.serve.offsets import Offsets
from blocktable.serve.tools import Reading, ToolUse

Json = dict[str, Any]


def usage(updates: Sequence[Update]) -> Json:
    """Token counts over all prompts of a call."""
    prompt = sum(u.num_prompt_tokens for u in updates)
    made = sum(part.num_tokens for u in updates for part in u.parts)
    cached = sum(u.num_cached_tokens for u in updates)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_reason(part: Part) -> str | None:
    """OpenAI's word for why a completion ended."""
    if part.finish_reason in (None, "stop", "length"):
        return part.finish_reason
    return "stop" if part.finish_reason == "abort" else "length"


def _finite(logprob: float) -> float:
    """JSON knows no infinity; -9999 is what the field uses for "never"."""
    return max(logprob, -9999.0)


class Shape:
    """How one kind of answer (completion or chat) looks; remembers what was streamed.

    ``n`` completions for each prompt: choice number = prompt number * n + completion's index.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, model: str, n: int, detokenizer: Detokenizer | None, echoes: Sequence[str]
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self._n, self._detokenizer = model, n, detokenizer
        self._echoes = echoes  # text that stands before each prompt's completions
        self.echo_only = False  # the one token generated is not shown
        self.scores_prompt = False  # prompt_logprobs were asked for
        self.prompts: Sequence[Sequence[int]] = ()  # token ids, where text offsets are wanted
        self.skips_special = True  # special tokens are not part of the text
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> characters, tokens sent
        self._offsets: dict[int, Offsets] = {}  # choice -> of the tokens sent
        self._ended: set[int] = set()

    def whole(self, updates: Sequence[Update]) -> Json:
        """The answer of a finished call."""
        choices = [
            self._choice(u, place, part, 0, 0)
            for place, u in enumerate(updates)
            for part in u.parts
        ]
        return {
            **self._head(self.kind), "choices": choices, "usage": self.usage(updates),
            **self._whole_extra(updates),
        }  # fmt: skip

    def usage(self, updates: Sequence[Update]) -> Json:
        """Token counts over all prompts of a call."""
        counts = usage(updates)
        if self.echo_only:
            counts.update(completion_tokens=0, total_tokens=counts["prompt_tokens"])
        return counts

    def _whole_extra(self, updates: Sequence[Update]) -> Json:
        return {}

    def chunks(self, place: int, update: Update) -> list[Json]:
        """What is new in a request since the last call."""
        out = []
        for part in update.parts:
            choice = place * self._n + part.index
            characters, tokens = self._sent.get(choice, (0, 0))
            text, done = part.text[characters:], part.finish_reason is not None
            if choice in self._ended or not (text or done):
                continue
            delta = self._delta(update, place, part, characters, tokens)
            if delta is None:
                continue
            if choice not in self._sent:
                out += self._opening(choice)
            out.append({**self._head(self.chunk_kind), "choices": [delta]})
            self._sent[choice] = (len(part.text), part.num_tokens)
            if done:
                self._ended.add(choice)
        return out

    def usage_chunk(self, updates: Sequence[Update]) -> Json:
        """The last chunk of a stream with ``include_usage``."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage(updates)}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _opening(self, choice: int) -> list[Json]:
        return []

    def _choice(self, update: Update, place: int, part: Part, characters: int, tokens: int) -> Json:
        choice: Json = {
            "index": place * self._n + part.index,
            "text": part.text[characters:],
            "logprobs": self._logprobs(place, part, tokens),
            "finish_reason": finish_reason(part),
            "stop_reason": part.stop_reason,
        }
        if self._echoes and not tokens:
            self._echo(choice, update, place)
        if self.scores_prompt:
            choice["prompt_logprobs"] = self._prompt_logprobs(update)
        return choice

    def _delta(
        self, update: Update, place: int, part: Part, characters: int, tokens: int
    ) -> Json | None:
        return self._choice(update, place, part, characters, tokens)

    def _echo(self, choice: Json, update: Update, place: int) -> None:
        """Put the prompt, and its log probabilities if they are asked for, before the answer."""
        own, prompt = choice["logprobs"], self._echoes[place]
        if self.echo_only:
            choice.update(text="", finish_reason="length", stop_reason=None)
            own = own and {key: [] for key in own}
        choice["text"] = prompt + choice["text"]
        if own is not None and update.prompt_logprobs is not None:
            scored = self._scored_prompt(update, place)
            choice["logprobs"] = {key: scored[key] + own[key] for key in own}

    def _scored_prompt(self, update: Update, place: int) -> Json:
        """The prompt's tokens in the form of ``_logprobs``; the first has no probability."""
        detokenizer = self._detokenizer
        first = "" if detokenizer is None else detokenizer.token_text(update.first_token)
        offsets = Offsets(detokenizer)
        offsets.take(update.first_token)
        entries = (update.prompt_logprobs or [])[1:]
        rest = self._columns([e for e in entries if e is not None], offsets)
        before = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None],
                  "text_offset": [0]}  # fmt: skip
        scored = {key: before[key] + rest[key] for key in rest}
        # tokens that the tokenizer put before a text are not in it
        added = max(0, offsets.end - len(self._echoes[place]))
        scored["text_offset"] = [max(0, offset - added) for offset in scored["text_offset"]]
        return scored

    def _prompt_logprobs(self, update: Update) -> list[Json | None] | None:
        """vLLM's form: for each position its candidates by token id."""
        if update.prompt_logprobs is None:
            return None
        return [
            entry
            and {
                str(t.token_id): {
                    "logprob": _finite(t.logprob), "rank": t.rank, "decoded_token": self._token(t),
                }
                for t in [*entry.top, entry.chosen]
            }
            for entry in update.prompt_logprobs
        ]  # fmt: skip

    def _token(self, entry: Logprob) -> str:
        if entry.text or self._detokenizer is None:
            return entry.text
        return self._detokenizer.token_text(entry.token_id)

    def _logprobs(self, place: int, part: Part, tokens: int) -> Json | None:
        if part.logprobs is None:
            return None
        choice = place * self._n + part.index
        offsets = self._offsets.get(choice)
        if offsets is None:
            offsets = self._offsets[choice] = Offsets(
                self._detokenizer, skip_special=self.skips_special,
                context=self.prompts[place] if self.prompts else (),
                start=len(self._echoes[place]) if self._echoes else 0,
            )  # fmt: skip
        return self._columns(part.logprobs[tokens : part.num_tokens], offsets)

    def _columns(self, entries: Sequence[TokenLogprobs], offsets: Offsets) -> Json:
        names, values, tops, places = [], [], [], []
        for entry in entries:
            names.append(self._token(entry.chosen))
            values.append(_finite(entry.chosen.logprob))
            tops.append({self._token(t): _finite(t.logprob) for t in [*entry.top, entry.chosen]})
            places.append(offsets.take(entry.chosen.token_id))
        return {
            "tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": places,
        }  # fmt: skip


class ChatShape(Shape):
    """Answers of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, model: str, n: int, detokenizer: Detokenizer | None, tools: ToolUse | None
    ) -> None:
        super().__init__(model, n, detokenizer, ())
        self.tools = tools
        self._told: dict[int, list[int]] = {}

    def _opening(self, choice: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        opening = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._head(self.chunk_kind), "choices": [opening]}]

    def _choice(self, update: Update, place: int, part: Part, characters: int, tokens: int) -> Json:
        message: Json = {"role": "assistant", "content": part.text}
        called = False
        if self.tools is not None:
            reading = self.tools.reading(part.text, True)
            calls = [
                self._call(place, part, i, call.name, call.arguments)
                for i, call in enumerate(reading.calls)
            ]
            called = bool(calls)
            message["content"] = reading.content if reading.content or not calls else None
            if calls:
                message["tool_calls"] = calls
        return {
            "index": place * self._n + part.index,
            "message": message,
            **self._ending(part, tokens, called),
        }

    def _delta(
        self, update: Update, place: int, part: Part, characters: int, tokens: int
    ) -> Json | None:
        delta: Json = {"content": part.text[characters:]}
        called = False
        if self.tools is not None:
            done = part.finish_reason is not None
            reading = self.tools.reading(part.text, done)
            called = bool(reading.calls)
            delta = self._new_in(place, part, reading)
            if not delta and not done:
                return None
        return {
            "index": place * self._n + part.index,
            "delta": delta,
            **self._ending(part, tokens, called),
        }

    def _new_in(self, place: int, part: Part, reading: Reading) -> Json:
        """What a stream has not been told yet of a choice's content and calls."""
        choice = place * self._n + part.index
        told = self._told.setdefault(choice, [0])  # characters of content, then of each call
        delta: Json = {}
        if len(reading.content) > told[0]:
            delta["content"], told[0] = reading.content[told[0] :], len(reading.content)
        calls = []
        for i, call in enumerate(reading.calls):
            known = i + 1 < len(told)
            if not known:
                told.append(0)
            new, told[i + 1] = call.arguments[told[i + 1] :], len(call.arguments)
            if known and new:
                calls.append({"index": i, "function": {"arguments": new}})
            elif not known:
                calls.append({"index": i, **self._call(place, part, i, call.name, new)})
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _call(self, place: int, part: Part, index: int, name: str, arguments: str) -> Json:
        number = uuid.uuid4().hex
        short = self.tools is not None and self.tools.short_ids
        return {
            "id": number[:9] if short else f"call_{number[:24]}", "type": "function",
            "function": {"name": name, "arguments": arguments},
        }  # fmt: skip

    def _whole_extra(self, updates: Sequence[Update]) -> Json:
        return {"prompt_logprobs": self._prompt_logprobs(updates[0])} if self.scores_prompt else {}

    def _ending(self, part: Part, tokens: int, called: bool) -> Json:
        reason = finish_reason(part)
        if called and reason == "stop" and self.tools is not None and self.tools.forced is None:
            reason = "tool_calls"
        return {
            "logprobs": self._chat_logprobs(part, tokens),
            "finish_reason": reason,
            "stop_reason": part.stop_reason,
        }

    def _chat_logprobs(self, part: Part, tokens: int) -> Json | None:
        if part.logprobs is None:
            return None
        new: Sequence[TokenLogprobs] = part.logprobs[tokens : part.num_tokens]
        return {
            "content": [
                {**self._entry(e.chosen), "top_logprobs": [self._entry(t) for t in e.top]}
                for e in new
            ]
        }

    def _entry(self, entry: Logprob) -> Json:
        raw = b""
        if self._detokenizer is not None:
            raw = self._detokenizer.token_bytes(entry.token_id)
        value = _finite(entry.logprob)
        return {"token": self._token(entry), "logprob": value, "bytes": list(raw)}

"""Answers in OpenAI's form: whole, and chunk by chunk."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from blocktable.engine.detokenize import Detokenizer
from blocktable.engine.outputs import Logprob, TokenLogprobs
from blocktable.serve.bridge import Part, Update

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
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> characters, tokens sent
        self._ended: set[int] = set()

    def whole(self, updates: Sequence[Update]) -> Json:
        """The answer of a finished call."""
        choices = [
            self._choice(place, part, 0, 0) for place, u in enumerate(updates) for part in u.parts
        ]
        return {**self._head(self.kind), "choices": choices, "usage": usage(updates)}

    def chunks(self, place: int, update: Update) -> list[Json]:
        """What is new in a request since the last call."""
        out = []
        for part in update.parts:
            choice = place * self._n + part.index
            characters, tokens = self._sent.get(choice, (0, 0))
            text, done = part.text[characters:], part.finish_reason is not None
            if choice in self._ended or not (text or done):
                continue
            if choice not in self._sent:
                out += self._opening(choice)
            out.append(
                {**self._head(self.chunk_kind),
                 "choices": [self._delta(place, part, characters, tokens)]}
            )  # fmt: skip
            self._sent[choice] = (len(part.text), part.num_tokens)
            if done:
                self._ended.add(choice)
        return out

    def usage_chunk(self, updates: Sequence[Update]) -> Json:
        """The last chunk of a stream with ``include_usage``."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage(updates)}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _opening(self, choice: int) -> list[Json]:
        return []

    def _choice(self, place: int, part: Part, characters: int, tokens: int) -> Json:
        before = self._echoes[place] if self._echoes and characters == 0 else ""
        return {
            "index": place * self._n + part.index,
            "text": before + part.text[characters:],
            "logprobs": self._logprobs(part, tokens, len(before) + characters),
            "finish_reason": finish_reason(part),
            "stop_reason": part.stop_reason,
        }

    _delta = _choice

    def _token(self, entry: Logprob) -> str:
        if entry.text or self._detokenizer is None:
            return entry.text
        return self._detokenizer.token_text(entry.token_id)

    def _logprobs(self, part: Part, tokens: int, characters: int) -> Json | None:
        if part.logprobs is None:
            return None
        names, values, tops, offsets = [], [], [], []
        for entry in part.logprobs[tokens : part.num_tokens]:
            name = self._token(entry.chosen)
            names.append(name)
            values.append(_finite(entry.chosen.logprob))
            tops.append({self._token(t): _finite(t.logprob) for t in [*entry.top, entry.chosen]})
            offsets.append(characters)
            characters += len(name)
        return {
            "tokens": names, "token_logprobs": values, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip


class ChatShape(Shape):
    """Answers of ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _opening(self, choice: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        opening = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._head(self.chunk_kind), "choices": [opening]}]

    def _choice(self, place: int, part: Part, characters: int, tokens: int) -> Json:
        return {
            "index": place * self._n + part.index,
            "message": {"role": "assistant", "content": part.text},
            **self._ending(part, tokens),
        }

    def _delta(self, place: int, part: Part, characters: int, tokens: int) -> Json:
        return {
            "index": place * self._n + part.index,
            "delta": {"content": part.text[characters:]},
            **self._ending(part, tokens),
        }

    def _ending(self, part: Part, tokens: int) -> Json:
        return {
            "logprobs": self._chat_logprobs(part, tokens),
            "finish_reason": finish_reason(part),
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

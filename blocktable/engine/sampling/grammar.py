"""Output that follows a JSON schema, a regular expression, a list of choices or a grammar: which
tokens may come next, worked out by llguidance.

Each constrained row has a matcher, which takes the row's tokens and answers with a bit for each
token of the vocabulary. Rows without a grammar cost nothing; a batch with some waits for their
tokens (a sync on a GPU), since the next mask depends on them.

A guide comes from a client, so every piece of work it causes is bounded by llguidance's own limits
(``_LIMITS``; the worst guide in the tests takes 0.8 s). One that runs into them in the middle of an
output fails its own request and no other.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocktable.core.errors import RequestError
from blocktable.engine.params import Guide

ANY_JSON = '{"type": "object"}'
"""Schema of "any JSON object"."""
_MAX_COMPILED = 64
_LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 20_000, "verbose_errors": False}


class GrammarRows:
    """Matchers by row.

    Args:
        tokenizer: a fast transformers tokenizer; read when the first grammar comes (about 1 s).
        vocab_size: width of the logits, which may exceed the tokenizer's own.
        eos_token_ids: tokens that may end a complete text.

    ``check`` may be called from any thread, the rest from the engine's alone.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: Any = None
        self._matchers: dict[int, Any] = {}
        self._compiled: OrderedDict[Guide, Any] = OrderedDict()  # fresh matchers, newest last
        self._lock = threading.Lock()  # of the two above
        self.failed: dict[int, str] = {}
        """Rows whose guide could not be followed any further, and why; until they are cleared."""

    def check(self, guide: Guide) -> None:
        """Raise RequestError, with the reason, for a guide that cannot be followed. The newest
        guides stay compiled, so a check ahead of time takes the work off the engine."""
        self._fresh(guide)

    def add(self, row: int, guide: Guide, output_token_ids: Sequence[int] = ()) -> None:
        """Constrain a row, whose output so far is ``output_token_ids``."""
        matcher = self._fresh(guide)
        if len(output_token_ids):
            matcher.consume_tokens(list(map(int, output_token_ids)))
        self._matchers[row] = matcher

    def clear(self, rows: np.ndarray) -> None:
        """Forget the grammars of these rows."""
        if self._matchers:
            for row in rows.tolist():
                self._matchers.pop(row, None)
                self.failed.pop(row, None)

    def lines(self, rows: np.ndarray) -> list[int]:
        """Places in the batch whose rows have a grammar; [] at no cost if none has."""
        if not self._matchers:
            return []
        return [i for i, row in enumerate(rows.tolist()) if row in self._matchers]

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that may come next, bool [len(rows), V]; all rows must have a grammar. A row
        whose grammar fails here is put into ``failed`` and may draw anything."""
        words = np.zeros((len(rows), -(-self._vocab_size // 32)), np.int32)
        for i, row in enumerate(rows.tolist()):
            matcher, line = self._matchers[row], words[i]
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            if matcher.is_error():
                self.failed[row] = _first_line(matcher.get_error())
                line[:] = -1
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : self._vocab_size].astype(bool)

    def accept(self, rows: np.ndarray, tokens: Tensor) -> None:
        """Tell the matchers what was drawn for their rows."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers[row]
            if not matcher.is_stopped():
                matcher.consume_token(token)

    def _fresh(self, guide: Guide) -> Any:
        """A matcher of its own for a guide; compiles it where that was not done lately."""
        with self._lock:
            if guide not in self._compiled:
                self._compiled[guide] = self._compile(guide)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(guide)
            return self._compiled[guide].deep_copy()

    def _load(self) -> Any:
        if self._tokenizer is None:
            try:
                import llguidance.hf
            except ImportError:
                raise RequestError(
                    "guided output needs the package llguidance, which is not installed"
                ) from None
            try:
                self._tokenizer = llguidance.hf.from_tokenizer(
                    self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None
                )
            except (ValueError, AttributeError) as error:
                raise RequestError(f"guided output needs a fast tokenizer: {error}") from None
        return self._tokenizer

    def _compile(self, guide: Guide) -> Any:
        tokenizer = self._load()
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            grammar = _source(guide)
            reason = llguidance.LLMatcher.validate_grammar(grammar, tokenizer, limits=limits)
        except (ValueError, RecursionError) as error:
            reason, grammar = str(error) or type(error).__name__, ""
        matcher = None
        if not reason:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            reason = self._first_step(matcher.deep_copy())
        if reason:
            raise RequestError(f"{guide.kind} cannot be followed: {_first_line(reason)}")
        return matcher

    def _first_step(self, matcher: Any) -> str:
        """Why not even a first token can be chosen, or "": some guides compile all the same."""
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            return matcher.get_error() or "it allows no text"
        return "" if words.any() else "it allows no text"


def _source(guide: Guide) -> str:
    """The guide in llguidance's form; ValueError for broken JSON."""
    import llguidance

    make = llguidance.LLMatcher
    if guide.kind == "json_schema":
        json.loads(guide.text)
        return make.grammar_from_json_schema(guide.text)
    if guide.kind == "regex":
        return make.grammar_from_regex(guide.text)
    if guide.kind == "choice":
        choices = [json.dumps(text) for text in json.loads(guide.text)]
        return make.grammar_from_lark(f"start: {' | '.join(choices)}")
    return make.grammar_from_lark(guide.text)


def _first_line(reason: str) -> str:
    """A reason without the state that llguidance prints behind it."""
    text = " ".join(reason.split("<state>")[0].split())
    return "it allows no text" if text.startswith("NoExtension") else text[:300]


def apply_bits(logits: Tensor, lines: Sequence[int], bits: np.ndarray) -> None:
    """Take away, in place, the tokens that the grammars of these lines do not allow."""
    forbidden = torch.from_numpy(~bits).to(logits.device)
    index = torch.tensor(lines, device=logits.device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)

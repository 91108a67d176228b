"""Output that follows a JSON schema: which tokens may come next, worked out by llguidance.

Each constrained row has a matcher, which takes the row's tokens and answers with a bit for each
token of the vocabulary. Rows without a grammar cost nothing; a batch with some waits for their
tokens (a sync on a GPU), since the next mask depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocktable.core.errors import RequestError

ANY_JSON = '{"type": "object"}'
"""Schema of "any JSON object"."""


class GrammarRows:
    """Matchers by row.

    Args:
        tokenizer: a fast transformers tokenizer; read when the first grammar comes (about 1 s).
        vocab_size: width of the logits, which may exceed the tokenizer's own.
        eos_token_ids: tokens that may end a complete text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: Any = None
        self._matchers: dict[int, Any] = {}

    def check(self, schema: str) -> None:
        """Raise RequestError, with the reason, for a schema that cannot be followed."""
        self._compile(schema)

    def add(self, row: int, schema: str, output_token_ids: Sequence[int] = ()) -> None:
        """Constrain a row, whose output so far is ``output_token_ids``."""
        import llguidance

        matcher = llguidance.LLMatcher(self._load(), self._compile(schema))
        if len(output_token_ids):
            matcher.consume_tokens(list(map(int, output_token_ids)))
        self._matchers[row] = matcher

    def clear(self, rows: np.ndarray) -> None:
        """Forget the grammars of these rows."""
        if self._matchers:
            for row in rows.tolist():
                self._matchers.pop(row, None)

    def lines(self, rows: np.ndarray) -> list[int]:
        """Places in the batch whose rows have a grammar; [] at no cost if none has."""
        if not self._matchers:
            return []
        return [i for i, row in enumerate(rows.tolist()) if row in self._matchers]

    def bits(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that may come next, bool [len(rows), V]; all rows must have a grammar."""
        words = np.zeros((len(rows), -(-self._vocab_size // 32)), np.int32)
        for i, row in enumerate(rows.tolist()):
            matcher, line = self._matchers[row], words[i]
            matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
            if matcher.is_error():
                raise RequestError(f"the JSON schema cannot be followed: {matcher.get_error()}")
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : self._vocab_size].astype(bool)

    def accept(self, rows: np.ndarray, tokens: Tensor) -> None:
        """Tell the matchers what was drawn for their rows."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers[row]
            if not matcher.is_stopped():
                matcher.consume_token(token)

    def _load(self) -> Any:
        if self._tokenizer is None:
            try:
                import llguidance.hf
            except ImportError:
                raise RequestError(
                    "json_schema needs the package llguidance, which is not installed"
                ) from None
            try:
                self._tokenizer = llguidance.hf.from_tokenizer(
                    self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None
                )
            except (ValueError, AttributeError) as error:
                raise RequestError(f"json_schema needs a fast tokenizer: {error}") from None
        return self._tokenizer

    def _compile(self, schema: str) -> str:
        tokenizer = self._load()
        import llguidance

        try:
            json.loads(schema)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            reason = llguidance.LLMatcher.validate_grammar(grammar, tokenizer)
        except (ValueError, RecursionError) as error:
            reason = str(error)
        if reason:
            raise RequestError(f"json_schema cannot be followed: {' '.join(reason.split())[:300]}")
        return grammar


def apply_bits(logits: Tensor, lines: Sequence[int], bits: np.ndarray) -> None:
    """Take away, in place, the tokens that the grammars of these lines do not allow."""
    forbidden = torch.from_numpy(~bits).to(logits.device)
    index = torch.tensor(lines, device=logits.device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)

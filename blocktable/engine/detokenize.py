"""From token ids to text, piece by piece, never showing half a character or half a stop string.

A byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM, ...) maps each id to fixed bytes, so its text
is an incremental UTF-8 decoding of a lookup. Any other tokenizer (SentencePiece, byte fallback,
WordPiece) is decoded over a short window that begins at the last complete character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from blocktable.engine.params import SamplingParams

_CONTEXT = 5  # prompt tokens that decide about a leading space
_HALF = "�"
_NOT_A_CHARACTER = _HALF * 5  # a character has 4 bytes at most: these will never become one
_PROBE = "Hello, 中文 é\n\t  x<|"


def _byte_alphabet() -> dict[int, int]:
    """Code point of each byte's printable stand-in in a byte-level vocabulary (GPT-2's table) ->
    the byte. The bytes that are not printable themselves lead to what is no byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    no_byte = dict.fromkeys(rest, ord(_HALF))
    return no_byte | {b: b for b in plain} | {256 + i: b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


class Detokenizer:
    """A tokenizer seen from its decoding side; one for a model, shared by all requests.

    Args:
        tokenizer: a transformers tokenizer, or anything with ``decode(ids,
            skip_special_tokens=...)`` (then decoded by window).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._table = _byte_table(tokenizer)
        self._byte_of = {} if self._table is not None else _fallback_bytes(tokenizer)

    @property
    def by_bytes(self) -> bool:
        """True if ids map to fixed bytes."""
        return self._table is not None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole list of ids."""
        if self._table is None:
            return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return b"".join(self.pieces(ids, skip_special_tokens)).decode("utf-8", "replace")

    def pieces(self, ids: Sequence[int], skip_special_tokens: bool) -> list[bytes]:
        """Bytes of each id; only for a byte-level tokenizer. An id past the vocabulary is empty."""
        table = self._table or []
        size, special = len(table), self.special_ids if skip_special_tokens else ()
        return [table[i] if i < size and i not in special else b"" for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token on its own, special tokens included."""
        if self._table is not None:
            return self.pieces([token_id], False)[0]
        return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; bytes that are no character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def source(self, skip_special_tokens: bool, context: Sequence[int] = ()) -> TokenSource:
        """What turns ids, as they come, into new complete characters; ``context`` are the ids
        before them."""
        if self._table is not None:
            return _Bytes(self, skip_special_tokens)
        near = list(context[-_CONTEXT:])
        return _Window(self.tokenizer, skip_special_tokens, near, self._byte_of)

    def stream(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> TextStream:
        """The growing text of one completion."""
        return TextStream(self.source(params.skip_special_tokens, prompt_token_ids), params)


def _byte_table(tokenizer: Any) -> list[bytes] | None:
    """Bytes of every id of a byte-level tokenizer, or None if it is not one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if backend is None or type(decoder).__name__ != "ByteLevel":
        return None
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    added = set(backend.get_added_tokens_decoder())
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        table[index] = token.encode() if index in added else _token_bytes(token)
    ids = backend.encode(_PROBE, add_special_tokens=False).ids
    same = b"".join(table[i] for i in ids).decode("utf-8", "replace") == backend.decode(ids)
    return table if same else None


def _token_bytes(token: str) -> bytes:
    """The bytes that a token's characters stand for; its UTF-8 if one stands for none."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _fallback_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Byte of each byte-fallback token (``<0x41>``), empty if the tokenizer does not fall back."""
    vocab = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    names = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    byte_of = {vocab[name]: byte for name, byte in names.items() if name in vocab}
    falls_back = len(byte_of) == 256 and tokenizer.decode([vocab["<0x41>"]]) == "A"
    return byte_of if falls_back else {}


class TokenSource(Protocol):
    """Characters of token ids that come piece by piece."""

    def push(self, ids: Sequence[int]) -> str:
        """Characters that these ids complete."""
        ...

    def flush(self) -> str:
        """What is left, complete or not."""
        ...


class _Bytes:
    """Incremental UTF-8 over the bytes of each token."""

    __slots__ = ("_decode", "_detokenizer", "_skip")

    def __init__(self, detokenizer: Detokenizer, skip: bool) -> None:
        self._detokenizer, self._skip = detokenizer, skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Sequence[int]) -> str:
        return self._decode(b"".join(self._detokenizer.pieces(ids, self._skip)))

    def flush(self) -> str:
        return self._decode(b"", True)


class _Window:
    """Decodes from the last complete character on, with the tokens before it as context.

    Byte-fallback tokens are joined here, not by the tokenizer, which would spoil the complete
    characters before an incomplete one.
    """

    __slots__ = ("_byte_of", "_bytes", "_ids", "_read", "_shown", "_skip", "_tokenizer")

    def __init__(
        self, tokenizer: Any, skip: bool, context: list[int], byte_of: dict[int, bytes]
    ) -> None:
        self._tokenizer, self._skip, self._byte_of = tokenizer, skip, byte_of
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._ids = [i for i in context if i not in byte_of]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def _push_one(self, token_id: int) -> str:
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return self._bytes(byte)
        pending = self._bytes(b"", True)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        half = text.endswith(_HALF) and not text.endswith(_NOT_A_CHARACTER)
        if half or len(text) <= len(self._shown):
            return pending
        return pending + self._advance(text)

    def flush(self) -> str:
        return self._bytes(b"", True) + self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new


class TextStream:
    """The text of one completion: grows with ``push``, ends with ``finish``.

    ``text`` is what may be shown: complete characters only, and nothing that may still turn out to
    be the beginning of a stop string. Text once shown never changes.
    """

    __slots__ = ("_all", "_keep_stop", "_min_tokens", "_num_tokens", "_source", "_stops", "text")

    def __init__(self, source: TokenSource, params: SamplingParams) -> None:
        self._source = source
        self._stops = params.stop_strings
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._all = ""
        self.text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far; those behind a stop string are not."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Take new tokens; returns the stop string that ends the text, if one does.

        Where several match, the one that begins first in the text wins. A match may cross token
        borders. Below ``min_tokens`` nothing matches. Once it matched, ``text`` is final.
        """
        if not self._stops:
            self._grow(token_ids)
            self.text = self._all
            return None
        for token in token_ids:
            old = len(self._all)
            self._grow((token,))
            matched = self._find_stop(old) if self._num_tokens > self._min_tokens else None
            if matched is not None:
                return matched
        self.text = self._all[: len(self._all) - self._held()]
        return None

    def finish(self) -> str:
        """The whole text, held-back parts included, once the completion ends by other means."""
        self._all += self._source.flush()
        self.text = self._all
        return self.text

    def _grow(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        self._all += self._source.push(token_ids)

    def _find_stop(self, old: int) -> str | None:
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = self._all.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = at, stop
        if best is None:
            return None
        at, stop = best
        self._all = self.text = self._all[: at + len(stop) if self._keep_stop else at]
        return stop

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._all)), longest, -1):
                if self._all.endswith(stop[:size]):
                    longest = size
                    break
        return longest

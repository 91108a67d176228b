"""Where in its text each token begins, as ``text_offset`` says it.

A token's own text cannot be counted: a character may be spread over several tokens, a special token
may not be shown, and a stream may hold text back that its tokens' scores are already told of.
"""

from __future__ import annotations

from collections.abc import Sequence

from blocktable.engine.detokenize import Detokenizer

_HALF = "�"


class Offsets:
    """Offsets of one text's tokens, in the order of the tokens.

    Args:
        detokenizer: None where there is no tokenizer, and no text.
        skip_special: special tokens are not part of the text.
        context: token ids before the first one.
        start: characters before the first token.
    """

    def __init__(
        self, detokenizer: Detokenizer | None, *, skip_special: bool = False,
        context: Sequence[int] = (), start: int = 0,
    ) -> None:  # fmt: skip
        self._detokenizer, self.end = detokenizer, start
        self._source = detokenizer and detokenizer.source(skip_special, context)

    def take(self, token_id: int) -> int:
        """Offset of the character that the next token begins with, or goes on with."""
        at = self.end
        if self._source is None or self._detokenizer is None:
            return at
        new = self._source.push((token_id,))
        self.end += len(new)
        # what an earlier token began became no character, and is shown as one in front of this
        broken = new.startswith(_HALF) and not self._detokenizer.token_text(token_id).startswith(
            _HALF
        )
        return at + broken

"""Draft tokens for draft-and-verify decoding: the hook, and n-gram prompt lookup.

A proposer guesses how rows go on; the engine checks the guesses in one forward pass and the
scheduler takes back what was wrong. Greedy output is the same with any proposer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from blocktable.core.types import Counts, RowIds, TokenIds


class Drafts(NamedTuple):
    """``counts[i]`` draft tokens for row i, all concatenated in ``token_ids``."""

    counts: Counts
    token_ids: TokenIds


class DraftProposer(Protocol):
    """Anything that guesses the next tokens of rows."""

    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        """At most ``max_drafts[i]`` drafts for each of ``rows``.

        tokens: [max_num_rows, max_model_len] all tokens, indexed by row; read only.
        num_tokens: [len(rows)] how many of them are real.
        """
        ...

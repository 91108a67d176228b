"""Draft tokens for draft-and-verify decoding: the hook, and n-gram prompt lookup.

A proposer guesses how rows go on; the engine checks the guesses in one forward pass and the
scheduler takes back what was wrong. Greedy output is the same with any proposer.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
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


class NgramProposer:
    """Prompt lookup: what followed the last time the row's last tokens occurred in it.

    The longest of the last ``max_n`` .. ``min_n`` tokens that occurred before decides; of several
    places the latest. Cost: (max_n - min_n + 1) * max_n comparisons of each row's tokens, as
    whole-array operations. Idea: prompt lookup decoding (Saxena 2023).
    """

    def __init__(self, max_n: int = 4, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"n-gram lengths must be 1 <= min <= max, got {min_n} and {max_n}")
        self.max_n, self.min_n = max_n, min_n

    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        """See :class:`DraftProposer`."""
        start = np.zeros(len(rows), np.int64)  # where the continuation begins; 0 = none found
        todo = np.flatnonzero((max_drafts > 0) & (num_tokens > self.min_n))
        for n in range(self.max_n, self.min_n - 1, -1):
            todo = todo[start[todo] == 0]
            long = todo[num_tokens[todo] > n]
            if len(long):
                start[long] = _last_occurrence(tokens, rows[long], num_tokens[long], n)
        counts = np.minimum(max_drafts, num_tokens - start).astype(np.int32)
        counts[start == 0] = 0
        where = np.repeat(np.arange(len(rows)), counts)
        offset = np.arange(len(where)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Drafts(counts, tokens[rows[where], start[where] + offset])


def _last_occurrence(
    tokens: TokenIds, rows: RowIds, num_tokens: Counts, n: int
) -> NDArray[np.int64]:
    """[rows] position after the last earlier occurrence of each row's last n tokens, else 0."""
    width = int(num_tokens.max())
    text = tokens[rows, :width]
    last = text[np.arange(len(rows))[:, None], num_tokens[:, None] - n + np.arange(n)]
    # match[i, p]: the n tokens that end before p are the last n; p stays below num_tokens.
    match = np.ones((len(rows), width - n + 1), np.bool_)
    for i in range(n):
        match &= text[:, i : width - n + 1 + i] == last[:, i : i + 1]
    match &= np.arange(n, width + 1) < num_tokens[:, None]
    from_end = match[:, ::-1].argmax(axis=1)
    return np.where(match.any(axis=1), width - from_end, 0)

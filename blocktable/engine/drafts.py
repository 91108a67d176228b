"""Draft and verify: guessed tokens are checked in the step that computes them.

::

    known tokens   ... a b | x y z      three drafts behind the last known token b
    logits of            b   x y z      each gives the token that follows it
    drawn                x   y q r      x, y equal their drafts: accepted; q is drawn after them
    the row gains        x   y q        r followed a draft that was wrong

The token at a position is drawn as it would be without drafts: the largest logit, or a draw that
depends on the seed and the position alone. A draft is accepted while it equals that token, so the
output is the same, whoever proposes. Rejected drafts were written to slots beyond the known tokens;
the scheduler gives their blocks back, and no key is ever given for them.

Penalties and guides (JSON schemas, grammars) change with every token drawn, so requests with them
get no drafts.
Source: greedy case of Leviathan et al., "Fast inference from transformers via speculative decoding"
(ICML 2023); with counter-based draws the sampled case needs no rejection sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.sched.draft import DraftProposer, Drafts, NgramProposer
from blocktable.sched.output import SchedulerOutput

if TYPE_CHECKING:
    from blocktable.engine.options import EngineOptions
    from blocktable.engine.params import SamplingParams


class DrawLines(NamedTuple):
    """Lines of a step's logits: one for each sampled row and one more for each of its drafts."""

    owner: NDArray[np.int64]  # [lines] place in output.sample_rows
    offset: NDArray[np.int64]  # [lines] drafts of the row before this line
    drafts: Counts  # [m] drafts of each sampled row


class Verdict(NamedTuple):
    """What a step with drafts is worth: ``counts`` [m] tokens gained by each sampled row, all in
    ``token_ids``; ``first_line`` [m] is where its lines of the logits begin."""

    token_ids: NDArray[np.int64]
    counts: Counts
    first_line: NDArray[np.int64]


def draw_lines(output: SchedulerOutput, num_drafts: Counts) -> DrawLines:
    """The lines of a step with ``num_drafts`` [n] drafts by batch entry. O(lines)."""
    drafts = num_drafts[output.sample_index]
    lines = drafts.astype(np.int64) + 1
    owner = np.repeat(np.arange(len(lines)), lines)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(lines) - lines, lines)
    return DrawLines(owner, offset, drafts)


def draws(output: SchedulerOutput) -> tuple[RowIds, NDArray[np.int64]]:
    """(row, position of the token to draw) of each line of a step's logits."""
    positions = output.seq_lens[output.sample_index].astype(np.int64)
    if output.num_drafts is None:
        return output.sample_rows, positions
    lines = draw_lines(output, output.num_drafts)
    first = positions - lines.drafts
    return output.sample_rows[lines.owner], first[lines.owner] + lines.offset


def verify(output: SchedulerOutput, drawn: NDArray[np.int64], tokens: TokenIds) -> Verdict:
    """Accept the drafts that equal what was drawn at their positions, up to the first that does
    not, and the token drawn after them.

    drawn: [lines] in the order of `draws`; tokens: ``manager.tokens`` [rows, max_model_len], the
    drafts behind each row's known tokens. A fixed number of array calls.
    """
    num_drafts = output.num_drafts
    if num_drafts is None:
        ones = np.ones(len(drawn), np.int32)
        return Verdict(drawn, ones, np.arange(len(drawn), dtype=np.int64))
    lines = draw_lines(output, num_drafts)
    rows, positions = draws(output)
    counts = lines.drafts.astype(np.int64)  # until the first wrong draft
    checked = np.flatnonzero(lines.offset < lines.drafts[lines.owner])
    wrong = checked[drawn[checked] != tokens[rows[checked], positions[checked]]]
    np.minimum.at(counts, lines.owner[wrong], lines.offset[wrong])
    counts += 1
    keep = lines.offset < counts[lines.owner]
    return Verdict(drawn[keep], counts.astype(np.int32), np.flatnonzero(lines.offset == 0))


def may_draft(params: SamplingParams) -> bool:
    """Whether a request's next distributions depend on nothing but the tokens before them."""
    penalised = (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
    return not penalised and params.guide is None


def make_proposer(options: EngineOptions, vocab_size: int) -> DraftProposer | None:
    """The proposer of an engine; None where it drafts nothing. Raises ConfigError."""
    if not options.num_draft_tokens:
        return None
    if options.proposer is None:
        return NgramProposer(options.draft_ngram_max, options.draft_ngram_min)
    return CheckedProposer(options.proposer, vocab_size)


class CheckedProposer:
    """A caller's proposer, whose answers must have the right shape and know the vocabulary."""

    def __init__(self, inner: DraftProposer, vocab_size: int) -> None:
        self.inner, self.vocab_size = inner, vocab_size

    def propose(
        self, rows: RowIds, tokens: TokenIds, num_tokens: Counts, max_drafts: Counts
    ) -> Drafts:
        """See :class:`DraftProposer`. Raises ConfigError for an answer that cannot be used."""
        counts, ids = self.inner.propose(rows, tokens, num_tokens, max_drafts)
        counts, ids = np.asarray(counts, np.int32), np.asarray(ids, np.int32)
        if counts.shape != rows.shape or (counts < 0).any() or ids.shape != (int(counts.sum()),):
            raise ConfigError(
                f"the proposer gave {ids.shape} draft tokens as {counts.tolist()} "
                f"for {len(rows)} rows"
            )
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise ConfigError(
                f"the proposer gave token id {wrong[0]}, the vocabulary has {self.vocab_size}"
            )
        return Drafts(counts, ids)

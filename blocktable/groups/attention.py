"""Groups of attention layers: full, latent, sliding window, chunked local."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
    ceil_div,
)
from blocktable.core.types import NULL_BLOCK, BlockIds
from blocktable.groups.base import Group, Ints, SkipRule


class FullAttentionGroup(Group):
    """Every earlier position is attended: all blocks are kept. Also latent attention (MLA), and
    attention behind static sinks, which lie in blocks of their own."""


class SlidingWindowGroup(Group):
    """Only the last ``sliding_window`` positions (the query's own included) are attended.

    With w computed tokens, the next one attends to w - W + 1 .. w, so max(0, w - W + 1) tokens are
    skipped. Whole skipped blocks are released at the next allocation and become null in place.
    """

    prefix_closed: ClassVar[bool] = False
    skips: ClassVar[bool] = True

    @property
    def window(self) -> int:
        """Positions attended, the query's own included."""
        if not isinstance(self.spec, SlidingWindowSpec):
            raise TypeError(f"{type(self.spec).__name__} has no window")
        return self.spec.sliding_window

    def skipped_for(self, computed: Ints) -> Ints:
        return np.maximum(computed - (self.window - 1), 0) // self.block_size

    def skip_due(self, skipped: Ints) -> Ints:
        return (skipped + 1) * self.block_size + self.window - 1

    def skip_rule(self) -> SkipRule:
        return SkipRule(self.window - 1, 0)

    def admission_cap(self, tokens: int) -> int:
        step = min(self.window - 1 + self.max_step_tokens, self.max_model_len)
        return min(ceil_div(tokens, self.block_size), ceil_div(step, self.block_size) + 1)

    def trim_hit(self, found: BlockIds) -> BlockIds:
        """The right-most run of blocks that covers the W - 1 tokens before its end; a shorter run
        counts where it begins with block 0."""
        needed = ceil_div(self.window - 1, self.block_size)
        at = np.arange(len(found))
        last_miss = np.maximum.accumulate(np.where(found == NULL_BLOCK, at, -1))
        run = at - last_miss  # cached blocks in a row that end here
        good = (run >= max(needed, 1)) | (last_miss == -1)  # W = 1: at least one
        misses = np.flatnonzero(found[: self.kept_head] == NULL_BLOCK)
        if misses.size:  # nothing beyond a head that is not all there
            good[misses[0] :] = False
        if not good.any():
            return found[:0]
        stop = int(np.flatnonzero(good)[-1]) + 1
        entries = found[:stop].copy()
        entries[self.kept_head : max(self.kept_head, stop - needed)] = NULL_BLOCK
        return entries


class SinkWindowGroup(SlidingWindowGroup):
    """A window, and the sequence's first tokens beside it: their blocks are kept to the end.

    ::

        block size 4, 5 sink tokens, window 8, 40 tokens computed: 33..40 will be attended

        row   [ 3  7  .  .  .  .  .  .  21 9 ]      . = null, released
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if not isinstance(self.spec, SinkWindowSpec):
            raise TypeError(f"{type(self.spec).__name__} has no sink tokens")
        self.kept_head = ceil_div(self.spec.num_sink_tokens, self.block_size)

    def admission_cap(self, tokens: int) -> int:
        whole = ceil_div(tokens, self.block_size)
        return min(whole, super().admission_cap(tokens) + self.kept_head)


class ChunkedLocalGroup(Group):
    """Only positions of the query's own chunk are attended (Llama 4)."""

    prefix_closed: ClassVar[bool] = False
    skips: ClassVar[bool] = True

    @property
    def chunk(self) -> int:
        """Positions in a chunk."""
        if not isinstance(self.spec, ChunkedLocalAttentionSpec):
            raise TypeError(f"{type(self.spec).__name__} has no chunks")
        return self.spec.attention_chunk_size

    def skipped_for(self, computed: Ints) -> Ints:
        return computed // self.chunk * self.chunk // self.block_size

    def skip_due(self, skipped: Ints) -> Ints:
        return -((skipped + 1) * -self.block_size // self.chunk) * self.chunk

    def skip_rule(self) -> SkipRule:
        return SkipRule(0, self.chunk)

    def admission_cap(self, tokens: int) -> int:
        step = min(self.chunk + self.max_step_tokens, self.max_model_len)
        straddles = int(self.chunk % self.block_size != 0)  # a chunk may begin inside a block
        most = ceil_div(step, self.block_size) + straddles
        return min(ceil_div(tokens, self.block_size), most)

    def trim_hit(self, found: BlockIds) -> BlockIds:
        """The longest prefix whose blocks in the chunk of the next token are all cached."""
        ends = np.arange(1, len(found) + 1)
        first = self.skipped_for(ends * self.block_size)
        last_miss = np.maximum.accumulate(np.where(found == NULL_BLOCK, ends - 1, -1))
        good = np.flatnonzero(last_miss < first)
        if good.size == 0:
            return found[:0]
        stop = int(good[-1]) + 1
        entries = found[:stop].copy()
        entries[: int(first[stop - 1])] = NULL_BLOCK
        return entries

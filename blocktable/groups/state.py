"""Groups whose cache is no growing list of positions: recurrent states, encoder outputs, none."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from blocktable.core.specs import CrossAttentionSpec, MambaSpec
from blocktable.core.types import NULL_BLOCK, BlockIds
from blocktable.groups.base import NEVER, Group, Ints, SkipRule


class OneStateGroup(Group):
    """A recurrent state without caching (mode ``none``): one block from first token to last."""

    cacheable: ClassVar[bool] = False

    def row_width(self) -> int:
        return 1

    def entries_for(self, tokens: Ints) -> Ints:
        return np.minimum(tokens, 1)

    def capacity_of(self, entries: Ints) -> Ints:
        return np.where(entries > 0, NEVER, 0)

    def tail_column(self, computed: Ints) -> Ints:
        return np.where(computed > 0, 0, -1)


class StateGroup(Group):
    """A recurrent state kept at block boundaries (modes ``all`` and ``align``).

    Block i holds the state after (i + 1) * block_size tokens, or the running one. Only the state
    of the last computed token is needed, so everything before it is skipped, and a hit needs only
    the right-most cached state. A state is right once its step is over: keys come a step later.
    In mode ``align`` the scheduler ends each prefill chunk on a block boundary; states in between
    are never materialised, and their entries stay null.
    """

    prefix_closed: ClassVar[bool] = False
    skips: ClassVar[bool] = True
    deferred_keys: ClassVar[bool] = True

    def skipped_for(self, computed: Ints) -> Ints:
        return np.maximum(computed - 1, 0) // self.block_size

    def skip_due(self, skipped: Ints) -> Ints:
        return (skipped + 1) * self.block_size + 1

    def skip_rule(self) -> SkipRule:
        return SkipRule(1, 0)

    def admission_cap(self, tokens: int) -> int:
        every = super().admission_cap(tokens)
        return min(every, 2) if self.aligned else every

    def blocks_among(self, entries: Ints) -> Ints:
        return np.minimum(entries, 1) if self.aligned else entries

    def states_due(self, rows: Ints, computed: Ints) -> NDArray[np.bool_]:
        due = super().states_due(rows, computed)
        if self.aligned:  # only a step that ended on a boundary left that boundary's state
            due &= computed % self.block_size == 0
            ended = rows[due]
            self.keyed[ended] = computed[due] // self.block_size - 1
        return due

    @property
    def aligned(self) -> bool:
        """Whether only states on a chunk's end are materialised."""
        return isinstance(self.spec, MambaSpec) and self.spec.cache_mode == "align"

    def trim_hit(self, found: BlockIds) -> BlockIds:
        cached = np.flatnonzero(found)
        if cached.size == 0:
            return found[:0]
        entries = found[: cached[-1] + 1].copy()
        entries[:-1] = NULL_BLOCK
        return entries


class CrossAttentionGroup(Group):
    """K and V of the encoder's output: a fixed number of blocks, taken at admission."""

    cacheable: ClassVar[bool] = False

    def _entries(self) -> int:
        if not isinstance(self.spec, CrossAttentionSpec):
            raise TypeError(f"{type(self.spec).__name__} has no encoder length")
        return -(-self.spec.max_encoder_len // self.block_size)

    def row_width(self) -> int:
        return self._entries()

    def entries_for(self, tokens: Ints) -> Ints:
        return np.minimum(tokens, 1) * self._entries()

    def capacity_of(self, entries: Ints) -> Ints:
        return np.where(entries > 0, NEVER, 0)

    def tail_column(self, computed: Ints) -> Ints:
        return np.full_like(computed, -1)  # written once, then only read


class EncoderOnlyGroup(Group):
    """Bidirectional attention over the step's own tokens: no blocks, no say in hits."""

    def row_width(self) -> int:
        return 0

    def tail_column(self, computed: Ints) -> Ints:
        return np.full_like(computed, -1)

    def entries_for(self, tokens: Ints) -> Ints:
        return np.zeros_like(tokens)

    def capacity_of(self, entries: Ints) -> Ints:
        return np.full_like(entries, NEVER)

"""What one kind of attention keeps, skips and counts as a hit.

A `Group` owns the block table of its layers and four numbers a row, so that the question of a
decode step ("does this row need a block, does it complete one?") is a comparison of arrays:

- ``capacity``: tokens that fit into the row's blocks;
- ``keyed``: leading blocks that carry their key, or never will;
- ``key_due``: tokens at which the next key is due, (keyed + 1) * block_size;
- ``skipped``: leading blocks given up because no later token attends to them (null in place),
  except for the first ``kept_head``.

A fifth, ``due``, is common to all groups: up to that many tokens less one a row needs nothing at
all. It may be too low, never too high; whoever lowers one of the others sets it to 0.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blocktable.core.specs import KVCacheSpec, ceil_div
from blocktable.core.table import HostTable
from blocktable.core.types import BlockIds

NEVER = np.iinfo(np.int32).max
Ints: TypeAlias = Any
"""NumPy integers of any width, arrays (or scalars): NumPy's own types cannot say it."""


class SkipRule(NamedTuple):
    """`Group.skipped_for` in two numbers, for the compiled helper: chunks of ``chunk`` tokens, or
    (chunk 0) blocks that end before the last ``back`` computed tokens; back -1: none at all."""

    back: int
    chunk: int


class Group:
    """Base of all kinds: every block is kept, a hit is a run of leading cached blocks.

    ``block_size`` counts positions of the sequence in one block, on all context-parallel ranks.
    """

    cacheable: ClassVar[bool] = True  # False: a model with such a group has no prefix hits
    prefix_closed: ClassVar[bool] = True  # a hit of n blocks contains the hit of any m < n
    skips: ClassVar[bool] = False  # gives blocks up while the request runs
    deferred_keys: ClassVar[bool] = False  # a key is due once the step that computes it is over
    kept_head = 0  # leading blocks that are never given up

    def __init__(
        self, group_id: int, spec: KVCacheSpec, max_rows: int, max_model_len: int,
        max_step_tokens: int, caching: bool, cp_world: int = 1,
    ) -> None:  # fmt: skip
        self.group_id, self.spec = group_id, spec
        self.block_size = spec.block_size * cp_world
        self.max_model_len, self.max_step_tokens = max_model_len, max_step_tokens
        self.caching = caching and self.cacheable and self.row_width() > 0
        self.table = HostTable(max_rows, max(1, self.row_width()))
        self.capacity = self.capacity_of(np.zeros(max_rows, np.int32)).astype(np.int32)
        self.keyed = np.zeros(max_rows, np.int32)
        self.key_due = np.full(max_rows, self.block_size if self.caching else NEVER, np.int32)
        self.skipped = np.zeros(max_rows, np.int32)
        self.keys_stopped = np.zeros(max_rows, np.bool_)  # weights changed under the row
        self.due = np.zeros(max_rows, np.int32)
        self.static_blocks = np.zeros(0, np.int32)  # of the pool, behind no row (attention sinks)

    # -- what a kind defines --------------------------------------------------------------------

    def row_width(self) -> int:
        """Most entries a row can have."""
        return ceil_div(self.max_model_len, self.block_size)

    def entries_for(self, tokens: Ints) -> Ints:
        """Row entries needed for this many tokens (computed, scheduled and looked ahead)."""
        return -(-tokens // self.block_size)

    def capacity_of(self, entries: Ints) -> Ints:
        """Tokens that fit into a row of this many entries."""
        return entries * self.block_size

    def skipped_for(self, computed: Ints) -> Ints:
        """Leading blocks no token after the first ``computed`` ones attends to."""
        return np.zeros_like(computed)

    def skip_due(self, skipped: Ints) -> Ints:
        """Computed tokens from which on more than ``skipped`` blocks are given up."""
        return np.full_like(skipped, NEVER)

    def skip_rule(self) -> SkipRule:
        """What `skipped_for` computes."""
        return SkipRule(-1, 0)

    def due_at(self, rows: Ints) -> Ints:
        """Tokens at which the rows need a block, complete a key or give a block up."""
        due = np.minimum(self.capacity[rows], NEVER - 1) + 1
        if self.caching:
            due = np.minimum(due, self.key_due[rows])
        if self.skips:
            skipped = np.maximum(self.skipped[rows], self.kept_head)
            due = np.minimum(due, self.skip_due(skipped))
        return due

    def skipped_in(self, entries: BlockIds) -> int:
        """``skipped`` of a row that has these entries, from a hit or from host memory."""
        kept = np.flatnonzero(entries[self.kept_head :])
        return self.kept_head + int(kept[0]) if kept.size else len(entries)

    def tail_column(self, computed: Ints) -> Ints:
        """Column of the block that the next token writes into after others did; -1 = none."""
        return np.where(computed % self.block_size, computed // self.block_size, -1)

    def blocks_among(self, entries: Ints) -> Ints:
        """How many of this many new row entries are real blocks (the last ones)."""
        return entries

    def states_due(self, rows: Ints, computed: Ints) -> NDArray[np.bool_]:
        """Rows whose computed tokens complete blocks without a key (for deferred keys)."""
        return computed >= self.key_due[rows]

    def admission_cap(self, tokens: int) -> int:
        """Most blocks a request of ``tokens`` tokens holds at a time."""
        return int(self.entries_for(np.int64(tokens)))

    def trim_hit(self, found: BlockIds) -> BlockIds:
        """Row entries of the longest hit within ``found``, the cached block of each leading
        block of the prompt (0 = not cached)."""
        misses = np.flatnonzero(found == 0)
        return found[: misses[0]] if misses.size else found

    # -- bookkeeping ----------------------------------------------------------------------------

    def sync(self, rows: Ints) -> None:
        """Recompute capacity and key_due of rows whose counts or keys changed."""
        self.due[rows] = 0
        self.capacity[rows] = np.minimum(self.capacity_of(self.table.counts[rows]), NEVER)
        if self.caching:
            due = (self.keyed[rows] + 1) * self.block_size
            self.key_due[rows] = np.where(self.keys_stopped[rows], NEVER, due)

    def clear(self, rows: Ints) -> None:
        """Forget the rows; their blocks were released."""
        self.table.clear(rows)
        self.keyed[rows] = 0
        self.skipped[rows] = 0
        self.keys_stopped[rows] = False
        self.sync(rows)

    def row_arrays(self) -> tuple[NDArray[Any], ...]:
        """Arrays that move with a row, besides the table."""
        return self.capacity, self.keyed, self.key_due, self.skipped, self.keys_stopped

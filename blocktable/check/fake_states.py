"""Recurrent states on the fake device: the fingerprint of the last token each of them has seen.

Two kinds, as engines keep them. *By rows*: one state a row, which follows nothing but the outputs
(``admitted``, ``forked``, ``released``). *In blocks*: a `MambaSpec` group keeps the state after
each block's last token, and the running one, in the blocks of its table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlocktableError
from blocktable.core.specs import MambaSpec
from blocktable.sched.output import SchedulerOutput

Prints = NDArray[np.uint64]


class Corruption(BlocktableError):
    """A slot does not hold what the row that reads it needs; names row, group and position."""


class RowStates:
    """States by row. A row that comes in with a prefix hit or from host memory has its state set:
    an engine with such states has neither."""

    def __init__(self) -> None:
        self._states: dict[int, np.uint64 | None] = {}
        self.checked = 0

    def begin(self, output: SchedulerOutput) -> None:
        """Rows come and go, before the step."""
        copies = [(f.row, self._states.get(f.parent_row)) for f in self._forks(output, False)]
        for row in output.released.tolist():
            self._states.pop(row, None)
        self._states.update(copies)
        for entry in output.admitted:
            self._states[entry.row] = None

    def advance(self, row: int, start: int, prints: Prints) -> None:
        """``row`` computes ``prints[start:]``."""
        held = self._states.get(row)
        if start and held is not None:
            self.checked += 1
            if held != prints[start - 1]:
                raise Corruption(f"row {row}: its state is not that after {start} tokens")
        elif start and row not in self._states:
            raise Corruption(f"row {row}: it has no state, and {start} tokens computed")
        self._states[row] = prints[-1]

    def lose(self, row: int) -> None:
        """Nothing is known of the row's state any more."""
        self._states[row] = None

    def end(self, output: SchedulerOutput) -> None:
        """Children that drew their first token from their parent's logits go on from its state."""
        for fork in self._forks(output, True):
            self._states[fork.row] = self._states[fork.parent_row]

    def _forks(self, output: SchedulerOutput, drawn: bool) -> list:
        if not output.forked:
            return []
        only_drawn = set(output.sample_rows.tolist()) - set(output.rows.tolist())
        return [fork for fork in output.forked if (fork.row in only_drawn) == drawn]


def advance_blocks(
    memory: Prints, entries: NDArray[np.int32], spec: MambaSpec, start: int, prints: Prints,
    name: tuple[int, int],
) -> int:  # fmt: skip
    """A row of a state group computes ``prints[start:]``: its state so far must be in the block it
    is in; those after block ends (mode ``all``) and the last one are written to slot 0 of theirs.
    ``name``: row and group. Returns how many states were checked."""
    size, stop = spec.block_size, len(prints)
    columns = np.zeros(1, np.int64) if spec.cache_mode == "none" else np.arange(stop) // size
    if start:
        block = int(entries[0 if spec.cache_mode == "none" else (start - 1) // size])
        if block == 0 or memory[block, 0] != prints[start - 1]:
            raise Corruption(
                f"row {name[0]}, group {name[1]}: block {block} does not hold the state after "
                f"{start} tokens"
            )
    if spec.cache_mode == "all":
        ends = np.append(np.arange(start // size + 1, stop // size + 1) * size, stop)
        ends = np.unique(ends)
    else:
        ends = np.array([stop])
    for end in ends.tolist():
        block = int(entries[0 if len(columns) == 1 else columns[end - 1]])
        if block == 0:
            raise Corruption(
                f"row {name[0]}, group {name[1]}: the state after {end} tokens has no block"
            )
        memory[block, 0] = prints[end - 1]
    return int(start > 0)

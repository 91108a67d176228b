"""A drawn block map: who owns which block, what is shared, cached and free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

NULL, FREE, CACHED, FENCED, SHARED, OWNED = range(6)
_SIGNS = {NULL: "x", FREE: "·", CACHED: "▒", FENCED: "~", SHARED: "█"}
_STYLES = {
    NULL: "grey35", FREE: "grey35", CACHED: "grey58", FENCED: "dark_orange", SHARED: "bold white",
}  # fmt: skip
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_COLOURS = (
    "bright_red", "bright_green", "bright_yellow", "bright_blue", "bright_magenta", "bright_cyan",
    "orange1", "spring_green2", "deep_sky_blue1", "medium_purple1", "hot_pink", "gold1",
)  # fmt: skip


class PoolPicture(NamedTuple):
    """The pool at one moment.

    ``kind`` [num_blocks] is one of the constants above; ``owner`` [num_blocks] numbers the
    request that holds a block (-1 for none or several).
    """

    kind: NDArray[np.uint8]
    owner: NDArray[np.int32]

    def count(self, kind: int) -> int:
        """Blocks of one kind."""
        return int((self.kind == kind).sum())


def picture(manager: object, row_owner: NDArray[np.int32]) -> PoolPicture:
    """Read the pool and the tables; ``row_owner`` [max_num_rows] numbers each row's request.

    O(num_blocks + table entries in use), no effect on the manager.
    """
    from blocktable.core import pool as states

    pool = manager.pool  # type: ignore[attr-defined]
    table_of_state = np.zeros(4, np.uint8)
    table_of_state[states.FREE], table_of_state[states.OWNED] = FREE, OWNED
    table_of_state[states.FENCED], table_of_state[states.EVICTABLE] = FENCED, CACHED
    kind = table_of_state[pool.state]
    kind[(kind == OWNED) & (pool.ref > 1)] = SHARED
    kind[0] = NULL
    owner = np.full(pool.num_blocks, -1, np.int32)
    for table in manager.tables:  # type: ignore[attr-defined]
        used = np.flatnonzero(table.counts)
        for row in used.tolist():
            owner[table.rows[row, : table.counts[row]]] = row_owner[row]
    owner[kind != OWNED] = -1
    return PoolPicture(kind, owner)


def draw_map(pool: PoolPicture, width: int, max_lines: int = 16) -> Text:
    """The map as text, ``width`` blocks a line, up to the last block that is not free.

    Where that takes more than ``max_lines`` lines only every k-th block is shown, and said so.
    """
    used = np.flatnonzero(pool.kind != FREE)
    lines = int(used[-1]) // width + 1 if len(used) else 1
    end = min(lines * width, len(pool.kind))
    step = -(-lines // max_lines)
    text = Text()
    for i, block in enumerate(range(0, end, step)):
        if i and i % width == 0:
            text.append("\n")
        text.append(*_cell(int(pool.kind[block]), int(pool.owner[block])))
    notes = [f"1 of {step} blocks shown"] if step > 1 else []
    if end < len(pool.kind):
        notes.append(f"{len(pool.kind) - end:,} more blocks, all free")
    if notes:
        text.append(f"\n... {', '.join(notes)}", style="dim")
    return text


def _cell(kind: int, owner: int) -> tuple[str, str]:
    if kind == OWNED and owner >= 0:
        return _LETTERS[owner % len(_LETTERS)], _COLOURS[owner % len(_COLOURS)]
    return _SIGNS.get(kind, "?"), _STYLES.get(kind, "white")


def letter(owner: int) -> tuple[str, str]:
    """Sign and colour of a request in the map."""
    return _cell(OWNED, owner)


def legend(pool: PoolPicture) -> Text:
    """One line that explains the signs, with the count of each."""
    text = Text()
    text.append("A-Z", style="bright_green")
    text.append(f" one request's own {pool.count(OWNED)}   ")
    for kind, name in ((SHARED, "shared"), (CACHED, "cached, free to take"), (FENCED, "fenced"),
                       (FREE, "free")):  # fmt: skip
        if kind == FENCED and not pool.count(kind):
            continue
        text.append(_SIGNS[kind], style=_STYLES[kind])
        text.append(f" {name} {pool.count(kind)}   ")
    text.append(_SIGNS[NULL], style=_STYLES[NULL])
    text.append(" null block")
    return text

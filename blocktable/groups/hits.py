"""One hit length for all groups of a model, found by fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np

from blocktable.core.types import BlockIds
from blocktable.groups.base import Group

_NONE = np.zeros(0, np.int32)


class CommonHit(NamedTuple):
    """``num_tokens`` are a hit in every group; ``entries`` has each group's row entries."""

    num_tokens: int
    entries: tuple[BlockIds, ...]


def common_hit(
    groups: Sequence[Group], find: Callable[[Group, int], BlockIds], max_tokens: int
) -> CommonHit:
    """The longest prefix of at most ``max_tokens`` tokens that is a hit in every group.

    ``find(group, num_blocks)`` gives the cached block of each of the first num_blocks blocks (0 =
    not cached; a group whose hits are prefix-closed may stop at its first miss). Each group
    shortens the candidate until none does; the length only falls, so it ends. Groups that keep
    every block come first: their run of leading hits bounds the others. Hits are multiples of the
    least common multiple of the block sizes.
    """
    voters = [g for g in groups if g.row_width() > 0]
    nothing = CommonHit(0, tuple(_NONE for _ in groups))
    if not voters or not all(g.cacheable for g in voters):
        return nothing
    unit = lcm(*(g.block_size for g in voters))
    length = max_tokens // unit * unit
    voters.sort(key=lambda g: not g.prefix_closed)
    found: dict[int, BlockIds] = {}
    entries: dict[int, BlockIds] = {}
    agreed = 0
    while length and agreed < len(voters):
        for group in voters:
            blocks = length // group.block_size
            if group.group_id not in found:
                found[group.group_id] = find(group, blocks)
            hit = _aligned(group, found[group.group_id][:blocks], unit)
            entries[group.group_id] = hit
            shorter = len(hit) * group.block_size
            agreed = agreed + 1 if shorter == length else 1
            length = shorter
            if agreed >= len(voters) or not length:
                break
    if not length:
        return nothing
    cut = [entries.get(g.group_id, _NONE)[: length // g.block_size] for g in groups]
    return CommonHit(length, tuple(cut))


def _aligned(group: Group, found: BlockIds, unit: int) -> BlockIds:
    """The group's longest hit whose length is a multiple of ``unit`` tokens."""
    hit = group.trim_hit(found)
    step = unit // group.block_size
    while len(hit) % step:
        hit = group.trim_hit(found[: len(hit) // step * step])
    return hit

"""How layers of several kinds share one block pool and its memory.

Layers that keep the same blocks (equal specs) form groups of equal size, and layer j of every group
lies in the same memory, because a block belongs to one group at a time::

                 memory 0        memory 1
    group 0      layer 0         layer 2         full attention
    group 1      layer 1         layer 3         sliding window
    group 2      layer 4         -               sliding window

    block 7 is group 1's: layers 1 and 3 use page 7 of memory 0 and 1; layers 0 and 2 never do.

So one pool serves full and windowed layers without being cut up in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from blocktable.core.specs import AttentionSpec, KVCacheGroupSpec, ceil_div

_MOST_GROUPS_A_KIND = 8
_CLOSE = 1.25


class LayerPlace(NamedTuple):
    """Which group a layer is in and which memory of the pool it uses."""

    group: int
    memory: int


class Grouping(NamedTuple):
    """``places[i]`` belongs to the i-th layer. A block costs ``num_memories * page_bytes``."""

    groups: tuple[KVCacheGroupSpec, ...]
    places: tuple[LayerPlace, ...]
    num_memories: int
    page_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """What one more block of the pool costs over all memories."""
        return self.num_memories * self.page_bytes


def group_layers(names: Sequence[str], specs: Sequence[AttentionSpec]) -> Grouping:
    """Group attention layers by their specs.

    Group size: the smallest number of layers any kind has, or the largest where they are within a
    quarter of each other (padding is then cheaper than one more group), and never so small that a
    kind is cut into more than 8 groups. Without layers there are no groups.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(index)
    if not kinds:
        return Grouping((), (), 1, 1)
    page = max(spec.page_size_bytes for spec in kinds)
    size = _group_size([len(members) for members in kinds.values()])
    groups: list[KVCacheGroupSpec] = []
    places: dict[int, LayerPlace] = {}
    for spec, members in kinds.items():
        padded = spec if spec.page_size_bytes == page else replace(spec, page_size_padded=page)
        count = ceil_div(len(members), size)
        for first in range(count):
            chosen = members[first::count]  # each group spans the whole depth of the model
            for memory, index in enumerate(chosen):
                places[index] = LayerPlace(len(groups), memory)
            groups.append(KVCacheGroupSpec(tuple(names[i] for i in chosen), padded))
    return Grouping(tuple(groups), tuple(places[i] for i in range(len(specs))), size, page)


def _group_size(counts: Sequence[int]) -> int:
    size = max(counts) if max(counts) < _CLOSE * min(counts) else min(counts)
    return max(size, ceil_div(max(counts), _MOST_GROUPS_A_KIND))

"""How a model's attention layers share the block pool and its memory.

Layers that keep the same blocks (same window, same shapes) form groups of equal size, and layer j
of every group lies in the same memory, because a block belongs to one group at a time::

                 memory 0        memory 1
    group 0      layer 0         layer 2         full attention
    group 1      layer 1         layer 3         sliding window
    group 2      layer 4         -               sliding window

    block 7 is group 1's: layers 1 and 3 use page 7 of memory 0 and 1; layers 0 and 2 never do.

So one pool serves full and windowed layers without being cut up in advance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from blocktable.core.errors import ConfigError
from blocktable.core.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    ceil_div,
)
from blocktable.engine.attention_glue import AttentionCall
from blocktable.engine.probe import ProbeResult

STATE_GROUP = "recurrent_state"
"""Layer name of the group that stands for all stateful mixers of a model."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Which group a layer is in and which memory of the pool it uses."""

    group: int
    memory: int


@dataclass(frozen=True)
class KVLayout:
    """Groups, places and page sizes of one model at one block size.

    ``places[i]`` belongs to the i-th probed layer. ``bytes_per_block`` is what one more block of
    the pool costs over all memories.
    """

    block_size: int
    dtype: torch.dtype
    groups: tuple[KVCacheGroupSpec, ...]
    places: tuple[LayerPlace, ...]
    num_memories: int
    page_bytes: int

    @property
    def bytes_per_block(self) -> int:
        return self.num_memories * self.page_bytes

    def config(self, num_blocks: int) -> KVCacheConfig:
        """What the manager is built from."""
        return KVCacheConfig(num_blocks, self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that one request of this length holds at most, over all groups, unless a window
        releases some."""
        return sum(group.kv_cache_spec.max_blocks_per_request(num_tokens) for group in self.groups)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes that contiguous buffers for this many tokens would take (every layer in full)."""
        pages = ceil_div(num_tokens, self.block_size)
        used = sum(
            len(g.layer_names) * g.kv_cache_spec.real_page_size_bytes
            for g in self.groups
            if isinstance(g.kv_cache_spec, AttentionSpec)
        )
        return pages * used


def spec_of(call: AttentionCall, block_size: int, dtype: torch.dtype) -> AttentionSpec:
    """The cache spec of a layer that asks for this."""
    shape = {
        "block_size": block_size,
        "num_kv_heads": call.num_kv_heads,
        "head_size": call.head_size,
        "head_size_v": None if call.head_size_v == call.head_size else call.head_size_v,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if call.chunk is not None:
        return ChunkedLocalAttentionSpec(attention_chunk_size=call.chunk, **shape)
    if call.sliding_window is not None:
        return SlidingWindowSpec(sliding_window=call.sliding_window, **shape)
    return FullAttentionSpec(**shape)


def plan_layout(probed: ProbeResult, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Group the probed layers; a model without attention gets one group for its states alone.

    Group size: the smallest number of layers any kind has, or the largest where they are within a
    quarter of each other (padding is then cheaper than one more group), and never so small that a
    kind is cut into more than 8 groups.
    """
    kinds: dict[AttentionSpec, list[int]] = {}
    for index, layer in enumerate(probed.layers):
        kinds.setdefault(spec_of(layer.call, block_size, dtype), []).append(index)
    groups: list[KVCacheGroupSpec] = []
    places: dict[int, LayerPlace] = {}
    page = max((spec.page_size_bytes for spec in kinds), default=1)
    sizes = [len(members) for members in kinds.values()]
    size = 0
    if sizes:
        size = max(sizes) if max(sizes) < 1.25 * min(sizes) else min(sizes)
        size = max(size, ceil_div(max(sizes), 8))
    for spec, members in kinds.items():
        padded = spec if spec.page_size_bytes == page else replace(spec, page_size_padded=page)
        # stride through the layers, so that each group spans the whole depth of the model
        count = ceil_div(len(members), size)
        for first in range(count):
            chosen = members[first::count]
            names = tuple(probed.layers[i].name for i in chosen)
            for memory, i in enumerate(chosen):
                places[i] = LayerPlace(len(groups), memory)
            groups.append(KVCacheGroupSpec(names, padded))
    if not groups:
        groups.append(_state_group(block_size))
    ordered = tuple(places[i] for i in range(len(probed.layers)))
    return KVLayout(block_size, dtype, tuple(groups), ordered, max(size, 1), page)


def _state_group(block_size: int) -> KVCacheGroupSpec:
    """One block a request, for models whose layers all keep states of their own."""
    spec = MambaSpec(block_size=block_size, shapes=((1,),), dtypes=("uint8",), cache_mode="none")
    return KVCacheGroupSpec((STATE_GROUP,), spec)


DEFAULT_MEMORY_SHARE = 0.25
"""Share of the memory that is available when the engine is built, for the pool on a CPU."""


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now: the GPU's free memory, or what Linux says is available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30


def choose_num_blocks(
    layout: KVLayout,
    *,
    num_blocks: int | None,
    memory_bytes: int | None,
    available: int,
    share: float,
    max_useful_tokens: int,
) -> int:
    """Blocks of the pool: as told, or what the memory holds, but no more than can ever be used.

    Raises ConfigError, naming what is missing, where not even one usable block fits.
    """
    if num_blocks is not None:
        return num_blocks
    budget = int(available * share) if memory_bytes is None else memory_bytes
    fitting = budget // layout.bytes_per_block
    if fitting < 2:
        raise ConfigError(
            f"the KV cache has {budget} bytes, but 2 blocks (one is reserved) of "
            f"{layout.bytes_per_block} bytes need {2 * layout.bytes_per_block - budget} more"
        )
    return min(fitting, max(2, 1 + layout.blocks_for(max_useful_tokens)))

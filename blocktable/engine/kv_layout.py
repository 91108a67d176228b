"""The layout of one model's KV cache: its layers' specs, grouped as `core.grouping` says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from blocktable.core.errors import ConfigError
from blocktable.core.grouping import LayerPlace, group_layers
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


@dataclass(frozen=True)
class KVLayout:
    """Groups, places and page sizes of one model at one block size.

    ``places[i]`` belongs to the i-th probed layer. ``bytes_per_block`` is what one more block of
    the pool costs over all memories. ``block_size`` counts the positions a page of this rank holds,
    the specs of ``groups`` those of a block on all context-parallel ranks (see `dealt_out`).
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
        return sum(
            len(g.layer_names)
            * g.kv_cache_spec.real_page_size_bytes
            * ceil_div(num_tokens, g.kv_cache_spec.block_size)
            for g in self.groups
            if isinstance(g.kv_cache_spec, AttentionSpec)
        )

    def dealt_out(self, world_size: int) -> KVLayout:
        """The layout with the positions of full-attention groups dealt out to context-parallel
        ranks: a page stays what it is, a block covers ``world_size`` times the positions. Other
        groups are kept whole on every rank: a window holds few positions, whatever the context.

        Raises ConfigError where no group can be dealt out."""
        if world_size == 1:
            return self
        if not any(is_dealt_out(group) for group in self.groups):
            kinds = ", ".join(sorted({group.kv_cache_spec.kind for group in self.groups}))
            raise ConfigError(
                f"context_parallel_size {world_size} needs a layer with full attention, this model "
                f"has {kinds}"
            )
        groups = [_widened(group, world_size) for group in self.groups]
        return replace(self, groups=tuple(groups))


def is_dealt_out(group: KVCacheGroupSpec) -> bool:
    """Whether context-parallel ranks share out the positions of a group."""
    return isinstance(group.kv_cache_spec, FullAttentionSpec)


def _widened(group: KVCacheGroupSpec, world_size: int) -> KVCacheGroupSpec:
    spec = group.kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        return group
    padded = spec.page_size_padded
    wide = replace(
        spec, block_size=spec.block_size * world_size,
        page_size_padded=None if padded is None else padded * world_size,
    )  # fmt: skip
    return replace(group, kv_cache_spec=wide)


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
    """Group the probed layers; a model without attention gets one group for its states alone."""
    made = group_layers(
        [layer.name for layer in probed.layers],
        [spec_of(layer.call, block_size, dtype) for layer in probed.layers],
    )
    groups = made.groups or (_state_group(block_size),)
    return KVLayout(block_size, dtype, groups, made.places, made.num_memories, made.page_bytes)


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

"""KV writes in plain torch, for caches and installations the compiled kernel does not serve."""

from __future__ import annotations

from typing import Any

import torch

from blocktable.attention.reference import per_head
from blocktable.core.errors import ConfigError


def write(
    source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, factor: Any
) -> None:
    """Store rows [T, Hkv, D] in their slots of ``cache``; nothing is written if a slot is wrong."""
    num_blocks, kv_heads, block_size = cache.shape[:3]
    bad = (slot_mapping < -1) | (slot_mapping >= num_blocks * block_size)
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        raise ConfigError(
            f"slot {int(slot_mapping[token])} of token {token} is outside a cache of {num_blocks} "
            f"blocks of {block_size}"
        )
    live = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[live]
    stored = source[live]
    if factor is not None:
        factors = torch.from_numpy(per_head(factor, kv_heads, 1.0)).float()
        stored = stored.float() / factors[:, None]
    cache[slots // block_size, :, slots % block_size] = stored.to(cache.dtype)

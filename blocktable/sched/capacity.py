"""The longest request that a pool can hold alone."""

from __future__ import annotations

from blocktable.core.sizing import live_blocks
from blocktable.core.specs import KVCacheSpec


def longest_request(specs: list[KVCacheSpec], usable: int, max_model_len: int, budget: int) -> int:
    """Most tokens, at most ``max_model_len``, for which one request fits into ``usable`` blocks;
    0 if not even one token does. O(log max_model_len)."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if sum(live_blocks(spec, middle, step_tokens=budget) for spec in specs) <= usable:
            low = middle
        else:
            high = middle - 1
    return low

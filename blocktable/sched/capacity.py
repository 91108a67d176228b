"""The longest request that a pool can hold alone."""

from __future__ import annotations

from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    ceil_div,
)


def most_blocks(spec: KVCacheSpec, num_tokens: int, budget: int) -> int:
    """Most blocks a request of ``num_tokens`` holds at once in a group, ``budget`` tokens a step.

    A window group keeps what the step's first token still sees, what the step computes, and one
    block for a window that begins inside a block.
    """
    whole = ceil_div(num_tokens, spec.block_size)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return 0
    if isinstance(spec, CrossAttentionSpec):
        return ceil_div(spec.max_encoder_len, spec.block_size)
    if isinstance(spec, MambaSpec):
        return {"none": 1, "align": min(whole, 2)}.get(spec.cache_mode, whole)
    if isinstance(spec, SlidingWindowSpec):
        return min(whole, ceil_div(spec.sliding_window - 1 + budget, spec.block_size) + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return min(whole, ceil_div(spec.attention_chunk_size - 1 + budget, spec.block_size) + 1)
    return whole


def longest_request(specs: list[KVCacheSpec], usable: int, max_model_len: int, budget: int) -> int:
    """Most tokens, at most ``max_model_len``, for which one request fits into ``usable`` blocks;
    0 if not even one token does. O(log max_model_len)."""
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if sum(most_blocks(spec, middle, budget) for spec in specs) <= usable:
            low = middle
        else:
            high = middle - 1
    return low

"""How many blocks fit in a memory, and how many blocks a request holds."""

from __future__ import annotations

from collections.abc import Sequence

from blocktable.core.errors import ConfigError
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
    ceil_div,
)


def blocks_from_memory(
    *,
    total_bytes: int,
    free_before_load: int,
    free_at_peak: int,
    block_bytes: int,
    utilization: float = 0.9,
) -> int:
    """Blocks of a pool (the null block included) that a device has room for.

    The engine may take ``utilization`` of the *total* memory, but never more than was free before
    it loaded; what it used at its own peak (``free_before_load - free_at_peak``: weights and
    activations, not what other processes hold) is subtracted. Raises ConfigError when fewer than
    2 blocks remain, since block 0 is reserved, and says how many bytes are missing.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(f"memory utilization must be above 0 and at most 1, got {utilization}")
    if block_bytes < 1:
        raise ConfigError(f"a block must take at least 1 byte, got {block_bytes}")
    if not 0 <= free_at_peak <= free_before_load <= total_bytes:
        raise ConfigError(
            f"memory profile does not add up: total {total_bytes}, free before load "
            f"{free_before_load}, free at peak {free_at_peak} bytes (another process may have "
            "freed or taken memory meanwhile)"
        )
    peak = free_before_load - free_at_peak
    budget = min(int(total_bytes * utilization), free_before_load)
    room = budget - peak
    if room < 2 * block_bytes:
        raise ConfigError(
            f"no room for a KV cache: {budget} bytes may be used, {peak} are used at the peak, "
            f"and 2 blocks of {block_bytes} bytes need {2 * block_bytes - room} bytes more "
            f"(utilization {utilization} of {total_bytes} bytes)"
        )
    return room // block_bytes


def live_blocks(spec: KVCacheSpec, num_tokens: int, *, step_tokens: int = 1) -> int:
    """Most blocks of one group that a request of ``num_tokens`` tokens holds, when a step runs
    ``step_tokens`` of them at most.

    A window group keeps the blocks that overlap the last ``window - 1`` tokens before the step
    and the step's own, which may begin in the middle of a block, and those of its sink tokens.
    """
    whole = ceil_div(num_tokens, spec.block_size)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return 0
    if isinstance(spec, CrossAttentionSpec):
        return ceil_div(spec.max_encoder_len, spec.block_size)
    if isinstance(spec, MambaSpec):
        return {"none": 1, "align": min(2, whole), "all": whole}[spec.cache_mode]
    if isinstance(spec, SlidingWindowSpec):
        span = spec.sliding_window - 1 + step_tokens
        sinks = spec.num_sink_tokens if isinstance(spec, SinkWindowSpec) else 0
        return min(whole, ceil_div(span, spec.block_size) + 1 + ceil_div(sinks, spec.block_size))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        span = spec.attention_chunk_size - 1 + step_tokens
        return min(whole, ceil_div(span, spec.block_size) + 1)
    return whole


def request_blocks(
    groups: Sequence[KVCacheGroupSpec], num_tokens: int, *, step_tokens: int = 1
) -> int:
    """Blocks of all groups together that a request of ``num_tokens`` tokens holds at most."""
    specs = (group.kv_cache_spec for group in groups)
    return sum(live_blocks(spec, num_tokens, step_tokens=step_tokens) for spec in specs)


def shared_blocks(spec: KVCacheSpec, prefix_tokens: int) -> int:
    """Blocks of one group that requests with a common prefix can share: whole blocks of it that
    are still held after ``prefix_tokens`` tokens. Recurrent states are not shared."""
    if isinstance(spec, MambaSpec | EncoderOnlyAttentionSpec | CrossAttentionSpec):
        return 0
    whole = prefix_tokens // spec.block_size
    return min(whole, live_blocks(spec, max(prefix_tokens, 1)))

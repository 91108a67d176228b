"""The memory profile's arithmetic and how many blocks a request holds."""

import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.sizing import blocks_from_memory, live_blocks, shared_blocks
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)

GIB, MIB = 1 << 30, 1 << 20
HEADS = {"num_kv_heads": 1, "head_size": 8}


def blocks(free_before, free_at_peak, utilization=1.0, block=2 * MIB):
    return blocks_from_memory(
        total_bytes=24 * GIB,
        free_before_load=int(free_before * GIB),
        free_at_peak=int(free_at_peak * GIB),
        block_bytes=block,
        utilization=utilization,
    )


def test_the_peak_is_measured_against_what_was_free():
    """24 GiB in all, 23 free before, 20 free at the peak: 20 GiB for blocks, never 21."""
    assert blocks(23, 20) == 10_240
    assert blocks(24, 21, 0.5) == (12 - 3) * 512


def test_no_room_says_how_much_is_missing():
    with pytest.raises(ConfigError, match=f"{GIB + 4 * MIB} bytes more"):
        blocks(23, 10, 0.5)


def test_one_block_is_not_enough_because_one_is_reserved():
    one = 2 * MIB
    with pytest.raises(ConfigError, match=f"{one} bytes more"):
        blocks_from_memory(
            total_bytes=10 * one, free_before_load=10 * one, free_at_peak=one, block_bytes=one,
            utilization=1.0,
        )  # fmt: skip
    assert blocks_from_memory(
        total_bytes=10 * one, free_before_load=10 * one, free_at_peak=2 * one, block_bytes=one,
        utilization=1.0,
    ) == 2  # fmt: skip


@pytest.mark.parametrize(("before", "peak"), [(25, 20), (10, 11), (10, -1)])
def test_a_profile_that_does_not_add_up_is_refused(before, peak):
    with pytest.raises(ConfigError, match="does not add up"):
        blocks(before, peak)


def test_bad_utilization_and_block_size_are_refused():
    for utilization in (0, -0.1, 1.1):
        with pytest.raises(ConfigError, match="utilization"):
            blocks(23, 20, utilization)
    with pytest.raises(ConfigError, match="at least 1 byte"):
        blocks(23, 20, block=0)


def test_blocks_of_each_kind():
    full = FullAttentionSpec(block_size=16, **HEADS)
    window = SlidingWindowSpec(block_size=16, sliding_window=40, **HEADS)
    chunk = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS)
    assert [live_blocks(full, n) for n in (1, 16, 17, 500, 700)] == [1, 1, 2, 32, 44]
    assert [live_blocks(window, n) for n in (16, 33, 129, 10_000)] == [1, 3, 4, 4]
    assert [live_blocks(window, n, step_tokens=50) for n in (20, 1000)] == [2, 7]
    assert [live_blocks(chunk, 10_000, step_tokens=step) for step in (1, 16)] == [5, 6]
    sinks = SinkWindowSpec(block_size=16, sliding_window=40, num_sink_tokens=20, **HEADS)
    assert [live_blocks(sinks, n) for n in (16, 33, 81, 97, 10_000)] == [1, 3, 6, 6, 6]
    static = SinkFullAttentionSpec(block_size=16, sink_len=32, **HEADS)
    assert static.static_blocks == 2 and live_blocks(static, 17) == 2
    cross = CrossAttentionSpec(block_size=32, max_encoder_len=1500, **HEADS)
    assert live_blocks(cross, 1024) == 47
    assert live_blocks(EncoderOnlyAttentionSpec(block_size=16, **HEADS), 99) == 0
    state = {"block_size": 16, "shapes": ((4,),), "dtypes": ("float32",)}
    modes = [MambaSpec(**state, cache_mode=mode) for mode in ("none", "align", "all")]
    assert [live_blocks(spec, 64) for spec in modes] == [1, 2, 4]
    assert [shared_blocks(spec, 100) for spec in (full, window, cross)] == [6, 4, 0]

"""What each group kind skips, needs for a hit, and agrees on with the others."""

import numpy as np
import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.invariants import check
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.groups import Group, group_class
from blocktable.groups.hits import common_hit
from blocktable.manager import KVCacheManager

ATTENTION = {"num_kv_heads": 1, "head_size": 1}


def make(spec: KVCacheSpec, number: int = 0, budget: int = 8) -> Group:
    return group_class(spec)(number, spec, 4, 200, budget, True)


def window(size: int, width: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=size, sliding_window=width, **ATTENTION)


def sinks(size: int, width: int, count: int) -> SinkWindowSpec:
    return SinkWindowSpec(block_size=size, sliding_window=width, num_sink_tokens=count, **ATTENTION)


def full(size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, **ATTENTION)


def state(size: int, mode: str) -> MambaSpec:
    return MambaSpec(block_size=size, shapes=((1,),), dtypes=("float32",), cache_mode=mode)


def found(cached: list[int], count: int) -> np.ndarray:
    row = np.zeros(count, np.int32)
    row[cached] = np.array(cached) + 100
    return row


@pytest.mark.parametrize(
    ("cached", "hit", "row"),
    [([5, 6, 7], 128, [0, 0, 0, 0, 0, 105, 106, 107]), ([6, 7], 0, []),
     ([4, 5, 6], 112, [0, 0, 0, 0, 104, 105, 106]), ([0, 1, 6, 7], 32, [100, 101])],
)  # fmt: skip
def test_window_group_hits(cached: list[int], hit: int, row: list[int]) -> None:  # case B23
    groups = [make(full(16)), make(window(16, 40), 1)]

    def find(group: Group, count: int) -> np.ndarray:
        return found(list(range(8)) if group.group_id == 0 else cached, 8)[:count]

    common = common_hit(groups, find, 129 - 1)
    assert common.num_tokens == hit
    assert common.entries[1].tolist() == row
    assert len(common.entries[0]) == hit // 16


def test_a_window_of_eight_over_forty_tokens() -> None:  # oracle rule 9
    entries = make(window(4, 8)).trim_hit(found(list(range(9)), 9))
    assert entries.tolist() == [0] * 7 + [107, 108]


@pytest.mark.parametrize(("computed", "blocks"), [(15, 2), (16, 4), (19, 4), (7, 0), (8, 2)])
def test_chunked_local_skips(computed: int, blocks: int) -> None:  # case B23
    spec = ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8, **ATTENTION)
    assert make(spec).skipped_for(np.array([computed])).tolist() == [blocks]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 9])
@pytest.mark.parametrize("kind", ["window", "chunk", "sinks 1", "sinks 4", "sinks 7"])
def test_hits_by_definition(size: int, width: int, kind: str) -> None:
    """A hit of n blocks is right if everything the next token attends to is cached."""
    head = int(kind.split()[1]) if kind.startswith("sinks") else 0
    if head:
        group = make(sinks(size, width, head))
    elif kind == "window":
        group = make(window(size, width))
    else:
        spec = ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=width, **ATTENTION)
        group = make(spec)
    rng = np.random.default_rng(size * 10 + width)
    for _ in range(60):
        cached = np.flatnonzero(rng.integers(0, 3, 9)).tolist()
        best = 0
        for blocks in range(10):
            tokens = blocks * size
            if kind != "chunk":  # as the oracle has it, a window of 1 needs one block too
                first = max(0, tokens - max(width - 1, 1))
            else:
                first = tokens // width * width
            attended = {p // size for p in [*range(first, tokens), *range(min(head, tokens))]}
            if attended <= set(cached):
                best = blocks
        entries = group.trim_hit(found(cached, 9))
        assert len(entries) == best
        kept = np.flatnonzero(entries)
        assert set(kept) <= set(cached) and (entries[kept] == kept + 100).all()
        tokens = best * size
        first = tokens // width * width if kind == "chunk" else max(0, tokens - (width - 1))
        attended = {p // size for p in [*range(first, tokens), *range(min(head, tokens))]}
        assert attended <= set(kept.tolist())


@pytest.mark.parametrize(
    ("cached", "row"),
    [(range(9), [100, 101, 0, 0, 0, 0, 0, 107, 108]),
     ([0, 1, 4, 5, 7, 8], [100, 101, 0, 0, 0, 0, 0, 107, 108]),
     ([0, 1, 4, 5, 8], [100, 101, 0, 0, 104, 105]), ([0, 4, 5], [100]), ([4, 5], [])],
)  # fmt: skip
def test_a_hit_behind_sinks_needs_them_and_the_window(cached: list[int], row: list[int]) -> None:
    """Block size 4, 5 sink tokens (2 blocks), window 8 (2 blocks)."""
    assert make(sinks(4, 8, 5)).trim_hit(found(list(cached), 9)).tolist() == row


def test_sinks_are_never_given_up() -> None:
    spec = KVCacheConfig(40, (KVCacheGroupSpec((), sinks(4, 8, 5)),))
    manager = KVCacheManager(spec, max_num_rows=2, max_model_len=100, seed=0)
    tokens = list(range(41))
    manager.admit(0, manager.find_hit(manager.sequence(tokens)), 16)
    rows = np.array([0])
    for _ in range(3):
        manager.allocate(rows, 8)
    manager.allocate(rows, 1)
    # 40 tokens are computed, token 40 attends to 33 .. 40: blocks 8 and up, and the sinks
    row = manager.tables[0].rows[0, :11]
    assert (row != 0).tolist() == [True] * 2 + [False] * 6 + [True] * 3
    assert manager.pool.used == 5
    check(manager)
    manager.release(rows)
    hit = manager.find_hit(manager.sequence(tokens))
    manager.admit(1, hit, 1)
    assert hit.num_tokens == 40 and (hit.blocks[0] != 0).sum() == 4
    check(manager)


def test_static_sinks_take_blocks_from_the_pool_for_good() -> None:
    static = SinkFullAttentionSpec(block_size=4, sink_len=8, **ATTENTION)
    groups = [KVCacheGroupSpec((), static), KVCacheGroupSpec((), window(4, 8))]
    manager = KVCacheManager(
        KVCacheConfig(12, tuple(groups)), max_num_rows=2, max_model_len=40, seed=0
    )
    assert manager.groups[0].static_blocks.tolist() == [1, 2]
    assert (manager.pool.usable, manager.pool.available, manager.pool.used) == (9, 9, 0)
    manager.admit(0, manager.find_hit(manager.sequence(range(9))), 9)
    assert manager.pool.used == 6 and not np.isin(manager.tables[0].rows, [1, 2]).any()
    check(manager)
    assert not manager.reset_prefix_cache()
    manager.release(np.array([0]))
    assert manager.reset_prefix_cache() and manager.pool.available == 9
    check(manager)


def test_static_sinks_must_be_whole_blocks_and_leave_room() -> None:
    with pytest.raises(ConfigError, match="sink_len 6 is no multiple of the block size 4"):
        SinkFullAttentionSpec(block_size=4, sink_len=6, **ATTENTION)
    static = SinkFullAttentionSpec(block_size=4, sink_len=8, **ATTENTION)
    KVCacheConfig(4, (KVCacheGroupSpec((), static),))
    with pytest.raises(ConfigError, match="num_blocks is 3: 2 hold attention sinks"):
        KVCacheConfig(3, (KVCacheGroupSpec((), static),))
    with pytest.raises(ConfigError, match="num_sink_tokens must be a positive integer, got 0"):
        sinks(4, 8, 0)


def test_state_hits_need_only_the_last_state() -> None:
    assert make(state(4, "all")).trim_hit(found([1, 3], 6)).tolist() == [0, 0, 0, 103]
    assert make(state(4, "align")).skipped_for(np.array([0, 1, 4, 5, 8])).tolist() == [
        0, 0, 0, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("spec", [
    state(4, "none"), CrossAttentionSpec(block_size=4, max_encoder_len=10, **ATTENTION),
])  # fmt: skip
def test_groups_that_allow_no_hit(spec: KVCacheSpec) -> None:
    groups = [make(full(4)), make(spec, 1)]
    assert common_hit(groups, lambda g, n: found(list(range(n)), n), 40).num_tokens == 0


def test_encoder_only_has_no_say_and_no_blocks() -> None:
    encoder = make(EncoderOnlyAttentionSpec(block_size=4, **ATTENTION), 1)
    groups = [make(full(4)), encoder]
    common = common_hit(groups, lambda g, n: found(list(range(n)), n), 11)
    assert common.num_tokens == 8 and common.entries[1].size == 0
    assert encoder.entries_for(np.array([1, 100])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("spec", "tokens", "entries"),
    [(state(4, "none"), [1, 5, 100], [1, 1, 1]), (state(4, "all"), [1, 4, 5], [1, 1, 2]),
     (CrossAttentionSpec(block_size=32, max_encoder_len=1500, **ATTENTION), [1, 900], [47, 47]),
     (MLAAttentionSpec(block_size=4, head_size=8), [1, 4, 5], [1, 1, 2])],
)  # fmt: skip
def test_entries_needed(spec: KVCacheSpec, tokens: list[int], entries: list[int]) -> None:
    group = make(spec)
    need = group.entries_for(np.array(tokens))
    assert need.tolist() == entries and need.max() <= max(1, group.row_width())
    assert (group.capacity_of(need) >= np.array(tokens)).all()


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (6, 4), (3, 5)])
def test_hits_of_different_block_sizes_meet_at_common_multiples(sizes: tuple[int, int]) -> None:
    groups = [make(full(sizes[0])), make(window(sizes[1], 9), 1)]
    common = common_hit(groups, lambda g, n: found(list(range(n)), n), 59)
    unit = np.lcm(*sizes)
    assert common.num_tokens == 59 // unit * unit
    for group, entries in zip(groups, common.entries, strict=True):
        assert len(entries) * group.block_size == common.num_tokens


def test_fixed_point_of_three_groups() -> None:
    """Each group shortens what the others agreed on, over several rounds."""
    groups = [make(full(2)), make(window(2, 5), 1), make(window(2, 9), 2)]
    cached = {0: list(range(20)), 1: [0, 1, 2, 6, 7, 12, 13], 2: [0, 1, 2, 3, 4, 5, 6, 7]}
    common = common_hit(groups, lambda g, n: found(cached[g.group_id], 20)[:n], 40)
    assert common.num_tokens == 16


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="abstract"):
        group_class(KVCacheSpec(block_size=4))

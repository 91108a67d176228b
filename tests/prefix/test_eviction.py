"""The reuse-aware eviction order keeps every invariant of the pool under any traffic."""

import numpy as np
import pytest

from blocktable.core.errors import ConfigError, OutOfBlocks
from blocktable.core.invariants import check
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager


def make(eviction: str, blocks: int = 40) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=1)
    config = KVCacheConfig(blocks, (KVCacheGroupSpec((), spec),))
    return KVCacheManager(config, max_num_rows=4, max_model_len=40, seed=0, eviction=eviction)


@pytest.mark.parametrize("seed", range(4))
def test_pool_stays_whole(seed: int) -> None:
    manager, rng = make("reuse"), np.random.default_rng(seed)
    for _ in range(250):
        row = int(rng.integers(0, 4))
        if manager.num_tokens[row]:
            ran = rng.integers(0, 4) > 0
            done = None if ran else manager.num_computed[[row]] // 2
            manager.release(np.array([row]), num_computed=done)
        else:
            tokens = [int(rng.integers(0, 3))] * int(rng.integers(1, 30))
            hit = manager.find_hit(manager.sequence(tokens))
            try:
                manager.admit(row, hit, len(tokens) - hit.num_tokens)
            except OutOfBlocks:
                continue
        if rng.integers(0, 60) == 0:
            manager.invalidate_prefix_cache()
        check(manager)
    manager.release(np.flatnonzero(manager.num_tokens).astype(np.int32))
    assert manager.pool.available == 39 and manager.reset_prefix_cache()
    check(manager)
    assert len(manager.pool.take(39)) == 39


def test_equal_traffic_gives_equal_orders() -> None:
    orders = []
    for _ in range(2):
        manager = make("reuse", 30)
        for i in range(60):
            tokens = [i % 7] * 12
            hit = manager.find_hit(manager.sequence(tokens))
            manager.admit(0, hit, 12 - hit.num_tokens)
            manager.release(np.array([0]))
        orders.append(manager.pool.eviction.order().tolist())
    assert orders[0] == orders[1]


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fifo.*lru, reuse"):
        make("fifo")


def hits_of(eviction: str, seed: int) -> int:
    """Conversations whose next turn comes when LRU has just lost them, between prompts that never
    come back."""
    manager, rng = make(eviction, 151), np.random.default_rng(seed)
    turns, fresh = {name: 0 for name in range(12)}, 1000
    for i in range(1200):
        if i % 3 == 0:
            name = i // 3 % 12
            turns[name] = turns[name] % 6 + 1
            tokens = [name + 1 + 20 * (i // 216)] * (10 + 4 * turns[name])
        else:
            fresh += 1
            tokens = [fresh] * int(rng.integers(8, 24))
        hit = manager.find_hit(manager.sequence(tokens))
        manager.admit(0, hit, len(tokens) - hit.num_tokens)
        manager.release(np.array([0], np.int32))
    check(manager)
    return manager.admission.hit_tokens


def test_reuse_keeps_what_lru_loses_just_too_early() -> None:
    assert hits_of("reuse", 0) > hits_of("lru", 0) + 800

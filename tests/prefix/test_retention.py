"""Retention hints order evictions, run out, stay within their share, and never wedge the pool."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktable.core.errors import ConfigError, OutOfBlocks
from blocktable.core.invariants import check
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager

ROW = np.array([0], np.int32)


def make(blocks: int = 21, **options: object) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=1)
    config = KVCacheConfig(blocks, (KVCacheGroupSpec((), spec),))
    manager = KVCacheManager(config, max_num_rows=4, max_model_len=60, seed=0, **options)  # type: ignore[arg-type]
    manager.clock = lambda: 0.0
    return manager


def prompt(name: int, blocks: int = 4) -> list[int]:
    return [name] * (2 * blocks)


def serve(manager: KVCacheManager, tokens: list[int], row: int = 0) -> None:
    hit = manager.find_hit(manager.sequence(tokens))
    manager.admit(row, hit, len(tokens) - hit.num_tokens)


def cache(manager: KVCacheManager, *names: int) -> None:
    for name in names:
        serve(manager, prompt(name))
        manager.release(ROW)


def cached(manager: KVCacheManager, name: int) -> int:
    assert manager.index is not None
    return len(manager.index.find_prefix(manager.sequence(prompt(name)).keys()))


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_kept_prefixes_go_last_and_still_go(eviction: str) -> None:
    manager = make(eviction=eviction)
    cache(manager, 1, 2, 3)
    assert manager.retain(prompt(2), priority=1) == 4 and manager.pin(prompt(1)) == 4
    assert manager.num_retained == 8
    check(manager)
    for count, left in ((8, [4, 4, 4]), (4, [4, 4, 0]), (4, [4, 0, 0]), (4, [0, 0, 0])):
        manager.pool.take(count)
        assert [cached(manager, name) for name in (1, 2, 3)] == left
    assert manager.pool.available == 0 and manager.num_retained == 0


def test_the_end_of_a_kept_chain_goes_first() -> None:
    manager = make()
    cache(manager, 1)
    manager.pin(prompt(1))
    manager.pool.take(16 + 1)
    assert cached(manager, 1) == 3


def test_the_share_of_kept_blocks_is_bounded() -> None:
    manager = make(retain_share=0.3)
    cache(manager, 1, 2)
    assert manager.pin(manager.sequence(prompt(1))) == 4
    assert manager.pin(prompt(2)) == 2  # the beginning of it
    assert manager.pin(prompt(1)) == 4  # renewing takes no room
    assert manager.num_retained == 6
    assert manager.unpin(prompt(1)) == 4 and manager.pin(prompt(2)) == 4


def test_seconds_and_steps_run_out() -> None:
    manager, now = make(), [0.0]
    manager.clock = lambda: now[0]
    cache(manager, 1, 2)
    manager.retain(prompt(1), seconds=5)
    manager.retain(prompt(2), steps=2)
    now[0] = 4.9
    assert manager.num_retained == 8
    manager.retain(prompt(1), seconds=5)  # a later hint replaces the earlier one
    now[0] = 9.0
    for left in (8, 4):
        manager.end_step(manager.begin_step())
        assert manager.num_retained == left
    now[0] = 9.9
    assert manager.num_retained == 0
    manager.begin_step()
    assert type(manager.pool.eviction).__name__ == "LRUQueue"  # nothing is left of the hints
    check(manager)


def test_hints_hold_while_blocks_are_in_use() -> None:
    manager = make()
    serve(manager, prompt(1))
    assert manager.pin(prompt(1)) == 4
    manager.release(ROW)
    cache(manager, 2, 3, 4, 5, 6, 7)
    assert cached(manager, 1) == 4
    serve(manager, prompt(1))
    assert manager.admission.hit_tokens == 6
    manager.release(ROW)
    assert manager.num_retained == 4
    check(manager)


def test_expired_prefixes_go_first_unless_they_are_hit_again() -> None:
    manager = make()
    cache(manager, 1, 2, 3)
    assert manager.expire(prompt(3)) == 4
    manager.pool.take(8 + 4)
    assert [cached(manager, name) for name in (1, 2, 3)] == [4, 4, 0]
    manager.expire(prompt(2))
    serve(manager, prompt(2)[:7])
    manager.release(ROW)
    manager.pool.take(4)
    assert cached(manager, 2) == 3  # its end, not hit, went at once; then 1 was older


def test_a_hint_goes_with_the_key() -> None:
    manager = make()
    serve(manager, prompt(1))
    manager.pin(prompt(1))
    manager.invalidate_prefix_cache()
    manager.release(ROW)
    cache(manager, 2, 3, 4)
    assert manager.pin(prompt(4)) == 4 and manager.pin(prompt(3)) == 4
    assert manager.pin(prompt(2)) == 2 and manager.num_retained == 10  # half of 20: none leaked
    check(manager)


def test_wrong_hints_are_refused() -> None:
    manager = make()
    with pytest.raises(ConfigError, match="priority is 5"):
        manager.retain(prompt(1), priority=5)
    with pytest.raises(ConfigError, match="seconds must be positive, got 0"):
        manager.retain(prompt(1), seconds=0)
    with pytest.raises(ConfigError, match="off"):
        make(enable_caching=False).pin(prompt(1))
    with pytest.raises(ConfigError, match=r"retain_share .* got 1\.5"):
        make(retain_share=1.5)
    assert manager.pin(prompt(1)) == manager.unpin(prompt(1)) == manager.expire(prompt(1)) == 0


operation = st.tuples(
    st.sampled_from(["serve", "release", "pin", "retain", "unpin", "expire", "step", "lapse",
                     "withdraw", "invalidate"]),
    st.integers(0, 3), st.integers(0, 4), st.integers(1, 9),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(operation, max_size=50), st.sampled_from(["lru", "reuse"]), st.sampled_from([0.5, 1.0])
)
def test_the_pool_can_always_be_filled(
    operations: list[tuple[str, int, int, int]], eviction: str, share: float
) -> None:
    manager, now = make(eviction=eviction, retain_share=share), [0.0]
    manager.clock = lambda: now[0]
    for name, row, content, size in operations:
        apply(manager, now, name, row, prompt(content, size))
        check(manager)
        assert 0 <= manager.num_retained <= share * manager.pool.usable
    manager.release(np.flatnonzero(manager.num_tokens).astype(np.int32))
    assert manager.pool.available == manager.pool.usable
    assert len(set(manager.pool.take(manager.pool.usable).tolist())) == manager.pool.usable
    assert manager.num_retained == 0


def apply(
    manager: KVCacheManager, now: list[float], name: str, row: int, tokens: list[int]
) -> None:
    size = len(tokens) // 2
    if name == "serve" and not manager.num_tokens[row]:
        try:
            serve(manager, tokens, row)
        except OutOfBlocks as error:
            assert error.needed > manager.pool.available  # a true shortage, whatever is kept
    elif name in ("release", "withdraw") and manager.num_tokens[row]:
        done = manager.num_computed[[row]] // 2 if name == "withdraw" else None
        manager.release(np.array([row], np.int32), num_computed=done)
    elif name in ("pin", "unpin", "expire"):
        getattr(manager, name)(tokens)
    elif name == "retain":
        manager.retain(tokens, priority=1 + size % 4, seconds=size, steps=1 + size // 3)
    elif name == "step":
        manager.end_step(manager.begin_step())
    elif name == "lapse":
        now[0] += size / 2
    elif name == "invalidate":
        manager.invalidate_prefix_cache()

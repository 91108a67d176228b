"""The life of a block: taken, shared, released, fenced, evicted; and every illegal move."""

import re
import time

import numpy as np
import pytest

from blocktable.core.errors import BlockStateError, ConfigError, OutOfBlocks
from blocktable.core.eviction import LRUQueue
from blocktable.core.pool import BlockPool


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_one_release_list_may_name_a_block_twice() -> None:  # case B01, first run
    pool = BlockPool(10)
    (block,) = pool.take(1)
    pool.touch(ids(block))
    pool.release(ids(block, block))
    assert pool.available == 9
    handed = pool.take(9)
    assert len(set(handed.tolist())) == 9 and 0 not in handed
    with pytest.raises(OutOfBlocks) as caught:
        pool.take(1)
    assert (caught.value.needed, caught.value.available, caught.value.fenced) == (1, 0, 0)


@pytest.mark.parametrize("times", [2, 3, 7])
def test_releasing_more_often_than_held_changes_nothing(times: int) -> None:  # B01, second run
    pool = BlockPool(10)
    (block,) = pool.take(1)
    with pytest.raises(BlockStateError, match=f"block {block} "):
        pool.release(np.repeat(block, times), request="r7")
    assert pool.counts().used == 1 and pool.ref[block] == 1
    pool.release(ids(block))
    assert pool.available == 9


def test_error_names_block_and_request_and_keeps_the_others() -> None:
    pool = BlockPool(8)
    held = pool.take(3)
    with pytest.raises(BlockStateError, match=r"block 7 is released by request 'a'.*free"):
        pool.release(np.append(held, 7).astype(np.int32), request="a")
    assert pool.used == 3 and pool.ref[held].tolist() == [1, 1, 1]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "count", [-1, 1.5, 2.0, True, "2", None, np.float64(1), np.int32(-3), [1], float("nan")]
)
def test_what_is_no_number_of_blocks_takes_none(count: object, native: bool) -> None:
    pool = BlockPool(10)
    pool.native = pool.native if native else None
    with pytest.raises(BlockStateError, match="number of blocks must be an integer >= 0"):
        pool.take(count)  # type: ignore[arg-type]
    assert pool.counts().used == 0 and len(pool.take(np.int64(9))) == 9  # type: ignore[arg-type]
    assert len(pool.take(0)) == 0


@pytest.mark.parametrize("nulls", [1, 5])
def test_null_entries_are_skipped(nulls: int) -> None:
    pool = BlockPool(6)
    held = pool.take(2)
    pool.touch(np.zeros(nulls, np.int32))
    pool.release(np.concatenate([np.zeros(nulls, np.int32), held]))
    assert pool.available == 5 and pool.ref[0] == 0


def test_free_block_cannot_be_touched() -> None:
    pool = BlockPool(6)
    held = pool.take(2)
    pool.release(held)
    with pytest.raises(BlockStateError, match="no content to share"):
        pool.touch(held)
    with pytest.raises(BlockStateError, match="outside a pool of 6"):
        pool.touch(ids(6))


def test_order_of_release_is_the_order_of_eviction() -> None:
    pool = BlockPool(9)
    dropped: list[int] = []
    pool.on_evict = lambda blocks: dropped.extend(blocks.tolist())
    a, b = pool.take(4), pool.take(4)
    pool.mark_keyed(a[:3])
    pool.mark_keyed(b[:3])
    pool.release(a[::-1])
    pool.release(b[::-1])
    assert pool.counts().evictable == 6 and pool.counts().free == 2
    pool.take(2)
    assert dropped == []
    pool.take(6)
    assert dropped == [3, 2, 1, 7, 6, 5]  # first released, tail of a chain before its head


def test_ids_come_out_in_ascending_runs_after_a_mess() -> None:
    pool, rng = BlockPool(4001), np.random.default_rng(1)
    held = pool.take(4000)
    for part in np.array_split(rng.permutation(held), 40):
        pool.release(part)
    again = pool.take(4000)
    assert np.count_nonzero(np.diff(again) != 1) < 40


def test_fences_count_apart_and_open_in_release_order() -> None:
    pool = BlockPool(7)
    first, second = pool.take(3), pool.take(3)
    pool.mark_keyed(first)
    step = pool.begin_step()
    pool.release(first[::-1])
    later = pool.begin_step()
    pool.release(second)
    assert pool.counts() == (6, 0, 0, 0, 6)
    with pytest.raises(OutOfBlocks) as caught:
        pool.take(1)
    assert caught.value.fenced == 6
    pool.end_step(step)
    assert pool.counts() == (6, 0, 0, 3, 3)
    pool.end_step(later)
    assert pool.counts() == (6, 0, 3, 3, 0)
    assert pool.eviction.order().tolist() == first[::-1].tolist()
    with pytest.raises(BlockStateError, match="not in flight"):
        pool.end_step(later)


def test_steps_that_end_out_of_order_keep_the_older_fence() -> None:
    pool = BlockPool(4)
    held = pool.take(3)
    one, two = pool.begin_step(), pool.begin_step()
    pool.release(held)
    pool.end_step(two)
    assert pool.fenced == 3
    pool.end_step(one)
    assert pool.available == 3


def test_a_hit_on_a_fenced_cached_block_takes_it_at_once() -> None:
    pool = BlockPool(5)
    held = pool.take(2)
    pool.mark_keyed(held)
    step = pool.begin_step()
    pool.release(held)
    pool.touch(held[:1])
    assert pool.counts() == (4, 1, 2, 0, 1)
    pool.release(held[:1])  # fenced again, by the same step
    pool.end_step(step)
    assert pool.counts() == (4, 0, 2, 2, 0)
    unkeyed = pool.take(1)
    step = pool.begin_step()
    pool.release(unkeyed)
    with pytest.raises(BlockStateError, match="fenced"):
        pool.touch(unkeyed)


def test_losing_its_key_makes_a_cached_block_free() -> None:
    pool = BlockPool(5)
    held = pool.take(3)
    pool.mark_keyed(held)
    pool.release(held)
    pool.unkey(held[:2])
    assert pool.counts() == (4, 0, 3, 1, 0)
    pool.forget_keys()
    assert pool.counts() == (4, 0, 4, 0, 0)


@pytest.mark.parametrize(
    "size", [1, 0, -3, 2**31, 10**30, 5.0, 1.5, True, "x", None, [], float("nan")]
)
def test_impossible_sizes(size: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(size))):
        BlockPool(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("what", ["touch", "release", "unkey"])
@pytest.mark.parametrize(
    "blocks",
    [
        [1.5], [True], ["1"], [None], [2**32 + 1], [10**30], [float("nan")], [-1], [10], "x", None,
        np.array([1.0]), np.array([2**32 + 1]), np.array([True]), np.array([2**64 - 1], np.uint64),
    ],
    ids=repr,
)  # fmt: skip
def test_what_names_no_block_is_refused(blocks: object, what: str, native: bool) -> None:
    """Nothing is rounded or wrapped round to a block that somebody else holds."""
    pool = BlockPool(10)
    pool.native = pool.native if native else None
    pool.take(3)
    before = pool.counts(), pool.ref.tolist()
    with pytest.raises(BlockStateError):
        getattr(pool, what)(blocks)
    assert (pool.counts(), pool.ref.tolist()) == before
    for form in ([2], 2, np.array([[2]]), np.array([2], np.uint8), np.array([0, 2, 0])[1:2]):
        pool.touch(form)  # type: ignore[arg-type]
    assert pool.ref[2] == 6


def test_building_a_pool_of_four_million_blocks_takes_no_time() -> None:
    best = min(_seconds_to_build() for _ in range(3))
    assert best < 0.01


def _seconds_to_build() -> float:
    start = time.perf_counter()
    BlockPool(4_000_000)
    return time.perf_counter() - start


@pytest.mark.parametrize("blocks", [3, 10, 100])
def test_lru_queue_against_a_list(blocks: int) -> None:
    rng, queue, model = np.random.default_rng(blocks), LRUQueue(blocks), []
    for _ in range(3000):
        outside = np.setdiff1d(np.arange(1, blocks), model)
        move = rng.integers(3)
        if move == 0 and outside.size:
            some = rng.permutation(outside)[: rng.integers(1, outside.size + 1)].astype(np.int32)
            queue.push(some)
            model += some.tolist()
        elif move == 1 and model:
            some = rng.permutation(model)[: rng.integers(1, len(model) + 1)].astype(np.int32)
            queue.remove(some)
            model = [b for b in model if b not in some]
        elif model:
            count = int(rng.integers(1, len(model) + 1))
            assert queue.pop(count).tolist() == model[:count]
            model = model[count:]
        assert len(queue) == len(model) and queue.order().tolist() == model

"""The prefix index against a dictionary of lists."""

import numpy as np
import pytest

from blocktable.prefix.index import PrefixIndex


@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("few", [0, 3, 1000])
@pytest.mark.parametrize(("blocks", "distinct"), [(5, 2), (40, 20), (600, 200), (600, 5)])
def test_against_a_dictionary(
    blocks: int, distinct: int, width: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blocktable.prefix.index.FEW", few)
    rng = np.random.default_rng(blocks + distinct)
    index = PrefixIndex(blocks, width)
    keys = rng.integers(0, 256, (distinct, width), dtype=np.uint8)
    model: dict[tuple[int, int], list[int]] = {}
    where: dict[int, tuple[int, int]] = {}
    for _ in range(400):
        idle = np.setdiff1d(np.arange(1, blocks), list(where))
        if idle.size and rng.integers(2):
            some = rng.permutation(idle)[: rng.integers(1, idle.size + 1)].astype(np.int32)
            which, group = rng.integers(0, distinct, len(some)), int(rng.integers(0, 3))
            index.insert(some, keys[which], group)
            for block, key in zip(some.tolist(), which.tolist(), strict=True):
                model.setdefault((group, key), []).append(block)
                where[block] = (group, key)
        elif where:
            some = rng.permutation(list(where))[: rng.integers(1, len(where) + 1)].astype(np.int32)
            assert (index.keys_of(some) == keys[[where[b][1] for b in some.tolist()]]).all()
            index.remove(some)
            for block in some.tolist():
                model[where.pop(block)].remove(block)
        for group in range(3):
            want = [(model.get((group, k)) or [0])[0] for k in range(distinct)]
            assert index.find(keys, group).tolist() == want
        assert len(index) == len(where)
    index.clear()
    assert len(index) == 0 and not index.find(keys).any()


def test_storing_twice_and_removing_twice_leaves_one_copy_each() -> None:  # case B40, variant
    index, keys = PrefixIndex(10, 32), np.eye(3, 32, dtype=np.uint8)
    index.insert(np.array([1, 2, 3], np.int32), keys)
    index.insert(np.array([4, 5, 6], np.int32), keys)
    assert index.num_distinct(np.arange(1, 7)) == 3
    index.remove(np.array([3], np.int32))
    assert index.find(keys).tolist() == [1, 2, 6]
    index.remove(np.array([6], np.int32))
    assert index.find(keys).tolist() == [1, 2, 0]


def test_a_block_without_a_key_cannot_be_taken_out() -> None:
    index, keys = PrefixIndex(10, 32), np.eye(3, 32, dtype=np.uint8)
    index.insert(np.array([1], np.int32), keys[:1])
    with pytest.raises(KeyError, match="block 2 carries no key"):
        index.remove(np.array([2], np.int32))
    assert index.find(keys).tolist() == [1, 0, 0] and len(index) == 1


def test_one_batch_may_hold_one_key_many_times() -> None:
    index = PrefixIndex(50, 32)
    index.insert(np.arange(1, 31, dtype=np.int32)[::-1].copy(), np.zeros((30, 32), np.uint8))
    found = []
    for _ in range(30):
        found.append(int(index.find(np.zeros((1, 32), np.uint8))[0]))
        index.remove(np.array([found[-1]], np.int32))
    assert found == list(range(30, 0, -1))


def test_prefix_search_stops_at_the_first_miss() -> None:
    index, rng = PrefixIndex(200, 32), np.random.default_rng(0)
    keys = rng.integers(0, 256, (150, 32), dtype=np.uint8)
    index.insert(np.arange(1, 151, dtype=np.int32), keys)
    index.remove(np.array([101], np.int32))
    assert index.find_prefix(keys).tolist() == list(range(1, 101))
    assert index.find_prefix(keys[:0]).size == 0

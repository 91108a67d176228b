"""Plans cover every key of every query exactly once, whatever is shared or split."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from blocktable.attention.plan import AttentionPlan, PlanConfig, plan_attention
from blocktable.attention.plan_items import field
from blocktable.attention.sharing import find_shared
from blocktable.core.errors import ConfigError


def covered(plan: AttentionPlan, config: PlanConfig, heads: int) -> NDArray[np.int64]:
    """How often each (query token, head of a group, key) is read, by walking the items naively."""
    longest = int(max(field(plan.small, "kv_end").max(initial=0),
                      field(plan.tile, "kv_end").max(initial=0)))  # fmt: skip
    seen = np.zeros((plan.num_tokens, heads, longest), dtype=np.int64)
    for items, block_m in ((plan.small, 16), (plan.tile, plan.tile_m)):
        for item in items:
            assert item[5] <= block_m
            for m in range(item[5]):
                packed = item[4] + m
                token = item[3] + packed // heads
                if item[7]:
                    token = plan.tokens[token, 0]
                seen[token, packed % heads, item[1] : item[2]] += 1
    return seen


def table_of(lens: list[int], block_size: int, rng: np.random.Generator) -> NDArray[np.int32]:
    width = max(-(-max(lens) // block_size), 1)
    ids = rng.permutation(len(lens) * width).astype(np.int32) + 1
    return ids.reshape(len(lens), width)


@pytest.mark.parametrize("seed", range(8))
def test_every_key_is_read_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group, rows, block_size = int(rng.choice([1, 3, 4, 7, 40])), int(rng.integers(1, 12)), 16
    query = rng.integers(0, 5, rows) * rng.choice([1, 1, 9], rows)
    lens = np.where(query > 0, query + rng.integers(0, 700, rows), 0)
    lens[rng.random(rows) < 0.2] = 0
    config = PlanConfig(
        num_q_heads=group, num_kv_heads=1, block_size=block_size, num_workers=9,
        num_tile_workers=5, min_piece=64, min_tile_piece=64, share=False,
    )  # fmt: skip
    starts = np.concatenate(([0], np.cumsum(query)))
    plan = plan_attention(config, starts, lens, num_tokens=int(starts[-1]) + 3)
    seen = covered(plan, config, group)
    for row in range(rows):
        for i in range(query[row]):
            visible = lens[row] - query[row] + i + 1 if lens[row] else 0
            assert (seen[starts[row] + i, :, :visible] == 1).all()


def test_idle_tokens_are_items_without_keys() -> None:
    config = PlanConfig(num_q_heads=8, num_kv_heads=2, block_size=16)
    plan = plan_attention(config, np.array([0, 1, 2, 3]), np.array([5, 0, 7]), num_tokens=9)
    empty = field(plan.small, "kv_end") == field(plan.small, "kv_start")
    tokens = [item[3] + (item[4] + m) // 4 for item in plan.small[empty] for m in range(item[5])]
    assert sorted(set(tokens)) == [1, 3, 4, 5, 6, 7, 8]


def test_nested_prefixes_form_a_tree() -> None:
    table = np.array(
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 8, 9], [1, 2, 7, 8, 10], [11, 12, 13, 14, 15]],
        dtype=np.int32,
    )
    nodes = find_shared(table, np.full(5, 4), np.arange(5), min_blocks=1, min_saved=1)
    found = sorted((sorted(n.rows.tolist()), n.start, n.end) for n in nodes)
    assert found == [([0, 1], 2, 4), ([0, 1, 2, 3], 0, 2), ([2, 3], 2, 4)]


def test_small_nodes_stay_with_their_children() -> None:
    table = np.array([[1, 2, 3, 9], [1, 2, 3, 8], [1, 5, 6, 7]], dtype=np.int32)
    nodes = find_shared(table, np.full(3, 4), np.arange(3), min_blocks=2, min_saved=2)
    assert [(sorted(n.rows.tolist()), n.start, n.end) for n in nodes] == [([0, 1], 0, 3)]


@pytest.mark.parametrize("seed", range(4))
def test_tree_agrees_with_a_naive_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(1, 3, (40, 12)).astype(np.int32)
    table += np.arange(12, dtype=np.int32) * 10
    limits = rng.integers(0, 13, 40)
    nodes = find_shared(table, limits, np.arange(40), min_blocks=1, min_saved=1)
    read = np.zeros((40, 12), dtype=np.int64)
    for node in nodes:
        assert (table[node.rows, : node.end] == table[node.rows[0], : node.end]).all()
        assert (limits[node.rows] >= node.end).all()
        read[node.rows, node.start : node.end] += 1
    for row in range(40):
        shared = max(
            (int((np.cumprod(table[row, :m] == table[other, :m])).sum())
             for other in range(40) if other != row
             for m in [min(limits[row], limits[other])]), default=0,
        )  # fmt: skip
        assert read[row, :shared].tolist() == [1] * shared
        assert not read[row, shared:].any()


def test_shared_rows_read_each_key_once_and_the_prefix_together() -> None:
    rng = np.random.default_rng(0)
    lens = [900, 850, 1000, 400, 1]
    table = table_of(lens, 16, rng)
    table[:3, :40] = table[0, :40]
    table[:2, 40:50] = table[0, 40:50]
    config = PlanConfig(num_q_heads=4, num_kv_heads=1, block_size=16, min_saved_tokens=64)
    plan = plan_attention(config, np.arange(6), np.array(lens), table)
    assert [(sorted(n.rows.tolist()), n.start, n.end) for n in plan.nodes] == [
        ([0, 1, 2], 0, 40), ([0, 1], 40, 50),
    ]  # fmt: skip
    seen = covered(plan, config, 4)
    for row, length in enumerate(lens):
        assert (seen[row, :, :length] == 1).all() and not seen[row, :, length:].any()
    keys = (field(plan.tile, "kv_end") - field(plan.tile, "kv_start")).sum()
    assert keys == 640 + 160


def test_last_token_is_never_shared() -> None:
    table = np.tile(np.arange(1, 17, dtype=np.int32), (4, 1))
    config = PlanConfig(num_q_heads=1, num_kv_heads=1, block_size=16, min_saved_tokens=16)
    plan = plan_attention(config, np.arange(5), np.full(4, 256), table)
    assert plan.nodes[0].end == 15
    assert (field(plan.small, "kv_end") - field(plan.small, "kv_start") == 16).all()


@pytest.mark.parametrize("option", [{"sliding_window": 64}, {"chunk": 128}, {"share": False}])
def test_no_sharing_where_a_query_does_not_see_the_whole_prefix(option: dict) -> None:
    table = np.tile(np.arange(1, 33, dtype=np.int32), (4, 1))
    config = PlanConfig(num_q_heads=1, num_kv_heads=1, block_size=16, **option)
    assert not plan_attention(config, np.arange(5), np.full(4, 500), table).shares


def test_ragged_batch_is_balanced() -> None:
    rng = np.random.default_rng(1)
    lens = rng.integers(128, 8193, 128)
    config = PlanConfig(num_q_heads=32, num_kv_heads=8, block_size=16)
    plan = plan_attention(config, np.arange(129), lens)
    keys = field(plan.small, "kv_end") - field(plan.small, "kv_start")
    assert (np.diff(keys) <= 0).all()
    load = np.zeros(config.num_workers)
    for amount in np.repeat(keys, config.num_kv_heads):
        load[load.argmin()] += amount
    assert load.max() < 1.05 * load.mean() + config.min_piece


def test_one_long_row_fills_the_machine() -> None:
    config = PlanConfig(num_q_heads=32, num_kv_heads=8, block_size=16)
    plan = plan_attention(config, np.array([0, 1]), np.array([131072]))
    assert 0.9 * config.num_workers <= len(plan.small) * 8 <= config.num_workers + 8


@pytest.mark.parametrize(
    ("starts", "lens", "message"),
    [([0, 1], [1, 1], "need 3"), ([0, 2], [1], "2 query tokens"), ([0, 2, 1], [4, 4], "-1 query")],
)
def test_impossible_batches_are_refused(starts: list, lens: list, message: str) -> None:
    config = PlanConfig(num_q_heads=1, num_kv_heads=1, block_size=16)
    with pytest.raises(ConfigError, match=message):
        plan_attention(config, np.array(starts), np.array(lens))


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="7 query heads"):
        PlanConfig(num_q_heads=7, num_kv_heads=2, block_size=16)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        PlanConfig(num_q_heads=8, num_kv_heads=2, block_size=0)

"""Planned runs move exactly the right bytes between caches of any two layouts."""

import numpy as np
import pytest
from caches import Cache, copy_runs, layout, value
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable.core.errors import ConfigError, TransferError
from blocktable.transfer.layout import CacheLayout, CacheView, check_convertible, plan_runs


def rows_for(rng, made, num_tokens, num_blocks, groups=1):
    count = -(-num_tokens // made.block_size)
    ids = 1 + rng.permutation(num_blocks - 1)[: count * groups]
    return [ids[g * count : (g + 1) * count].astype(np.int32) for g in range(groups)]


@given(
    st.sampled_from([(4, 4), (4, 16), (16, 4), (8, 12)]),
    st.sampled_from([((0, 4), (0, 4)), ((0, 4), (2, 4)), ((1, 3), (0, 2)), ((0, 1), (0, 4))]),
    st.sampled_from([("HTD", "HTD"), ("THD", "THD"), ("HTD", "THD")]),
    st.integers(1, 60),
    st.integers(0, 59),
    st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_exact_conversion(blocks, heads, orders, num_tokens, first, seed):
    rng = np.random.default_rng(seed)
    first = min(first, num_tokens - 1)
    made = [
        layout(b, h, o, groups=[0, 1], padding=p, size_v=4)
        for b, h, o, p in zip(blocks, heads, orders, (0, 64), strict=True)
    ]
    source, target = (Cache(m, 40) for m in made)
    rows = [rows_for(rng, m, num_tokens, 40, groups=2) for m in made]
    if len(rows[0][1]) > 1:
        rows[0][1][0] = 0  # outside a window: the source has it no more
    source.fill_request(rows[0], num_tokens)
    views = [CacheView(c.layout, c.bases, r) for c, r in zip((source, target), rows, strict=True)]
    before = [memory.copy() for memory in target.memories]
    copy_runs(plan_runs(*views, first, num_tokens))
    expected = Cache(made[1], 40)
    for (layer, values, head, position), vector in expected.vectors(rows[1], num_tokens):
        held = heads[0][0] <= head < heads[0][1]
        lost = int(rows[0][layer][position // blocks[0]]) == 0
        if held and not lost and position >= first:
            vector[:] = value(layer, values, head, position, len(vector))
    for got, want, old in zip(target.memories, expected.memories, before, strict=True):
        assert np.array_equal(got, want)
        assert (old == -1).all()


def test_equal_layouts_move_neighbouring_blocks_as_one_run():
    made = layout()
    cache = Cache(made, 70)
    run = [np.arange(1, 65, dtype=np.int32)]
    runs = plan_runs(CacheView(made, cache.bases, run), CacheView(made, cache.bases, run), 0, 1024)
    assert runs.size.tolist() == [64 * made.page_bytes] * 2
    fours = [np.concatenate([np.arange(a, a + 4) for a in (1, 9, 20, 33)]).astype(np.int32)]
    runs = plan_runs(
        CacheView(made, cache.bases, fours), CacheView(made, cache.bases, [run[0][:16]]), 0, 256
    )
    assert len(runs.size) == 2 * 4


def test_a_load_touches_only_positions_the_engine_lacks():
    """The engine holds 14,816 tokens, the peer 14,820: positions 14,816 .. 14,819 change alone."""
    made = layout(layers=1, heads=(0, 1), num_kv_heads=1)
    source, target = Cache(made, 928, 7.0), Cache(made, 928, 3.0)
    row = [np.arange(1, 928, dtype=np.int32)]
    views = [CacheView(made, c.bases, row) for c in (source, target)]
    runs = plan_runs(*views, 14_816, 14_820)
    copy_runs(runs)
    changed = np.flatnonzero(target.memories[0] == 7.0)
    start = 927 * made.page_bytes // 4
    assert changed.tolist() == [start + i for i in range(32)] + [
        start + 16 * 8 + i for i in range(32)
    ]
    assert runs.total_bytes == 4 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype is float16 at the source and float32 here"),
        ({"layers": 3}, "num_layers is 3 at the source and 2 here"),
        ({"size": 16}, "head_size is 16 at the source and 8 here"),
        ({"num_kv_heads": 8}, "num_kv_heads is 8 at the source and 4 here"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(change, message):
    with pytest.raises(TransferError, match=message):
        check_convertible(layout(**change), layout())


def test_a_short_row_is_refused():
    made = layout()
    cache = Cache(made, 8)
    view = CacheView(made, cache.bases, [np.array([1, 2], np.int32)])
    with pytest.raises(TransferError, match="position 32 lies beyond a row of 2 blocks of 16"):
        plan_runs(view, view, 0, 33)


def test_layouts_travel_as_plain_values():
    made = layout(order="THD", groups=[0, 1])
    assert CacheLayout.from_dict(made.as_dict()) == made
    for bad in ({}, {"dtype": "x"}, made.as_dict() | {"block_size": 0}, made.as_dict() | {"z": 1}):
        with pytest.raises(TransferError):
            CacheLayout.from_dict(bad)
    with pytest.raises(ConfigError, match="too small"):
        CacheLayout("float32", 16, 4, 0, 4, 8, 8, (0,), (0,), 64)

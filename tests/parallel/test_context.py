"""KV of one sequence on several ranks: slots, lengths, and attention equal to the single rank's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_all_ranks

from blocktable.attention import paged_attention, write_kv
from blocktable.core.geometry import SlotGeometry
from blocktable.core.protocols import Communicator
from blocktable.parallel.context import ContextRank, local_lengths, merge_by_lse
from blocktable.parallel.torch_comm import SingleRank


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(0, 200))
def test_local_lengths_count_the_owned_positions(interleave, world, tokens):
    positions = np.arange(tokens)
    for rank in range(world):
        geometry = SlotGeometry(8, cp_world=world, cp_rank=rank, cp_interleave=interleave)
        owned = int((geometry.owner(positions) == rank).sum())
        assert local_lengths(np.array(tokens), geometry) == owned
        assert local_lengths(torch.tensor([tokens]), geometry).tolist() == [owned]


def test_merge_with_nothing_seen_is_zero_and_finite():
    nan = torch.full((1, 2, 4), float("nan"))
    minus = torch.full((1, 2), float("-inf"))
    out, lse = merge_by_lse([nan, nan], [minus, minus])
    assert torch.equal(out, torch.zeros(1, 2, 4)) and torch.isinf(lse).all()
    one = torch.ones(1, 2, 4)
    out, lse = merge_by_lse([nan, one], [minus, torch.zeros(1, 2)])
    assert torch.equal(out, one) and torch.equal(lse, torch.zeros(1, 2))


def whole_batch(seed, lens, counts, heads, kv_heads, size):
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    query = torch.randn(total, heads, size, generator=generator)
    keys = [torch.randn(n, kv_heads, size, generator=generator) for n in lens]
    values = [torch.randn(n, kv_heads, size, generator=generator) for n in lens]
    return query, keys, values


def attend_on(communicator, batch, lens, counts, *, block, interleave, seed, **options):
    """Write this rank's share of every sequence into blocks of its own, then attend."""
    query, keys, values = batch
    share = ContextRank(communicator, interleave)
    geometry = share.geometry(block)
    width = max(-(-n // geometry.span) for n in lens)
    rng = np.random.default_rng(seed + communicator.rank)
    table = (1 + rng.permutation(len(lens) * width).reshape(len(lens), width)).astype(np.int32)
    shape = (table.size + 1, keys[0].shape[1], block, query.shape[2])
    k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    for row, (k, v) in enumerate(zip(keys, values, strict=True)):
        slots = geometry.slots(table, np.full(len(k), row), np.arange(len(k)))
        write_kv(k, v, k_cache, v_cache, torch.from_numpy(slots))
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    positions = np.arange(len(rows)) + np.repeat(np.array(lens) - ends, counts)
    return share.attend(paged_attention)(
        query, k_cache, v_cache, torch.from_numpy(table[rows]),
        torch.arange(len(rows) + 1, dtype=torch.int32),
        torch.from_numpy(share.visible(positions, geometry)), scale=query.shape[2] ** -0.5,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (2, 4), (3, 2), (4, 8)])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_equal_to_a_single_rank(world, interleave, seed, data):
    """Prefill, chunks and decodes in one batch; ranks that own none of a short sequence."""
    lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    counts = [data.draw(st.integers(1, n)) for n in lens]
    batch = whole_batch(seed, lens, counts, 4, 2, 16)
    sinks = torch.randn(4) if data.draw(st.booleans()) else None
    softcap = data.draw(st.sampled_from([None, 20.0]))

    def run(communicator):
        return attend_on(
            communicator, batch, lens, counts, block=8, interleave=interleave, seed=seed,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip

    single = run(SingleRank())
    ranks = on_all_ranks(world, run)
    for out in ranks:
        torch.testing.assert_close(out, single, rtol=1e-4, atol=1e-5)
        assert torch.equal(out, ranks[0])


def test_single_rank_equals_plain_causal_attention():
    lens, counts = [40, 17], [40, 1]
    batch = whole_batch(0, lens, counts, 4, 2, 16)
    out = attend_on(SingleRank(), batch, lens, counts, block=8, interleave=8, seed=0)
    query, keys, values = batch
    q = query[:40].transpose(0, 1)
    k, v = (t[0].transpose(0, 1).repeat_interleave(2, 0) for t in (keys, values))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out[:40], plain.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", [{"sliding_window": 4}, {"chunk": 4}])
def test_windows_are_refused(option):
    batch = whole_batch(0, [9], [9], 2, 1, 8)
    with pytest.raises(ValueError, match="window"):
        attend_on(SingleRank(), batch, [9], [9], block=8, interleave=1, seed=0, **option)


def test_single_rank_is_a_communicator():
    assert isinstance(SingleRank(), Communicator)

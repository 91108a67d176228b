"""The float64 oracle against an independent dense computation and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_cases import Problem, make_problem

from blocktable.attention.options import AttentionOptions
from blocktable.attention.reference import (
    paged_attention_reference,
    per_head,
    visible_keys,
    write_kv_reference,
)
from blocktable.core.errors import ConfigError


def dense(problem: Problem, row: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """SDPA in float64 of one row over its gathered keys: [count, Hq, Dv]."""
    length = int(problem.seq_lens[row])
    start, end = (int(x) for x in problem.query_start_loc[row : row + 2])
    block_size = problem.k_cache.shape[2]
    at = torch.arange(length)
    blocks = problem.block_table[row, at // block_size].long()
    k = problem.k_cache[blocks, :, at % block_size].double()  # [L, Hkv, D]
    v = problem.v_cache[blocks, :, at % block_size].double()
    q = problem.query[start:end].double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if mask is None:
        mask = at[None] <= torch.arange(length - (end - start), length)[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, scale=0.2
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_equals_dense_attention(block_size: int) -> None:
    problem = make_problem(
        [17, 0, 33, 1, 64], [1, 2, 5, 1, 40], heads=6, kv_heads=2, size=20, block_size=block_size,
        pad_tokens=3,
    )  # fmt: skip
    out, lse = paged_attention_reference(*problem.args(), scale=0.2)
    for row in (0, 2, 3, 4):
        start, end = (int(x) for x in problem.query_start_loc[row : row + 2])
        np.testing.assert_allclose(out[start:end], dense(problem, row).numpy(), atol=1e-12)
    assert (out[1:3] == 0).all() and np.isneginf(lse[1:3]).all()
    assert (out[-3:] == 0).all() and np.isneginf(lse[-3:]).all()


def test_window_equals_a_masked_dense_attention() -> None:
    problem = make_problem([40], [9], heads=4, kv_heads=4, size=8, block_size=16)
    out = paged_attention_reference(*problem.args(), scale=0.2, sliding_window=7).out
    k, q = torch.arange(40)[None], torch.arange(31, 40)[:, None]
    expected = dense(problem, 0, (k <= q) & (k > q - 7))
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-12)


def test_sink_is_one_more_key_without_a_value() -> None:
    problem = make_problem([5], [1], heads=2, kv_heads=2, size=4, block_size=4)
    plain = paged_attention_reference(*problem.args(), scale=0.2)
    sunk = paged_attention_reference(*problem.args(), scale=0.2, sinks=np.array([0.5, -3.0]))
    share = 1 / (1 + np.exp(np.array([0.5, -3.0]) - plain.lse[0]))
    np.testing.assert_allclose(sunk.out[0], plain.out[0] * share[:, None], atol=1e-12)
    np.testing.assert_allclose(sunk.lse[0], np.logaddexp(plain.lse[0], [0.5, -3.0]), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "position", "expected"),
    [
        ({}, 4, (0, 0, 5)),
        ({"causal": False}, 4, (0, 0, 10)),
        ({"sliding_window": 1}, 4, (0, 4, 5)),
        ({"sliding_window": 3}, 4, (0, 2, 5)),
        ({"sliding_window": 3, "causal": False}, 4, (0, 2, 7)),
        ({"sliding_window": 3, "num_sink_tokens": 1}, 4, (1, 2, 5)),
        ({"sliding_window": 3, "num_sink_tokens": 5}, 4, (2, 2, 5)),
        ({"sliding_window": 3, "num_sink_tokens": 5}, 1, (0, 0, 2)),
        ({"chunk": 4}, 3, (0, 0, 4)),
        ({"chunk": 4}, 4, (0, 4, 5)),
        ({"chunk": 4, "causal": False}, 5, (0, 4, 8)),
        ({"chunk": 4, "sliding_window": 2}, 7, (0, 6, 8)),
    ],
)
def test_visible_keys(options: dict, position: int, expected: tuple[int, int, int]) -> None:
    assert visible_keys(position, 10, AttentionOptions(scale=1.0, **options)) == expected


@pytest.mark.parametrize("sinks", [1, 4, 7, 40])
def test_sink_tokens_stay_in_sight(sinks: int) -> None:
    problem = make_problem([60], [50], heads=4, kv_heads=2, size=8, block_size=16)
    at, query = torch.arange(60)[None], torch.arange(10, 60)[:, None]
    mask = (at <= query) & ((at > query - 9) | (at < sinks))
    got = paged_attention_reference(
        *problem.args(), scale=0.2, sliding_window=9, num_sink_tokens=sinks
    )
    np.testing.assert_allclose(got.out, dense(problem, 0, mask).numpy(), atol=1e-12)


def test_write_skips_pad_slots_and_divides_by_the_scale() -> None:
    k, v = np.zeros((3, 1, 2, 2)), np.zeros((3, 1, 2, 3))
    key, value = np.ones((3, 1, 2)), np.ones((3, 1, 3))
    write_kv_reference(key, value, k, v, np.array([5, -1, 2]), k_scale=2.0, v_scale=[4.0])
    assert (k[2, 0, 1] == 0.5).all() and (k[1, 0, 0] == 0.5).all()
    assert (v[2, 0, 1] == 0.25).all() and k.sum() == 2.0 and v.sum() == 1.5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="sliding_window must be at least 1, got 0"):
        AttentionOptions(scale=1.0, sliding_window=0)
    for options in ({"num_sink_tokens": 4}, {"num_sink_tokens": -1, "sliding_window": 8}):
        with pytest.raises(ConfigError, match=r"num_sink_tokens -?[14] must be positive, beside"):
            AttentionOptions(scale=1.0, **options)
    with pytest.raises(ConfigError, match=r"softcap must be above 0, got -1"):
        AttentionOptions(scale=1.0, softcap=-1.0)
    with pytest.raises(ConfigError, match="3 values fits neither 1 nor 2 heads"):
        per_head([1.0, 2.0, 3.0], 2, 1.0)
    problem = make_problem([5], [1], heads=3, kv_heads=3, size=4, block_size=4)
    problem.query = problem.query[:, :2]
    with pytest.raises(ConfigError, match="2 query heads are no multiple of 3 KV heads"):
        paged_attention_reference(*problem.args(), scale=1.0)

"""Every CPU back end (and every instruction set level) against the float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cpu_backends import cpu_backends, forced
from paged_cases import Problem, make_problem

from blocktable.attention import paged_attention
from blocktable.attention.cpu import plan_step
from blocktable.attention.reference import paged_attention_reference
from blocktable.core.errors import ConfigError

# Rounding of the result alone: scores and sums are float32 in every back end.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=cpu_backends())
def backend(request: pytest.FixtureRequest) -> Any:
    with forced(request.param):
        yield request.param


def check(problem: Problem, **options: Any) -> None:
    """The back end in force equals the oracle on this problem, log denominators included."""
    expected = paged_attention_reference(*problem.args(), scale=0.17, **options)
    got: Any = paged_attention(*problem.args(), scale=0.17, return_lse=True, **options)
    tolerance = TOLERANCE[problem.query.dtype]
    assert got.out.dtype == problem.query.dtype
    np.testing.assert_allclose(
        got.out.double().numpy(), expected.out, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(got.lse.numpy(), expected.lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 17, 64])
def test_lengths_around_block_borders(backend: str, block_size: int, dtype: torch.dtype) -> None:
    k = 3
    lens = [1, block_size, k * block_size - 1, k * block_size, k * block_size + 1, 0, 130]
    lens = [max(length, 0) for length in lens]
    problem = make_problem(
        lens, [1] * len(lens), heads=6, kv_heads=2, size=64, block_size=block_size, dtype=dtype,
        seed=block_size,
    )  # fmt: skip
    check(problem)


@pytest.mark.parametrize(
    ("size", "size_v"),
    [(1, 1), (33, 33), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128),
     (192, 192), (256, 256), (576, 512), (20, 36)],
)  # fmt: skip
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
def test_head_sizes(backend: str, size: int, size_v: int, heads: int, kv_heads: int) -> None:
    lens, queries = [1, 15, 16, 17, 33, 0, 70], [1, 1, 1, 1, 1, 1, 13]
    problem = make_problem(
        lens, queries, heads=heads, kv_heads=kv_heads, size=size, size_v=size_v, block_size=16,
        seed=size,
    )  # fmt: skip
    check(problem)


OPTIONS: list[dict[str, Any]] = [
    {"causal": False},
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"sliding_window": 20, "causal": False},
    {"sliding_window": 20, "num_sink_tokens": 1},
    {"sliding_window": 20, "num_sink_tokens": 50},
    {"sliding_window": 9, "num_sink_tokens": 17, "causal": False},
    {"sliding_window": 7, "num_sink_tokens": 5, "sinks": torch.linspace(-1, 1, 6),
     "alibi_slopes": torch.linspace(0, 0.1, 6)},
    {"chunk": 1},
    {"chunk": 24},
    {"chunk": 24, "causal": False},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.3, -2.0, 5.0, 30.0, -30.0, 0.0])},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 0.1, 1.0, 2.0])},
    {"k_scale": 0.5, "v_scale": torch.tensor([2.0, 0.25])},
    {"softcap": 3.0, "sliding_window": 30, "sinks": torch.linspace(-1, 1, 6),
     "alibi_slopes": torch.linspace(0, 0.1, 6)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options(backend: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    lens, queries = [3, 0, 47, 64, 150, 200], [3, 2, 1, 2, 70, 1]
    problem = make_problem(
        lens, queries, heads=6, kv_heads=2, size=40, block_size=16, dtype=dtype, pad_tokens=2
    )
    check(problem, **options)


@pytest.mark.parametrize("options", [
    {}, {"sliding_window": 700}, {"sliding_window": 700, "num_sink_tokens": 600}, {"chunk": 512},
], ids=str)  # fmt: skip
def test_long_sequences_are_split_and_merged(backend: str, options: dict[str, Any]) -> None:
    lens, queries = [1500, 513, 512, 511, 4100], [1, 2, 1, 1, 3]
    problem = make_problem(lens, queries, heads=4, kv_heads=2, size=16, block_size=16)
    check(problem, sinks=torch.tensor([1.0, -1.0, 3.0, 0.0]), **options)


@pytest.mark.parametrize("queries", [2, 7, 8, 9, 31, 33, 130])
def test_chunked_prefill(backend: str, queries: int) -> None:
    problem = make_problem(
        [150, 130, 131], [queries, min(queries, 130), 1], heads=9, kv_heads=3, size=64,
        block_size=16,
    )  # fmt: skip
    check(problem)


def test_many_heads_share_one_kv_head(backend: str) -> None:
    problem = make_problem(
        [70, 33], [1, 3], heads=128, kv_heads=1, size=36, size_v=20, block_size=16
    )
    check(problem)


def test_query_and_cache_dtypes_may_differ(backend: str) -> None:
    problem = make_problem(
        [70, 33], [1, 20], heads=4, kv_heads=2, size=64, block_size=16, cache_dtype=torch.bfloat16
    )
    check(problem)


def test_poison_in_the_null_block_and_unused_slots_is_harmless(backend: str) -> None:
    """B08: the cache is NaN wherever no live token was written; padded rows carry NaN queries."""
    problem = make_problem(
        [17, 5, 0, 0], [1, 1, 1, 1], heads=4, kv_heads=2, size=64, block_size=16, pad_tokens=1
    )
    problem.query[2:] = float("nan")
    assert bool(problem.k_cache[0].isnan().all())
    out: Any = paged_attention(*problem.args(), scale=0.1)
    assert bool(out[:2].isfinite().all()) and bool((out[2:] == 0).all())
    check(problem)


def test_released_blocks_before_the_window_may_be_null(backend: str) -> None:
    problem = make_problem([100], [2], heads=2, kv_heads=2, size=64, block_size=16)
    problem.block_table[0, :4] = 0  # the window starts at position 100 - 2 - 30 + 1 = 69
    check(problem, sliding_window=30)


@pytest.mark.parametrize(("sinks", "first"), [(16, 1), (17, 2), (3, 1)])
def test_released_blocks_behind_sinks_may_be_null(backend: str, sinks: int, first: int) -> None:
    problem = make_problem([100, 600], [2, 1], heads=2, kv_heads=2, size=64, block_size=16)
    problem.block_table[0, first:4] = 0
    problem.block_table[1, first : (600 - 30) // 16] = 0
    check(problem, sliding_window=30, num_sink_tokens=sinks)


def test_a_live_nan_is_not_hidden(backend: str) -> None:
    problem = make_problem([40, 40], [1, 1], heads=2, kv_heads=2, size=64, block_size=16)
    block = int(problem.block_table[0, 1])
    problem.k_cache[block, 0, 3] = float("nan")
    out: Any = paged_attention(*problem.args(), scale=0.1)
    assert bool(out[0, 0].isnan().all()) and bool(out[0, 1].isfinite().all())
    assert bool(out[1].isfinite().all())


def test_output_lands_in_a_strided_buffer_and_nowhere_else(backend: str) -> None:
    problem = make_problem([40, 9], [1, 4], heads=4, kv_heads=2, size=33, block_size=16)
    room = torch.full((5, 4, 40), 7.0)
    out: Any = paged_attention(*problem.args(), scale=0.17, out=room[:, :, :33])
    assert out.data_ptr() == room.data_ptr() and bool((room[:, :, 33:] == 7.0).all())
    expected = paged_attention_reference(*problem.args(), scale=0.17).out
    np.testing.assert_allclose(room[:, :, :33].numpy(), expected, atol=2e-5)


def test_transposed_queries_are_read_by_their_strides(backend: str) -> None:
    problem = make_problem([40, 9], [1, 4], heads=4, kv_heads=2, size=64, block_size=16)
    problem.query = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(problem)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pool", [None, "own"])
def test_threads_change_nothing(backend: str, threads: int, pool: str | None) -> None:
    """The same bits with any number of threads, whoever owns them, and in any batch."""
    lens, queries = [1500, 33, 900, 64, 700], [1, 1, 40, 1, 2]
    problem = make_problem(lens, queries, heads=4, kv_heads=2, size=64, block_size=16)
    expected = paged_attention(*problem.args(), scale=0.1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with forced(backend, pool):
            out: Any = paged_attention(*problem.args(), scale=0.1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected)
    alone: Any = paged_attention(
        problem.query[:1], problem.k_cache, problem.v_cache, problem.block_table[:1],
        torch.tensor([0, 1], dtype=torch.int32), problem.seq_lens[:1], scale=0.1,
    )  # fmt: skip
    assert torch.equal(alone, expected[:1])


def test_one_plan_serves_layers_of_different_windows(backend: str) -> None:
    problem = make_problem([100, 40], [1, 20], heads=4, kv_heads=2, size=64, block_size=16)
    plan = plan_step(problem.block_table, problem.query_start_loc, problem.seq_lens)
    for _ in range(2):
        for window in (None, 10):
            got: Any = paged_attention(*problem.args(), scale=0.1, sliding_window=window, plan=plan)
            expected = paged_attention_reference(
                *problem.args(), scale=0.1, sliding_window=window
            ).out
            np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": 99}, "block table row 1 entry 2 is 99, outside the cache of"),
        ({"table": -1}, "block table row 1 entry 2 is -1, outside the cache of"),
        ({"length": 81}, "row 1 has 1 query tokens and seq_len 81; its table holds 80 positions"),
        ({"length": -1}, "row 1 has 1 query tokens and seq_len -1"),
        ({"start": 9}, "query_start_loc spans 0..9 of 2 query tokens"),
    ],
    ids=str,
)
def test_wrong_batches_are_named(backend: str, change: dict[str, int], message: str) -> None:
    problem = make_problem([20, 40], [1, 1], heads=2, kv_heads=2, size=8, block_size=16)
    if "table" in change:
        problem.block_table[1, 2] = change["table"]
    if "length" in change:
        problem.seq_lens[1] = change["length"]
    if "start" in change:
        problem.query_start_loc[2] = change["start"]
    with pytest.raises(ConfigError, match=message):
        paged_attention(*problem.args(), scale=1.0)


def test_more_queries_than_tokens_is_an_error_only_where_positions_matter(backend: str) -> None:
    problem = make_problem([3], [5], heads=2, kv_heads=2, size=8, block_size=16)
    with pytest.raises(ConfigError, match="row 0 has 5 query tokens and seq_len 3"):
        paged_attention(*problem.args(), scale=1.0)
    check(problem, causal=False)


def test_unknown_back_end_is_named() -> None:
    problem = make_problem([3], [1], heads=2, kv_heads=2, size=8, block_size=16)
    with forced("cuda"), pytest.raises(ConfigError, match="BLOCKTABLE_CPU_KERNEL is 'cuda'"):
        paged_attention(*problem.args(), scale=1.0)


def test_eight_bit_caches_with_scales(backend: str) -> None:
    problem = make_problem([40, 9], [1, 4], heads=4, kv_heads=2, size=64, block_size=16)
    problem.k_cache = problem.k_cache.to(torch.float8_e4m3fn)
    problem.v_cache = problem.v_cache.to(torch.float8_e4m3fn)
    check(problem, k_scale=0.5, v_scale=2.0)

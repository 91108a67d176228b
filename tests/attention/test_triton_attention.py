"""The Triton attention kernel against the float64 reference, in the interpreter or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention.triton_device import DEVICE  # isort: skip - before the kernels

from blocktable.attention.plan import plan_attention
from blocktable.attention.reference import paged_attention_reference
from blocktable.attention.triton import PlanBuffers, paged_attention, plan_config, upload_plan
from blocktable.core.errors import ConfigError
from tests.attention.paged_cases import Problem, make_problem

LIMIT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def on_device(problem: Problem) -> tuple[torch.Tensor, ...]:
    """Arguments on the test device; caches keep their strides and whether they share memory."""
    memory: dict[int, torch.Tensor] = {}

    def cache(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            memory[storage.data_ptr()] = flat.to(DEVICE)
        flat = memory[storage.data_ptr()]
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    q, table, starts, lens = (
        t.to(DEVICE)
        for t in (problem.query, problem.block_table, problem.query_start_loc, problem.seq_lens)
    )
    return q, cache(problem.k_cache), cache(problem.v_cache), table, starts, lens


def check(problem: Problem, *, plan: object = None, **options: object) -> None:
    """Output and lse agree with float64; nothing else is NaN."""
    scale = problem.query.shape[2] ** -0.5
    want = paged_attention_reference(*problem.args(), scale=scale, **options)
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    args = on_device(problem)
    out = torch.full(want.out.shape, float("nan"), dtype=problem.query.dtype, device=DEVICE)
    got = paged_attention(*args, scale=scale, return_lse=True, out=out, plan=plan, **moved)
    assert got.out.data_ptr() == out.data_ptr()
    error = got.out.double().cpu().numpy() - want.out
    size = max(np.linalg.norm(want.out), 1e-9)
    assert np.linalg.norm(error) / size < LIMIT[problem.query.dtype]
    lse = got.lse.double().cpu().numpy()
    assert (np.isinf(lse) == np.isinf(want.lse)).all()
    live = np.isfinite(want.lse)
    assert np.abs(lse[live] - want.lse[live]).max(initial=0) < 1e-2


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_decode_with_every_head_size(size: int, kv_heads: int) -> None:
    check(make_problem([1, 15, 16, 17, 33, 0], [1, 1, 1, 1, 1, 0], heads=8, kv_heads=kv_heads,
                       size=size, block_size=16, dtype=torch.float16, seed=size))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    check(make_problem([70, 3], [1, 3], heads=4, kv_heads=2, size=64, block_size=16, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32, 48, 100, 128, 544, 1024])
def test_page_sizes(block_size: int) -> None:
    check(make_problem([150, 700, 1], [1, 1, 1], heads=4, kv_heads=1, size=64,
                       block_size=block_size, seed=block_size))  # fmt: skip


@pytest.mark.parametrize("rank_heads", [16, 40, 128])
def test_latent_attention(rank_heads: int) -> None:
    problem = make_problem([1, 17, 90], [1, 1, 2], heads=rank_heads, kv_heads=1, size=576,
                           size_v=576, block_size=16, dtype=torch.bfloat16)  # fmt: skip
    problem.v_cache = problem.k_cache[..., :512]  # values are the first 512 of a key
    check(problem)


def test_values_of_another_size() -> None:
    check(make_problem([40, 9], [1, 2], heads=4, kv_heads=2, size=192, size_v=128, block_size=16))


OPTIONS: list[dict[str, object]] = [
    {"sliding_window": 20}, {"sliding_window": 1}, {"chunk": 32}, {"softcap": 5.0},
    {"sinks": torch.linspace(-2, 3, 8)}, {"alibi_slopes": torch.linspace(0.01, 0.5, 8)},
    {"causal": False}, {"causal": False, "sliding_window": 20}, {"causal": False, "chunk": 32},
    {"sliding_window": 50, "softcap": 9.0, "sinks": torch.ones(8),
     "alibi_slopes": torch.linspace(0.1, 0.2, 8)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("queries", [[1, 1, 0, 1, 1], [20, 7, 0, 70, 1]], ids=["decode", "prefill"])
def test_options(options: dict[str, object], queries: list[int]) -> None:
    check(make_problem([90, 7, 0, 333, 1], queries, heads=8, kv_heads=2, size=64, block_size=16),
          **options)  # fmt: skip


def test_sinks_without_keys_and_with_pieces() -> None:
    sinks = torch.linspace(-1, 1, 4)
    check(make_problem([1500, 3], [1, 1], heads=4, kv_heads=1, size=64, block_size=16),
          sinks=sinks)  # fmt: skip


@pytest.mark.parametrize("lens", [[3000], [2000, 40, 0, 1], [129] * 9])
def test_rows_read_in_pieces(lens: list[int]) -> None:
    queries = [min(n, 1) for n in lens]
    check(make_problem(lens, queries, heads=4, kv_heads=1, size=64, block_size=16))


def test_prefill_with_earlier_context_and_mixed_batch() -> None:
    check(make_problem([200, 130, 1, 64, 300], [130, 130, 1, 1, 5], heads=8, kv_heads=2, size=64,
                       block_size=16, dtype=torch.bfloat16))  # fmt: skip


@pytest.mark.parametrize("group", [3, 5, 7, 20])
def test_groups_that_are_no_power_of_two(group: int) -> None:
    check(make_problem([80, 33, 200], [1, 9, 30], heads=group * 2, kv_heads=2, size=64,
                       block_size=16))  # fmt: skip


def test_long_context_of_few_queries_is_split() -> None:
    problem = make_problem([2500], [40], heads=4, kv_heads=1, size=64, block_size=16)
    config = plan_config(problem.query, problem.k_cache, problem.v_cache)
    host = plan_attention(config, np.array([0, 40]), np.array([2500]))
    assert host.num_slots > 0 and len(host.small) == 0
    check(problem)


def shared_problem(dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Nine rows: all behind 256 tokens, five of them behind 272 more; one page for all copies."""
    lens = [529, 560, 600, 544, 700, 270, 257, 300, 1030]
    problem = make_problem(lens, [1] * 9, heads=8, kv_heads=2, size=64, block_size=16, dtype=dtype)
    problem.block_table[:, :16] = problem.block_table[0, :16]
    problem.block_table[:5, 16:33] = problem.block_table[0, 16:33]
    return problem


@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}, {"sinks": torch.ones(8)},
                                     {"alibi_slopes": torch.linspace(0.01, 0.05, 8)}])  # fmt: skip
def test_shared_prefixes(options: dict[str, object]) -> None:
    problem = shared_problem()
    host = plan_attention(
        plan_config(problem.query, problem.k_cache, problem.v_cache),
        problem.query_start_loc.numpy(), problem.seq_lens.numpy(), problem.block_table.numpy(),
    )  # fmt: skip
    assert sorted(node.rows.size for node in host.nodes) == [5, 9]
    check(problem, **options)


def test_one_plan_in_fixed_buffers_serves_changing_batches() -> None:
    problem = shared_problem(torch.float32)
    args = on_device(problem)
    config = plan_config(args[0], args[1], args[2])
    buffers = PlanBuffers(config, 64, 9, DEVICE, max_tiles=16)
    address = buffers.plan.small.data_ptr()
    for step, shared in enumerate((True, False, True)):
        if not shared:
            problem.block_table[1:] = problem.block_table[1:].flip(0)[torch.randperm(8)]
            problem.seq_lens = torch.tensor([400, 1, 0, 17, 20, 256, 257, 100, 33]).int()
        problem.seq_lens[0] += step
        host = plan_attention(
            buffers.config, problem.query_start_loc.numpy(), problem.seq_lens.numpy(),
            problem.block_table.numpy(),
        )  # fmt: skip
        assert buffers.fits(host)
        buffers.load(host)
        assert buffers.plan.small.data_ptr() == address
        check(problem, plan=buffers)
        assert not buffers.workspace.counters.any()


def test_a_plan_that_does_not_fit_is_refused() -> None:
    problem = shared_problem()
    config = plan_config(problem.query, problem.k_cache, problem.v_cache)
    host = plan_attention(config, np.arange(10), problem.seq_lens.numpy(),
                          problem.block_table.numpy())  # fmt: skip
    buffers = PlanBuffers(config, 64, 9, DEVICE, max_tiles=0)
    with pytest.raises(ConfigError, match="does not fit"):
        buffers.load(host)


def test_wide_rows_of_the_table_and_a_head_major_cache() -> None:
    problem = make_problem([50, 20], [1, 4], heads=4, kv_heads=2, size=64, block_size=16)
    problem.k_cache = problem.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    problem.v_cache = problem.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(2, 100, dtype=torch.int32)
    wide[:, : problem.block_table.shape[1]] = problem.block_table
    problem.block_table = wide[:, :6]
    check(problem)


@pytest.mark.parametrize("scale", ["tensor", "head"])
def test_fp8_cache(scale: str) -> None:
    problem = make_problem([40, 17, 300], [1, 3, 1], heads=8, kv_heads=2, size=64, block_size=16,
                           dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)  # fmt: skip
    factor = torch.tensor([0.5, 2.0]) if scale == "head" else torch.tensor([0.7])
    check(problem, k_scale=factor, v_scale=factor * 3)


def test_plan_is_reusable_across_layers() -> None:
    problem = make_problem([2000, 40], [1, 1], heads=4, kv_heads=1, size=64, block_size=16)
    q, k, v, *_ = on_device(problem)
    config = plan_config(q, k, v)
    host = plan_attention(config, np.array([0, 1, 2]), np.array([2000, 40]))
    plan = upload_plan(host, config, 64, DEVICE)
    check(problem, plan=plan)
    check(problem, plan=plan)


def test_layouts_that_cannot_work_are_refused() -> None:
    problem = make_problem([5], [1], heads=2, kv_heads=1, size=64, block_size=16)
    q, k, v, table, starts, lens = on_device(problem)
    with pytest.raises(ConfigError, match="not int32"):
        paged_attention(q, k, v, table.long(), starts, lens, scale=1.0)
    with pytest.raises(ConfigError, match="last dimension of k_cache"):
        paged_attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, table, starts, lens,
                        scale=1.0)  # fmt: skip

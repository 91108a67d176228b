"""FlashInfer and FlashAttention through the adapters, on stand-ins that check their arguments.

Unused slots and the null block are NaN, so a wrong page, length or order shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import library_stand_ins as libraries
import numpy as np
import pytest
import torch
from paged_cases import Problem, make_problem

from blocktable.attention import paged_attention
from blocktable.attention.adapters import ADAPTERS, Batch, Tables, kind_of
from blocktable.attention.adapters.flashinfer import workspace_bytes
from blocktable.attention.reference import paged_attention_reference
from blocktable.core.errors import ConfigError

BUILDS = {
    "flashinfer": ("flashinfer", 16),
    "flash_attn_interface": ("flash_attn", 16),
    "vllm": ("flash_attn", 16),
    "flash_attn": ("flash_attn", 256),
}
"""What is installed -> the adapter's name, the smallest pages it takes."""


@pytest.fixture(params=BUILDS)
def build(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, int]:
    libraries.install(monkeypatch, request.param, folder=tmp_path)
    return BUILDS[request.param]


def expected(problem: Problem, **options: Any) -> torch.Tensor:
    want = paged_attention_reference(*problem.args(), scale=0.21, **options).out
    return torch.from_numpy(want).to(problem.query.dtype)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "a window of one key": {"sliding_window": 1},
    "softcap": {"softcap": 3.0},
    "both": {"sliding_window": 300, "softcap": 20.0},
}
SHAPES: dict[str, tuple[list[int], list[int]]] = {
    "ragged decode": ([1, 15, 16, 17, 600, 257, 33], [1] * 7),
    "decode with padding": ([40, 0, 7, 0], [1] * 4),
    "prefill": ([33, 9, 512], [33, 4, 100]),
    "mixed": ([70, 1, 530, 16], [30, 1, 1, 16]),
    "rows of length 0 among others": ([20, 0, 31, 0], [4, 3, 1, 2]),
    "one token": ([1], [1]),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_a_call_by_name(
    build: tuple[str, int], shape: tuple[list[int], list[int]], options: dict[str, Any],
    heads: tuple[int, int],
) -> None:  # fmt: skip
    name, page = build
    problem = make_problem(
        *shape, heads=heads[0], kv_heads=heads[1], size=64, block_size=page,
        dtype=torch.bfloat16, seed=3, pad_tokens=2,
    )  # fmt: skip
    got = paged_attention(*problem.args(), scale=0.21, backend=name, **options)
    torch.testing.assert_close(got, expected(problem, **options), rtol=0, atol=0)


def test_into_a_given_output(build: tuple[str, int]) -> None:
    name, page = build
    problem = make_problem([9, 20], [2, 1], heads=4, kv_heads=2, size=64, block_size=page,
                           dtype=torch.float16)  # fmt: skip
    out = torch.full_like(problem.query, 7.0)
    got = paged_attention(*problem.args(), scale=0.21, backend=name, out=out)
    assert got is out
    torch.testing.assert_close(out, expected(problem), rtol=0, atol=0)


def scattered_tables(problem: Problem, rng: np.random.Generator) -> tuple[Tables, np.ndarray]:
    """The problem's rows at random places of a larger table; the other rows name a page past the
    cache, which must never be read."""
    live = problem.block_table.numpy()
    rows = rng.permutation(3 * len(live))[: len(live)].astype(np.int32)
    host = np.full((3 * len(live), live.shape[1]), 1 << 20, np.int32)
    host[rows] = live
    return Tables(host, torch.from_numpy(host.copy())), rows


def test_graph_buffers_keep_their_addresses_and_pad_with_zeros(build: tuple[str, int]) -> None:
    """One plan object, loaded with a batch after another, as a captured graph sees it."""
    name, page = build
    rng = np.random.default_rng(4)
    size = 6
    kind = plan = None
    for step, lens in enumerate([[5, 700, 16, 1], [6, 701], [9], [2 * page, 40, 3, 8, 1, 300]]):
        problem = make_problem(
            lens, [1] * len(lens), heads=4, kv_heads=2, size=64, block_size=page,
            dtype=torch.bfloat16, seed=step, pad_tokens=size - len(lens),
        )  # fmt: skip
        tables, rows = scattered_tables(problem, rng)
        if kind is None or plan is None:
            kind = kind_of(problem.query, problem.k_cache, problem.v_cache, scale=0.21)
            room = np.zeros((3 * size, 64), np.int32)
            held = Tables(room, torch.from_numpy(room.copy()))
            buffers = ADAPTERS[name].planner(kind, held, size, {}).buffers(size)
            plan = buffers.plan
        held.host[:] = 1 << 20
        held.host[: len(tables.host), : tables.host.shape[1]] = tables.host
        held.device.copy_(torch.from_numpy(held.host))
        batch = Batch.decode(rows, np.array(lens, np.int32), size)
        assert buffers.fits(batch) and not buffers.fits(batch._replace(lens=batch.lens[:-1]))
        buffers.load(batch)
        assert buffers.plan is plan
        got = plan.attend(problem.query, problem.k_cache, problem.v_cache)
        torch.testing.assert_close(got, expected(problem), rtol=0, atol=0)


def test_steps_outside_graphs_through_a_larger_table(build: tuple[str, int]) -> None:
    """The planner makes a plan a step: decode, prefill, decode."""
    name, page = build
    rng = np.random.default_rng(8)
    for queries in ([1, 1, 1], [4, 30, 1], [1, 1, 1]):
        problem = make_problem([70, 31, 500], queries, heads=4, kv_heads=2, size=64,
                               block_size=page, dtype=torch.float16, pad_tokens=1)  # fmt: skip
        tables, rows = scattered_tables(problem, rng)
        kind = kind_of(problem.query, problem.k_cache, problem.v_cache, scale=0.21)
        planner = ADAPTERS[name].planner(kind, tables, 4, {})
        for _ in range(2):
            batch = Batch(rows, problem.query_start_loc.numpy(), problem.seq_lens.numpy(),
                          problem.query.shape[0])  # fmt: skip
            plan = planner.plan(batch)
            got = paged_attention(*problem.args(), scale=0.21, plan=plan)
            torch.testing.assert_close(got, expected(problem), rtol=0, atol=0)


def test_float32_queries_over_a_16_bit_plan(build: tuple[str, int]) -> None:
    """As of a model that rotates its queries in float32: answered in float32."""
    name, page = build
    problem = make_problem([9, 20], [2, 1], heads=4, kv_heads=2, size=64, block_size=page,
                           dtype=torch.float16)  # fmt: skip
    kind = kind_of(problem.query, problem.k_cache, problem.v_cache, scale=0.21)
    table = problem.block_table
    planner = ADAPTERS[name].planner(kind, Tables(table.numpy(), table), 2, {})
    plan = planner.plan(Batch(np.arange(2, dtype=np.int32), problem.query_start_loc.numpy(),
                              problem.seq_lens.numpy(), 3))  # fmt: skip
    _, *rest = problem.args()
    got = paged_attention(problem.query.float(), *rest, scale=0.21, plan=plan)
    torch.testing.assert_close(got, expected(problem).float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"scale": 0.3}, "scale"), ({"softcap": 2.0}, "softcap"), ({"sliding_window": 8}, "window"),
     ({"return_lse": True}, "return_lse")],
)  # fmt: skip
def test_a_plan_refuses_calls_it_was_not_made_for(
    build: tuple[str, int], asked: dict[str, Any], named: str
) -> None:
    name, page = build
    problem = make_problem([9], [1], heads=4, kv_heads=2, size=64, block_size=page,
                           dtype=torch.float16)  # fmt: skip
    kind = kind_of(problem.query, problem.k_cache, problem.v_cache, scale=0.21)
    table = problem.block_table
    planner = ADAPTERS[name].planner(kind, Tables(table.numpy(), table), 1, {})
    plan = planner.plan(Batch(np.zeros(1, np.int32), problem.query_start_loc.numpy(),
                              problem.seq_lens.numpy(), 1))  # fmt: skip
    with pytest.raises(ConfigError, match=named):
        paged_attention(*problem.args(), plan=plan, **{"scale": 0.21, **asked})


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [({}, {"sinks": torch.zeros(4)}, "sinks"), ({}, {"alibi_slopes": torch.zeros(4)}, "alibi"),
     ({}, {"chunk": 8}, "chunked"), ({}, {"causal": False}, "not causal"),
     ({}, {"k_scale": 2.0}, "cache of"), ({}, {"num_sink_tokens": 2}, "first tokens"),
     ({"dtype": torch.float32}, {}, "float32"), ({"size": 80}, {}, "size 80"),
     ({"size": 64, "size_v": 32}, {}, "values of size 32"),
     ({"cache_dtype": torch.float8_e4m3fn}, {}, "float8")],
)  # fmt: skip
def test_what_the_libraries_cannot_do_is_refused_with_the_reason(
    build: tuple[str, int], shape: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    name, page = build
    problem = make_problem(
        [9], [1], **{"heads": 4, "kv_heads": 2, "size": 64, "block_size": page,
                     "dtype": torch.bfloat16, **shape},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=reason):
        paged_attention(*problem.args(), scale=0.21, backend=name, **options)


@pytest.mark.parametrize(("name", "page"), [("flash_attn", 16), ("vllm", 8)])
def test_page_sizes_a_build_does_not_take(
    name: str, page: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    libraries.install(monkeypatch, name, folder=tmp_path)
    problem = make_problem([9], [1], heads=4, kv_heads=2, size=64, block_size=page,
                           dtype=torch.float16)  # fmt: skip
    with pytest.raises(ConfigError, match=f"pages of a multiple of {BUILDS[name][1]}"):
        paged_attention(*problem.args(), scale=1.0, backend="flash_attn")


def test_not_installed_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)
    problem = make_problem([9], [1], heads=4, kv_heads=2, size=64, block_size=16,
                           dtype=torch.float16)  # fmt: skip
    for name, text in (
        ("flashinfer", "not installed"),
        ("flash_attn", "not installed"),
        ("xformers", "'xformers'; libraries are flashinfer, flash_attn"),
    ):
        with pytest.raises(ConfigError, match=text):
            paged_attention(*problem.args(), scale=1.0, backend=name)
    assert [adapter.versions() for adapter in ADAPTERS.values()] == [None, None]


def test_the_best_build_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from blocktable.attention.adapters.flash_attention import installed_builds

    libraries.install(monkeypatch, "flash_attn_interface", "vllm", "flash_attn", folder=tmp_path)
    titles = [build.title.split()[0] for build in installed_builds()]
    assert titles == ["flash_attn_interface", "vllm_flash_attn", "flash_attn"]


def test_workspace_of_flashinfer_holds_its_largest_graph() -> None:
    """By hand: 1024 rows, 32/8 heads of 128: 1024 * 4 / 16 + 1023 tiles of 16 rows, 129 floats a
    row and head."""
    query, cache = torch.zeros(1, 32, 128, dtype=torch.float16), torch.zeros(1, 8, 16, 128)
    kind = kind_of(query, cache.half(), cache.half(), scale=1.0)
    assert workspace_bytes(kind, 1024, 132) == 1279 * 16 * 32 * 129 * 4 + (1 << 20)
    assert workspace_bytes(kind, 1, 132) == 128 << 20

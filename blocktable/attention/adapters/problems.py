"""Random steps of a kind of layer: what a candidate must get right, and what it is timed on.

All steps lie in one small cache whose null block and unused slots are NaN, as a step that went
wrong may leave them: a library that lets those reach a live output is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from blocktable.attention.adapters.kind import Batch, LayerKind, Tables

_KEYS = 128 << 20
"""Bytes of keys, and as many of values: together more than a GPU's cache holds."""
_ROWS = 32

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Problem(NamedTuple):
    """One step on the device."""

    query: torch.Tensor  # [T, Hq, D]
    k_cache: torch.Tensor  # [N, Hkv, bs, D]
    v_cache: torch.Tensor  # [N, Hkv, bs, D]
    tables: Tables
    batch: Batch


def make_problems(
    kind: LayerKind, device: torch.device, *, key_bytes: int = _KEYS
) -> dict[str, Problem]:
    """Steps by name: "decode" (32 ragged rows, one of them padding), "prefill" (a chunk of a long
    prompt and a whole short one) and "mixed" (a chunk beside decoding rows)."""
    per_token = kind.num_kv_heads * kind.head_size * kind.cache_dtype.itemsize
    tokens = min(max(key_bytes // per_token, 16 * _ROWS), 4096 * _ROWS)
    rng = np.random.default_rng(7)
    mean = tokens // _ROWS
    lens = np.maximum(rng.integers(mean // 2, 3 * mean // 2, _ROWS), 2).astype(np.int32)
    lens[:2] = (mean, min(2 * mean, 4096))
    chunk = min(1024, int(lens[0]) // 2 + 1)
    k_cache, v_cache, tables = _cache(kind, lens, rng, device)
    rows = np.arange(_ROWS, dtype=np.int32)
    some, many = rows[:2], rows[:17]
    one_long = np.array([chunk, *([1] * (len(many) - 1))])
    batches = {
        "decode": Batch.decode(rows[:-1], lens[:-1], _ROWS),
        "prefill": _batch(some, np.array([chunk, int(lens[1])]), lens[some]),
        "mixed": _batch(many, one_long, lens[many]),
    }
    generator = torch.Generator(device=device).manual_seed(7)
    problems = {}
    for name, batch in batches.items():
        shape = (batch.num_tokens, kind.num_heads, kind.head_size)
        query = torch.randn(shape, generator=generator, device=device).to(kind.dtype)
        problems[name] = Problem(query, k_cache, v_cache, tables, batch)
    return problems


def _batch(rows: np.ndarray, counts: np.ndarray, lens: np.ndarray) -> Batch:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(rows, starts, lens.astype(np.int32), int(starts[-1]))


def _cache(
    kind: LayerKind, lens: np.ndarray, rng: np.random.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    size = kind.block_size
    counts = -(-lens // size)
    blocks = 1 + int(counts.sum())
    ids = rng.permutation(np.arange(1, blocks)).astype(np.int32)
    table = np.zeros((len(lens), int(counts.max()) + 1), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = ids
    generator = torch.Generator(device=device).manual_seed(3)
    shape = (blocks, 2, kind.num_kv_heads, size, kind.head_size)
    cache = torch.empty(shape, dtype=kind.cache_dtype, device=device)
    for part in cache.split(max(1, blocks // 16)):  # random numbers come in float32
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    cache[0] = float("nan")
    for last, used in zip(table[np.arange(len(lens)), counts - 1], (lens - 1) % size + 1,
                          strict=True):  # fmt: skip
        cache[int(last), :, :, int(used) :] = float("nan")
    return cache[:, 0], cache[:, 1], Tables(table, torch.from_numpy(table).to(device))


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``want``, the worst token's; infinite where
    ``got`` has numbers that are not finite."""
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    apart = (got.float() - want.float()).flatten(1).norm(dim=1)
    size = want.float().flatten(1).norm(dim=1)
    return float((apart / torch.where(size > 0, size, torch.ones_like(size))).max())


def microseconds(run: Callable[[], object], *, repeats: int = 7) -> float:
    """Best time of one run on the GPU: replays of a CUDA graph, so that no launch counts."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles and allocates outside the graph
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 3)
    return min(times)

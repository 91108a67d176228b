"""Runs :mod:`numba_kernels` on torch tensors: views, work items and threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.attention.cpu import numba_kernels
from blocktable.attention.options import AttentionOptions
from blocktable.attention.reference import per_head

_CODE_VIEW = {2: torch.uint16, 1: torch.uint8}


@lru_cache(maxsize=8)
def _code_table(dtype: torch.dtype) -> NDArray[np.float32]:
    """Float32 value of every bit pattern of an 8 or 16 bit dtype."""
    view = _CODE_VIEW[dtype.itemsize]
    codes = np.arange(1 << (8 * dtype.itemsize), dtype=f"uint{8 * dtype.itemsize}")
    return torch.from_numpy(codes).view(view).view(dtype).float().numpy()


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="blocktable-attention")


def work_items(starts: NDArray, lens: NDArray, kv_heads: int, group: int) -> NDArray[np.int64]:
    """(row, kv head, first token, tokens) of every tile of queries, padded rows left out."""
    tile = max(1, numba_kernels.TILE_ROWS // group)
    counts = np.where(lens > 0, np.diff(starts), 0)
    tiles = -(-counts // tile)
    row = np.repeat(np.arange(lens.size), tiles)
    index = np.arange(row.size) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    token = starts[row] + index * tile
    tokens = np.minimum(tile, starts[row + 1] - token)
    items = np.empty((row.size, kv_heads, 4), np.int64)
    items[:, :, 0], items[:, :, 1] = row[:, None], np.arange(kv_heads)
    items[:, :, 2], items[:, :, 3] = token[:, None], tokens[:, None]
    return items.reshape(-1, 4)


def _split_by_cost(items: NDArray[np.int64], lens: NDArray, parts: int) -> list[NDArray]:
    """Cut items into runs of about equal cost (keys x query rows)."""
    cost = np.cumsum(lens[items[:, 0]] * (4 + items[:, 3]))
    cuts = np.searchsorted(cost, cost[-1] * np.arange(1, parts) / parts) if items.size else []
    return [run for run in np.split(items, cuts) if run.size]


def _run_shared(runs: list[NDArray], threads: int, arguments: tuple[object, ...]) -> None:
    """The caller and helper threads take runs of items until none is left.

    The caller works too: a helper may be kept waiting by the OpenMP team of the last torch operator
    that still spins on its core, and then does fewer runs.
    """
    queue = iter(runs)

    def take() -> None:
        for run in queue:  # next() of a list iterator is atomic
            numba_kernels.attend_items(run, *arguments)

    helpers = min(threads, len(runs)) - 1
    waiting = [_threads(threads).submit(take) for _ in range(helpers)] if helpers > 0 else []
    take()
    for helper in waiting:
        if not helper.cancel():
            helper.result()


def _cache_view(cache: torch.Tensor) -> NDArray:
    if cache.dtype == torch.float32:
        return cache.detach().numpy()
    return cache.detach().view(_CODE_VIEW[cache.dtype.itemsize]).numpy()


def attend(
    arrays: tuple[torch.Tensor, ...], options: AttentionOptions, *,
    sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None, k_scale: object,
    v_scale: object, out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, Hq, Dv] (any float dtype) and ``lse`` [T, Hq]; arguments are checked.

    arrays: query, k_cache, v_cache, block_table, query_start_loc, seq_lens.
    """
    query, k_cache, v_cache, block_table, query_start_loc, seq_lens = arrays
    starts = query_start_loc.numpy().astype(np.int64)
    lens = seq_lens.numpy().astype(np.int64)
    kv_heads = k_cache.shape[1]
    items = work_items(starts, lens, kv_heads, query.shape[1] // kv_heads)
    coded = k_cache.dtype != torch.float32
    result = np.zeros(out.shape, np.float32)
    denominators = np.full(out.shape[:2], -np.inf, np.float32)
    none = np.empty(0, np.float32)
    arguments = (
        query.detach().float().numpy(), _cache_view(k_cache), _cache_view(v_cache),
        block_table.numpy(), starts, lens, coded,
        _code_table(k_cache.dtype) if coded else none,
        np.float32(options.scale), options.causal, options.sliding_window or 0,
        options.num_sink_tokens, options.chunk or 0, np.float32(options.softcap or 0),
        none if sinks is None else sinks.detach().float().numpy(),
        none if alibi_slopes is None else alibi_slopes.detach().float().numpy(),
        per_head(k_scale, kv_heads, 1.0).astype(np.float32),
        per_head(v_scale, kv_heads, 1.0).astype(np.float32),
        result, denominators,
    )  # fmt: skip
    threads = torch.get_num_threads()
    _run_shared(_split_by_cost(items, lens, 4 * threads), threads, arguments)
    out.copy_(torch.from_numpy(result))
    if lse is not None:
        lse.copy_(torch.from_numpy(denominators))

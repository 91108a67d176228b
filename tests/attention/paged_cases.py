"""Random paged attention problems whose unused slots are poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class Problem:
    """Arguments of one paged_attention call over a cache full of NaN outside the live slots."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return (
            self.query, self.k_cache, self.v_cache, self.block_table, self.query_start_loc,
            self.seq_lens,
        )  # fmt: skip


def make_problem(
    seq_lens: list[int], query_lens: list[int], *, heads: int, kv_heads: int, size: int,
    block_size: int, size_v: int | None = None, dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None, seed: int = 0, pad_tokens: int = 0,
) -> Problem:  # fmt: skip
    """Blocks are dealt in random order; the cache is one [N, 2, Hkv, bs, D] tensor if D == Dv."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    size_v = size if size_v is None else size_v
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(counts) + 2
    ids = rng.permutation(np.arange(1, num_blocks))
    table = np.zeros((len(seq_lens), max([*counts, 1]) + 2), np.int32)
    cache_dtype = cache_dtype or dtype
    if size == size_v:
        pair = torch.full((num_blocks, 2, kv_heads, block_size, size), float("nan"))
        k, v = pair[:, 0], pair[:, 1]
    else:
        k = torch.full((num_blocks, kv_heads, block_size, size), float("nan"))
        v = torch.full((num_blocks, kv_heads, block_size, size_v), float("nan"))
    taken = 0
    for row, length in enumerate(seq_lens):
        table[row, : counts[row]] = ids[taken : taken + counts[row]]
        taken += counts[row]
        at = np.arange(length)
        blocks = torch.from_numpy(table[row, at // block_size].astype(np.int64))
        offsets = torch.from_numpy(at % block_size)
        k[blocks, :, offsets] = torch.randn(length, kv_heads, size, generator=generator)
        v[blocks, :, offsets] = torch.randn(length, kv_heads, size_v, generator=generator)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    tokens = int(starts[-1]) + pad_tokens
    query = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    if size == size_v:
        pair = pair.to(cache_dtype)
        k, v = pair[:, 0], pair[:, 1]
    return Problem(
        query, k.to(cache_dtype), v.to(cache_dtype), torch.from_numpy(table),
        torch.from_numpy(starts), torch.tensor(seq_lens, dtype=torch.int32),
    )  # fmt: skip

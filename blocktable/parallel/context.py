"""Context parallelism: the KV of one sequence dealt out to ranks, attention merged across them.

::

    interleave 2, 2 ranks    position  0 1 2 3 4 5 6 7 8
                             rank      0 0 1 1 0 0 1 1 0
                             local     0 1 0 1 2 3 2 3 4

Each rank attends to the keys it owns and gives its output with the logarithm of its softmax's
denominator (lse); the ranks' outputs are joined by

    out = sum_r exp(lse_r - lse) * out_r,   lse = log(sum_r exp(lse_r))

which is what one rank with all the keys computes. Where keys lie is `SlotGeometry`'s word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.geometry import SlotGeometry
from blocktable.core.protocols import Communicator


def local_lengths(num_tokens: NDArray, geometry: SlotGeometry) -> NDArray[np.int32]:
    """How many of the first ``num_tokens`` positions this rank owns; int32, same shape."""
    tokens = np.asarray(num_tokens, np.int64)
    period = geometry.cp_world * geometry.cp_interleave
    rest = tokens % period - geometry.cp_rank * geometry.cp_interleave
    own = tokens // period * geometry.cp_interleave + rest.clip(0, geometry.cp_interleave)
    return own.astype(np.int32)


def merge_by_lse(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join partial attention outputs [T, H, D] with lse float32 [T, H] over disjoint keys.

    A part that saw no key has lse -inf and adds nothing; where no part saw one the output is 0.
    Returns the output in the parts' dtype and the joint lse.
    """
    lse = torch.stack(list(lses)).float()
    total = torch.logsumexp(lse, dim=0)
    safe = torch.where(torch.isinf(total), torch.zeros_like(total), total)
    weights = torch.exp(lse - safe).unsqueeze(-1)
    stacked = torch.stack([out.float() for out in outputs])
    merged = torch.where(weights > 0, stacked * weights, torch.zeros_like(stacked)).sum(0)
    return merged.to(outputs[0].dtype), total


def context_parallel_attention(
    query: torch.Tensor,  # [T, Hq, D], the same on every rank
    k_cache: torch.Tensor,  # [N, Hkv, block_size, D], this rank's part
    v_cache: torch.Tensor,  # [N, Hkv, block_size, Dv]
    block_table: torch.Tensor,  # int32 [n, W], this rank's
    query_start_loc: NDArray,  # int32 [n + 1], on the host
    seq_lens: NDArray,  # int32 [n], whole sequences, on the host
    *,
    geometry: SlotGeometry,
    communicator: Communicator,
    attend: Callable[..., Any],
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention [T, Hq, Dv] over KV that is spread over the ranks, equal on every rank.

    ``attend`` is a `paged_attention`. A query at position p sees the keys this rank owns up to p,
    which is one length for each token, so each token is handed to ``attend`` as a request of one
    query. Cost: one gather of the outputs and lse over the ranks.
    """
    starts, lens = np.asarray(query_start_loc, np.int64), np.asarray(seq_lens, np.int64)
    counts = starts[1:] - starts[:-1]
    owner = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(int(counts.sum())) - np.repeat(starts[:-1], counts)
    visible = np.repeat(lens - counts, counts) + offset + 1
    own = torch.from_numpy(local_lengths(visible, geometry)).to(query.device)
    rows = block_table[torch.from_numpy(owner).to(block_table.device)]
    single = torch.arange(len(owner) + 1, dtype=torch.int32, device=query.device)
    out, lse = attend(
        query, k_cache, v_cache, rows, single, own, scale=scale, causal=False, softcap=softcap,
        return_lse=True,
    )  # fmt: skip
    lse = torch.where((own == 0)[:, None], torch.full_like(lse, float("-inf")), lse)
    outputs = communicator.all_gather(out.float())
    merged, _ = merge_by_lse(outputs, communicator.all_gather(lse.contiguous()))
    return merged.to(query.dtype)

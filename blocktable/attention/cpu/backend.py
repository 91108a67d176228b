"""Chooses the CPU back end and checks what a call hands it."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from blocktable.attention.options import AttentionOptions, AttentionOutput, check_shapes
from blocktable.attention.reference import paged_attention_reference, per_head
from blocktable.core.errors import ConfigError

BackendName = Literal["native", "numba", "reference"]


def backend_name() -> BackendName:
    """The back end in force: BLOCKTABLE_CPU_KERNEL, else the fastest one that is there."""
    name = os.environ.get("BLOCKTABLE_CPU_KERNEL", "numba")
    if name not in ("native", "numba", "reference"):
        raise ConfigError(
            f"BLOCKTABLE_CPU_KERNEL is {name!r}; it may be native, numba or reference"
        )
    return name  # type: ignore[return-value]


def _check_rows(
    query: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, causal: bool,
) -> None:  # fmt: skip
    """Raise ConfigError where the lengths do not fit the batch, the table or the cache."""
    counts = query_start_loc.diff()
    rows, capacity = seq_lens.shape[0], block_table.shape[1] * k_cache.shape[2]
    if int(query_start_loc[0]) < 0 or int(query_start_loc[-1]) > query.shape[0]:
        raise ConfigError(
            f"query_start_loc spans {int(query_start_loc[0])}..{int(query_start_loc[-1])} "
            f"of {query.shape[0]} query tokens"
        )
    live = seq_lens > 0
    bad = (counts < 0) | (seq_lens < 0) | (seq_lens > capacity)
    if causal:
        bad |= live & (counts > seq_lens)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ConfigError(
            f"row {row} has {int(counts[row])} query tokens and seq_len {int(seq_lens[row])}; its "
            f"table holds {capacity} positions"
        )
    if rows and live.any():
        entries = torch.arange(block_table.shape[1])[None] * k_cache.shape[2] < seq_lens[:, None]
        wrong = entries & ((block_table[:rows] < 0) | (block_table[:rows] >= k_cache.shape[0]))
        if bool(wrong.any()):
            row, entry = (int(x) for x in wrong.nonzero()[0])
            raise ConfigError(
                f"block table row {row} entry {entry} is {int(block_table[row, entry])}, outside "
                f"the cache of {k_cache.shape[0]} blocks"
            )


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: Any = None,
) -> torch.Tensor | AttentionOutput:
    """:func:`blocktable.attention.paged_attention` for CPU tensors."""
    check_shapes(query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
    options = AttentionOptions(
        scale=scale, causal=causal, sliding_window=sliding_window, chunk=chunk, softcap=softcap
    )
    _check_rows(query, k_cache, block_table, query_start_loc, seq_lens, causal)
    if out is None:
        out = query.new_empty((*query.shape[:2], v_cache.shape[3]))
    lse = torch.empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    if backend_name() == "reference":
        result = paged_attention_reference(
            query, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale=scale,
            causal=causal, sliding_window=sliding_window, chunk=chunk, softcap=softcap,
            sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        out.copy_(torch.from_numpy(result.out))
        if lse is not None:
            lse.copy_(torch.from_numpy(result.lse))
    else:
        from blocktable.attention.cpu import numba_backend

        numba_backend.attend(
            query, k_cache, v_cache, block_table, query_start_loc, seq_lens, options, sinks=sinks,
            alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
        )  # fmt: skip
    return out if lse is None else AttentionOutput(out, lse)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """:func:`blocktable.attention.write_kv` for CPU tensors."""
    blocks_total, kv_heads, block_size = k_cache.shape[:3]
    if slot_mapping.numel() and int(slot_mapping.max()) >= blocks_total * block_size:
        raise ConfigError(
            f"slot {int(slot_mapping.max())} is outside a cache of {blocks_total} blocks of "
            f"{block_size}"
        )
    live = (slot_mapping >= 0).nonzero().flatten()
    blocks = slot_mapping[live] // block_size
    offsets = slot_mapping[live] % block_size
    for source, cache, factor in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        stored = source[: slot_mapping.shape[0]][live]
        if factor is not None:
            factors = torch.from_numpy(per_head(factor, kv_heads, 1.0)).float()
            stored = stored.float() / factors[:, None]
        cache[blocks, :, offsets] = stored.to(cache.dtype)

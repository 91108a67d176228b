"""Attention over a paged KV cache: one signature, several back ends.

``paged_attention`` and ``write_kv`` take torch tensors and go to the back end of their device: CPU
tensors to :mod:`blocktable.attention.cpu`, CUDA tensors to :mod:`blocktable.attention.triton`, or
to a library that is asked for by name (:mod:`blocktable.attention.adapters`). The meaning of every
argument is that of :mod:`blocktable.attention.reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blocktable.attention.options import AttentionOptions, AttentionOutput
from blocktable.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionOptions", "AttentionOutput", "paged_attention", "write_kv"]


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    backend: str | None = None,
    plan: Any = None,
    **options: Any,
) -> torch.Tensor | AttentionOutput:
    """Attention of a ragged batch of queries over keys and values in pages, read in place.

    query: [T, Hq, D], the tokens of all requests behind each other; float32, bfloat16, float16.
    k_cache, v_cache: [N, Hkv, bs, D] and [N, Hkv, bs, Dv], any strides with the last one 1.
    block_table: int32 [n, W]; entry j of a row is the block of positions j*bs .. j*bs+bs-1.
    query_start_loc: int32 [n + 1]; tokens of row i are query_start_loc[i] .. query_start_loc[i+1],
        the last positions of its seq_lens[i]. seq_lens: int32 [n]; 0 is a padded row (zeros).
    options: causal (True), sliding_window, num_sink_tokens (on a CPU), chunk, softcap (see
        AttentionOptions), sinks [Hq], alibi_slopes [Hq], k_scale, v_scale (number, [1] or [Hkv]),
        out [T, Hq, Dv], return_lse (False).
    backend: "flashinfer" or "flash_attn" for that library, where it is installed; None for ours.
    plan: the step's work made ready, by a back end or a library that can; its maker runs it.

    Returns out [T, Hq, Dv] in the query's dtype, or AttentionOutput with ``return_lse``. Raises
    ConfigError for arrays that do not fit each other, and for a library that is not installed or
    cannot serve such a layer. Cost: one read of the live K and V.
    """
    if hasattr(plan, "attend"):
        from blocktable.attention.adapters import attend_planned

        return attend_planned(plan, query, k_cache, v_cache, scale=scale, **options)
    arrays = (query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
    if backend is not None:
        from blocktable.attention.adapters import attend_once

        return attend_once(backend, *arrays, scale=scale, **options)
    if query.is_cuda:
        if options.pop("num_sink_tokens", 0):
            raise ConfigError("num_sink_tokens is supported on the CPU only")
        from blocktable.attention.triton import paged_attention as run
    else:
        from blocktable.attention.cpu import paged_attention as run
    return run(*arrays, scale=scale, plan=plan, **options)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] in their slots (int64 [T]); -1 writes nothing.

    Stored values are divided by their scale and rounded to the cache's dtype. Raises ConfigError
    for a slot past the cache (CPU); on CUDA the kernel skips such a slot.
    """
    if key.is_cuda:
        from blocktable.attention.triton import write_kv as run
    else:
        from blocktable.attention.cpu import write_kv as run
    run(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)

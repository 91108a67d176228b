"""Paged attention in plain NumPy float64: the oracle every kernel is tested against.

Written for reading, not for speed: it walks one request and one head at a time and gathers its keys
through the block table exactly as the definition says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.attention.options import AttentionOptions, check_shapes
from blocktable.core.errors import ConfigError

Float64 = NDArray[np.float64]


class ReferenceOutput(NamedTuple):
    """Output [T, Hq, Dv] and log denominators [T, Hq], both float64."""

    out: Float64
    lse: Float64


def as_float64(array: Any) -> Float64:
    """A NumPy float64 copy of a NumPy array or of a torch tensor of any float dtype."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array, dtype=np.float64)


def _as_int64(array: Any) -> NDArray[np.int64]:
    if hasattr(array, "detach"):
        array = array.detach().cpu().numpy()
    return np.asarray(array, dtype=np.int64)


def _gather(
    cache: Any, blocks: NDArray[np.int64], head: int, offsets: NDArray[np.int64]
) -> Float64:
    """Rows [L, D] of one KV head; only these are converted, so that a cache may be huge."""
    if hasattr(cache, "detach"):
        import torch

        return as_float64(cache.detach()[torch.from_numpy(blocks), head, torch.from_numpy(offsets)])
    return as_float64(cache[blocks, head, offsets])


def per_head(value: Any, heads: int, default: float) -> Float64:
    """A scale given as None, a number, or an array [1] or [heads], as an array [heads]."""
    if value is None:
        return np.full(heads, default)
    array = as_float64(value).reshape(-1)
    if array.size not in (1, heads):
        raise ConfigError(f"a scale of {array.size} values fits neither 1 nor {heads} heads")
    return np.broadcast_to(array, (heads,)).copy()


class VisibleKeys(NamedTuple):
    """The key positions a query sees: 0 .. head - 1 (sinks) and first .. end - 1, head <= first."""

    head: int
    first: int
    end: int


def visible_keys(position: int, seq_len: int, options: AttentionOptions) -> VisibleKeys:
    """Key positions that a query at ``position`` sees in a sequence of ``seq_len``."""
    first, end = 0, min(position + 1, seq_len) if options.causal else seq_len
    if options.sliding_window is not None:
        first = max(first, position - options.sliding_window + 1)
        end = min(end, position + options.sliding_window)
    if options.chunk is not None:
        chunk_start = position // options.chunk * options.chunk
        first, end = max(first, chunk_start), min(end, chunk_start + options.chunk)
    return VisibleKeys(min(options.num_sink_tokens, first), first, max(first, end))


def _attend_row(
    query: Float64, keys: Float64, values: Float64, bias: Float64, softcap: float | None,
    sink: float | None,
) -> tuple[Float64, float]:  # fmt: skip
    """Softmax attention of one query [D] (scaled) over keys [L, D] and values [L, Dv]."""
    scores = keys @ query
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + bias
    top = max(scores.max(initial=-np.inf), -np.inf if sink is None else sink)
    if top == -np.inf:
        return np.zeros(values.shape[1]), -np.inf
    weights = np.exp(scores - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    return (weights @ values) / total, float(top + np.log(total))


def paged_attention_reference(
    query: Any, k_cache: Any, v_cache: Any, block_table: Any, query_start_loc: Any, seq_lens: Any,
    *, scale: float, causal: bool = True, sliding_window: int | None = None,
    num_sink_tokens: int = 0, chunk: int | None = None, softcap: float | None = None,
    sinks: Any = None, alibi_slopes: Any = None, k_scale: Any = None, v_scale: Any = None,
) -> ReferenceOutput:  # fmt: skip
    """Attention of ragged queries over keys and values in pages; see ``attention.paged_attention``.

    The query tokens of request i are the last ``query_start_loc[i+1] - query_start_loc[i]``
    positions of its ``seq_lens[i]``. Order of operations on a score: scale, softcap, alibi bias
    ``slope * (key position - query position)``, mask, sink (a score of its own without a value).
    Only the slots a query sees are read, so NaN anywhere else is harmless. Rows of length 0 and
    tokens behind the last row give zeros and lse -inf.
    """
    check_shapes(query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
    options = AttentionOptions(
        scale=scale, causal=causal, sliding_window=sliding_window,
        num_sink_tokens=num_sink_tokens, chunk=chunk, softcap=softcap,
    )  # fmt: skip
    q = as_float64(query)
    table, starts, lens = _as_int64(block_table), _as_int64(query_start_loc), _as_int64(seq_lens)
    heads, kv_heads, block_size = q.shape[1], k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    k_factor, v_factor = per_head(k_scale, kv_heads, 1.0), per_head(v_scale, kv_heads, 1.0)
    sink = None if sinks is None else as_float64(sinks)
    slopes = np.zeros(heads) if alibi_slopes is None else as_float64(alibi_slopes)
    out = np.zeros((q.shape[0], heads, v_cache.shape[3]))
    lse = np.full((q.shape[0], heads), -np.inf)
    for row in range(lens.size):
        seq_len, first_token = int(lens[row]), int(starts[row])
        count = int(starts[row + 1]) - first_token
        if seq_len == 0:
            continue
        for i in range(count):
            position = seq_len - count + i
            head_end, first, end = visible_keys(position, seq_len, options)
            positions = np.concatenate([np.arange(head_end), np.arange(first, end)])
            blocks, offsets = table[row, positions // block_size], positions % block_size
            for head in range(heads):
                kv = head // group
                out[first_token + i, head], lse[first_token + i, head] = _attend_row(
                    q[first_token + i, head] * scale * k_factor[kv],
                    _gather(k_cache, blocks, kv, offsets),
                    _gather(v_cache, blocks, kv, offsets) * v_factor[kv],
                    slopes[head] * (positions - position),
                    softcap,
                    None if sink is None else float(sink[head]),
                )
    return ReferenceOutput(out, lse)


def write_kv_reference(
    key: Any, value: Any, k_cache: Float64, v_cache: Float64, slot_mapping: Any,
    k_scale: Any = None, v_scale: Any = None,
) -> None:  # fmt: skip
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] at their slots in place; slot -1 writes nothing.

    A stored value is the given one divided by its scale.
    """
    k, v, slots = as_float64(key), as_float64(value), _as_int64(slot_mapping)
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    k_factor, v_factor = per_head(k_scale, kv_heads, 1.0), per_head(v_scale, kv_heads, 1.0)
    live = np.flatnonzero(slots >= 0)
    blocks, offsets = slots[live] // block_size, slots[live] % block_size
    k_cache[blocks, :, offsets] = k[live] / k_factor[:, None]
    v_cache[blocks, :, offsets] = v[live] / v_factor[:, None]

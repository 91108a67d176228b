"""Paged attention on a CPU without a C++ compiler: the same pass over the pages, in Numba.

One work item is a tile of query tokens of one request for one KV head; it walks the request's pages
once, with an online softmax, and all query heads of the group share each page it reads. Threads are
Python threads over functions that release the GIL, so no second OpenMP runtime comes in. The first
call of each dtype compiles for 2-4 s; the result is cached on disk.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

TILE_ROWS = 32
"""Most query rows (tokens x group) of a work item: K and V of a page are read once for them."""

_FAST = {"reassoc", "contract", "nsz", "arcp"}  # not nnan/ninf: -inf marks masked scores


@njit(nogil=True, cache=True, fastmath=_FAST, inline="always")
def _visible(position, seq_len, causal, window, sink_tokens, chunk):
    first, end = 0, seq_len
    if causal:
        end = min(end, position + 1)
    if window > 0:
        first = max(first, position - window + 1)
        end = min(end, position + window)
    if chunk > 0:
        start = position // chunk * chunk
        first, end = max(first, start), min(end, start + chunk)
    return min(sink_tokens, first), first, max(first, end)


@njit(nogil=True, cache=True, fastmath=_FAST)
def _score_page(q, k_page, live, codes, table, softcap, scores):
    """scores[r, j] = q[r] . k_page[j] for the ``live`` slots of a page, with softcap."""
    rows, size = q.shape
    key = np.empty(size, np.float32)
    for j in range(live[0], live[1]):
        if codes:
            for d in range(size):
                key[d] = table[int(k_page[j, d])]
        else:
            for d in range(size):
                key[d] = np.float32(k_page[j, d])
        for r in range(rows):
            total = np.float32(0)
            for d in range(size):
                total += q[r, d] * key[d]
            if softcap > 0:
                total = np.float32(softcap * math.tanh(total / softcap))
            scores[r, j] = total


@njit(nogil=True, cache=True, fastmath=_FAST)
def _absorb_page(scores, v_page, live, codes, table, top, total, acc):
    """Online softmax step: fold the live slots of one page into (top, total, acc)."""
    rows, size = acc.shape
    for r in range(rows):
        best = top[r]
        for j in range(live[0], live[1]):
            best = max(best, scores[r, j])
        if best == -np.inf:
            for j in range(live[0], live[1]):
                scores[r, j] = 0
            continue
        if best > top[r]:
            shrink = np.float32(math.exp(top[r] - best))
            total[r] *= shrink
            for d in range(size):
                acc[r, d] *= shrink
            top[r] = best
        for j in range(live[0], live[1]):
            scores[r, j] = np.float32(math.exp(scores[r, j] - best))
            total[r] += scores[r, j]
    value = np.empty(size, np.float32)
    for j in range(live[0], live[1]):
        if codes:
            for d in range(size):
                value[d] = table[int(v_page[j, d])]
        else:
            for d in range(size):
                value[d] = np.float32(v_page[j, d])
        for r in range(rows):
            weight = scores[r, j]
            for d in range(size):
                acc[r, d] += weight * value[d]


@njit(nogil=True, cache=True, fastmath=_FAST)
def attend_items(
    items, query, k_cache, v_cache, block_table, starts, lens, codes, code_table, scale, causal,
    window, sink_tokens, chunk, softcap, sinks, slopes, k_factor, v_factor, out, lse,
):  # fmt: skip
    """Run work items (row, kv head, first token, tokens) [n, 4]; writes float32 out and lse.

    ``codes``: K and V hold integer codes whose float32 values are ``code_table[code]``.
    """
    group = query.shape[1] // k_cache.shape[1]
    block_size, size_v = k_cache.shape[2], v_cache.shape[3]
    for item in range(items.shape[0]):
        row, kv, token, tokens = items[item]
        seq_len = lens[row]
        rows = tokens * group
        base = seq_len - (starts[row + 1] - starts[row]) + (token - starts[row])
        q = np.empty((rows, query.shape[2]), np.float32)
        top, total = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        head_of, first_of = np.empty(rows, np.int64), np.empty(rows, np.int64)
        end_of = np.empty(rows, np.int64)
        acc = np.zeros((rows, size_v), np.float32)
        scores = np.empty((rows, block_size), np.float32)
        for r in range(rows):
            head = kv * group + r % group
            for d in range(query.shape[2]):
                q[r, d] = query[token + r // group, head, d] * scale * k_factor[kv]
            head_of[r], first_of[r], end_of[r] = _visible(
                base + r // group, seq_len, causal, window, sink_tokens, chunk
            )
            if sinks.size:
                top[r], total[r] = sinks[head], 1
        run = first_of.min()
        for first, end in ((0, min(sink_tokens, run)), (run, end_of.max())):
            for page in range(first // block_size, (end + block_size - 1) // block_size):
                block, start = np.int64(block_table[row, page]), page * block_size
                live = (max(first - start, 0), min(end - start, block_size))
                _score_page(q, k_cache[block, kv], live, codes, code_table, softcap, scores)
                for r in range(rows):
                    slope = slopes[kv * group + r % group] if slopes.size else np.float32(0)
                    position = base + r // group
                    for j in range(live[0], live[1]):
                        key = start + j
                        scores[r, j] += slope * (key - position)
                        if key >= end_of[r] or head_of[r] <= key < first_of[r]:
                            scores[r, j] = -np.inf
                _absorb_page(scores, v_cache[block, kv], live, codes, code_table, top, total, acc)
        for r in range(rows):
            t, head = token + r // group, kv * group + r % group
            factor = v_factor[kv] / total[r] if total[r] > 0 else np.float32(0)
            for d in range(size_v):
                out[t, head, d] = acc[r, d] * factor
            lse[t, head] = top[r] + math.log(total[r]) if total[r] > 0 else -np.inf

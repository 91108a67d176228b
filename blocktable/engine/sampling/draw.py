"""Drawing one token a row from shaped logits, by inverse CDF.

Without top-k and top-p the vocabulary is walked in its own order, in two levels (runs of 128
tokens, then inside one run), so the CDF of the whole vocabulary is never written out. With them
only the most likely candidates are sorted and walked. Which way a row goes depends on its own
parameters alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_RUN = 128
_FIRST_CANDIDATES = 128
_MAX_CANDIDATES = 2048


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index drawn from each row of float64 weights; never one of weight 0. [m, K], [m] -> [m]."""
    cdf = weights.cumsum(-1)  # [m, K] float64
    target = uniform.unsqueeze(-1) * cdf[:, -1:]
    return _first_above(cdf, target, weights)


def _first_above(cdf: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """First index whose cumulated weight passes the target, at most the last one with weight."""
    index = (cdf <= target).sum(-1)
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(-1)
    return torch.minimum(index, last)


def draw_plain(logits: Tensor, uniform: Tensor, min_p: Tensor | None) -> Tensor:
    """Draw from softmax(logits), less what ``min_p`` drops.

    Args:
        logits: [m, V] float32, temperature applied; overwritten.
        uniform: [m] float64 in [0, 1).
        min_p: [m] float32, or None where no row asks for it.

    Returns:
        [m] int64 token ids. Reads the logits twice, writes them once, makes no sync.
    """
    rows, vocab = logits.shape
    logits -= logits.amax(-1, keepdim=True)
    weights = logits.exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p.unsqueeze(-1), 0.0)
    if vocab % _RUN:
        weights = F.pad(weights, (0, _RUN - vocab % _RUN))
    runs = weights.view(rows, -1, _RUN)  # [m, V / 128, 128]
    mass = runs.sum(-1, dtype=torch.float64)  # [m, V / 128]
    cdf = mass.cumsum(-1)
    target = uniform.unsqueeze(-1) * cdf[:, -1:]  # [m, 1]
    run = _first_above(cdf, target, mass).unsqueeze(-1)  # [m, 1]
    before = cdf.gather(1, run) - mass.gather(1, run)
    inside = runs.gather(1, run.unsqueeze(-1).expand(-1, -1, _RUN)).squeeze(1).double()
    index = _first_above(inside.cumsum(-1), target - before, inside)
    return run.squeeze(-1) * _RUN + index


def draw_filtered(
    logits: Tensor,
    uniform: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    largest_k: int | None,
) -> Tensor:
    """Draw after top-k, then top-p on what is left, then min-p.

    Args:
        logits: [m, V] float32, temperature applied; kept as they are.
        uniform: [m] float64.
        top_k: [m] int64, 0 for no limit. top_p, min_p: [m] float32.
        largest_k: the largest ``top_k`` if every row has one, else None (known on the host).

    Returns:
        [m] int64 token ids. On the CPU a row without top-k looks at its 128 most likely tokens,
        then 2,048, then all, until they hold ``top_p`` of the mass; a GPU sorts at once, since
        looking would cost a sync.
    """
    vocab = logits.shape[1]
    if largest_k is not None and largest_k <= _MAX_CANDIDATES:
        return _draw_candidates(logits, uniform, top_k, top_p, min_p, min(largest_k, vocab), None)
    total = torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1, dtype=torch.float64)
    if logits.device.type != "cpu":
        return _draw_candidates(logits, uniform, top_k, top_p, min_p, vocab, total)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    left = torch.arange(logits.shape[0])
    for size in (_FIRST_CANDIDATES, _MAX_CANDIDATES, vocab):
        size = min(size, vocab)
        part = (x[left] for x in (logits, uniform, top_k, top_p, min_p))
        drawn, enough = _draw_enough(*part, size, total[left])
        tokens[left[enough]] = drawn[enough]
        left = left[~enough]
        if left.numel() == 0:
            break
    return tokens


def _draw_enough(
    logits: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    size: int, total: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draw from the ``size`` most likely tokens and say for which rows they were enough."""
    values, ids = logits.topk(size, dim=-1)
    drawn = _from_sorted(values, ids, uniform, top_k, top_p, min_p, total)
    if size == logits.shape[1]:
        return drawn, torch.ones_like(top_k, dtype=torch.bool)
    mass = torch.exp(values - values[:, :1]).sum(-1, dtype=torch.float64)
    enough = ((top_k > 0) & (top_k <= size)) | ((top_k == 0) & (mass >= top_p * total))
    return drawn, enough


def _draw_candidates(
    logits: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    size: int, total: Tensor | None,
) -> Tensor:  # fmt: skip
    if size == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    else:
        values, ids = logits.topk(size, dim=-1)
    return _from_sorted(values, ids, uniform, top_k, top_p, min_p, total)


def _from_sorted(
    values: Tensor, ids: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    total: Tensor | None,
) -> Tensor:  # fmt: skip
    """Draw from candidates sorted by falling logit. ``total``: the mass of the whole row."""
    weights = kept_weights(values, top_k, top_p, min_p, total)
    return ids.gather(1, _pick(weights, uniform).unsqueeze(-1)).squeeze(-1)


def kept_weights(
    values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, total: Tensor | None
) -> Tensor:
    """Weights relative to the most likely token, 0 where a filter drops the candidate.

    ``values`` [m, K] fall along a row. A candidate survives top-p if those before it hold less
    than ``top_p`` of the mass that top-k left, so the first always survives. [m, K] float64.
    """
    places = torch.arange(values.shape[1], device=values.device)
    limit = torch.where(top_k > 0, top_k, values.shape[1]).unsqueeze(-1)
    weights = torch.exp(values - values[:, :1]).double()
    weights = torch.where(places < limit, weights, 0.0)
    cdf = weights.cumsum(-1)
    mass = cdf[:, -1] if total is None else torch.where(top_k > 0, cdf[:, -1], total)
    drop = (cdf - weights) >= (top_p * mass).unsqueeze(-1)
    drop[:, 0] = False
    drop |= weights < min_p.unsqueeze(-1)
    return weights.masked_fill(drop, 0.0)

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
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from blocktable.core.geometry import SlotGeometry
from blocktable.core.protocols import Communicator

Lengths = TypeVar("Lengths", np.ndarray, torch.Tensor)


def local_lengths(num_tokens: Lengths, geometry: SlotGeometry) -> Lengths:
    """How many of the first ``num_tokens`` positions this rank owns; int32, same shape. NumPy
    arrays, or tensors on any device (nothing waits for it)."""
    period = geometry.cp_world * geometry.cp_interleave
    rest = num_tokens % period - geometry.cp_rank * geometry.cp_interleave
    own = num_tokens // period * geometry.cp_interleave + rest.clip(0, geometry.cp_interleave)
    return own.to(torch.int32) if isinstance(own, torch.Tensor) else own.astype(np.int32)


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
    merged = torch.zeros(outputs[0].shape, dtype=torch.float32, device=total.device)
    for out, weight in zip(outputs, torch.exp(lse - safe).unsqueeze(-1), strict=True):
        merged += torch.where(weight > 0, out * weight, 0.0)  # a part without keys may hold NaN
    return merged.to(outputs[0].dtype), total


class ContextRank:
    """One rank's part in attention over KV that is dealt out to all ranks of ``communicator``.

    ``interleave`` neighbouring positions stay on one rank. Every rank must make the same calls in
    the same order, with the same queries. Cost of a layer: one gather of the ranks' outputs and
    lse, and of the merge; on a GPU both can be captured in a CUDA graph.
    """

    def __init__(self, communicator: Communicator, interleave: int = 1) -> None:
        self.communicator, self.interleave = communicator, interleave

    def geometry(self, block_size: int) -> SlotGeometry:
        """Where positions lie; ``block_size`` counts those in one rank's page. Raises ConfigError
        where the interleave does not divide it."""
        world, rank = self.communicator.world_size, self.communicator.rank
        return SlotGeometry(block_size, cp_world=world, cp_rank=rank, cp_interleave=self.interleave)

    def visible(self, positions: Lengths, geometry: SlotGeometry) -> Lengths:
        """int32, same shape: keys of this rank that a query at each position sees."""
        return local_lengths(positions + 1, geometry)

    def attend(self, back_end: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        """``back_end``, a `paged_attention`, as one over the keys of all ranks.

        It takes each query token as a request of its own, with the number of this rank's keys that
        the token sees (`visible`) as its length. Windows and chunks are refused with ValueError:
        how far back they reach is another number of own keys for each token.
        """
        return partial(self._attend, back_end)

    def _attend(
        self,
        back_end: Callable[..., Any],
        query: torch.Tensor,  # [T, Hq, D], the same on every rank
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        sliding_window: int | None = None,
        chunk: int | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if sliding_window is not None or chunk is not None:
            raise ValueError("a window cannot be dealt out: keep such layers whole on every rank")
        first = self.communicator.rank == 0  # a sink is a score like a key's: it counts once
        out, lse = back_end(
            query, k_cache, v_cache, block_table, query_start_loc, seq_lens, causal=False,
            sinks=sinks if first else None, return_lse=True, **options,
        )  # fmt: skip
        return self._join(out, lse)

    def _join(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The ranks' outputs, gathered in one message of lse and then output, and merged."""
        count = lse.numel() * lse.element_size()
        parts = self.communicator.all_gather(torch.cat([_bytes(lse), _bytes(out)]))
        lses = [part[:count].view(lse.dtype).view(lse.shape) for part in parts]
        outputs = [part[count:].view(out.dtype).view(out.shape) for part in parts]
        return merge_by_lse(outputs, lses)[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()

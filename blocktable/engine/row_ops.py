"""One-pass CPU operations on rows: RMS norm and rotary embedding, from the compiled kernels.

torch runs them as chains of 6 to 12 small operators with a temporary each: at one token that is
some 20 us a norm and 95 us a rotary embedding (SmolLM2-135M, one thread), against 3 us here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from blocktable.attention.cpu.backend import native_available

TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def row_ops_available() -> bool:
    """Whether this installation has the compiled kernels."""
    return native_available()


class _Handle(NamedTuple):
    """The kernels and the settings they are called with, looked up once."""

    rms_norm: Any
    rotate: Any
    level: int
    own_threads: bool


@lru_cache(maxsize=1)
def _handle() -> _Handle:
    from blocktable.attention.cpu import _kernels, native  # pyright: ignore

    return _Handle(_kernels.rms_norm, _kernels.rotate, native.level(), native.own_threads())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, shift: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + shift)`` over the last dimension.

    x [..., size] and weight [size] share a dtype of TYPES; computed in float32, rounded once.
    """
    size = x.shape[-1]
    kernel = _handle()
    x = x.contiguous()
    out = torch.empty_like(x)
    kernel.rms_norm(
        kernel.level, torch.get_num_threads(), kernel.own_threads, x.data_ptr(), TYPES[x.dtype],
        size, x.numel() // size, size, weight.data_ptr(), shift, eps, out.data_ptr(),
    )  # fmt: skip
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x * cos + rotate_half(x) * sin`` for x [1, H, T, D] with cos, sin [1, T, D], one dtype.

    The result is laid out in memory as x is: [T, H, D] where x is the view of a projection.
    """
    kernel = _handle()
    _, heads, tokens, size = x.shape
    _, x_head, x_token, _ = x.stride()
    out = torch.empty_like(x)  # keeps the order of the dimensions in memory
    _, out_head, out_token, _ = out.stride()
    kernel.rotate(
        kernel.level, torch.get_num_threads(), kernel.own_threads, x.data_ptr(), TYPES[x.dtype],
        x_token, x_head, cos.data_ptr(), sin.data_ptr(), cos.stride(1), tokens, heads, size,
        out.data_ptr(), out_token, out_head,
    )  # fmt: skip
    return out

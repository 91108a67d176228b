"""Shorter forwards for small modules of a transformers model on a CPU, each proven before use.

Once the matrix products are fast, the chains of small operators between them show. Modules keep
their class, their parameters and their place; only the ``forward`` of the instance is replaced, by
one that computes the same function in fewer passes:

- an RMS norm in one pass (15 -> 5 us at one token, 105 -> 32 at 512);
- an attention module whose own code runs unchanged, except that the ``apply_rotary_pos_emb`` it
  calls is the one-pass form (20 -> 7 us at one token).

Fusing the activation and the product of a gated MLP into oneDNN's products was tried and gains
0-5%: its elementwise part is small beside three products, so MLPs stay as they are.

Nothing is recognised by name alone: the new forward runs beside the old one on random input, and a
module whose results differ by more than rounding keeps the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from blocktable.engine.linear import AcceleratedLinears, accelerate_linears
from blocktable.engine.row_ops import TYPES, rms_norm, rotate, row_ops_available

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Acceleration:
    """What :func:`accelerate_model` did, and the way back (linears only if they were kept)."""

    linears: AcceleratedLinears
    fused: tuple[tuple[str, nn.Module], ...]

    def restore(self) -> None:
        """Give every fused module its class's forward back, and kept linears their place."""
        for _, module in self.fused:
            module.__dict__.pop("forward", None)
        self.linears.restore()


def accelerate_model(
    model: nn.Module, dtype: torch.dtype | None = None, *, keep: bool = False
) -> Acceleration:
    """Pack the linear layers of ``model`` and shorten the modules between them, in place.

    dtype, keep: as in :func:`accelerate_linears`. For inference on a CPU; results differ from the
    original's in rounding only. Modules that cannot be proven equal are left alone. Cost: one pass
    over the weights and a few small products per module.
    """
    with torch.no_grad():
        linears = accelerate_linears(model, dtype, keep=keep)
        fused = [(name, module) for name, module in model.named_modules() if _shorten(module)]
    return Acceleration(linears, tuple(fused))


def _shorten(module: nn.Module) -> bool:
    """Give ``module`` a shorter forward if one is known and proven; True if it has one now."""
    if "forward" in module.__dict__ or module.training:
        return False
    if type(module).__name__.endswith("RMSNorm"):
        forward = _norm_forward(module)
    elif row_ops_available() and hasattr(module, "q_proj"):
        forward = rotary_forward(type(module))
    else:
        forward = None
    if forward is None:
        return False
    module.forward = MethodType(forward, module)
    return True


def _agree(old: Callable[[], Any], new: Callable[[], Any], dtype: torch.dtype) -> bool:
    """Whether two computations give one result up to rounding; an error in either is a no."""
    try:
        a, b = old(), new()
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError):
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    scale = max(1.0, float(a.float().abs().max()))
    return float((a.float() - b.float()).abs().max()) <= _TOLERANCE[dtype] * scale


def _norm_forward(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """``rms_norm`` with the module's weight, where that is what the module computes."""
    weight = module._parameters.get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.dtype not in TYPES:
        return None
    if not row_ops_available() or not isinstance(eps, float) or weight.device.type != "cpu":
        return None
    original = type(module).forward

    def forward(self: Any, hidden_states: torch.Tensor, *extra: Any, **named: Any) -> torch.Tensor:
        weight = self._parameters["weight"]
        if extra or named or hidden_states.dtype is not weight.dtype or torch.is_grad_enabled():
            return original(self, hidden_states, *extra, **named)
        return rms_norm(hidden_states, weight, eps, shift)

    x = torch.randn(3, weight.shape[0], dtype=torch.float32).to(weight.dtype) * 2
    for shift in (0.0, 1.0):  # Gemma's weights are offsets from 1
        if _agree(
            lambda: module(x), lambda: rms_norm(x, weight, eps, shift), x.dtype  # noqa: B023
        ):  # fmt: skip
            return forward
    return None


def rotary_forward(attention: type[nn.Module]) -> Callable[..., Any] | None:
    """The class's own forward, compiled code and all, calling the one-pass rotary embedding.

    The function is copied with a namespace of its own, so that nothing changes for other models or
    for users of the module. None where the class applies no standard rotary embedding.
    """
    inner = inspect.unwrap(attention.forward)
    if not isinstance(inner, FunctionType) or _ROTARY not in inner.__code__.co_names:
        return None
    original = inner.__globals__.get(_ROTARY)
    if original is None or not _is_half_rotation(original):
        return None
    namespace = {**inner.__globals__, _ROTARY: _rotary_or(original)}
    copy = FunctionType(
        inner.__code__, namespace, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy


_ROTARY = "apply_rotary_pos_emb"


def _is_half_rotation(function: Callable[..., Any]) -> bool:
    """Whether ``function(q, k, cos, sin)`` is ``x * cos + rotate_half(x) * sin`` on both."""
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 1, 5, 8)
    cos, sin = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    return all(
        _agree(
            lambda: function(q, k, cos, sin)[i], lambda: rotate((q, k)[i], cos, sin),  # noqa: B023
            torch.float32,
        )
        for i in (0, 1)
    )  # fmt: skip


def _rotary_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """The one-pass rotary embedding where it applies, ``original`` everywhere else."""

    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *extra: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        if extra or named or torch.is_grad_enabled() or not _fits(q, k, cos, sin):
            return original(q, k, cos, sin, *extra, **named)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    shape = (1, q.shape[2], q.shape[3]) if q.dim() == 4 else None
    return (
        k.dim() == 4 and q.shape[0] == 1 and cos.shape == shape and sin.shape == shape
        and k.shape[2:] == q.shape[2:] and q.dtype in TYPES and q.shape[3] % 2 == 0
        and q.dtype is k.dtype is cos.dtype is sin.dtype and q.device.type == "cpu"
        and q.stride(3) == k.stride(3) == cos.stride(2) == sin.stride(2) == 1
        and cos.stride(1) == sin.stride(1)
    )  # fmt: skip

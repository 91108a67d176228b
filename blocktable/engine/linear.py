"""Faster linear layers for a transformers model on a CPU, swapped in module by module.

The model's code stays transformers' own: only its ``nn.Linear`` instances are replaced by modules
that compute the same product from weights packed once in the blocked layout oneDNN's kernels read.
``nn.Linear`` keeps weights row-major, so every call either re-packs them (bfloat16) or runs at a
third of the machine's memory rate (float32). Measured on 2 cores (Zen 5, AVX-512) at 1536 x 576:
float32 202 -> 60 us at 1 token, 520 -> 160 at 32; bfloat16 83 -> 31 and 199 -> 96.
"""

from __future__ import annotations

import dis
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType
from typing import TypeGuard

import torch
from torch import nn

from blocktable.core.errors import ConfigError

PACK_HINT_TOKENS = 16
"""Batch size oneDNN is told when it picks a layout: 8..64 gave the same time within 3% at every
batch size from 1 to 512; a hint of 1 costs 30% at 8 tokens and more."""

_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""oneDNN and PyTorch's layer over it keep what they made for each number of tokens and each weight
shape, up to 1,024 of each by default: a server's memory grew by 0.65 MB for every prompt length and
layer shape it had not seen before. They read these variables at their first product; what the
environment says already stays."""

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """``nn.Linear`` over packed weights: y [..., N] = x [..., K] W^T + b. Inference only.

    ``weight`` is a meta tensor: shape and dtype can be read, its values cannot (they live, packed,
    in ``packed``). An x of another dtype is cast
    on the way in and the result on the way out.
    """

    def __init__(self, source: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        for name, entries in _KERNEL_CACHES.items():
            os.environ.setdefault(name, entries)
        self.in_features, self.out_features = source.in_features, source.out_features
        weight = source.weight.detach().to(dtype).contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT_TOKENS)
        self.packed_bias = None if source.bias is None else source.bias.detach().to(dtype)
        self.packed_dtype = dtype
        self.weight = nn.Parameter(source.weight.detach().to("meta"), requires_grad=False)
        self.bias = source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is self.packed_dtype:
            return torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.packed_bias, "none", [], ""
            )
        y = torch.ops.mkldnn._linear_pointwise(
            x.to(self.packed_dtype), self.packed, self.packed_bias, "none", [], ""
        )
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, packed {self.packed_dtype}"


class SharedProjection:
    """Several linear layers of one input as one product: query, key and value of an attention.

    The first layer called with an input computes all of them and the others find their columns
    ready: one kernel call instead of three (52 -> 25 us at one token, 576 -> 960, bfloat16).
    """

    def __init__(self, sources: list[nn.Linear], dtype: torch.dtype) -> None:
        has_bias = sources[0].bias is not None
        fused = nn.Linear(sources[0].in_features, 1, bias=has_bias, device="meta")
        fused.out_features = sum(source.out_features for source in sources)
        fused.weight = nn.Parameter(torch.cat([s.weight.detach() for s in sources]), False)
        if has_bias:
            fused.bias = nn.Parameter(torch.cat([s.bias.detach() for s in sources]), False)
        self.linear = PackedLinear(fused, dtype)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def columns(self, x: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """Columns [first, end) of the product with x; the last part drops what was kept."""
        last = self._last
        if last is not None and last[0] is x:
            y = last[1]
            if end == self.linear.out_features:
                self._last = None
        else:
            y = self.linear(x)
            self._last = (x, y) if end < self.linear.out_features else None
        return y[..., first:end]


class ProjectionPart(nn.Module):
    """One layer of a :class:`SharedProjection`: y [..., N] is a view of the shared result.

    The input must not be changed in place between the calls of the parts (no model does).
    """

    def __init__(self, source: nn.Linear, shared: SharedProjection, first: int) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.shared, self.first, self.end = shared, first, first + source.out_features
        self.weight = nn.Parameter(source.weight.detach().to("meta"), requires_grad=False)
        self.bias = source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.columns(x, self.first, self.end)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, columns from {self.first}"


@dataclass(frozen=True)
class AcceleratedLinears:
    """What :func:`accelerate_linears` did, and the way back.

    replaced: module names. weight_bytes: bytes of packed weights held besides the model's own.
    originals: name -> (parent, attribute, module) while ``keep`` was asked for, else empty.
    """

    replaced: tuple[str, ...]
    weight_bytes: int
    originals: dict[str, tuple[nn.Module, str, nn.Linear]]

    def restore(self) -> None:
        """Put the original modules back; does nothing for those that were not kept."""
        for parent, attribute, module in self.originals.values():
            setattr(parent, attribute, module)


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32 (AVX512-BF16 or AMX)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    probes = [getattr(torch.cpu, name, None) for name in names]
    return any(bool(probe()) for probe in probes if probe is not None)


@lru_cache(maxsize=4)
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies this dtype here, found out by one small product."""
    if not torch.backends.mkldnn.is_available():
        return False
    source = nn.Linear(32, 16, bias=True).to(dtype)
    x = torch.linspace(-1, 1, 64).view(2, 32).to(dtype)
    try:
        with torch.no_grad():
            difference = (PackedLinear(source, dtype)(x) - source(x)).abs().max()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return float(difference) < 0.05


def _replacements(
    parts: list[tuple[str, nn.Linear]], dtype: torch.dtype | None
) -> dict[str, nn.Module]:
    """Packed modules for the linear children of one parent, by attribute."""
    made: dict[str, nn.Module] = {}
    found = dict(parts)
    shared = [found[name] for name in _SHARED_INPUT if name in found]
    one_kind = len({(s.in_features, s.bias is None, s.weight.dtype) for s in shared}) == 1
    if len(shared) == len(_SHARED_INPUT) and one_kind:
        packed_dtype = dtype or shared[0].weight.dtype
        if packed_dtype in _PACKED_DTYPES and _packs(packed_dtype):
            projection, first = SharedProjection(shared, packed_dtype), 0
            for name, source in zip(_SHARED_INPUT, shared, strict=True):
                made[name] = ProjectionPart(source, projection, first)
                first += source.out_features
    for name, source in parts:
        packed_dtype = dtype or source.weight.dtype
        if name not in made and packed_dtype in _PACKED_DTYPES and _packs(packed_dtype):
            made[name] = PackedLinear(source, packed_dtype)
    return made


_SHARED_INPUT = ("q_proj", "k_proj", "v_proj")


def accelerate_linears(
    model: nn.Module, dtype: torch.dtype | None = None, *, keep: bool = False
) -> AcceleratedLinears:
    """Replace the plain ``nn.Linear`` modules of ``model`` in place by packed ones.

    dtype: weights are packed in this dtype, float32 or bfloat16; None keeps each layer's own
        (layers of another dtype are left alone). The output has the input's dtype.
    keep: hold the originals, so that ``restore()`` can put them back; costs their memory.

    Siblings called q_proj, k_proj and v_proj share one product. Subclasses of ``nn.Linear`` are
    left alone, and so are layers whose weights the model's code reads itself (Mamba's dt_proj). A
    weight that something else shares (a tied embedding) stays where it is for the
    other user. Does nothing where oneDNN cannot pack. Call it when the weights are final: later
    changes of the originals are not seen. Results differ from ``nn.Linear`` in rounding only.
    Cost: one pass over the weights.
    """
    if dtype not in (None, *_PACKED_DTYPES):
        raise ConfigError(f"linear layers are packed as float32 or bfloat16, got {dtype}")
    replaced: list[str] = []
    originals: dict[str, tuple[nn.Module, str, nn.Linear]] = {}
    weight_bytes = 0
    for prefix, parent in list(model.named_modules()):
        read = _weights_read(type(parent))
        parts = [(n, m) for n, m in parent.named_children() if _is_plain(m) and n not in read]
        made = _replacements(parts, dtype)
        for attribute, source in parts:
            if attribute not in made:
                continue
            setattr(parent, attribute, made[attribute])
            name = f"{prefix}.{attribute}".lstrip(".")
            replaced.append(name)
            weight_bytes += source.weight.numel() * (dtype or source.weight.dtype).itemsize
            if keep:
                originals[name] = (parent, attribute, source)
    return AcceleratedLinears(tuple(replaced), weight_bytes, originals)


@cache
def _weights_read(kind: type) -> frozenset[str]:
    """Children whose weights' values a module class reads itself, as ``self.<child>.weight``.

    Their shape, dtype and device may be read: a packed layer has those. O(code of the class), once.
    """
    found = set()
    members = (member for base in kind.__mro__ for member in vars(base).values())
    codes = (inspect.unwrap(f).__code__ for f in members if inspect.isfunction(f))
    for code in codes:
        names = list(_attributes(code)) if "weight" in code.co_names else []
        for child, weight, use in zip(names, names[1:], [*names[2:], ""], strict=False):
            if weight == "weight" and use not in ("shape", "dtype", "device"):
                found.add(child)
    return frozenset(found)


def _attributes(code: CodeType) -> Iterator[str]:
    """Names of the attributes that code loads, in order; "" where it does something else."""
    for step in dis.get_instructions(code):
        if step.opname != "CACHE":
            yield step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else ""


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu"

"""What a library is asked to do, and the shape in which it is asked.

A *kind* of layer is everything that decides whether a library can serve it and how fast. A *batch*
is one step's work as host arrays. A *plan* is a batch made ready by a library; its ``attend`` runs
every layer of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.types import BlockIds, Counts, RowIds


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """An attention layer as a library sees it: shapes, types and variants.

    window and chunk as in ``AttentionOptions``. has_scales: the cache holds scaled (fp8) values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    scale: float
    causal: bool = True
    sliding_window: int | None = None
    num_sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    has_scales: bool = False

    def __str__(self) -> str:
        parts = [
            f"{self.num_heads}/{self.num_kv_heads} heads", f"size {self.head_size}",
            f"page {self.block_size}", str(self.dtype).removeprefix("torch."),
        ]  # fmt: skip
        if self.head_size_v != self.head_size:
            parts.append(f"value size {self.head_size_v}")
        if self.cache_dtype != self.dtype:
            parts.append(f"cache {str(self.cache_dtype).removeprefix('torch.')}")
        named = ("sliding_window", "num_sink_tokens", "chunk", "softcap")
        parts += [f"{name} {getattr(self, name)}" for name in named if getattr(self, name)]
        flags = ("has_sinks", "has_alibi", "has_scales")
        parts += [name.removeprefix("has_") for name in flags if getattr(self, name)]
        return ", ".join(parts if self.causal else [*parts, "not causal"])

    @property
    def key(self) -> str:
        """All fields as text; equal for equal kinds."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def window(self) -> tuple[int, int]:
        """Keys seen to the left and right of the query's own, -1 for all, as the libraries count:
        a window of w keys is the own one and w - 1 to its left."""
        return (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, 0)

    def check_call(self, query: Any, k_cache: Any, v_cache: Any, **asked: Any) -> None:
        """Raise ConfigError unless a call's tensors and options are those of this kind."""
        found = kind_of(query, k_cache, v_cache, **asked)
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(found, field.name)
            if mine != theirs:
                raise ConfigError(
                    f"the plan was made for layers with {field.name} {mine}, the call has {theirs}"
                )


def kind_of(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, scale: float,
    causal: bool = True, sliding_window: int | None = None, num_sink_tokens: int = 0,
    chunk: int | None = None, softcap: float | None = None, sinks: Any = None,
    alibi_slopes: Any = None, k_scale: Any = None, v_scale: Any = None,
) -> LayerKind:  # fmt: skip
    """The kind of layer that a call of ``paged_attention`` with these arguments is."""
    return LayerKind(
        num_heads=query.shape[1], num_kv_heads=k_cache.shape[1], head_size=query.shape[2],
        head_size_v=v_cache.shape[3], block_size=k_cache.shape[2], dtype=query.dtype,
        cache_dtype=k_cache.dtype, scale=float(scale), causal=causal,
        sliding_window=sliding_window, num_sink_tokens=num_sink_tokens, chunk=chunk,
        softcap=softcap, has_sinks=sinks is not None, has_alibi=alibi_slopes is not None,
        has_scales=k_scale is not None or v_scale is not None,
    )  # fmt: skip


class Batch(NamedTuple):
    """One step's work, on the host. Requests behind ``rows`` are padding of length 0."""

    rows: RowIds  # int32 [m], table rows of the first m requests
    starts: NDArray[np.int32]  # [n + 1], query tokens of request i are starts[i] .. starts[i + 1]
    lens: Counts  # int32 [n]
    num_tokens: int  # rows of the query tensor, those behind starts[n] included

    @classmethod
    def decode(cls, rows: RowIds, lens: Counts, size: int) -> Batch:
        """Each of ``rows`` decodes one token; padded to ``size`` requests."""
        padded = np.zeros(size, np.int32)
        padded[: len(rows)] = lens
        return cls(rows, np.minimum(np.arange(size + 1), len(rows)).astype(np.int32), padded, size)

    @property
    def is_decode(self) -> bool:
        """Whether every request has one query token, or is padding behind those that have."""
        counts = np.diff(self.starts)
        live = len(self.rows)
        return bool((counts[:live] == 1).all()) and not counts[live:].any()


class Tables(NamedTuple):
    """A group's block table on both sides; the device's is up to date when a batch is planned."""

    host: BlockIds  # int32 [R, W]
    device: torch.Tensor  # int32 [R, W]


class LibraryPlan(Protocol):
    """A batch made ready by a library. Good until its planner makes the next one."""

    kind: LayerKind

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Output [T, Hq, Dv] of one layer, on the current stream; tokens of padding give zeros."""
        ...


class DecodeBuffers(Protocol):
    """Fixed device memory for decode plans of one batch size, ready for CUDA graphs."""

    @property
    def plan(self) -> LibraryPlan:
        """The plan in the buffers; what it reads keeps its address."""
        ...

    def fits(self, batch: Batch) -> bool:
        """Whether a batch goes into these buffers."""
        ...

    def load(self, batch: Batch) -> None:
        """Bring a batch to the device, on the current stream, without waiting for it."""
        ...


class LibraryPlanner(Protocol):
    """Plans of one kind of layer over one table."""

    def plan(self, batch: Batch) -> LibraryPlan:
        """A batch for a step outside the graphs."""
        ...

    def buffers(self, num_rows: int) -> DecodeBuffers:
        """Buffers of a graph of ``num_rows`` requests."""
        ...


class Adapter(Protocol):
    """A library that attends through pages: a module of this package."""

    def versions(self) -> str | None:
        """Name and version of what is installed, None if nothing is. Imports nothing."""
        ...

    def reason_against(self, kind: LayerKind, device: torch.device) -> str | None:
        """Why the library cannot serve such layers there, None if it can."""
        ...

    def planner(
        self, kind: LayerKind, tables: Tables, max_rows: int, shared: dict[str, torch.Tensor]
    ) -> LibraryPlanner:
        """A planner for at most ``max_rows`` requests. ``shared``: memory that all planners of an
        engine use one after the other; empty at first."""
        ...


def common_reason(kind: LayerKind, device: torch.device, head_sizes: tuple[int, ...]) -> str | None:
    """What none of the libraries can do through pages, as text."""
    if not kind.causal:
        return "attention that is not causal"
    if kind.chunk is not None:
        return "chunked attention"
    if kind.num_sink_tokens:
        return "first tokens kept beside a window"
    if kind.has_alibi:
        return "alibi slopes of the caller's own"
    if kind.has_sinks:
        return "attention sinks"
    if kind.has_scales or kind.cache_dtype != kind.dtype:
        return f"a cache of {kind.cache_dtype} under queries of {kind.dtype}"
    if kind.dtype not in (torch.float16, torch.bfloat16):
        return f"queries of {kind.dtype}, only float16 and bfloat16"
    if kind.head_size_v != kind.head_size:
        return f"values of size {kind.head_size_v} beside keys of size {kind.head_size}"
    if kind.head_size not in head_sizes:
        return f"heads of size {kind.head_size}, only {', '.join(map(str, head_sizes))}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)}, older than compute capability 8.0"
    return None


def zero_behind(out: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """``out`` [t, H, D] with zeros behind it up to ``num_tokens``."""
    if out.shape[0] == num_tokens:
        return out
    whole = out.new_zeros((num_tokens, *out.shape[1:]))
    whole[: out.shape[0]] = out
    return whole

"""FlashInfer: its paged wrappers over our cache, planned from host arrays.

Our cache [N, Hkv, bs, D] is its HND layout, strides and all. Its plan wants the batch's pages as
one flat list::

    lengths 40, 0, 17, pages of 16    indptr 0 3 3 5    indices a b c d e    last page 8 0 1

Decoding always runs its tensor-core kernel (``use_tensor_cores``), for which a request without
pages is one whose output is zero. Its ``plan`` writes pinned memory and enqueues a copy from it:
before it writes there again, that copy must be done, so an event guards each wrapper. A page list
handed over on the host would be copied with a wait for the device; so we bring it over ourselves.

Written against FlashInfer 0.6.13 (flashinfer/decode.py, prefill.py, attention/scheduler.cuh).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from blocktable.attention.adapters.kind import (
    Batch,
    LayerKind,
    LibraryPlan,
    Tables,
    common_reason,
    zero_behind,
)
from blocktable.device.staging import StagingRing
from blocktable.device.views import CSRTable, csr_view

NAME = "flashinfer"
HEAD_SIZES = (64, 128, 256)
_LAYOUT = "HND"
_LEAST_WORKSPACE = 128 << 20
_INT_WORKSPACE = 8 << 20
"""What its wrappers take for themselves."""


def versions() -> str | None:
    """Name and version of what is installed, None if nothing is."""
    if find_spec("flashinfer") is None:
        return None
    try:
        return f"flashinfer {version('flashinfer-python')}"
    except PackageNotFoundError:
        return "flashinfer ?"


def reason_against(kind: LayerKind, device: torch.device) -> str | None:
    """Why FlashInfer cannot serve such layers, None if it can. (Its kernels for Hopper and older
    take no attention sinks: the argument is there, but only its Blackwell kernels read it.)"""
    if versions() is None:
        return "FlashInfer is not installed (pip install flashinfer-python)"
    reason = common_reason(kind, device, HEAD_SIZES)
    return None if reason is None else f"FlashInfer does not take {reason}"


def planner(
    kind: LayerKind, tables: Tables, max_rows: int, shared: dict[str, torch.Tensor]
) -> FlashInferPlanner:
    """See ``kind.Adapter``. Compiles nothing yet: FlashInfer does at its first plan."""
    return FlashInferPlanner(kind, tables, max_rows, shared)


def workspace_bytes(kind: LayerKind, max_rows: int, processors: int) -> int:
    """Memory for partial results, by the formulas of its ``PrefillPlan``: a graph of n decoding
    requests is laid out for as many tiles as they can have, n * group / tile + n - 1."""
    group = kind.num_heads // kind.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 or kind.head_size >= 256 else 128
    tiles = max(2 * processors // kind.num_kv_heads, -(-max_rows * group // tile) + max_rows - 1)
    decode = tiles * tile
    prefill = 2 * processors // kind.num_kv_heads * 128
    need = kind.num_heads * max(decode, prefill) * (kind.head_size + 1) * 4
    return max(_LEAST_WORKSPACE, need + (1 << 20))


class FlashInferPlanner:
    """Plans of one kind of layer, for steps in a graph and for others."""

    def __init__(
        self, kind: LayerKind, tables: Tables, max_rows: int, shared: dict[str, torch.Tensor]
    ) -> None:
        self.kind, self.tables, self.max_rows = kind, tables, max_rows
        self.device = tables.device.device
        self._memory = _float_workspace(kind, max_rows, self.device, shared)
        self._graph_ints = self._graph_pages = torch.empty(0)
        self._ring = StagingRing(1 << 16, self.device)
        self._eager: dict[bool, _Guarded] = {}  # decode or not -> wrapper

    def plan(self, batch: Batch) -> LibraryPlan:
        """A batch for a step outside the graphs. The plan before it is no longer good."""
        decodes = batch.is_decode
        guarded = self._eager.get(decodes)
        if guarded is None:
            guarded = self._eager[decodes] = _Guarded(self._wrapper(decodes), self.device)
        if decodes:
            guarded.plan(*_tensors(self._pages(batch)), **self._decode_options())
            return _Plan(self.kind, guarded.wrapper, len(batch.lens))
        live, dead = _without_empty(batch)
        csr = self._pages(live)
        starts = torch.from_numpy(np.ascontiguousarray(live.starts, dtype=np.int32))
        guarded.plan(starts, *_tensors(csr), **self._prefill_options())
        return _Plan(self.kind, guarded.wrapper, int(live.starts[-1]), self._on_device(dead))

    def buffers(self, num_rows: int) -> FlashInferBuffers:
        """The fixed buffers of a graph of ``num_rows`` decoding requests."""
        if not self._graph_pages.numel():
            width = self.tables.host.shape[1]
            self._graph_pages = torch.zeros(
                self.max_rows * width, dtype=torch.int32, device=self.device
            )
            self._graph_ints = torch.empty(_INT_WORKSPACE, dtype=torch.uint8, device=self.device)
        return FlashInferBuffers(self, num_rows)

    def _wrapper(self, decodes: bool) -> Any:
        library: Any = import_module("flashinfer")
        if not decodes:
            return library.BatchPrefillWithPagedKVCacheWrapper(self._memory, _LAYOUT)
        return library.BatchDecodeWithPagedKVCacheWrapper(
            self._memory, _LAYOUT, use_tensor_cores=True
        )

    def _graph_wrapper(self, num_rows: int, words: torch.Tensor) -> Any:
        """A wrapper whose plans all lie in the same memory: indptr [n + 1] and last pages [n] in
        ``words``; the pages and its own integers are shared by the graphs of all sizes, which
        never run at once."""
        library: Any = import_module("flashinfer")
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            self._memory, _LAYOUT, use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=words[: num_rows + 1],
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=words[num_rows + 1 :],
        )  # fmt: skip
        wrapper.reset_workspace_buffer(self._memory, self._graph_ints)
        return wrapper

    def _pages(self, batch: Batch) -> CSRTable:
        live, lens = len(batch.rows), np.asarray(batch.lens)
        width = max(1, -(-int(lens.max(initial=0)) // self.kind.block_size))
        table = np.zeros((len(lens), width), np.int32)
        found = self.tables.host[batch.rows, :width]
        table[:live, : found.shape[1]] = found
        return csr_view(table, lens, self.kind.block_size)

    def _upload_pages(self, indices: np.ndarray) -> torch.Tensor:
        """The batch's pages in the graphs' page list, by one copy that nothing waits for."""
        target = self._graph_pages[: len(indices)]
        if len(indices):
            with self._ring.next(4 * len(indices)) as slot:
                slot.ints[: len(indices)] = indices
                slot.copy_to(target.view(torch.uint8), 0, 4 * len(indices))
        return target

    def _on_device(self, tokens: np.ndarray) -> torch.Tensor | None:
        if not len(tokens):
            return None
        return torch.from_numpy(tokens).to(self.device, non_blocking=True)

    def _decode_options(self) -> dict[str, Any]:
        return {"head_dim": self.kind.head_size, **self._options()}

    def _prefill_options(self) -> dict[str, Any]:
        return {"head_dim_qk": self.kind.head_size, "causal": True, **self._options()}

    def _options(self) -> dict[str, Any]:
        kind = self.kind
        return {
            "num_qo_heads": kind.num_heads, "num_kv_heads": kind.num_kv_heads,
            "page_size": kind.block_size, "pos_encoding_mode": "NONE",
            "window_left": kind.window[0], "logits_soft_cap": kind.softcap,
            "sm_scale": kind.scale, "q_data_type": kind.dtype, "kv_data_type": kind.cache_dtype,
        }  # fmt: skip


class FlashInferBuffers:
    """Decode plans of one batch size at fixed addresses."""

    def __init__(self, planner: FlashInferPlanner, num_rows: int) -> None:
        self._planner, self.num_rows = planner, num_rows
        words = torch.zeros(2 * num_rows + 1, dtype=torch.int32, device=planner.device)
        self._guarded = _Guarded(planner._graph_wrapper(num_rows, words), planner.device)
        self.plan: LibraryPlan = _Plan(planner.kind, self._guarded.wrapper, num_rows)

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has this size."""
        return len(batch.lens) == self.num_rows

    def load(self, batch: Batch) -> None:
        """Plan a batch: one copy for its pages, three small ones of FlashInfer's."""
        csr = self._planner._pages(batch)
        indptr, _, last = _tensors(csr)
        pages = self._planner._upload_pages(csr.indices)
        self._guarded.plan(indptr, pages, last, **self._planner._decode_options())


class _Guarded:
    """A wrapper, and the event behind which its pinned memory may be written again."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._planned = False

    def plan(self, *args: Any, **options: Any) -> None:
        if self._copied is not None and self._planned:
            self._copied.synchronize()
        self.wrapper.plan(*args, **options)
        if self._copied is not None:
            self._copied.record()
            self._planned = True


class _Plan:
    """``live`` tokens of the query are planned, those behind them are padding; ``dead`` tokens
    belong to rows of length 0, which were planned with some keys."""

    def __init__(
        self, kind: LayerKind, wrapper: Any, live: int, dead: torch.Tensor | None = None
    ) -> None:
        self.kind, self._wrapper, self._live, self._dead = kind, wrapper, live, dead

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See ``kind.LibraryPlan``."""
        planned = query[: self._live].contiguous()
        out = self._wrapper.run(planned, (k_cache, v_cache))
        if self._dead is not None:
            out.index_fill_(0, self._dead, 0)  # replaces what is there, NaN too
        return zero_behind(out, query.shape[0])


def _tensors(csr: CSRTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(csr.indptr), torch.from_numpy(csr.indices),
        torch.from_numpy(csr.last_page_len),
    )  # fmt: skip


def _without_empty(batch: Batch) -> tuple[Batch, np.ndarray]:
    """The batch with as many keys as queries for rows that have queries but no keys (its prefill
    kernels were not made for those), and these queries' tokens, whose output is thrown away."""
    counts = np.diff(batch.starts)
    empty = (np.asarray(batch.lens) == 0) & (counts > 0)
    if not empty.any():
        return batch, np.zeros(0, np.int64)
    lens = np.where(empty, counts, batch.lens).astype(np.int32)
    tokens = int(batch.starts[0]) + np.flatnonzero(np.repeat(empty, counts))
    return batch._replace(lens=lens), tokens


def _float_workspace(
    kind: LayerKind, max_rows: int, device: torch.device, shared: dict[str, torch.Tensor]
) -> torch.Tensor:
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    need = workspace_bytes(kind, max_rows, processors)
    held = shared.get(NAME)
    if held is None or held.numel() < need:
        held = shared[NAME] = torch.zeros(need, dtype=torch.uint8, device=device)
    return held

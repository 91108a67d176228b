"""FlashAttention, in whichever build is there.

| build | module | pages |
|---|---|---|
| 3 (Hopper) | ``flash_attn_interface`` | any size |
| 3 or 2 of vLLM | ``vllm.vllm_flash_attn`` | multiples of 16 |
| 2 | ``flash_attn`` | multiples of 256 |

All of them take keys and values as [N, bs, Hkv, D] with any strides, which is a view of ours, and
the block table of the batch as a tensor [n, W] on the device. The device's table is in row order,
so a batch's rows are gathered from it, into a fixed place for a graph. How often to split the keys
of a request is decided on the device (or from W), so nothing is planned on the host.

Written against flash-attention's hopper/flash_attn_interface.py, flash_api.cpp and
flash_attn/flash_attn_interface.py, and vLLM 0.25.1.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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
from blocktable.core.errors import ConfigError
from blocktable.device.staging import StagingRing

NAME = "flash_attn"
HEAD_SIZES = (64, 96, 128, 192, 256)
_PARTIAL_BYTES = 256 << 20
"""Most memory for partial results of split keys; larger steps have enough work unsplit."""
_MOST_SPLITS = 32


class DeviceBatch(NamedTuple):
    """A batch on the device."""

    table: torch.Tensor  # int32 [n, w], in batch order
    starts: torch.Tensor  # int32 [n + 1]
    lens: torch.Tensor  # int32 [n]
    max_query: int
    decodes: bool


class Build(NamedTuple):
    """One build of FlashAttention: what it is, what it needs, how it is called."""

    title: str
    page_multiple: int
    newest: tuple[int, int]  # compute capability it was made for, at least and at most
    oldest: tuple[int, int]
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DeviceBatch, LayerKind], torch.Tensor]


def versions() -> str | None:
    """Names and versions of the builds that are installed, None if there are none."""
    found = [build.title for build in installed_builds()]
    return ", ".join(found) or None


def installed_builds() -> list[Build]:
    """The builds that are there, best first. Imports nothing but parent packages."""
    builds = []
    if find_spec("flash_attn_interface") is not None:
        title = f"flash_attn_interface {_version('flash-attn-3', 'flash_attn_3')}"
        builds.append(Build(title, 1, (9, 0), (9, 0), _run_hopper))
    for number, newest, oldest in ((3, (9, 0), (9, 0)), (2, (12, 9), (8, 0))):
        if _vllm_has(number):
            title = f"vllm_flash_attn {number} of vllm {_version('vllm')}"
            builds.append(Build(title, 16, newest, oldest, _vllm_runner(number)))
    if find_spec("flash_attn") is not None:
        builds.append(Build(f"flash_attn {_version('flash-attn')}", 256, (12, 9), (8, 0), _run_two))
    return builds


def reason_against(kind: LayerKind, device: torch.device) -> str | None:
    """Why FlashAttention cannot serve such layers, None if one of the builds can."""
    builds = installed_builds()
    if not builds:
        return (
            "FlashAttention is not installed (looked for flash_attn_interface, "
            "vllm.vllm_flash_attn and flash_attn)"
        )
    reason = common_reason(kind, device, HEAD_SIZES)
    if reason is not None:
        return f"FlashAttention does not take {reason}"
    against = [_build_reason(build, kind, device) for build in builds]
    return None if None in against else "; ".join(text for text in against if text)


def planner(
    kind: LayerKind, tables: Tables, max_rows: int, shared: dict[str, torch.Tensor]
) -> FlashAttentionPlanner:
    """See ``kind.Adapter``. Raises ConfigError where no build fits (see ``reason_against``)."""
    return FlashAttentionPlanner(kind, tables, max_rows)


class FlashAttentionPlanner:
    """Plans of one kind of layer: the batch's rows of the table, gathered on the device."""

    def __init__(self, kind: LayerKind, tables: Tables, max_rows: int) -> None:
        self.kind, self.tables, self.max_rows = kind, tables, max_rows
        self.device = tables.device.device
        fitting = [b for b in installed_builds() if _build_reason(b, kind, self.device) is None]
        if not fitting:
            raise ConfigError(f"FlashAttention cannot serve layers of {kind}")
        self.build = fitting[0]
        self.ring = StagingRing(1 << 14, self.device)
        self._gathered: torch.Tensor | None = None

    def plan(self, batch: Batch) -> LibraryPlan:
        """A batch for a step outside the graphs."""
        decodes, n = batch.is_decode, len(batch.lens)
        longest = int(np.asarray(batch.lens).max(initial=1))
        width = min(-(-longest // self.kind.block_size), self.tables.host.shape[1])
        words = torch.empty(4 * n + 2, dtype=torch.int32, device=self.device)
        starts = np.arange(n + 1) if decodes else batch.starts
        rows, on_device, lens = self.upload(batch, starts, words)
        table = self.tables.device[:, :width].index_select(0, rows)
        max_query = 1 if decodes else int(np.diff(batch.starts).max(initial=1))
        ready = DeviceBatch(table, on_device, lens, max_query, decodes)
        return _Plan(self.kind, self.build, ready, int(starts[-1]))

    def buffers(self, num_rows: int) -> FlashAttentionBuffers:
        """The fixed buffers of a graph of ``num_rows`` decoding requests."""
        if self._gathered is None:
            shape = (self.max_rows, self.tables.device.shape[1])
            self._gathered = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return FlashAttentionBuffers(self, self._gathered[:num_rows])

    def upload(
        self, batch: Batch, starts: np.ndarray, words: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Table rows int64 [n], starts int32 [n + 1] and lengths int32 [n], in ``words``
        [4n + 2], by one copy. Padding names row 0, of which nothing is read."""
        n = len(batch.lens)
        with self.ring.next(4 * len(words)) as slot:
            host = slot.ints[: len(words)]
            names = host[: 2 * n].view(np.int64)
            names[:] = 0
            names[: len(batch.rows)] = batch.rows
            host[2 * n : 3 * n + 1] = starts
            host[3 * n + 1 : 4 * n + 1] = batch.lens
            slot.copy_to(words.view(torch.uint8), 0, 4 * len(words))
        return words[: 2 * n].view(torch.int64), words[2 * n : 3 * n + 1], words[3 * n + 1 : -1]


class FlashAttentionBuffers:
    """Decode plans of one batch size at fixed addresses. Each request has one query token, padding
    too: with length 0, which gives zeros."""

    def __init__(self, planner: FlashAttentionPlanner, gathered: torch.Tensor) -> None:
        self._planner, self._gathered = planner, gathered
        self.num_rows = n = gathered.shape[0]
        self._words = torch.zeros(4 * n + 2, dtype=torch.int32, device=planner.device)
        self._starts = np.arange(n + 1, dtype=np.int32)
        ready = DeviceBatch(
            gathered, self._words[2 * n : 3 * n + 1], self._words[3 * n + 1 : -1], 1, True
        )
        self.plan: LibraryPlan = _Plan(planner.kind, planner.build, ready, n)

    def fits(self, batch: Batch) -> bool:
        """Whether a batch has this size."""
        return len(batch.lens) == self.num_rows

    def load(self, batch: Batch) -> None:
        """One copy of rows and lengths, and one gather of the batch's table."""
        rows, _, _ = self._planner.upload(batch, self._starts, self._words)
        torch.index_select(self._planner.tables.device, 0, rows, out=self._gathered)


class _Plan:
    """A batch on the device; query tokens behind the first ``live`` are padding."""

    def __init__(self, kind: LayerKind, build: Build, batch: DeviceBatch, live: int) -> None:
        self.kind, self._build, self._batch, self._live = kind, build, batch, live

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """See ``kind.LibraryPlan``."""
        k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # [N, bs, Hkv, D]
        out = self._build.run(query[: self._live], k, v, self._batch, self.kind)
        return zero_behind(out, query.shape[0])


def _run_hopper(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, kind: LayerKind
) -> torch.Tensor:
    library: Any = import_module("flash_attn_interface")
    return library.flash_attn_with_kvcache(
        query, k, v, cache_seqlens=batch.lens, page_table=batch.table, cu_seqlens_q=batch.starts,
        max_seqlen_q=batch.max_query, softmax_scale=kind.scale, causal=True,
        window_size=kind.window, softcap=kind.softcap or 0.0, num_splits=_splits(query),
    )  # fmt: skip


def _vllm_runner(number: int) -> Callable[..., torch.Tensor]:
    def run(
        query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, kind: LayerKind
    ) -> torch.Tensor:
        library: Any = import_module("vllm.vllm_flash_attn")
        return library.flash_attn_varlen_func(
            query, k, v, max_seqlen_q=batch.max_query, cu_seqlens_q=batch.starts,
            max_seqlen_k=batch.table.shape[1] * kind.block_size, seqused_k=batch.lens,
            softmax_scale=kind.scale, causal=True, window_size=list(kind.window),
            softcap=kind.softcap or 0.0, block_table=batch.table, num_splits=_splits(query),
            fa_version=number,
        )  # fmt: skip

    return run


def _run_two(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, kind: LayerKind
) -> torch.Tensor:
    library: Any = import_module("flash_attn")
    options: dict[str, Any] = {
        "softmax_scale": kind.scale, "causal": True, "window_size": kind.window,
        "softcap": kind.softcap or 0.0, "block_table": batch.table,
    }  # fmt: skip
    if batch.decodes:  # this one splits keys
        return library.flash_attn_with_kvcache(
            query.unsqueeze(1), k, v, cache_seqlens=batch.lens, **options
        ).squeeze(1)
    key_starts = torch.nn.functional.pad(batch.lens.cumsum(0, dtype=torch.int32), (1, 0))
    return library.flash_attn_varlen_func(
        query, k, v, batch.starts, key_starts, batch.max_query,
        batch.table.shape[1] * kind.block_size, **options,
    )  # fmt: skip


def _splits(query: torch.Tensor) -> int:
    """0: as the library thinks best; 1: not at all, where partial results would take too much."""
    return int(_MOST_SPLITS * query.numel() * 4 > _PARTIAL_BYTES)


def _build_reason(build: Build, kind: LayerKind, device: torch.device) -> str | None:
    if kind.block_size % build.page_multiple:
        return f"{build.title} takes pages of a multiple of {build.page_multiple} tokens"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if not build.oldest <= capability <= build.newest:
            return f"{build.title} is not made for compute capability {capability}"
    return None


def _vllm_has(number: int) -> bool:
    """Whether vLLM's package holds the compiled build; a CPU build of vLLM has none."""
    spec = find_spec("vllm")
    places = [] if spec is None else spec.submodule_search_locations or []
    pattern = f"_vllm_fa{number}_C*.so"
    return any(any((Path(place) / "vllm_flash_attn").glob(pattern)) for place in places)


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"

"""FlashInfer and FlashAttention as far as the adapters use them, without a GPU.

They take what the real functions take and refuse what those refuse (shapes, types, layouts, sizes
fixed at construction), and compute with the NumPy reference. What a kernel would read at run time
is read at run time, from the buffers it would read; what it leaves unwritten is NaN.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from blocktable.attention.reference import paged_attention_reference

BROKEN: dict[str, bool] = {}
"""Set ["nan"] or ["wrong"] to make the stand-ins give such results."""


def attend(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: np.ndarray, starts: np.ndarray,
    lens: np.ndarray, *, scale: float, window_left: int, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """The reference, in the query's type; tokens of no request are NaN."""
    found = paged_attention_reference(
        query, k, v, torch.from_numpy(table), torch.from_numpy(starts), torch.from_numpy(lens),
        scale=scale, sliding_window=None if window_left < 0 else window_left + 1,
        softcap=softcap or None,
    )  # fmt: skip
    out = torch.from_numpy(found.out).to(query.dtype)
    out[int(starts[-1]) :] = float("nan")
    if BROKEN.get("nan"):
        out[0] = float("nan")
    return out + 1 if BROKEN.get("wrong") else out


def need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"the library would refuse this: {what}")


# -- FlashInfer -----------------------------------------------------------------------------------


class _Wrapper:
    """What both wrappers do: keep the page list, check it, read it back at run time."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        need(workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20, "workspace")
        need(layout in ("NHD", "HND"), layout)
        self._layout, self._planned = layout, False
        self._fixed: int | None = None

    def reset_workspace_buffer(self, float_buffer: torch.Tensor, int_buffer: torch.Tensor) -> None:
        need(float_buffer.numel() >= 128 << 20 and int_buffer.numel() >= 8 << 20, "workspaces")

    def _keep(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        for tensor in (indptr, indices, last):
            need(tensor.dtype == torch.int32 and tensor.ndim == 1, f"{tensor.dtype}")
        need(len(indptr) == len(last) + 1, "indptr and last_page_len")
        need(int(indptr[-1]) == len(indices), "indices are as many as indptr says")
        need(bool((indptr.diff() >= 0).all()), "indptr rises")
        if self._fixed is None:
            self._indptr, self._indices, self._last = (t.clone() for t in (indptr, indices, last))
        else:
            need(len(last) == self._fixed, "the batch size of a CUDA graph")
            need(len(indices) <= len(self._indices), "the page list has room")
            need(
                not len(indices) or indices.data_ptr() == self._indices.data_ptr(),
                "pages on the host, which are copied with a wait for the device",
            )
            self._indptr.copy_(indptr)
            self._last.copy_(last)
            self._indices[: len(indices)].copy_(indices)
        self._planned = True

    def _options(self, shape: tuple[int, int, int, int], window_left: int,
                 logits_soft_cap: float | None, sm_scale: float | None,
                 types: tuple[Any, Any], pos_encoding_mode: str) -> None:  # fmt: skip
        need(pos_encoding_mode == "NONE" and shape[0] % shape[1] == 0, "heads")
        need(shape[2] in (64, 128, 256), f"head size {shape[2]}")
        need(types[0] == types[1] and types[0] in (torch.float16, torch.bfloat16), f"{types}")
        self._shape, self._types = shape, types
        self._window, self._cap, self._scale = window_left, logits_soft_cap, sm_scale

    def _run(
        self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], starts: np.ndarray
    ) -> torch.Tensor:
        need(self._planned, "run before plan")
        k, v = cache
        heads, kv_heads, size, page = self._shape
        need(query.dtype == self._types[0] and k.dtype == self._types[1], "types")
        need(query.shape[1:] == (heads, size) and query.stride(2) == 1, f"query {query.shape}")
        need(self._layout == "HND" and k.shape[1:] == (kv_heads, page, size), f"keys {k.shape}")
        need(k.stride() == v.stride() and k.stride(3) == 1, "strides of keys and values")
        indptr, indices = self._indptr.numpy(), self._indices.numpy()
        counts, last = np.diff(indptr), self._last.numpy()
        need(bool(((last >= 1) & (last <= page))[counts > 0].all()), "1 <= last page <= page")
        lens = np.where(counts > 0, (counts - 1) * page + last, 0)
        table = np.zeros((len(lens), max(1, int(counts.max(initial=0)))), np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = indices[indptr[row] : indptr[row + 1]]
        need(bool((table < k.shape[0]).all()), "a page past the cache")
        scale = size**-0.5 if self._scale is None else self._scale
        return attend(query, k, v, table, starts, lens, scale=scale, window_left=self._window,
                      softcap=self._cap or 0.0)  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        need(use_tensor_cores, "only the tensor-core kernel takes requests without keys")
        if use_cuda_graph:
            self._indptr, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
            self._last, self._fixed = (
                paged_kv_last_page_len_buffer,
                len(paged_kv_last_page_len_buffer),
            )
            need(len(self._indptr) == self._fixed + 1, "indptr buffer")

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        self._keep(indptr, indices, last_page_len)
        self._options((num_qo_heads, num_kv_heads, head_dim, page_size), window_left,
                      logits_soft_cap, sm_scale, (q_data_type, kv_data_type),
                      pos_encoding_mode)  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        need(q.shape[0] == len(self._last), f"{q.shape[0]} queries of {len(self._last)} requests")
        return self._run(q, paged_kv_cache, np.arange(len(self._last) + 1, dtype=np.int32))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        causal: bool = False, pos_encoding_mode: str = "NONE", sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        need(qo_indptr.dtype == torch.int32 and len(qo_indptr) == len(paged_kv_indptr), "qo_indptr")
        need(causal and head_dim_vo in (None, head_dim_qk), "causal")
        self._keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        pages = paged_kv_indptr.diff()
        need(bool((pages[qo_indptr.diff() > 0] > 0).all()), "queries without keys")
        self._starts = qo_indptr.clone().numpy()
        self._options((num_qo_heads, num_kv_heads, head_dim_qk, page_size), window_left,
                      logits_soft_cap, sm_scale, (q_data_type, kv_data_type),
                      pos_encoding_mode)  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        need(q.shape[0] == int(self._starts[-1]), "q has as many tokens as qo_indptr says")
        return self._run(q, paged_kv_cache, self._starts)


# -- FlashAttention -------------------------------------------------------------------------------


def _paged(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, starts: Any, lens: Any,
    scale: float | None, causal: bool, window: Any, softcap: float,
) -> torch.Tensor:  # fmt: skip
    for tensor in (table, starts, lens):
        need(tensor.dtype == torch.int32 and tensor.stride(-1) == 1, f"{tensor.dtype}")
    rows = len(lens)
    need(table.shape[0] == rows and len(starts) == rows + 1, "rows of the table")
    need(k.shape == v.shape and k.shape[3] == query.shape[2], f"keys {k.shape}, [N, bs, H, D]")
    need(query.shape[1] % k.shape[2] == 0 and k.stride(-1) == v.stride(-1) == 1, "heads")
    need(query.dtype == k.dtype and query.dtype in (torch.float16, torch.bfloat16), "types")
    need(causal and tuple(window)[1] in (-1, 0), "causal, a window to the left")
    need(int(starts[-1]) <= query.shape[0], "queries")
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return attend(
        query, k.transpose(1, 2), v.transpose(1, 2), table.numpy(), starts.numpy(), lens.numpy(),
        scale=scale, window_left=window[0], softcap=softcap,
    )  # fmt: skip


def three_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, max_seqlen_q: int | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, num_splits: int = 0,
) -> torch.Tensor:  # fmt: skip
    need(max_seqlen_q == max(int(cu_seqlens_q.diff().max()), 1), f"max_seqlen_q {max_seqlen_q}")
    return _paged(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens, softmax_scale,
                  causal, window_size, softcap)  # fmt: skip


def vllm_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, max_seqlen_q: int, cu_seqlens_q: Any,
    max_seqlen_k: int, seqused_k: Any = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: list[int] | None = None, softcap: float = 0.0,
    block_table: Any = None, num_splits: int = 0, fa_version: int = 2,
) -> torch.Tensor:  # fmt: skip
    need(k.shape[1] % 16 == 0, "pages of 16")
    need(max_seqlen_k >= int(seqused_k.max()), "max_seqlen_k")
    need(fa_version == 3, "the best version that is there")
    return _paged(q, k, v, block_table, cu_seqlens_q, seqused_k, softmax_scale, causal,
                  window_size, softcap)  # fmt: skip


def two_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: Any = None,
    block_table: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: Any = (-1, -1), softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    need(q.ndim == 4 and q.shape[1] == 1 and k_cache.shape[1] % 256 == 0, "pages of 256")
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return _paged(q[:, 0], k_cache, v_cache, block_table, starts, cache_seqlens, softmax_scale,
                  causal, window_size, softcap).unsqueeze(1)  # fmt: skip


def two_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
    block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    need(k.shape[1] % 256 == 0, "pages of 256")
    need(cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_k[0]) == 0, "cu_seqlens_k")
    return _paged(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale, causal,
                  window_size, softcap)  # fmt: skip


# -- installing them ------------------------------------------------------------------------------


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in contents.items():
        setattr(module, key, value)
    return module


def install(monkeypatch: pytest.MonkeyPatch, *names: str, folder: Path | None = None) -> None:
    """Make exactly these libraries installed: flashinfer, flash_attn_interface, flash_attn,
    vllm."""
    made = {
        "flashinfer": _module(
            "flashinfer",
            BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        ),
        "flash_attn_interface": _module(
            "flash_attn_interface", flash_attn_with_kvcache=three_with_kvcache
        ),
        "flash_attn": _module(
            "flash_attn", flash_attn_with_kvcache=two_with_kvcache,
            flash_attn_varlen_func=two_varlen,
        ),
        "vllm": _module("vllm"),
    }  # fmt: skip
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module if name in names else None)
    inner = None
    if "vllm" in names and folder is not None:
        (folder / "vllm_flash_attn").mkdir()
        (folder / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
        spec = made["vllm"].__spec__
        if spec is not None:
            spec.submodule_search_locations = [str(folder)]
        made["vllm"].__path__ = [str(folder)]
        inner = _module("vllm.vllm_flash_attn", flash_attn_varlen_func=vllm_varlen)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", inner)
    monkeypatch.setattr(sys.modules[__name__], "BROKEN", {})

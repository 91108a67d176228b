"""Launching the Hopper tile kernel, where it applies; elsewhere the plain kernel does the work."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from blocktable.attention.options import AttentionOptions
from blocktable.attention.triton.buffers import DevicePlan
from blocktable.attention.triton.layer import LayerTensors

BLOCK_N, STAGES = 128, 2
"""For prefill (H200: 577 TFLOP/s, 534 with the others)."""
SHARED_BLOCK_N, SHARED_STAGES = 64, 4
"""For shared prefixes, whose tiles are short (65 us instead of 71)."""


class RowView(NamedTuple):
    """A cache as rows of one matrix, for the copy engine: key t of block b and head h begins in
    row ``b * block_rows + h * head_rows + t``, column ``h * head_cols``."""

    rows: int
    cols: int
    block_rows: int
    head_rows: int
    head_cols: int


def row_view(cache: torch.Tensor) -> RowView | None:
    """The row view of a cache [N, Hkv, bs, D], None where its strides allow none."""
    blocks, heads, block_size, size = cache.shape
    per_block, per_head, per_row, _ = cache.stride()
    if per_row < size or per_block % per_row or per_row * cache.element_size() % 16:
        return None
    if per_head % per_row == 0:
        head_rows, head_cols = per_head // per_row, 0
    elif (heads - 1) * per_head + size <= per_row:
        head_rows, head_cols = 0, per_head
    else:
        return None
    rows = (blocks - 1) * (per_block // per_row) + (heads - 1) * head_rows + block_size
    if rows >= 0x7FFF0000 or cache.data_ptr() % 16:
        return None
    return RowView(rows, (heads - 1) * head_cols + size, per_block // per_row, head_rows, head_cols)


@functools.cache
def _kernel_module() -> Any:
    """The Gluon kernel, None where this Triton has none (it needs 3.6 or later)."""
    try:
        from blocktable.attention.triton import tile_hopper
    except ImportError:
        return None
    return tile_hopper


def takes(layer: LayerTensors, plan: DevicePlan) -> bool:
    """Whether the Hopper kernel can run these tile items."""
    q, k, v = layer.query, layer.k_cache, layer.v_cache
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == k.dtype == v.dtype
        and q.shape[2] == v.shape[3]
        and q.shape[2] in (64, 128)
        and k.shape[2] % 16 == 0
        and plan.tile_m == 128
        and not plan.tile_merges
        and layer.alibi_slopes is None
        and layer.k_scale is None
        and layer.v_scale is None
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and row_view(k) is not None
        and row_view(v) is not None
        and _kernel_module() is not None
    )


def run_tiles(
    layer: LayerTensors, options: AttentionOptions, plan: DevicePlan, *, starts_next: bool
) -> None:
    """One launch over all tile items; the caller has asked ``takes``."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    q, k, out = layer.query, layer.k_cache, layer.out
    size, block_size = q.shape[2], k.shape[2]
    rows = min(block_size & -block_size, 64)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    descriptors, places = [], []
    for cache in (k, layer.v_cache):
        view = row_view(cache)
        if view is None:
            raise ValueError(f"no row view of a cache with strides {cache.stride()}")
        shape, strides = [view.rows, view.cols], [cache.stride(2), 1]
        descriptors.append(TensorDescriptor(cache, shape, strides, [rows, 64], layout))
        places += [view.block_rows, view.head_rows, view.head_cols]
    block_n, stages = (SHARED_BLOCK_N, SHARED_STAGES) if plan.gathers else (BLOCK_N, STAGES)
    softcap = options.softcap
    scale = options.scale * 1.4426950408889634
    kernel: Any = _kernel_module().tile_kernel
    kernel[(len(plan.tile), k.shape[1])](
        *descriptors, q, layer.block_table, plan.tile, plan.tokens, out,
        plan.workspace.part_lse if layer.lse is None else layer.lse,
        plan.workspace.part_out, plan.workspace.part_lse,
        plan.workspace.part_lse if layer.sinks is None else layer.sinks,
        scale if softcap is None else scale * 2.0 / softcap, softcap or 0.0,
        q.stride(0), q.stride(1), layer.block_table.stride(0), out.stride(0), out.stride(1),
        *places, HQ=q.shape[1], HKV=k.shape[1], D=size, BS=block_size, ROWS=rows,
        BLOCK_N=block_n, STAGES=stages, CAUSAL=options.causal,
        WINDOW=options.sliding_window or 0, CHUNK=options.chunk or 0,
        SOFTCAP=softcap is not None, HAS_SINK=layer.sinks is not None,
        HAS_LSE=layer.lse is not None, STARTS_NEXT=starts_next, num_warps=4,
    )  # fmt: skip

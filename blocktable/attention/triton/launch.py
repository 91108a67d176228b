"""Launching the attention kernel: checks, strides, tile sizes, the chain of two launches."""

from __future__ import annotations

from typing import Any

import torch

from blocktable.attention.options import AttentionOptions, AttentionOutput, check_shapes
from blocktable.attention.plan import SMALL_M, PlanConfig, plan_attention
from blocktable.attention.triton.attend import attend_kernel
from blocktable.attention.triton.buffers import DevicePlan, PlanBuffers, upload_plan
from blocktable.attention.triton.layer import LayerTensors
from blocktable.attention.triton.merge import merge_kernel
from blocktable.attention.triton.tile_launch import run_tiles, takes
from blocktable.attention.triton.tuning import (
    KernelSizes,
    next_power,
    small_sizes,
    split_head,
    tile_rows,
    tile_sizes,
)
from blocktable.core.errors import ConfigError

Scale = float | torch.Tensor | None
MAX_ITEMS = 65535
"""Limit of CUDA on the second dimension of a grid."""
MERGE_P = 32
"""Partial results that a merging program has in flight."""


def plan_config(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, causal: bool = True,
    sliding_window: int | None = None, chunk: int | None = None, share: bool = True,
) -> PlanConfig:  # fmt: skip
    """The plan configuration of a layer on the device of its tensors (132 multiprocessors where
    there is no CUDA device, as on an H200)."""
    processors = 132
    if query.is_cuda:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    head, value = query.shape[2], v_cache.shape[3]
    many, few = (
        small_sizes(head, value, k_cache.element_size(), query.element_size(), few).resident
        for few in (False, True)
    )
    return PlanConfig(
        num_q_heads=query.shape[1], num_kv_heads=k_cache.shape[1], block_size=k_cache.shape[2],
        causal=causal, sliding_window=sliding_window, chunk=chunk, share=share,
        num_workers=processors * many, num_few_workers=processors * few,
        num_tile_workers=processors, tile_sizes=tile_rows(head, query.element_size()),
    )  # fmt: skip


def values_in_keys(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether values are the first elements of the keys (latent attention keeps one tensor)."""
    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and k_cache.stride() == v_cache.stride()
        and v_cache.shape[3] == split_head(k_cache.shape[3]).d1
    )


def paged_attention(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *, scale: float, causal: bool = True,
    sliding_window: int | None = None, chunk: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
    k_scale: Scale = None, v_scale: Scale = None, out: torch.Tensor | None = None,
    return_lse: bool = False, plan: DevicePlan | PlanBuffers | None = None,
) -> torch.Tensor | AttentionOutput:  # fmt: skip
    """``blocktable.attention.paged_attention`` on CUDA tensors (CPU tensors in the interpreter).

    plan: made beforehand from host lengths (one plan serves all layers of a step that share lengths
    and table). Without it, lengths and table are copied to the host here, which waits for the
    device: fine for a single call, not for a decode loop or a graph capture.

    Raises ConfigError for tensors that do not fit each other.
    """
    check_shapes(query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
    options = AttentionOptions(
        scale=scale, causal=causal, sliding_window=sliding_window, chunk=chunk, softcap=softcap
    )
    _check_layout(query, k_cache, v_cache, block_table)
    value_size = v_cache.shape[3]
    if out is None:
        out = query.new_empty((query.shape[0], query.shape[1], value_size))
    elif tuple(out.shape) != (query.shape[0], query.shape[1], value_size) or out.stride(2) != 1:
        raise ConfigError(f"out has shape {tuple(out.shape)} and strides {out.stride()}")
    lse = None
    if return_lse:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if plan is None:
        config = plan_config(
            query, k_cache, v_cache, causal=causal, sliding_window=sliding_window, chunk=chunk
        )
        host = plan_attention(
            config, query_start_loc.cpu().numpy(), seq_lens.cpu().numpy(),
            block_table.cpu().numpy(), num_tokens=query.shape[0],
        )  # fmt: skip
        plan = upload_plan(host, config, value_size, query.device)
    layer = LayerTensors(
        query, k_cache, v_cache, block_table, out, lse, sinks, alibi_slopes,
        _scale_tensor(k_scale, k_cache), _scale_tensor(v_scale, v_cache),
    )  # fmt: skip
    launch(layer, options, plan.plan if isinstance(plan, PlanBuffers) else plan)
    return out if lse is None else AttentionOutput(out, lse)


def launch(layer: LayerTensors, options: AttentionOptions, plan: DevicePlan) -> None:
    """Tile items first, small items beside them, then the merge of what they share."""
    chained = len(plan.merges) > 0 and len(plan.tile) > 0 and layer.query.is_cuda
    if len(plan.tile) and takes(layer, plan):
        run_tiles(layer, options, plan, starts_next=chained)
    elif len(plan.tile):
        sizes = tile_sizes(plan.tile_m, *_kind(layer))
        run_items(layer, options, plan, plan.tile, plan.tile_m, sizes, starts_next=chained)
    if len(plan.small):
        sizes = small_sizes(*_kind(layer), plan.few)
        run_items(layer, options, plan, plan.small, SMALL_M, sizes, follows=chained)
    if len(plan.merges):
        merge_shared(layer, plan)


def run_items(
    layer: LayerTensors, options: AttentionOptions, plan: DevicePlan, items: torch.Tensor,
    block_m: int, sizes: KernelSizes, *, starts_next: bool = False, follows: bool = False,
) -> None:  # fmt: skip
    """One launch: a program per item and KV head."""
    q, k, v, out = layer.query, layer.k_cache, layer.v_cache, layer.out
    head_size, value_size, split = q.shape[2], v.shape[3], split_head(q.shape[2])
    shared_values = values_in_keys(k, v)
    launch_options: dict[str, Any] = {"num_warps": sizes.warps}
    if follows:
        launch_options["launch_pdl"] = True  # may start before the launch it follows has ended
    kernel: Any = attend_kernel  # a launcher takes plain numbers for constexpr
    if len(items) > MAX_ITEMS:
        raise ConfigError(f"{len(items)} items in one launch, at most {MAX_ITEMS}")
    kernel[(k.shape[1], len(items))](
        q, k, v, layer.block_table, items, plan.tokens, out, layer.lse,
        plan.workspace.part_out, plan.workspace.part_lse, plan.workspace.counters,
        layer.sinks, layer.alibi_slopes, layer.k_scale, layer.v_scale,
        options.scale, options.softcap or 0.0,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2), layer.block_table.stride(0),
        out.stride(0), out.stride(1), _stride(layer.k_scale), _stride(layer.v_scale),
        HQ=q.shape[1], HKV=k.shape[1], D=head_size, DV=value_size, BS=k.shape[2],
        D1=split.d1, D2=split.d2, BLOCK_DV=next_power(value_size),
        BLOCK_M=block_m, BLOCK_N=sizes.block_n, STAGES=sizes.stages,
        CAUSAL=options.causal, WINDOW=options.sliding_window or 0, CHUNK=options.chunk or 0,
        SOFTCAP=options.softcap is not None, HAS_SINK=layer.sinks is not None,
        HAS_ALIBI=layer.alibi_slopes is not None, K_SCALED=layer.k_scale is not None,
        V_SCALED=layer.v_scale is not None, HAS_LSE=layer.lse is not None,
        V_IN_K=shared_values, GATHERS=plan.gathers and block_m > SMALL_M,
        SKIP_MASK=block_m > SMALL_M,
        AS_HALF=q.dtype == torch.bfloat16 and k.element_size() == 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        WIDE=not q.is_cuda, STARTS_NEXT=starts_next, FOLLOWS=follows, MERGE_P=MERGE_P,
        **launch_options,
    )  # fmt: skip


def merge_shared(layer: LayerTensors, plan: DevicePlan) -> None:
    """One launch: a program per token behind a shared prefix and head."""
    out, heads, value_size = layer.out, layer.query.shape[1], layer.v_cache.shape[3]
    kernel: Any = merge_kernel
    kernel[(heads, len(plan.merges))](
        plan.merges, plan.workspace.part_out, plan.workspace.part_lse, out, layer.lse,
        layer.sinks, layer.v_scale, out.stride(0), out.stride(1), _stride(layer.v_scale),
        HQ=heads, HKV=layer.k_cache.shape[1], DV=value_size, BLOCK_DV=next_power(value_size),
        HAS_SINK=layer.sinks is not None, V_SCALED=layer.v_scale is not None,
        HAS_LSE=layer.lse is not None, MERGE_P=8, num_warps=1,
    )  # fmt: skip


def _kind(layer: LayerTensors) -> tuple[int, int, int, int]:
    return (
        layer.query.shape[2], layer.v_cache.shape[3],
        layer.k_cache.element_size(), layer.query.element_size(),
    )  # fmt: skip


def _stride(scale: torch.Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def _scale_tensor(scale: Scale, cache: torch.Tensor) -> torch.Tensor | None:
    """A scale as float32 [1] or [Hkv] beside the cache."""
    if scale is None:
        return None
    if not isinstance(scale, torch.Tensor):
        return torch.full((1,), float(scale), dtype=torch.float32, device=cache.device)
    scale = scale.reshape(-1)
    if scale.numel() not in (1, cache.shape[1]):
        raise ConfigError(f"a scale of {scale.numel()} values fits neither 1 nor {cache.shape[1]}")
    return scale.to(device=cache.device, dtype=torch.float32)


def _check_layout(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor
) -> None:
    for name, tensor in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(-1) != 1:
            raise ConfigError(f"the last dimension of {name} has stride {tensor.stride(-1)}, not 1")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ConfigError(
            f"block_table is {block_table.dtype} with strides {block_table.stride()}, not int32 "
            "with contiguous rows"
        )

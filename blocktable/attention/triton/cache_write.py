"""Cache write: keys and values of a ragged batch into their pages, in one kernel."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from blocktable.attention.triton.launch import Scale, _scale_tensor, _stride
from blocktable.attention.triton.tuning import next_power
from blocktable.core.errors import ConfigError


@triton.jit
def _store_rows(
    source, cache, source_rows, cache_rows, heads, dims, live, factor, source_head, cache_head,
    HKV: tl.constexpr, D: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copy [tokens, heads, dims]; divided by ``factor`` [heads] and held within LIMIT where set."""
    mask = live[:, None, None] & (heads < HKV)[None, :, None] & (dims < D)[None, None, :]
    values = tl.load(
        source + source_rows[:, None, None] + (heads * source_head)[None, :, None]
        + dims[None, None, :], mask=mask, other=0.0,
    )  # fmt: skip
    if LIMIT > 0:
        scaled = values.to(tl.float32) / factor[None, :, None]
        values = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    target = cache + cache_rows[:, None, None] + (heads * cache_head)[None, :, None]
    if LIMIT > 0 and cache.dtype.element_ty.primitive_bitwidth < 32:
        stored = values.to(cache.dtype.element_ty, fp_downcast_rounding="rtne")
    else:
        stored = values.to(cache.dtype.element_ty)
    tl.store(target + dims[None, None, :], stored, mask=mask)


@triton.jit
def write_kernel(
    key, value, k_cache, v_cache, slots, block_table, token_rows, positions, k_scale, v_scale,
    num_tokens, num_slots, table_row, table_width,
    key_token, key_head, value_token, value_head,
    k_block, k_head, k_slot, v_block, v_head, v_slot, k_scale_stride, v_scale_stride,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FROM_TABLE: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr,
    K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens x HEADS heads a program; grid (tokens, heads). A limit of 0: copy as it is."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    if FROM_TABLE:
        row = tl.load(token_rows + token, mask=inside, other=-1).to(tl.int64)
        position = tl.load(positions + token, mask=inside, other=-1).to(tl.int64)
        live = (row >= 0) & (position >= 0) & (position < table_width * BS)
        block = tl.load(block_table + row * table_row + position // BS, mask=live, other=0)
        block = block.to(tl.int64)
        live &= block > 0
        offset = position % BS
    else:
        slot = tl.load(slots + token, mask=inside, other=-1)
        live = (slot >= 0) & (slot < num_slots)
        block, offset = slot // BS, slot % BS
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    token = token.to(tl.int64)
    k_factor = tl.full([HEADS], 1.0, tl.float32)
    if K_SCALED:
        k_factor = tl.load(k_scale + heads * k_scale_stride, mask=heads < HKV, other=1.0)
    v_factor = tl.full([HEADS], 1.0, tl.float32)
    if V_SCALED:
        v_factor = tl.load(v_scale + heads * v_scale_stride, mask=heads < HKV, other=1.0)
    _store_rows(
        key, k_cache, token * key_token, block * k_block + offset * k_slot, heads,
        tl.arange(0, BLOCK_D), live, k_factor, key_head, k_head, HKV, D, K_LIMIT,
    )  # fmt: skip
    _store_rows(
        value, v_cache, token * value_token, block * v_block + offset * v_slot, heads,
        tl.arange(0, BLOCK_DV), live, v_factor, value_head, v_head, HKV, DV, V_LIMIT,
    )  # fmt: skip


def write_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slot_mapping: torch.Tensor, k_scale: Scale = None, v_scale: Scale = None,
) -> None:  # fmt: skip
    """Store key [T, Hkv, D] and value [T, Hkv, Dv] in the slots int64 [T]; -1 writes nothing.

    slot_mapping may be longer or shorter than key: the shorter one counts (padded graphs). A slot
    past the cache writes nothing. Stored values are the given ones divided by their scale, held
    within the range of an fp8 cache (no infinity, no NaN), rounded. Raises ConfigError for tensors
    that do not fit each other. Cost: each byte read and written once.
    """
    if slot_mapping.dtype != torch.int64:
        raise ConfigError(f"slot_mapping is {slot_mapping.dtype}, not torch.int64")
    tokens = min(key.shape[0], slot_mapping.shape[0])
    _run(key, value, k_cache, v_cache, tokens, k_scale, v_scale, slots=slot_mapping)


def write_kv_by_table(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_table: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor,
    k_scale: Scale = None, v_scale: Scale = None,
) -> None:  # fmt: skip
    """``write_kv`` without a slot tensor: the kernel looks the slots up in the block table.

    block_table: int32 [n, W]. token_rows: int32 [T], row of each token, -1 writes nothing.
    positions: int64 or int32 [T]. Null blocks and positions past the row's width write nothing.
    """
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ConfigError(f"block_table is {block_table.dtype}, not int32 with contiguous rows")
    tokens = min(key.shape[0], token_rows.shape[0], positions.shape[0])
    _run(
        key, value, k_cache, v_cache, tokens, k_scale, v_scale,
        table=block_table, token_rows=token_rows, positions=positions,
    )  # fmt: skip


def _fp8_limit(cache: torch.Tensor, scale: torch.Tensor | None) -> float:
    """Largest stored value of a scaled or fp8 cache; 0 where values are copied as they are."""
    if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or scale is not None:
        return float(torch.finfo(cache.dtype).max)
    return 0.0


def _run(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    tokens: int, k_scale: Scale, v_scale: Scale, *, slots: torch.Tensor | None = None,
    table: torch.Tensor | None = None, token_rows: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:  # fmt: skip
    _check(key, value, k_cache, v_cache)
    if tokens == 0:
        return
    kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    k_factor, v_factor = _scale_tensor(k_scale, k_cache), _scale_tensor(v_scale, v_cache)
    block_d, block_dv = next_power(key.shape[2]), next_power(value.shape[2])
    heads = min(next_power(kv_heads, 1), max(1, 1024 // max(block_d, block_dv)))
    per_program = 1 if tokens <= 2048 else 4
    grid = (triton.cdiv(tokens, per_program), triton.cdiv(kv_heads, heads))
    kernel: Any = write_kernel  # a launcher takes plain numbers for constexpr
    kernel[grid](
        key, value, k_cache, v_cache, slots, table, token_rows, positions, k_factor, v_factor,
        tokens, k_cache.shape[0] * block_size, 0 if table is None else table.stride(0),
        0 if table is None else table.shape[1],
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        _stride(k_factor), _stride(v_factor),
        HKV=kv_heads, D=key.shape[2], DV=value.shape[2], BS=block_size, TOKENS=per_program,
        HEADS=heads, BLOCK_D=block_d, BLOCK_DV=block_dv, FROM_TABLE=table is not None,
        K_SCALED=k_factor is not None, V_SCALED=v_factor is not None,
        K_LIMIT=_fp8_limit(k_cache, k_factor), V_LIMIT=_fp8_limit(v_cache, v_factor), num_warps=4,
    )  # fmt: skip


def _check(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    if key.ndim != 3 or value.ndim != 3 or key.shape[:2] != value.shape[:2]:
        raise ConfigError(f"key {tuple(key.shape)} and value {tuple(value.shape)} do not fit")
    for name, given, cache in (("key", key, k_cache), ("value", value, v_cache)):
        if given.shape[1] != cache.shape[1] or given.shape[2] != cache.shape[3]:
            raise ConfigError(
                f"{name} {tuple(given.shape)} does not fit a cache {tuple(cache.shape)}"
            )
        if given.stride(2) != 1 or cache.stride(3) != 1:
            raise ConfigError(f"the last dimension of {name} and its cache must be contiguous")

"""The compiled kernels (``_kernels``), handed torch tensors: addresses, strides and a step plan."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch

from blocktable.attention.cpu import _kernels  # pyright: ignore[reportAttributeAccessIssue]
from blocktable.attention.options import AttentionOptions
from blocktable.attention.reference import per_head
from blocktable.core.errors import ConfigError

TYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types of queries and caches the kernels read, by their code."""


@lru_cache(maxsize=1)
def level() -> int:
    """Index of the instruction set level in force; the environment is read once.

    BLOCKTABLE_CPU_LEVEL names one of ``_kernels.levels()`` (avx512, avx2, generic); without it, the
    best one this CPU runs.
    """
    names: tuple[str, ...] = _kernels.levels()
    name = os.environ.get("BLOCKTABLE_CPU_LEVEL", names[0])
    if name not in names:
        raise ConfigError(f"BLOCKTABLE_CPU_LEVEL is {name!r}; this CPU runs {', '.join(names)}")
    return names.index(name)


@lru_cache(maxsize=1)
def own_threads() -> bool:
    """Whether to leave the loaded OpenMP team alone (BLOCKTABLE_CPU_THREADS=own)."""
    return os.environ.get("BLOCKTABLE_CPU_THREADS") == "own"


class StepPlan:
    """The work of one step over one block table, cut up once and used by every layer.

    Holds plain int32 copies or views of the three arrays; they must not change while it is in use.
    Plans of layers of other shapes or windows are added when first asked for: 3-10 us each for 64
    rows, plus about 1 ns for each live table entry, which is checked against the cache's size.
    """

    __slots__ = ("_plans", "block_table", "query_start_loc", "seq_lens")

    def __init__(
        self,
        block_table: torch.Tensor,  # [n, W]
        query_start_loc: torch.Tensor,  # [n + 1]
        seq_lens: torch.Tensor,  # [n]
    ) -> None:
        self.block_table = _int32(block_table)
        self.query_start_loc = _int32(query_start_loc).contiguous()
        self.seq_lens = _int32(seq_lens).contiguous()
        self._plans: dict[tuple[Any, ...], Any] = {}

    def native(self, key: tuple[Any, ...]) -> Any:
        """The compiled plan for (tokens, heads, kv heads, block size, blocks, causal, window,
        sink tokens, chunk); ConfigError where lengths or block ids do not fit."""
        plan = self._plans.get(key)
        if plan is None:
            try:
                plan = _kernels.plan(
                    self.block_table.data_ptr(), self.block_table.stride(0),
                    self.block_table.shape[1], self.query_start_loc.data_ptr(),
                    self.seq_lens.data_ptr(), self.seq_lens.shape[0], *key,
                )  # fmt: skip
            except ValueError as error:
                raise ConfigError(str(error)) from None
            self._plans[key] = plan
        return plan


def _int32(array: torch.Tensor) -> torch.Tensor:
    if array.dtype != torch.int32 or array.stride(-1) != 1:
        return array.to(torch.int32).contiguous()
    return array


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scale_array(value: Any, heads: int) -> torch.Tensor | None:
    return None if value is None else torch.from_numpy(per_head(value, heads, 1.0)).float()


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float32).contiguous()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: StepPlan,
    options: AttentionOptions, *, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None,
    k_scale: Any, v_scale: Any, out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, Hq, Dv] (query dtype, last stride 1) and ``lse`` [T, Hq] float32."""
    query = _rows_contiguous(query)
    num_blocks, kv_heads, block_size, size = k_cache.shape
    tokens, heads = query.shape[0], query.shape[1]
    window, chunk = options.sliding_window or 0, options.chunk or 0
    native = plan.native(
        (
            tokens, heads, kv_heads, block_size, num_blocks, options.causal, window,
            options.num_sink_tokens, chunk,
        )
    )  # fmt: skip
    sinks, slopes = _floats(sinks), _floats(alibi_slopes)
    k_factor, v_factor = _scale_array(k_scale, kv_heads), _scale_array(v_scale, kv_heads)
    q_token, q_head, _ = query.stride()
    k_strides, v_strides, out_strides = k_cache.stride(), v_cache.stride(), out.stride()
    table = plan.block_table
    _kernels.attend(
        level(), torch.get_num_threads(), own_threads(), native, table.data_ptr(), table.stride(0),
        size, v_cache.shape[3], options.scale, options.softcap or 0.0,
        query.data_ptr(), TYPES[query.dtype], q_token, q_head,
        k_cache.data_ptr(), *k_strides[:3], v_cache.data_ptr(), *v_strides[:3],
        TYPES[k_cache.dtype], out.data_ptr(), out_strides[0], out_strides[1],
        _address(lse), _address(sinks), _address(slopes), _address(k_factor), _address(v_factor),
    )  # fmt: skip


def write(
    source: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, factor: Any
) -> None:
    """Store rows [T, Hkv, D] in their slots of ``cache``; nothing is written if a slot is wrong."""
    source = _rows_contiguous(source)
    num_blocks, kv_heads, block_size, size = cache.shape
    block, head, token, _ = cache.stride()
    factors = _scale_array(factor, kv_heads)
    try:
        _kernels.write_kv(
            level(), torch.get_num_threads(), own_threads(),
            source.data_ptr(), TYPES[source.dtype], source.stride(0), source.stride(1),
            cache.data_ptr(), TYPES[cache.dtype], block, head, token, slot_mapping.data_ptr(),
            slot_mapping.shape[0], kv_heads, block_size, size, num_blocks, _address(factors),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(str(error)) from None

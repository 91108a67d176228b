"""Chooses the CPU back end and checks what a call hands it."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any, Literal

import torch

from blocktable.attention.options import AttentionOptions, AttentionOutput, check_shapes
from blocktable.attention.reference import paged_attention_reference
from blocktable.core.errors import ConfigError

BackendName = Literal["native", "numba", "reference"]
_NATIVE_TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def native_available() -> bool:
    """Whether the compiled kernels are in this installation."""
    try:
        from blocktable.attention.cpu import _kernels  # noqa: F401  # pyright: ignore
    except ImportError:
        return False
    return True


@lru_cache(maxsize=1)
def backend_name() -> BackendName:
    """The back end in force: BLOCKTABLE_CPU_KERNEL, else the fastest one that is there.

    The environment is read once (``backend_name.cache_clear()`` forgets it); one line in the log
    says when the compiled kernels are missing.
    """
    name = os.environ.get("BLOCKTABLE_CPU_KERNEL")
    if name is None:
        if native_available():
            return "native"
        logging.getLogger("blocktable").warning(
            "CPU attention was installed without its compiled kernel; using Numba (slower)"
        )
        return "numba"
    if name not in ("native", "numba", "reference"):
        raise ConfigError(
            f"BLOCKTABLE_CPU_KERNEL is {name!r}; it may be native, numba or reference"
        )
    return name  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _checked_options(
    scale: float, causal: bool, sliding_window: int | None, num_sink_tokens: int,
    chunk: int | None, softcap: float | None,
) -> AttentionOptions:  # fmt: skip
    return AttentionOptions(
        scale=scale, causal=causal, sliding_window=sliding_window,
        num_sink_tokens=num_sink_tokens, chunk=chunk, softcap=softcap,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _native() -> Any:
    from blocktable.attention.cpu import native

    return native


def plan_step(
    block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> Any:
    """Work of one step, computed once for all layers: pass it as ``plan=`` to paged_attention.

    block_table int32 [n, W], query_start_loc int32 [n + 1], seq_lens int32 [n]: the arrays of the
    attention calls, which must not change until the step's last layer is done. None where the back
    end in force cannot use one. Cost: microseconds, see StepPlan.
    """
    if backend_name() != "native":
        return None
    return _native().StepPlan(block_table, query_start_loc, seq_lens)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    num_sink_tokens: int = 0,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: Any = None,
) -> torch.Tensor | AttentionOutput:
    """:func:`blocktable.attention.paged_attention` for CPU tensors.

    plan: from :func:`plan_step` on the same block_table, query_start_loc and seq_lens. Caches in
    other dtypes than float32, bfloat16 and float16 go through Numba.
    """
    check_shapes(query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
    if k_cache.dtype != v_cache.dtype or k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ConfigError(
            f"k_cache and v_cache need one dtype and a last stride of 1, got {k_cache.dtype} "
            f"{k_cache.stride()} and {v_cache.dtype} {v_cache.stride()}"
        )
    options = _checked_options(scale, causal, sliding_window, num_sink_tokens, chunk, softcap)
    shape = (query.shape[0], query.shape[1], v_cache.shape[3])
    if out is None:
        out = torch.empty(shape, dtype=query.dtype)
    elif out.shape != shape or out.dtype != query.dtype or out.stride(-1) != 1:
        raise ConfigError(
            f"out must be {query.dtype} {shape} with last stride 1, got {out.dtype} "
            f"{tuple(out.shape)} with strides {out.stride()}"
        )
    lse = torch.empty(shape[:2], dtype=torch.float32) if return_lse else None
    extras = {"sinks": sinks, "alibi_slopes": alibi_slopes, "k_scale": k_scale, "v_scale": v_scale}
    name = "native" if plan is not None else backend_name()
    if name == "native" and query.dtype in _NATIVE_TYPES and k_cache.dtype in _NATIVE_TYPES:
        if plan is None:
            plan = _native().StepPlan(block_table, query_start_loc, seq_lens)
        _native().attend(query, k_cache, v_cache, plan, options, out=out, lse=lse, **extras)
    else:
        arrays = (query, k_cache, v_cache, block_table, query_start_loc, seq_lens)
        _attend_portable(name, arrays, options, extras, out, lse)
    return out if lse is None else AttentionOutput(out, lse)


def _attend_portable(
    name: BackendName, arrays: tuple[torch.Tensor, ...], options: AttentionOptions,
    extras: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Numba or the reference, behind the checks the compiled plan makes by itself."""
    query, k_cache, _, block_table, query_start_loc, seq_lens = arrays
    _check_lengths(query, k_cache, block_table, query_start_loc, seq_lens, options.causal)
    _check_ids(block_table, seq_lens, k_cache)
    if name == "reference":
        result = paged_attention_reference(*arrays, **vars(options), **extras)
        out.copy_(torch.from_numpy(result.out))
        if lse is not None:
            lse.copy_(torch.from_numpy(result.lse))
        return
    from blocktable.attention.cpu import numba_backend

    numba_backend.attend(arrays, options, out=out, lse=lse, **extras)


def _check_lengths(
    query: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor,
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, causal: bool,
) -> None:  # fmt: skip
    counts, capacity = query_start_loc.diff(), block_table.shape[1] * k_cache.shape[2]
    if int(query_start_loc[0]) < 0 or int(query_start_loc[-1]) > query.shape[0]:
        raise ConfigError(
            f"query_start_loc spans {int(query_start_loc[0])}..{int(query_start_loc[-1])} "
            f"of {query.shape[0]} query tokens"
        )
    bad = (counts < 0) | (seq_lens < 0) | (seq_lens > capacity)
    if causal:
        bad |= (seq_lens > 0) & (counts > seq_lens)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ConfigError(
            f"row {row} has {int(counts[row])} query tokens and seq_len {int(seq_lens[row])}; its "
            f"table holds {capacity} positions"
        )


def _check_ids(block_table: torch.Tensor, seq_lens: torch.Tensor, k_cache: torch.Tensor) -> None:
    table = block_table[: seq_lens.shape[0]]
    live = torch.arange(table.shape[1])[None] * k_cache.shape[2] < seq_lens[:, None]
    wrong = live & ((table < 0) | (table >= k_cache.shape[0]))
    if bool(wrong.any()):
        row, entry = (int(x) for x in wrong.nonzero()[0])
        raise ConfigError(
            f"block table row {row} entry {entry} is {int(table[row, entry])}, outside the cache "
            f"of {k_cache.shape[0]} blocks"
        )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """:func:`blocktable.attention.write_kv` for CPU tensors."""
    for source, cache in ((key, k_cache), (value, v_cache)):
        if source.ndim != 3 or source.shape[1:] != (cache.shape[1], cache.shape[3]):
            raise ConfigError(
                f"a cache of shape {tuple(cache.shape)} stores [T, {cache.shape[1]}, "
                f"{cache.shape[3]}], got {tuple(source.shape)}"
            )
        if source.shape[0] < slot_mapping.shape[0]:
            raise ConfigError(f"{slot_mapping.shape[0]} slots for {source.shape[0]} tokens")
    slots = slot_mapping.to(torch.int64).contiguous()
    types = {key.dtype, value.dtype, k_cache.dtype, v_cache.dtype}
    if backend_name() == "native" and types <= _NATIVE_TYPES:
        write = _native().write
    else:
        from blocktable.attention.cpu.portable_write import write
    write(key, k_cache, slots, k_scale)
    write(value, v_cache, slots, v_scale)

"""Attention by other libraries over our pages and tables, where they are installed.

::

    kind.py             what is asked: a kind of layer, a batch, a plan
    flashinfer.py       FlashInfer's paged wrappers
    flash_attention.py  FlashAttention 2 and 3, vLLM's builds of them
    problems.py         random steps that every candidate must get right, and their timing
    choose.py           which library serves which kind of step
    decisions.py        what was measured, kept on disk

Nothing here imports a library before it is used. For one call::

    paged_attention(..., backend="flashinfer")

and for many layers over one batch, with the plan made once::

    planner = flashinfer.planner(kind, Tables(host_table, device_table), max_rows, {})
    paged_attention(..., plan=planner.plan(Batch(rows, starts, lens, num_tokens)))
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from blocktable.attention.adapters import flash_attention, flashinfer
from blocktable.attention.adapters.kind import (
    Adapter,
    Batch,
    LayerKind,
    LibraryPlan,
    LibraryPlanner,
    Tables,
    kind_of,
)
from blocktable.core.errors import ConfigError

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Batch",
    "LayerKind",
    "LibraryPlan",
    "LibraryPlanner",
    "Tables",
    "attend_once",
    "attend_planned",
    "kind_of",
]

ADAPTERS: dict[str, Adapter] = {
    flashinfer.NAME: flashinfer, flash_attention.NAME: flash_attention,
}  # fmt: skip
"""The libraries, by the name that forces them."""


def attend_planned(
    plan: LibraryPlan, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    out: torch.Tensor | None = None, return_lse: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """One layer by a library's plan, in the query's type (some models rotate in float32; the
    libraries want queries of the cache's type). Raises ConfigError for a call that the plan was not
    made for."""
    if return_lse:
        raise ConfigError("return_lse is given by our own kernels only")
    asked = query.to(plan.kind.dtype)
    plan.kind.check_call(asked, k_cache, v_cache, **options)
    result = plan.attend(asked, k_cache, v_cache).to(query.dtype)
    return result if out is None else out.copy_(result)


def attend_once(
    name: str, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *,
    out: torch.Tensor | None = None, return_lse: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """One call by a library: plans for it, which copies table and lengths to the host.

    Raises ConfigError where the library is unknown, not installed, or cannot serve the call.
    """
    if name not in ADAPTERS:
        raise ConfigError(f"backend is {name!r}; libraries are {', '.join(ADAPTERS)}")
    adapter = ADAPTERS[name]
    kind = kind_of(query, k_cache, v_cache, **options)
    reason = adapter.reason_against(kind, query.device)
    if reason is not None:
        raise ConfigError(f"backend {name!r} cannot serve layers of {kind}: {reason}")
    lens = seq_lens.cpu().numpy().astype(np.int32)
    starts = query_start_loc.cpu().numpy().astype(np.int32)
    table = block_table[: len(lens)]
    batch = Batch(np.arange(len(lens), dtype=np.int32), starts, lens, query.shape[0])
    planner = adapter.planner(kind, Tables(table.cpu().numpy(), table), len(lens), {})
    return attend_planned(
        planner.plan(batch), query, k_cache, v_cache, out=out, return_lse=return_lse, **options
    )

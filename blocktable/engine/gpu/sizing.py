"""How many blocks a GPU has room for, measured rather than guessed.

The largest step that can ever run is run once, with attention stubbed out (it needs no memory that
grows with the pool): what the allocator held at its peak is what weights and activations take. The
rest of the allowed share is the pool's.
"""

from __future__ import annotations

from typing import Any

import torch

from blocktable.core.sizing import blocks_from_memory
from blocktable.engine.attention_glue import AttentionSwitch
from blocktable.engine.kv_layout import KVLayout
from blocktable.engine.options import EngineOptions
from blocktable.engine.probe import ProbeResult

_MARGIN = 512 << 20
"""Bytes left for CUDA graphs, staging and the libraries' own workspaces."""


def measured_num_blocks(
    model: Any, probed: ProbeResult, layout: KVLayout, options: EngineOptions, model_len: int
) -> int:
    """Blocks of the pool, the null block included, but no more than can ever be used.

    Raises ConfigError, saying how many bytes are missing, where fewer than two blocks fit.
    """
    device = torch.device(options.device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    peak = _peak_bytes(model, options, device)
    before_load = min(free + held, total)
    fitting = blocks_from_memory(
        total_bytes=total, free_before_load=before_load,
        free_at_peak=max(before_load - peak - _MARGIN, 0),
        block_bytes=layout.bytes_per_block, utilization=options.gpu_memory_utilization,
    )  # fmt: skip
    return min(fitting, max(2, 1 + layout.blocks_for(model_len) * options.max_num_seqs))


@torch.inference_mode()
def _peak_bytes(model: Any, options: EngineOptions, device: torch.device) -> int:
    """Bytes the allocator held at most while the largest step ran and was sampled from."""
    tokens, rows = options.max_num_batched_tokens, options.max_num_seqs
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
    keep = torch.arange(min(rows, tokens), device=device)
    with AttentionSwitch(model):
        logits = model(
            input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=keep,
            blocktable=_stand_in,
        ).logits[0]  # fmt: skip
    logits.float().softmax(-1)  # what sampling takes at least
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del logits
    torch.cuda.empty_cache()
    return peak


def _stand_in(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention's output shape without attention."""
    shape = (1, query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None

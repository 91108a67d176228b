"""blocktable: the memory system of LLM inference.

Importing this package is cheap (under 0.2 s) and loads no torch: public names are resolved when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BlockPool": "blocktable.core.pool",
    "HostTable": "blocktable.core.table",
    "KVCacheManager": "blocktable.manager",
    "KVCacheConfig": "blocktable.core.specs",
    "KVCacheGroupSpec": "blocktable.core.specs",
    "KVCacheSpec": "blocktable.core.specs",
    "AttentionSpec": "blocktable.core.specs",
    "FullAttentionSpec": "blocktable.core.specs",
    "SinkFullAttentionSpec": "blocktable.core.specs",
    "SlidingWindowSpec": "blocktable.core.specs",
    "SinkWindowSpec": "blocktable.core.specs",
    "ChunkedLocalAttentionSpec": "blocktable.core.specs",
    "MambaSpec": "blocktable.core.specs",
    "CrossAttentionSpec": "blocktable.core.specs",
    "EncoderOnlyAttentionSpec": "blocktable.core.specs",
    "MLAAttentionSpec": "blocktable.core.specs",
    "BlockTable": "blocktable.device.block_table",
    "MultiGroupBlockTable": "blocktable.device.block_table",
    "InputBatch": "blocktable.device.input_batch",
    "CommonAttentionMetadata": "blocktable.device.metadata",
    "Request": "blocktable.sched.request",
    "Scheduler": "blocktable.sched.scheduler",
    "SchedulerConfig": "blocktable.sched.config",
    "SchedulerOutput": "blocktable.sched.output",
    "Retention": "blocktable.prefix.hints",
    "SamplingParams": "blocktable.engine.params",
    "Engine": "blocktable.engine.engine",
    "RequestOutput": "blocktable.engine.outputs",
    "CompletionOutput": "blocktable.engine.outputs",
    "LLM": "blocktable.llm",
}

__all__ = sorted([*_HOME, "__version__"])

if TYPE_CHECKING:
    from blocktable.core.pool import BlockPool as BlockPool
    from blocktable.core.specs import FullAttentionSpec as FullAttentionSpec
    from blocktable.engine.params import SamplingParams as SamplingParams
    from blocktable.llm import LLM as LLM
    from blocktable.manager import KVCacheManager as KVCacheManager


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'blocktable' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

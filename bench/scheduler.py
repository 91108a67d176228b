"""Host time of a scheduler step: ``schedule`` + ``update`` of a decode step for R requests.

Prefix caching is on; hashing, key insertion, block tables and stop checks are included. With
``--peer`` vLLM's own Scheduler runs beside ours in the same process, on the same prompts (its
package must be importable; 0.25.1 was measured). Times are medians over the steps; ``quiet`` is
the fastest tenth, which a busy machine disturbs least.

    python bench/scheduler.py
    PYTHONPATH=path/to/vllm:path/to/deps python bench/scheduler.py --peer
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler

BLOCK, LENGTH = 16, 4096
TARGETS = {1: 20, 64: 60, 256: 120, 1024: 300, 4096: 1200}  # microseconds


def prompts(count: int) -> list[list[int]]:
    """Prompts of 64 to 191 tokens, so that rows cross block borders at different steps."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32000, rng.integers(64, 192)).tolist() for _ in range(count)]


def ours(count: int, steps: int) -> list[float]:
    """Seconds of each step."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128)
    blocks = count * (-(-(192 + steps + 8) // BLOCK)) + 2
    manager = KVCacheManager(
        KVCacheConfig(blocks, (KVCacheGroupSpec(("layer",), spec),)), max_num_rows=count,
        max_model_len=LENGTH, seed=0,
    )  # fmt: skip
    config = SchedulerConfig(
        max_num_seqs=count, max_num_batched_tokens=192 * count, max_model_len_must_fit=False
    )
    scheduler = Scheduler(config, manager)
    for i, prompt in enumerate(prompts(count)):
        scheduler.add(
            Request(
                request_id=str(i),
                prompt_token_ids=np.array(prompt, np.int32),
                max_tokens=steps + 50,
                eos_token_id=2,
            )
        )
    draw = np.random.default_rng(1).integers(3, 32000, (steps + 8, count)).astype(np.int32)

    def step(i: int) -> None:
        output = scheduler.schedule()
        scheduler.update(output, draw[i, : len(output.sample_rows)])

    return _measure(step, steps)


def _measure(step: Callable[[int], Any], steps: int) -> list[float]:
    for i in range(6):
        step(i)
    gc.collect()
    gc.freeze()
    gc.disable()
    times = []
    for i in range(steps):
        begin = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - begin)
    gc.enable()
    gc.unfreeze()
    return times


class _Defaults(SimpleNamespace):
    """Configuration fields the peer asks for and that play no part here are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _peer_scheduler(count: int, steps: int) -> tuple[Any, Any]:
    """vLLM's Scheduler with the options of ours, and its output class."""
    import torch
    from vllm.v1.core.sched import scheduler as module
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec as Spec
    from vllm.v1.kv_cache_interface import KVCacheConfig as Config
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as Group

    register_all_kvcache_specs(None)
    blocks = count * (-(-(192 + steps + 8) // BLOCK)) + 2
    spec = Spec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.float16)
    vllm_config = _Defaults(
        scheduler_config=_Defaults(
            max_num_seqs=count, max_num_batched_tokens=192 * count, policy="fcfs",
            max_num_scheduled_tokens=None, long_prefill_token_threshold=0, watermark=0.0,
            enable_chunked_prefill=True, scheduler_reserve_full_isl=True, async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=_Defaults(num_gpu_blocks=blocks, enable_prefix_caching=True,
                               mamba_cache_mode="none"),
        parallel_config=_Defaults(
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
            pipeline_parallel_size=1, data_parallel_index=0, data_parallel_size=1,
        ),
        model_config=_Defaults(max_model_len=LENGTH, is_encoder_decoder=False, is_diffusion=False),
        observability_config=_Defaults(kv_cache_metrics=False),
        num_speculative_tokens=0, max_concurrent_batches=1, use_v2_model_runner=False,
    )  # fmt: skip
    registry = SimpleNamespace(supports_multimodal_inputs=lambda config: False)
    structured = _Defaults(
        should_advance=lambda request: False, grammar_bitmask=lambda *a, **k: None
    )
    scheduler = module.Scheduler(
        vllm_config, Config(num_blocks=blocks, kv_cache_tensors=[],
                            kv_cache_groups=[Group(["layer"], spec)]),
        structured, block_size=BLOCK, mm_registry=registry,
    )  # fmt: skip
    return scheduler, module


def peer(count: int, steps: int) -> list[float]:
    """Seconds of each step of vLLM's Scheduler."""
    stub = ModuleType("xgrammar")  # named in annotations only
    stub.CompiledGrammar = stub.GrammarMatcher = object  # type: ignore[attr-defined]
    sys.modules.setdefault("xgrammar", stub)
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as PeerRequest

    scheduler, _ = _peer_scheduler(count, steps)
    from vllm.utils.hashing import sha256

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for i, prompt in enumerate(prompts(count)):
        params = SamplingParams(max_tokens=steps + 50)
        params.update_from_generation_config({}, 2)
        scheduler.add_request(PeerRequest(str(i), prompt, params, None, block_hasher=hasher))
    draw = np.random.default_rng(1).integers(3, 32000, (steps + 8, count))

    def step(i: int) -> None:
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        tokens = [[int(t)] for t in draw[i, : len(names)]]
        made = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: j for j, name in enumerate(names)},
            sampled_token_ids=tokens, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        clock.append(time.perf_counter())
        scheduler.update_from_output(output, made)
        clock.append(time.perf_counter())

    # The output object stands for the worker's reply: making it is not the scheduler's time.
    clock: list[float] = []
    original = scheduler.schedule

    def timed() -> Any:
        clock.append(time.perf_counter())
        output = original()
        clock.append(time.perf_counter())
        return output

    scheduler.schedule = timed
    _measure(step, steps)
    marks = np.array(clock).reshape(-1, 4)[-steps:]
    return (marks[:, 1] - marks[:, 0] + marks[:, 3] - marks[:, 2]).tolist()


def _summary(seconds: list[float]) -> tuple[float, float]:
    """Median and tenth percentile, in microseconds."""
    return 1e6 * statistics.median(seconds), 1e6 * float(np.percentile(seconds, 10))


def main() -> None:
    """Print a table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", action="store_true", help="vLLM's Scheduler beside ours")
    parser.add_argument("--requests", type=int, nargs="*", default=list(TARGETS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    print(f"{'R':>6} {'target us':>10} {'ours us':>10} {'quiet':>9} {'vLLM us':>10} {'quiet':>9}")
    for count in options.requests:
        mine = _summary(ours(count, 400 if count <= 256 else 100))
        row = {"requests": count, "ours_us": mine[0], "ours_quiet_us": mine[1]}
        text = f"{count:6d} {TARGETS.get(count, '-'):>10} {mine[0]:10.1f} {mine[1]:9.1f}"
        if options.peer:
            theirs = _summary(peer(count, 100 if count <= 256 else 24))
            row |= {"vllm_us": theirs[0], "vllm_quiet_us": theirs[1]}
            text += f" {theirs[0]:10.1f} {theirs[1]:9.1f}"
        rows.append(row)
        print(text, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"scheduler_step": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A decode step costs the same number of Python calls for any number of requests."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler


def calls_of_steps(count: int, in_flight: int, steps: int = 40) -> int:
    """Python and C calls of ``steps`` decode steps of ``count`` requests of equal length."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8)
    manager = KVCacheManager(
        KVCacheConfig(16 * count + 20, (KVCacheGroupSpec(("layer",), spec),)),
        max_num_rows=count, max_model_len=256, seed=0,
    )  # fmt: skip
    config = SchedulerConfig(
        max_num_seqs=count, max_num_batched_tokens=64 * count, max_steps_in_flight=in_flight
    )
    scheduler = Scheduler(config, manager)
    for i in range(count):
        prompt = np.full(40, i, np.int32)
        scheduler.add(
            Request(request_id=str(i), prompt_token_ids=prompt, max_tokens=150, eos_token_id=9)
        )
    flying = []

    def step() -> None:
        while len(flying) < in_flight:
            flying.append(scheduler.schedule())
        output = flying.pop(0)
        scheduler.update(output, np.full(len(output.sample_rows), 3, np.int32))

    for _ in range(4):
        step()
    seen = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("in_flight", [1, 2])
def test_calls_do_not_grow_with_requests(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = calls_of_steps(8, in_flight), calls_of_steps(256, in_flight)
    # Hashing is one call for each completed block where nothing is compiled: 256 - 8 rows
    # complete at most 3 blocks in 40 steps.
    assert many - few <= 4 * 3 * (256 - 8)
    assert few / 40 < 250

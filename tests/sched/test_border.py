"""What the scheduler refuses: bad requests, bad configurations, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import World

from blocktable.core.errors import ConfigError, RequestError
from blocktable.core.specs import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": []}, "at least 1 token"),
        ({"prompt_token_ids": [-1]}, "request 'a': token.* -1"),
        ({"prompt_token_ids": [2**31]}, "request 'a': token.* 0 .. 2147483647"),
        ({"prompt_token_ids": [1.5]}, "integers 0 .. 2147483647"),
        ({"prompt_token_ids": np.array([True])}, "list of integers, got bool"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": -3}, "max_tokens must be >= 1, got -3"),
        ({"n": 0}, "n must be >= 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be >= 0, got -1"),
    ],
)
def test_bad_requests(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(**{"request_id": "a", "prompt_token_ids": [1, 2], **fields})


def test_requests_the_scheduler_cannot_take() -> None:
    world = World(30, 4, max_num_seqs=2)
    world.add("a", 9)
    with pytest.raises(RequestError, match="'a' is in use"):
        world.add("a", 9)
    with pytest.raises(RequestError, match="120 tokens is too long: the model holds 120"):
        world.add("b", 120)
    with pytest.raises(RequestError, match="n 3 is above max_num_seqs 2"):
        world.add("c", 9, n=3)
    assert world.waiting == ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1, got 0"),
        ({"policy": "lottery"}, "policy must be fcfs or priority"),
        ({"watermark": 1.0}, "watermark must be in"),
        ({"preemption": "pray"}, "preemption must be recompute or swap"),
        ({"max_steps_in_flight": 3}, "max_steps_in_flight is 1 or 2"),
        ({"num_draft_tokens": 2, "max_steps_in_flight": 2}, "needs max_steps_in_flight 1"),
        ({"priority_head_start": -1.0}, "priority_head_start must be"),
    ],
)
def test_bad_configurations(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)


def test_configurations_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="host_blocks > 0"):
        World(30, 4, preemption="swap")
    with pytest.raises(ConfigError, match="without chunked prefill"):
        World(30, 4, chunked_prefill=False, max_num_batched_tokens=64)


def test_drafts_are_refused_for_recurrent_states() -> None:
    spec = MambaSpec(block_size=4, shapes=((4,),), dtypes=("float32",))
    manager = KVCacheManager(
        KVCacheConfig(31, (KVCacheGroupSpec(("state",), spec),)), max_num_rows=4, max_model_len=40
    )
    with pytest.raises(ConfigError, match="cannot be rolled back"):
        Scheduler(SchedulerConfig(max_num_seqs=4, num_draft_tokens=2), manager)

"""Small worlds for scheduler tests: a manager, a scheduler and a fake device."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable.check.fake_device import FakeDevice, next_token
from blocktable.core.invariants import check
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.output import SchedulerOutput, StepResult
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler


class World:
    """``usable`` blocks of ``block_size`` tokens, full attention. Time is ``now``."""

    def __init__(
        self,
        usable: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        host_blocks: int = 0,
        enable_caching: bool = True,
        vocabulary: int = 50,
        **options: Any,
    ) -> None:
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 8192, **options}
        config = SchedulerConfig(**options)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8)
        self.manager = KVCacheManager(
            KVCacheConfig(usable + 1, (KVCacheGroupSpec(("layer",), spec),)),
            max_num_rows=config.max_num_seqs,
            max_model_len=max_model_len or usable * block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_caching=enable_caching,
            host_blocks=host_blocks,
            seed=0,
        )
        self.now = 0.0
        self.scheduler = Scheduler(config, self.manager, clock=lambda: self.now)
        self.device = FakeDevice(self.manager, vocabulary)
        self.vocabulary = vocabulary
        self.outputs: list[SchedulerOutput] = []
        self.done: list[Request] = []

    @property
    def free(self) -> int:
        return self.manager.pool.available

    @property
    def running(self) -> list[str]:
        requests = self.scheduler.requests[self.scheduler.running_rows].tolist()
        return [request.request_id for request in requests]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    def add(
        self, name: str, prompt: int | list[int], max_tokens: int = 8, **fields: Any
    ) -> Request:
        """Queue a request; a number means that many tokens of its own."""
        if isinstance(prompt, int):
            seed = int.from_bytes(name.encode(), "little") % 2**31
            tokens = np.random.default_rng(seed).integers(0, self.vocabulary, prompt)
        else:
            tokens = np.array(prompt)
        request = Request(
            request_id=name, prompt_token_ids=tokens.astype(np.int32), max_tokens=max_tokens,
            arrival=self.now, **fields,
        )  # fmt: skip
        self.scheduler.add(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Decide a step and let the device run it."""
        output = self.scheduler.schedule()
        assert output.num_total == output.num_scheduled.sum()
        self.outputs.append(output)
        self.sampled = self.device.run(output, self.scheduler.requests)
        return output

    def step(self) -> tuple[SchedulerOutput, StepResult]:
        """A whole step, checked."""
        output = self.schedule()
        self.now += 1.0
        result = self.scheduler.update(output, *self.sampled)
        self.done += result.finished
        check(self.manager)
        return output, result

    def run(self, limit: int = 500) -> int:
        """Steps until all is done; fails after ``limit``."""
        for count in range(limit):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.running} {self.waiting}")

    def alone(self, request: Request) -> list[int]:
        """The tokens the request generates when nothing else runs and no stop id comes."""
        tokens = request.prompt_token_ids
        for _ in range(request.max_tokens):
            made = next_token(tokens, self.vocabulary, request.index)
            tokens = np.append(tokens, np.int32(made))
        return tokens[request.num_prompt_tokens :].tolist()

"""Replay a request trace through the real manager and scheduler, on a clock that a stated
step-time model drives. Nothing is computed; every decision is the one a server would make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from blocktable.core.errors import BlocktableError, ConfigError, RequestError
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.sched.config import Policy, SchedulerConfig
from blocktable.sched.output import SchedulerOutput
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler
from blocktable.sim.report import PoolUse, SimReport, percentiles
from blocktable.sim.step_time import StepTimeModel
from blocktable.sim.trace import Trace

OUTPUT_TOKEN_BASE = 2**30
"""Generated tokens of request i are all this + i: no prompt of the trace contains them."""


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """What to simulate. ``num_blocks`` counts usable blocks of ``Trace.block_size`` tokens; None
    = unbounded (room for the whole trace), which gives the exact upper bound of prefix hits."""

    num_blocks: int | None = None
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    policy: str = "fcfs"
    """fcfs or priority, as in ``SchedulerConfig``."""
    watermark: float = 0.01
    full_sequence_must_fit: bool = True
    enable_caching: bool = True
    eviction: str = "lru"
    samples: int = 2000
    """Most points of pool use over time that are kept."""

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be >= 1 or None (unbounded), got {self.num_blocks}")
        if self.samples < 2:
            raise ConfigError(f"samples must be >= 2, got {self.samples}")


def simulate(trace: Trace, options: SimOptions) -> SimReport:
    """Run a whole trace. Raises ConfigError for options that cannot work; requests that can never
    fit into the pool are refused, as a server would, and counted."""
    return _Simulation(trace, options).run()


class _Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Simulation:
    def __init__(self, trace: Trace, options: SimOptions) -> None:
        self.trace, self.options, self.clock = trace, options, _Clock()
        lengths = trace.input_length + trace.output_length
        needed = int((-(-lengths // trace.block_size)).sum())
        usable = needed if options.num_blocks is None else options.num_blocks
        spec = FullAttentionSpec(block_size=trace.block_size, num_kv_heads=1, head_size=1)
        self.manager = KVCacheManager(
            KVCacheConfig(usable + 1, (KVCacheGroupSpec(("kv",), spec),)),
            max_num_rows=options.max_num_seqs,
            max_model_len=trace.max_length + 1,
            max_num_batched_tokens=options.max_num_batched_tokens,
            enable_caching=options.enable_caching,
            eviction=options.eviction,
            seed=0,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                policy=cast(Policy, options.policy),  # checked there
                watermark=options.watermark,
                full_sequence_must_fit=options.full_sequence_must_fit,
                max_model_len_must_fit=False,
            ),
            self.manager,
            clock=self.clock,
        )
        self.next = 0
        self.refused = self.refused_tokens = 0
        self.done: list[Request] = []
        self.token_of_row = np.zeros(options.max_num_seqs, np.int32)
        self.pool_use = PoolUse(options.samples)

    def run(self) -> SimReport:
        idle_steps = 0
        while self.next < len(self.trace) or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.clock.now = max(self.clock.now, float(self.trace.arrival[self.next]))
            self._arrive()
            if not self.scheduler.has_work:
                continue
            output = self.scheduler.schedule()
            idle_steps = idle_steps + 1 if output.is_empty else 0
            if idle_steps > 2:
                raise BlocktableError(
                    f"the simulation is stuck at {self.clock.now:.3f} s with "
                    f"{self.scheduler.num_waiting} requests waiting"
                )
            self._step(output)
        return self._report()

    def _step(self, output: SchedulerOutput) -> None:
        for entry in output.admitted:
            number = int(entry.request.request_id)
            self.token_of_row[entry.row] = OUTPUT_TOKEN_BASE + number
        self.clock.now += self.options.step_time.seconds(
            output.num_computed, output.num_scheduled, output.num_total
        )
        result = self.scheduler.update(output, self.token_of_row[output.sample_rows])
        self.done.extend(result.finished)
        self._sample_pool()

    def _arrive(self) -> None:
        """Queue what has arrived by now."""
        trace = self.trace
        while self.next < len(trace) and trace.arrival[self.next] <= self.clock.now:
            i = self.next
            self.next += 1
            try:
                self.scheduler.add(
                    Request(
                        request_id=str(i),
                        prompt_token_ids=trace.prompt(i),
                        max_tokens=int(trace.output_length[i]),
                        arrival=float(trace.arrival[i]),
                    )
                )
            except RequestError:
                self.refused += 1
                self.refused_tokens += int(trace.input_length[i])

    def _sample_pool(self) -> None:
        pool = self.manager.pool
        self.pool_use.add(
            self.clock.now, pool.used, pool.evictable, len(self.scheduler.running_rows),
            self.scheduler.num_waiting,
        )  # fmt: skip

    def _report(self) -> SimReport:
        stats, trace = self.scheduler.stats, self.trace
        first = np.array([r.first_token_at or 0.0 for r in self.done])
        queued = np.array([(r.scheduled_at or 0.0) - r.arrival for r in self.done])
        arrival = np.array([r.arrival for r in self.done])
        ended = np.array([r.finished_at or 0.0 for r in self.done])
        made = np.array([len(r.tokens) - r.num_prompt_tokens for r in self.done])
        between = (ended - first)[made > 1] / (made[made > 1] - 1)
        usable = self.manager.pool.usable
        kv_bytes = self.options.step_time.kv_bytes_per_token
        return SimReport(
            requests=len(trace), finished=len(self.done), refused=self.refused,
            refused_tokens=self.refused_tokens,
            usable_blocks=None if self.options.num_blocks is None else usable,
            block_size=trace.block_size,
            pool_bytes=None
            if self.options.num_blocks is None
            else usable * trace.block_size * kv_bytes,
            query_tokens=stats.query_tokens, hit_tokens=stats.hit_tokens,
            hit_rate=stats.hit_rate, preemptions=stats.preemptions, steps=stats.steps,
            scheduled_tokens=stats.scheduled_tokens, generated_tokens=stats.generated_tokens,
            makespan_s=self.clock.now, peak_used_blocks=self.pool_use.peak,
            ttft_s=percentiles(first - arrival), queue_s=percentiles(queued),
            inter_token_s=percentiles(between), step_time_model=self.options.step_time.describe(),
            pool_use=self.pool_use.arrays(),
        )  # fmt: skip


DEFAULT_SWEEP_GB = (1.0, 4.0, 16.0, 40.0, 80.0, 160.0, 640.0, 2560.0)


def sweep(
    trace: Trace,
    options: SimOptions,
    sizes_gb: tuple[float, ...] = DEFAULT_SWEEP_GB,
    unbounded: bool = True,
) -> list[SimReport]:
    """The same trace at several pool sizes (GB = 1e9 bytes), the unbounded one last. A size too
    small for one block is a ConfigError."""
    block_bytes = trace.block_size * options.step_time.kv_bytes_per_token
    counts: list[int | None] = []
    for size in sizes_gb:
        blocks = int(size * 1e9 // block_bytes)
        if blocks < 1:
            raise ConfigError(
                f"a pool of {size:g} GB is smaller than one block of {block_bytes:,} bytes"
            )
        counts.append(blocks)
    reports = [simulate(trace, _with_blocks(options, blocks)) for blocks in counts]
    return [*reports, simulate(trace, _with_blocks(options, None))] if unbounded else reports


def _with_blocks(options: SimOptions, num_blocks: int | None) -> SimOptions:
    return replace(options, num_blocks=num_blocks)


def blocks_for_bytes(num_bytes: float, trace: Trace, model: StepTimeModel) -> int:
    """Usable blocks that ``num_bytes`` of KV memory hold."""
    return int(num_bytes // (trace.block_size * model.kv_bytes_per_token))

"""The scheduler's statistics against a plain recount of what the outputs said, under random
traffic with preemptions, aborts and failed steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from worlds import World

from blocktable.sched.output import SchedulerOutput, StepResult
from blocktable.sched.request import Request


@dataclass
class Recount:
    """What a reader of the outputs would note down."""

    queries: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    between: list[float] = field(default_factory=list)
    steps: int = 0
    scheduled: int = 0
    tokens: int = 0
    aborted: int = 0
    finished: int = 0
    preempted: int = 0

    def decided(self, output: SchedulerOutput, now: float) -> None:
        self.steps += 1
        self.scheduled += int(output.num_scheduled.sum())
        self.preempted += len(output.preempted)
        for request, _, num_cached, _ in output.admitted:
            name = request.request_id
            if name not in self.queries:
                self.queries[name] = request.num_prompt_tokens
                self.hits[name] = num_cached
                self.waited[name] = now - request.arrival

    def came(self, result: StepResult, now: float) -> None:
        self.finished += len(result.finished)
        for request, count in zip(result.requests, result.counts.tolist(), strict=True):
            name = request.request_id
            self.tokens += count
            if name in self.last:
                self.between.append((now - self.last[name]) / count)
            else:
                self.first[name] = now - request.arrival
            self.last[name] = now


def random_prompt(rng: random.Random) -> list[int]:
    """A few beginnings, so that there are hits."""
    return [rng.randrange(3)] * rng.randrange(1, 24) + [rng.randrange(50)] * rng.randrange(1, 9)


def abort_one(world: World, rng: random.Random, live: list[Request]) -> int:
    victim = rng.choice(live)
    gone = world.scheduler.abort([victim.request_id])
    assert world.scheduler.abort([victim.request_id]) == []
    return len(gone)


def compare(world: World, seen: Recount) -> None:
    stats = world.scheduler.stats
    assert stats.query_tokens == sum(seen.queries.values())
    assert stats.hit_tokens == sum(seen.hits.values())
    assert stats.admitted == len(seen.queries)
    cache = world.manager.stats()
    assert (cache.query_tokens, cache.hit_tokens) == (stats.query_tokens, stats.hit_tokens)
    assert (stats.finished, stats.aborted) == (seen.finished, seen.aborted)
    assert (stats.steps, stats.scheduled_tokens) == (seen.steps, seen.scheduled)
    assert stats.generated_tokens == seen.tokens
    for histogram, values in (
        (stats.queue_time, list(seen.waited.values())),
        (stats.time_to_first_token, list(seen.first.values())),
        (stats.inter_token_time, seen.between),
    ):
        assert histogram.count == len(values) == histogram.counts.sum()
        assert histogram.total == pytest.approx(sum(values))
    assert 0.0 <= world.scheduler.load().usage <= 1.0


@pytest.mark.parametrize("seed", range(12))
def test_statistics_equal_a_plain_recount(seed: int) -> None:
    rng, seen = random.Random(seed), Recount()
    swap = seed % 3 == 2
    world = World(
        14, 4, max_num_batched_tokens=rng.choice([8, 64]), full_sequence_must_fit=seed % 2 == 0,
        policy=rng.choice(["fcfs", "priority"]), preemption="swap" if swap else "recompute",
        host_blocks=20 if swap else 0, lookahead=rng.choice([0, 2]),
    )  # fmt: skip
    requests: list[Request] = []
    for i in range(150):
        if rng.random() < 0.5 and i < 110:
            fields = {"max_tokens": rng.randrange(1, 12), "priority": rng.randrange(3)}
            requests.append(world.add(f"r{i}", random_prompt(rng), **fields))
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.1:
            seen.aborted += abort_one(world, rng, live)
        if rng.random() < 0.08 and world.running:
            world.scheduler.preempt([rng.choice(world.running)])
        output = world.schedule()
        seen.decided(output, world.now)
        world.now += rng.choice([0.25, 1.0, 3.0])
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.1:  # in the step that is in flight
            seen.aborted += abort_one(world, rng, live)
        seen.came(world.scheduler.update(output, *world.sampled), world.now)
        compare(world, seen)
        assert world.scheduler.stats.preemptions == seen.preempted
        assert seen.preempted == sum(request.num_preemptions for request in requests)
    assert seen.preempted and seen.aborted and seen.finished and sum(seen.hits.values())

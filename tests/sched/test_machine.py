"""Hypothesis drives scheduler, manager, forks, swaps, drafts and aborts; everything is recounted
after each rule, and a fake device checks what each slot holds."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from blocktable.check.traffic import EVENTS, Traffic, run_traffic
from blocktable.check.traffic_world import random_world

RARE = ("pin", "unpin", "expire", "retain", "aborted child")  # one example may have each of them


class SchedulerMachine(RuleBasedStateMachine):
    """Rules call one operation each; subjects come from a seeded generator, so runs shrink."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(seed=st.integers(0, 999))
    def build(self, seed: int) -> None:
        rng = random.Random(seed)
        self.traffic = Traffic(random_world(rng), rng)

    @rule(times=st.integers(2, 8))
    def rush(self, times: int) -> None:
        for _ in range(times):
            self.traffic.add()
            self.traffic.schedule()
            self.traffic.check()

    @rule(times=st.integers(1, 3))
    def add(self, times: int) -> None:
        for _ in range(times):
            self.traffic.add()

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.traffic.schedule()
            self.traffic.update()
            self.traffic.check()

    @rule()
    def schedule(self) -> None:
        self.traffic.schedule()

    @rule()
    def update(self) -> None:
        self.traffic.update()

    @rule()
    def abort(self) -> None:
        self.traffic.abort()

    @rule(then_abort=st.booleans())
    def preempt(self, then_abort: bool) -> None:
        self.traffic.preempt()
        if then_abort:
            self.traffic.check()
            self.traffic.abort()

    @rule()
    def fork(self) -> None:
        self.traffic.fork()

    @rule()
    def cancel(self) -> None:
        self.traffic.cancel()

    @rule()
    def reset(self) -> None:
        self.traffic.reset()

    @rule()
    def hint(self) -> None:
        self.traffic.hint()

    @rule()
    def drop_cache(self) -> None:
        self.traffic.drop_cache()

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()
            self.reached.update(self.traffic.events)


def test_scheduler_machine() -> None:
    """All rules in any order; and every kind of event was really reached."""
    SchedulerMachine.reached.clear()
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=120, stateful_step_count=50, deadline=None, derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )  # fmt: skip
    assert [
        name for name in EVENTS if not SchedulerMachine.reached[name] and name not in RARE
    ] == []


def test_traffic_reaches_everything() -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        reached.update(run_traffic(seed, 150).events)
    assert [name for name in EVENTS if not reached[name]] == []

"""Hypothesis drives scheduler, manager, forks, swaps, drafts and aborts; everything is recounted
after each rule, and a fake device checks what each slot holds."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blocktable.check.traffic import Traffic, random_world


class SchedulerMachine(RuleBasedStateMachine):
    """Rules call one operation each; subjects come from a seeded generator, so runs shrink."""

    @initialize(seed=st.integers(0, 2**32))
    def build(self, seed: int) -> None:
        rng = random.Random(seed)
        self.traffic = Traffic(random_world(rng), rng)

    @rule(times=st.integers(1, 3))
    def add(self, times: int) -> None:
        for _ in range(times):
            self.traffic.add()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.traffic.schedule()
            self.traffic.update()

    @rule()
    def schedule(self) -> None:
        self.traffic.schedule()

    @rule()
    def update(self) -> None:
        self.traffic.update()

    @rule()
    def abort(self) -> None:
        self.traffic.abort()

    @rule()
    def preempt(self) -> None:
        self.traffic.preempt()

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
    def drop_cache(self) -> None:
        self.traffic.drop_cache()

    @invariant()
    def all_holds(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

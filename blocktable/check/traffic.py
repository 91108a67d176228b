"""Random traffic over a tiny pool: every operation a scheduler has, in any order, checked.

Drives the real scheduler and manager with a :class:`FakeDevice`; after each operation the
invariant checker recounts everything, and each finished request must have exactly the tokens it
would have had alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from blocktable.check.fake_device import FakeDevice, next_token
from blocktable.check.traffic_world import TrafficConfig, groups_of, random_world
from blocktable.core.errors import BlocktableError, RequestError
from blocktable.core.invariants import check
from blocktable.core.specs import KVCacheConfig
from blocktable.manager import KVCacheManager
from blocktable.prefix.hints import MAX_SECONDS, Retention
from blocktable.sched.output import SchedulerOutput
from blocktable.sched.request import Request, RequestStatus
from blocktable.sched.scheduler import Scheduler


class Traffic:
    """A scheduler, a manager and a fake device, and one method for each thing that can happen.
    Methods pick their subject with ``rng``."""

    def __init__(self, world: TrafficConfig, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.now = 0.0
        self.manager = KVCacheManager(
            KVCacheConfig(world.num_blocks, groups_of(world)),
            max_num_rows=world.scheduler.max_num_seqs,
            max_model_len=world.max_model_len,
            max_num_batched_tokens=world.scheduler.max_num_batched_tokens,
            enable_caching=world.enable_caching, host_blocks=world.host_blocks, seed=1,
            eviction=world.eviction,
        )  # fmt: skip
        self.manager.clock = lambda: self.now
        self.scheduler = Scheduler(world.scheduler, self.manager, clock=lambda: self.now)
        self.device = FakeDevice(self.manager, world.vocabulary)
        self.flying: deque[tuple[SchedulerOutput, np.ndarray, np.ndarray | None]] = deque()
        self.live: dict[str, Request] = {}
        self.start: dict[str, int] = {}  # tokens given from outside, at the head of each request
        self.prompts: list[list[int]] = []
        self.count = 0
        self.finished = 0
        self.events: Counter[str] = Counter()
        """How often each thing really happened."""

    # -- things that happen ---------------------------------------------------------------------

    def add(self) -> None:
        """A request arrives; prompts share prefixes."""
        rng, most = self.rng, self.world.max_model_len
        prompt = [rng.randrange(self.world.vocabulary) for _ in range(rng.randint(1, most))]
        if self.prompts and rng.random() < 0.6:
            old = rng.choice(self.prompts)
            prompt = (old[: rng.randint(0, len(old))] + prompt)[:most]
        self.prompts = [*self.prompts[-20:], prompt]
        request = Request(
            request_id=f"r{self.count}", prompt_token_ids=np.array(prompt, np.int32),
            max_tokens=rng.randint(1, 14), min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=rng.choice([(), (), (0,), (1, 3)]),
            n=rng.choice([1, 1, 1, min(3, self.world.scheduler.max_num_seqs)]),
            priority=rng.randint(0, 2), salt=rng.choice([None, None, "s"]), arrival=self.now,
            retention=rng.choice([None, None, self._retention()]),
        )  # fmt: skip
        self.count += 1
        try:
            self.scheduler.add(request)
        except RequestError:
            if len(prompt) < self.scheduler.capacity:
                raise
            self.events["refused"] += 1
            return
        self.events["added"] += 1
        self._watch(request, len(prompt))

    def _retention(self) -> Retention:
        rng = self.rng
        return Retention(
            priority=rng.randint(0, 3), seconds=rng.choice([1.0, 9.0, MAX_SECONDS]),
            tokens=rng.choice([None, 1, 6]),
        )  # fmt: skip

    def hint(self) -> None:
        """The operator says what is worth keeping, of any prompt so far."""
        if not self.prompts or self.manager.index is None:
            return
        rng, manager = self.rng, self.manager
        name = rng.choice(["pin", "unpin", "unpin", "expire", "retain"])
        steps, seconds = rng.choice([(None, None), (3, None), (2, 4.0), (None, 5.0)])
        hit = 0
        for prompt in rng.sample(self.prompts, len(self.prompts)):  # the first that is cached
            if name == "retain":
                hit = manager.retain(
                    prompt, priority=rng.randint(1, 4), steps=steps, seconds=seconds
                )
            else:
                hit = getattr(manager, name)(prompt)
            if hit:
                break
        self.events[name] += bool(hit)

    def schedule(self) -> None:
        """One more step, if as many are not in flight already; the device runs it at once."""
        if self.scheduler.num_in_flight >= self.world.scheduler.max_steps_in_flight:
            self.update()
        output = self.scheduler.schedule()
        for fork in output.forked:
            if fork.request.request_id not in self.start:
                self._watch(fork.request, fork.request.num_prompt_tokens)
        tokens, counts = self.device.run(output, self.scheduler.requests)
        self.flying.append((output, tokens, counts))
        self._count(output)

    def _count(self, output: SchedulerOutput) -> None:
        drafts = 0 if output.num_drafts is None else int(output.num_drafts.sum())
        self.events.update({
            "steps": 1, "empty steps": int(output.is_empty),
            "two in flight": int(len(self.flying) > 1),
            "pending tokens": 0 if output.pending is None else int(output.pending.sum()),
            "hits": sum(entry.num_cached > 0 for entry in output.admitted),
            "admitted": len(output.admitted), "forked": len(output.forked),
            "preempted": len(output.preempted), "copies": len(output.copies),
            "swapped out": len(output.swap_out), "swapped in": len(output.swap_in),
            "blocked": int(output.blocked is not None), "drafts": drafts,
            "retained": self.manager.num_retained,
        })  # fmt: skip

    def update(self) -> None:
        """The oldest step in flight comes back."""
        self.now += 1.0
        if self.flying:
            output, tokens, counts = self.flying.popleft()
            result = self.scheduler.update(output, tokens, counts)
            for request in result.finished:
                self._check_end(request)

    def cancel(self) -> None:
        """The device fails: all steps in flight are taken back."""
        while self.flying:
            self.scheduler.cancel(self.flying.pop()[0])
            self.events["cancelled"] += 1

    def abort(self) -> None:
        """A client goes away, at any moment."""
        some = self._pick()
        before = {name: self.live[name].status.name.lower() for name in some}
        gone = self.scheduler.abort(some) if self.rng.random() < 0.5 else None
        for request in gone if gone is not None else self.scheduler.finish(some, "stop"):
            self.live.pop(request.request_id)
            self.events[f"aborted {before.get(request.request_id, 'child')}"] += 1

    def preempt(self) -> None:
        """Someone is taken off its blocks."""
        self.scheduler.preempt(self._pick())

    def fork(self) -> None:
        """A beam splits."""
        running = [r for r in self.live.values() if r.status == RequestStatus.RUNNING]
        if self.flying or not running:
            return
        parent = self.rng.choice(running)
        known = int(self.manager.num_tokens[parent.row])
        token = (
            self.rng.randrange(self.world.vocabulary) if known > parent.num_prompt_tokens else None
        )
        try:
            children = self.scheduler.fork(
                parent.request_id, [f"f{self.count}"], None if token is None else [token]
            )
        except RequestError:
            return
        self.count += 1
        self.events["beam forks"] += 1
        self._watch(children[0], known)

    def reset(self) -> None:
        """Somebody tries to drop the prefix cache; refused while blocks are in use."""
        idle = self.manager.pool.used == 0 and self.manager.pool.fenced == 0
        if self.scheduler.reset_prefix_cache() != idle:
            raise BlocktableError(f"reset answered {not idle} with used {self.manager.pool.used}")

    def drop_cache(self) -> None:
        """The weights change: what was computed must not be hit any more."""
        if not self.flying:
            self.scheduler.drop_cache()
            self.events["cache dropped"] += 1
            for memory in (*self.device.memory, *self.device.host):
                memory[:] = 0

    def drain(self, limit: int = 5000) -> None:
        """Nobody comes any more: all end, and every block is free. BlocktableError otherwise."""
        steps = 0
        while self.scheduler.has_work:
            self.schedule()
            self.update()
            while self.flying and self.rng.random() < 0.3:
                self.update()
            steps += 1
            if steps > limit:
                raise BlocktableError(f"{len(self.live)} requests never end: a livelock")
        self.check()
        self.events["states"] += self.device.states.checked
        pool = self.manager.pool
        if pool.available != pool.usable or self.live:
            raise BlocktableError(
                f"{pool.usable - pool.available} blocks leaked, {len(self.live)} requests lost"
            )
        host = self.manager.host_pool
        if host is not None and host.available != host.usable:
            raise BlocktableError(f"{host.usable - host.available} host blocks leaked")

    def check(self) -> None:
        """Everything that must hold at any moment."""
        check(self.manager)
        running = self.scheduler.running_rows
        waiting = self.scheduler.waiting
        names = {request.request_id for request in self.scheduler.requests[running].tolist()}
        names |= {request.request_id for request in waiting}
        if names != set(self.live) or len(running) + len(waiting) != len(self.live):
            raise BlocktableError(f"requests {names ^ set(self.live)} are lost or double")

    # -- what must come out ---------------------------------------------------------------------

    def _pick(self) -> list[str]:
        names = list(self.live)
        off = [name for name in names if self.live[name].status in AWAY]
        if off and self.rng.random() < 0.5:  # rare, and where state is kept in most places
            names = off
        return self.rng.sample(names, min(len(names), self.rng.randint(1, 2)))

    def _watch(self, request: Request, given: int) -> None:
        self.live[request.request_id] = request
        self.start[request.request_id] = given

    def _check_end(self, request: Request) -> None:
        """The tokens are those the request would have had alone, and it ended where it must."""
        self.live.pop(request.request_id)
        self.finished += 1
        tokens, first = request.tokens, self.start.pop(request.request_id)
        for at in range(first, len(tokens)):
            right = next_token(tokens[:at], self.world.vocabulary, request.index)
            if tokens[at] != right:
                raise BlocktableError(
                    f"{request.request_id}: token {at} is {tokens[at]}, alone it is {right}"
                )
        made = len(tokens) - request.num_prompt_tokens
        most = min(request.max_tokens, self.scheduler.capacity - request.num_prompt_tokens)
        stops = [
            at for at in range(first, len(tokens))
            if int(tokens[at]) in request.stop_set
            and at + 1 - request.num_prompt_tokens >= request.min_tokens
        ]  # fmt: skip
        if request.finish_reason == "stop":
            good = stops == [len(tokens) - 1]
        else:
            good = made == most and not stops
        if not good:
            raise BlocktableError(
                f"{request.request_id} ended by {request.finish_reason} with {made} of {most} "
                f"tokens and stops at {stops}"
            )


AWAY = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)

EVENTS = (
    "added", "refused", "steps", "empty steps", "two in flight", "pending tokens", "admitted",
    "blocked", "hits", "copies", "forked", "beam forks", "drafts", "preempted", "swapped out",
    "swapped in", "aborted waiting", "aborted running", "aborted preempted", "aborted swapped",
    "aborted child", "cancelled", "cache dropped", "pin", "unpin", "retain", "expire", "retained",
    "states",
)  # fmt: skip
"""What traffic in enough worlds must have done; keys of ``Traffic.events``."""

WEIGHTS = {
    "add": 14, "schedule": 40, "update": 24, "abort": 5, "preempt": 4, "fork": 4, "reset": 1,
    "hint": 3, "cancel": 1, "drop_cache": 1,
}  # fmt: skip


def run_traffic(seed: int, operations: int, world: TrafficConfig | None = None) -> Traffic:
    """Random traffic, drained at the end; raises at the first thing that is wrong."""
    rng = random.Random(seed)
    traffic = Traffic(world or random_world(rng), rng)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(operations):
        name = rng.choices(names, weights)[0]
        if name == "add" and len(traffic.live) > 12:
            name = "update"
        getattr(traffic, name)()
        traffic.check()
    traffic.drain()
    return traffic

"""Nobody starves: look-ahead with ageing, priorities, and preemptions that come to an end."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from worlds import World


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_stream_of_small_requests_passes_a_large_one_only_so_often(
    policy: str, seed: int
) -> None:
    rng, patience, longest = np.random.default_rng(seed), 5, 12
    world = World(12, 4, lookahead=3, lookahead_patience=patience, policy=policy)
    world.add("hog", 24, max_tokens=longest)
    world.step()
    large = world.add("large", 40, max_tokens=4)
    for i in range(200):
        for j in range(int(rng.integers(1, 4))):
            length = int(rng.integers(1, 8))
            world.add(f"{i}.{j}", length, max_tokens=int(rng.integers(1, longest)))
        world.step()
        if large.num_cached_tokens >= 0:
            break
    assert 0 < large.passed_over <= patience, "the small ones did pass it, but not for ever"
    assert i < (patience + 1) * longest, "without anyone passing it, all who run end in that time"


def test_each_large_request_in_turn_is_passed_a_bounded_number_of_times() -> None:
    world = World(12, 4, lookahead=8, lookahead_patience=3)
    large = [world.add(f"{i}large", 36, max_tokens=6) for i in range(6)]
    for i in range(300):
        world.add(f"{i}small", 4, max_tokens=2)
        world.step()
    assert all(request.finish_reason == "length" for request in large)
    assert all(request.passed_over <= 3 for request in large)
    assert any(request.passed_over == 3 for request in large)
    ends = [request.request_id for request in world.done if request in large]
    assert ends == [request.request_id for request in large], "among themselves in order"


def test_a_high_priority_waits_for_who_runs_and_for_nobody_behind_it() -> None:
    world = World(10, 4, policy="priority")
    low = world.add("low", 24, max_tokens=8, priority=9)
    world.step()
    high = world.add("high", 36, max_tokens=2, priority=0)
    for i in range(40):  # each would fit beside the low one, and could keep the high one out
        world.add(f"{i}middle", 4, max_tokens=6, priority=5)
        output, _ = world.step()
        if high.num_cached_tokens >= 0:
            break
        assert output.blocked is high and output.admitted == ()
    assert low.finish_reason == "length" and low.num_preemptions == 0
    assert i == 7, "the step after the low one's last"


def test_the_low_one_makes_room_when_the_high_one_grows() -> None:
    world = World(8, 4, policy="priority", full_sequence_must_fit=False)
    low = world.add("low", 14, max_tokens=12, priority=9)
    world.step()
    high = world.add("high", 14, max_tokens=12, priority=0)
    world.run()
    assert high.num_preemptions == 0 and low.num_preemptions >= 1
    assert [request.request_id for request in world.done] == ["high", "low"]
    assert low.output_token_ids.tolist() == world.alone(low)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("must_fit", [True, False])
def test_preemptions_come_to_an_end(preemption: str, must_fit: bool, seed: int) -> None:
    """Far more wanted than there is room for. Who came first is never the victim, so the oldest
    request runs through, then the next; whoever leaves made room for a token of another."""
    rng = np.random.default_rng(seed)
    world = World(
        24, 4, preemption=preemption, host_blocks=40 if preemption == "swap" else 0,
        full_sequence_must_fit=must_fit, max_num_batched_tokens=32,
    )  # fmt: skip
    requests = [
        world.add(f"r{i}", int(rng.integers(8, 40)), max_tokens=int(rng.integers(10, 40)))
        for i in range(16)
    ]
    age = {request.request_id: i for i, request in enumerate(requests)}
    made = {request.request_id: -1 for request in requests}
    left: Counter[str] = Counter()
    while world.scheduler.has_work:
        oldest = min(world.running, key=age.__getitem__, default=None)
        output, result = world.step()
        assert output.num_total or len(output.swap_in), "a step that does nothing"
        for victim in output.preempted:
            assert victim.request_id != oldest
            left[victim.request_id] += 1
        made |= {request.request_id: len(request.tokens) for request in result.finished}
    assert left, "the pool was tight"
    generated = sum(request.max_tokens for request in requests)
    assert sum(left.values()) == world.scheduler.stats.preemptions <= generated // 4
    assert world.free == 24 and min(made.values()) > 0
    wanted = sum(request.num_prompt_tokens + request.max_tokens - 1 for request in requests)
    assert world.scheduler.stats.scheduled_tokens <= 3 * wanted
    assert all(r.output_token_ids.tolist() == world.alone(r) for r in requests)

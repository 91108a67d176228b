"""Hints that come with requests: what they keep, and what they can never do to others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktable.core.errors import RequestError
from blocktable.core.invariants import check
from blocktable.prefix.hints import MAX_PRIORITY, MAX_SECONDS, Retention
from blocktable.prefix.retention import RetainingQueue
from tests.sched.worlds import World

BLOCK = 4


def world(usable: int = 20, **options: Any) -> World:
    made = World(usable, block_size=BLOCK, **options)
    made.manager.clock = lambda: made.now
    return made


def cached(made: World, prompt: list[int]) -> int:
    """Blocks of the prompt that are cached."""
    index = made.manager.index
    assert index is not None
    return len(index.find_prefix(made.manager.sequence(prompt).keys()))


def serve(made: World, name: str, prompt: list[int], **fields: Any) -> None:
    made.add(name, prompt, max_tokens=1, **fields)
    made.run()


def prompt(number: int, blocks: int = 4) -> list[int]:
    return [number] * (blocks * BLOCK)


def fill(made: World, blocks: int) -> None:
    """Others need so many blocks."""
    made.manager.pool.release(made.manager.pool.take(blocks))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"priority": -1}, "priority"), ({"priority": MAX_PRIORITY + 1}, "priority"),
        ({"priority": 1.0}, "priority"), ({"priority": True}, "priority"),
        ({"seconds": 0}, "seconds"), ({"seconds": -1}, "seconds"),
        ({"seconds": MAX_SECONDS * 1.01}, "seconds"), ({"seconds": float("inf")}, "seconds"),
        ({"seconds": float("nan")}, "seconds"), ({"seconds": "5"}, "seconds"),
        ({"seconds": True}, "seconds"), ({"tokens": 0}, "tokens"), ({"tokens": 2**31}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(fields: dict[str, object], word: str) -> None:
    with pytest.raises(RequestError, match=f"retention {word} must be .*got"):
        Retention(**fields)  # type: ignore[arg-type]


def test_a_kept_conversation_outlives_later_ones() -> None:
    made = world()
    serve(made, "a", prompt(1), retention=Retention(priority=1))
    serve(made, "b", prompt(2))
    fill(made, 16)
    assert cached(made, prompt(1)) == 4 and cached(made, prompt(2)) == 0


def test_it_ends_with_its_time() -> None:
    made = world()
    serve(made, "a", prompt(1), retention=Retention(seconds=50))
    serve(made, "b", prompt(2))
    made.now += 60
    assert made.manager.num_retained == 0
    fill(made, 16)  # loosened now, it is the younger of the two
    assert cached(made, prompt(1)) == 4 - 0 and cached(made, prompt(2)) == 0
    fill(made, 20)
    assert cached(made, prompt(1)) == 0


def test_only_the_first_tokens_are_kept() -> None:
    made = world()
    serve(made, "a", prompt(1), retention=Retention(tokens=2 * BLOCK + 3))
    assert made.manager.num_retained == 2


def test_generated_tokens_are_kept_too() -> None:
    made = world()
    request = made.add("a", prompt(1), max_tokens=6, retention=Retention())
    made.run()
    assert made.manager.num_retained == (len(request.tokens) - 1) // BLOCK == 5


def test_priority_0_goes_first_but_spares_what_others_computed() -> None:
    made = world()
    serve(made, "a", prompt(1, 2))
    serve(made, "b", prompt(2))
    longer = prompt(1, 2) + prompt(3, 2)
    serve(made, "c", longer, retention=Retention(priority=0))
    assert cached(made, longer) == 4
    fill(made, made.manager.pool.free + 2)
    assert cached(made, longer) == 2 and cached(made, prompt(2)) == 4


def test_priority_0_spares_what_another_request_uses_or_keeps() -> None:
    made = world(40)
    serve(made, "first", prompt(1), retention=Retention(priority=1, seconds=1000))
    made.add("long", prompt(2), max_tokens=20)
    made.step()
    made.step()
    serve_with_hint = Retention(priority=0)
    for name, number in (("x", 1), ("y", 2)):
        made.add(name, prompt(number), max_tokens=1, retention=serve_with_hint)
    made.step()
    made.step()
    made.run()
    assert made.manager.num_retained == 4
    fill(made, made.manager.pool.free + 2)
    assert cached(made, prompt(1)) == 4


def test_a_request_cannot_weaken_a_pin_or_a_longer_hint() -> None:
    made = world(40)
    serve(made, "a", prompt(1))
    made.manager.pin(prompt(1))
    serve(made, "b", prompt(2), retention=Retention(priority=2, seconds=1000))
    for number in (1, 2):
        for weaker in (
            Retention(priority=1),
            Retention(priority=2, seconds=1),
            Retention(priority=0),
        ):
            serve(made, f"{number}{weaker}", prompt(number), retention=weaker)
    made.now += 500
    assert made.manager.num_retained == 8
    serve(made, "c", prompt(2), retention=Retention(priority=3, seconds=10))  # stronger, shorter
    made.now += 20
    assert made.manager.num_retained == 4


def test_without_the_prefix_cache_a_hint_does_nothing() -> None:
    made = world(enable_caching=False)
    serve(made, "a", prompt(1), retention=Retention())
    assert made.manager.num_retained == 0


def test_every_continuation_is_kept_and_the_share_holds() -> None:
    made = world(24)
    made.add("a", prompt(1), max_tokens=9, n=3, retention=Retention())
    made.run()
    assert 0 < made.manager.num_retained <= 12
    check(made.manager)


def test_deadlines_do_not_pile_up() -> None:
    """A client that repeats itself costs memory in proportion to the kept blocks."""
    made = world()
    for i in range(1000):
        serve(made, f"r{i}", prompt(1), retention=Retention(seconds=1000 + i))
    queue = made.manager.pool.eviction
    assert isinstance(queue, RetainingQueue) and made.manager.num_retained == 4
    assert len(queue._deadlines[0]) <= 2 * 4 + 65


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_hostile_hints_never_wedge_the_pool(seed: int) -> None:
    """Everyone keeps everything for as long as allowed; all are served all the same."""
    rng = random.Random(seed)
    made = world(
        rng.choice([6, 12, 30]),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([4, 64]),
        max_model_len=6 * BLOCK,
        enable_caching=True,
    )
    hints = [Retention(priority=p, seconds=s) for p in range(4) for s in (1, MAX_SECONDS)]
    for i in range(40):
        text = [rng.randrange(2)] * rng.randint(1, 4 * BLOCK) + [i] * rng.randint(0, BLOCK)
        made.add(
            f"r{i}",
            text,
            max_tokens=rng.randint(1, 6),
            n=rng.choice([1, 1, 2]),
            retention=rng.choice(hints),
        )
        for _ in range(rng.randint(0, 3)):
            made.step()
        if rng.random() < 0.2:
            made.scheduler.abort([f"r{rng.randrange(i + 1)}"])
        if rng.random() < 0.1:
            made.scheduler.preempt([f"r{rng.randrange(i + 1)}"])
    made.run()
    pool = made.manager.pool
    assert pool.available == pool.usable
    assert made.manager.num_retained <= pool.usable // 2
    assert len(pool.take(pool.usable)) == pool.usable == len(np.unique(pool.ref.nonzero()))
    assert made.manager.num_retained == 0

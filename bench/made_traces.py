"""Made-up request traces of several kinds, to try eviction policies on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from blocktable.sim.trace import Trace

BLOCK = 16
Event = tuple[float, list[int]]


class Ids:
    """Hands out hash ids that were never used."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def popularity(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """2,000 system prompts of unequal popularity, each request with its own end."""
    prompts = [ids.take(rng.randint(2, 24)) for _ in range(2000)]
    weights = [(i + 1) ** -0.7 for i in range(len(prompts))]
    for i in range(8000):
        yield i * 0.3, rng.choices(prompts, weights)[0] + ids.take(rng.randint(1, 16))


def agents(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """Tool loops: many short turns, a minute apart."""
    start = 0.0
    for _ in range(500):
        start += rng.expovariate(0.25)
        text, now = ids.take(rng.randint(4, 50)), start
        for _ in range(rng.randint(3, 30)):
            yield now, list(text)
            now += 60 * rng.lognormvariate(0, 1)
            text = text + ids.take(rng.randint(1, 2))


def chats(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """Conversations that go on with a chance of 0.6 a turn."""
    start = 0.0
    for _ in range(4000):
        start += rng.expovariate(1.2)
        text, now = ids.take(int(rng.lognormvariate(2, 1)) + 1), start
        yield now, list(text)
        while rng.random() < 0.6:
            now += 120 * rng.lognormvariate(0, 0.9)
            text = text + ids.take(rng.randint(1, 8))
            yield now, list(text)


def twice(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """Every prompt comes exactly twice."""
    for i in range(5000):
        text = ids.take(rng.randint(4, 40))
        yield i * 0.6, text
        yield i * 0.6 + rng.expovariate(1 / 400), text


def scans(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """A hot set, and long texts that nobody reads again."""
    hot = [ids.take(12) for _ in range(200)]
    for i in range(6000):
        yield i * 0.3, rng.choice(hot) + ids.take(1) if (i // 300) % 3 else ids.take(60)


def loop(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """The same 300 documents over and over."""
    texts = [ids.take(20) for _ in range(300)]
    for i in range(6000):
        yield i * 0.3, texts[i % 300] + ids.take(1)


def recency(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """Only how long ago a prompt came decides whether it comes again."""
    past: list[list[int]] = []
    for i in range(9000):
        if past and rng.random() < 0.5:
            text = past.pop(-1 - min(int(rng.expovariate(1 / 60)), len(past) - 1))
        else:
            text = ids.take(rng.randint(4, 40))
        past = [*past[-2000:], text]
        yield i * 0.3, text


def one_shot(rng: random.Random, ids: Ids) -> Iterator[Event]:
    """A short system prompt, and nothing else comes twice."""
    system = ids.take(3)
    for i in range(6000):
        yield i * 0.3, system + ids.take(rng.randint(1, 40))


KINDS: tuple[Callable[[random.Random, Ids], Iterator[Event]], ...] = (
    popularity, agents, chats, twice, scans, loop, recency, one_shot,
)  # fmt: skip


def make_trace(kind: Callable[[random.Random, Ids], Iterator[Event]], seed: int = 0) -> Trace:
    """Requests of whole blocks of 16 tokens and one token more, in order of arrival."""
    events = sorted(kind(random.Random(seed), Ids()), key=lambda event: event[0])
    end = 2**30 - 1  # the id of the started last block
    texts = [[*text, end] for _, text in events]
    counts = np.array([len(text) for text in texts], np.int64)
    return Trace(
        np.array([time for time, _ in events]), (counts - 1) * BLOCK + 1,
        np.ones(len(texts), np.int64), np.concatenate(texts).astype(np.int32),
        np.concatenate([[0], np.cumsum(counts)]), BLOCK,
    )  # fmt: skip

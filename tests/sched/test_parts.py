"""The queue, the n-gram proposer, capacity and histograms, each alone."""

from __future__ import annotations

import numpy as np
import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.specs import (
    FullAttentionSpec,
    SlidingWindowSpec,
)
from blocktable.sched.capacity import longest_request
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.draft import NgramProposer
from blocktable.sched.queue import WaitingQueue
from blocktable.sched.request import Request, RequestStatus
from blocktable.sched.stats import BOUNDS, Histogram


def request(name: str, **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=[1], **fields)


def names(queue: WaitingQueue) -> list[str]:
    return [r.request_id for r in queue]


def test_fcfs_queue_puts_preempted_requests_in_front() -> None:
    queue = WaitingQueue(SchedulerConfig())
    a, b, c = (request(name) for name in "abc")
    for one in (a, b):
        queue.append(one)
    queue.put_back(c)
    assert names(queue) == ["c", "a", "b"]
    assert queue.peek(1) is a
    queue.take(a)
    assert names(queue) == ["c", "b"] and len(queue) == 2


def test_priority_queue_orders_by_class_then_arrival() -> None:
    queue = WaitingQueue(SchedulerConfig(policy="priority"))
    for name, priority, arrival in (("a", 1, 0.0), ("b", 0, 5.0), ("c", 0, 4.0), ("d", 1, 0.0)):
        queue.append(request(name, priority=priority, arrival=arrival))
    assert names(queue) == ["c", "b", "a", "d"]
    head = queue.peek()
    queue.take(head)
    queue.put_back(head)
    assert names(queue) == ["c", "b", "a", "d"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_forgotten_requests_cost_no_memory_for_long(policy: str) -> None:
    queue = WaitingQueue(SchedulerConfig(policy=policy))
    gone = [request(f"r{i}") for i in range(1000)]
    keep = request("keep")
    for one in gone:
        queue.append(one)
    queue.append(keep)
    for one in gone:
        one.status = RequestStatus.FINISHED
        queue.forget(one)
    assert len(queue) == 1 and names(queue) == ["keep"] and queue.peek() is keep
    assert len(queue._items) + len(queue._list) <= 64


def propose(texts: list[list[int]], most: list[int], **options: int) -> list[list[int]]:
    width = max(len(text) for text in texts) + 2
    tokens = np.full((len(texts) + 1, width), 99, np.int32)  # row 0 is somebody else's
    for i, text in enumerate(texts):
        tokens[i + 1, : len(text)] = text
    rows = np.arange(1, len(texts) + 1, dtype=np.int32)
    lengths = np.array([len(text) for text in texts], np.int32)
    drafts = NgramProposer(**options).propose(rows, tokens, lengths, np.array(most, np.int32))
    return [part.tolist() for part in np.split(drafts.token_ids, np.cumsum(drafts.counts)[:-1])]


def test_ngram_takes_what_followed_the_longest_latest_match() -> None:
    assert propose([[1, 2, 3, 4, 1, 2]], [3]) == [[3, 4, 1]]
    assert propose([[1, 2, 7, 1, 2, 8, 1, 2]], [1]) == [[8]], "the latest place"
    assert propose([[5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]], [1]) == [[7]], "the longer match"
    assert propose([[1, 2, 3]], [3]) == [[]], "nothing occurred before"
    assert propose([[4, 4, 4, 4]], [5]) == [[4]], "no further than the text is known"
    assert propose([[1, 2, 3, 1, 2]], [0]) == [[]]


def test_ngram_equals_a_plain_search() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        texts = [rng.integers(0, 3, rng.integers(1, 25)).tolist() for _ in range(4)]
        most = rng.integers(0, 5, 4).tolist()
        assert propose(texts, most, max_n=3, min_n=1) == [
            plain(text, k, 3, 1) for text, k in zip(texts, most, strict=True)
        ]


def plain(text: list[int], most: int, max_n: int, min_n: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[end - n : end] == text[-n:]:
                return text[end : end + most]
    return []


def test_ngram_refuses_bad_lengths() -> None:
    with pytest.raises(ConfigError, match="got 3 and 2"):
        NgramProposer(max_n=2, min_n=3)


def test_the_longest_request_of_a_pool() -> None:
    heads = {"num_kv_heads": 1, "head_size": 8, "block_size": 16}
    full, window = FullAttentionSpec(**heads), SlidingWindowSpec(**heads, sliding_window=32)
    assert longest_request([full], 10, 1000, 64) == 160
    assert longest_request([full, window], 10, 1000, 16) == 96
    assert longest_request([full], 10, 100, 64) == 100


def test_histogram() -> None:
    times = Histogram()
    times.add(0.0015, 3)
    times.add_many(np.array([0.0015, 99999.0]))
    assert times.count == 5 and times.counts.sum() == 5
    assert times.counts[BOUNDS.index(0.002)] == 4 and times.counts[-1] == 1
    assert times.mean == pytest.approx((4 * 0.0015 + 99999.0) / 5)

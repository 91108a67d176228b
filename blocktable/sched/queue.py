"""The waiting queue: first come first served, or by priority; aborts cost O(1).

An aborted request is only marked (its status is FINISHED) and dropped when it comes up, so that
no call walks the queue.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import islice

from blocktable.sched.config import SchedulerConfig
from blocktable.sched.request import Request, RequestStatus


class WaitingQueue:
    """Requests that hold no row. ``len`` counts the live ones.

    FCFS keeps a deque: new requests behind, preempted ones in front. Priority keeps a list sorted
    by ``Request.order``, the next one last, so that taking it is O(1).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._sorted = config.policy == "priority"
        self._head_start = config.priority_head_start
        self._items: deque[Request] = deque()
        self._list: list[Request] = []
        self._live = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return self._live

    def append(self, request: Request) -> None:
        """Put a new request where its order says."""
        self._arrivals += 1
        request.order = self._order(request)
        self._put(request, front=False)

    def put_back(self, request: Request) -> None:
        """Return a preempted request: in front (FCFS), or where its order says."""
        self._put(request, front=True)

    def _order(self, request: Request) -> tuple[float, float, float]:
        """Smaller goes first. With a head start, a class of priority weighs as much as that many
        seconds of waiting, so that everyone's turn comes."""
        if not self._sorted:
            return (0.0, 0.0, self._arrivals)
        if self._head_start > 0:
            due = request.arrival + request.priority * self._head_start
            return (due, 0.0, self._arrivals)
        return (request.priority, request.arrival, self._arrivals)

    def _put(self, request: Request, front: bool) -> None:
        self._live += 1
        if self._sorted:
            insort(self._list, request, key=_backwards)
        elif front:
            self._items.appendleft(request)
        else:
            self._items.append(request)

    def peek(self, skip: int = 0) -> Request | None:
        """The live request behind ``skip`` others, or None. O(skip), amortised over the dead."""
        self._drop_dead()
        if skip == 0:
            if self._sorted:
                return self._list[-1] if self._list else None
            return self._items[0] if self._items else None
        return next(islice(iter(self), skip, None), None)

    def take(self, request: Request) -> None:
        """Remove a request found by ``peek``."""
        self._live -= 1
        if self._sorted:
            if self._list[-1] is request:
                self._list.pop()
            else:
                self._list.remove(request)
        elif self._items[0] is request:
            self._items.popleft()
        else:
            self._items.remove(request)

    def forget(self, request: Request) -> None:
        """A queued request was finished (its status says so): it will be skipped. O(1)."""
        self._live -= 1
        size = len(self._list) if self._sorted else len(self._items)
        if size > 64 and size > 4 * self._live:  # keep memory in proportion to the live ones
            self._list = [r for r in self._list if _alive(r)]
            self._items = deque(r for r in self._items if _alive(r))

    def _drop_dead(self) -> None:
        while self._list and not _alive(self._list[-1]):
            self._list.pop()
        while self._items and not _alive(self._items[0]):
            self._items.popleft()

    def __iter__(self) -> Iterator[Request]:
        """Live requests in order."""
        items = reversed(self._list) if self._sorted else self._items
        return (request for request in items if _alive(request))


def _alive(request: Request) -> bool:
    return request.status != RequestStatus.FINISHED


def _backwards(request: Request) -> tuple[float, float, float]:
    first, second, third = request.order
    return (-first, -second, -third)

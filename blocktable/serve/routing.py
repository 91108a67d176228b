"""Which replica a request goes to: the one that will have computed its prompt first.

    cost of a replica = blocks of the prompt it does not hold + blocks it still has to compute
                        + a tenth of the blocks it was lately given beyond the others

A replica holds what its key events say, and what it was sent lately and has not told of yet. The
last term spreads conversations: without it a system prompt that one replica saw first draws all of
them there, and its cache turns over while the others' stand empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from blocktable.core.errors import ConfigError
from blocktable.parallel.events import BlockCounter, BlockHash, KVEvent

_MOST_EXPECTED = 4096
_BALANCE = 0.1
_DECAY = 0.999  # of what was given, for each choice


class Choice(NamedTuple):
    """A replica and how many leading blocks of the prompt it is believed to hold."""

    replica: int
    matched: int


class PrefixRouter:
    """Routes by prefix and load. Not thread-safe. Cost of a choice: O(blocks of the prompt)."""

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ConfigError(f"a router needs a replica, got {num_replicas}")
        self._held = [BlockCounter() for _ in range(num_replicas)]
        self._expected: list[OrderedDict[BlockHash, None]] = [
            OrderedDict() for _ in range(num_replicas)
        ]
        self._pending = [0] * num_replicas
        self._given = [0.0] * num_replicas
        self._alive = [True] * num_replicas

    @property
    def alive(self) -> list[int]:
        """Replicas that take requests."""
        return [replica for replica, lives in enumerate(self._alive) if lives]

    def matched(self, replica: int, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks the replica is believed to hold."""
        held, expected = self._held[replica], self._expected[replica]
        for count, block_hash in enumerate(hashes):
            if not held.holds(block_hash) and block_hash not in expected:
                return count
        return len(hashes)

    def choose(self, hashes: Sequence[BlockHash]) -> Choice:
        """The replica for a prompt whose complete blocks have these hashes; ConfigError when no
        replica lives. Follow it with `begin`."""
        alive = self.alive
        if not alive:
            raise ConfigError("no replica is alive")
        least = min(self._given[replica] for replica in alive)
        found = []
        for replica in alive:
            matched = self.matched(replica, hashes)
            ahead = _BALANCE * (self._given[replica] - least)
            cost = len(hashes) - matched + self._pending[replica] + ahead
            found.append((cost, replica, matched))
        _, replica, matched = min(found)
        return Choice(replica, matched)

    def begin(self, choice: Choice, hashes: Sequence[BlockHash]) -> int:
        """A request was sent; returns the blocks it has to compute, for `end`."""
        replica, work = choice.replica, len(hashes) - choice.matched
        self._pending[replica] += work
        self._given = [given * _DECAY for given in self._given]
        self._given[replica] += work
        expected = self._expected[replica]
        for block_hash in hashes:
            expected[block_hash] = None
            expected.move_to_end(block_hash)
        while len(expected) > _MOST_EXPECTED:
            expected.popitem(last=False)
        return work

    def end(self, replica: int, work: int) -> None:
        """A request's prompt is computed, or the request is over: once for each `begin`."""
        self._pending[replica] = max(0, self._pending[replica] - work)

    def apply(self, replica: int, events: Sequence[KVEvent]) -> None:
        """Follow a replica's events. What it removed is no longer expected of it."""
        self._held[replica].apply(events)
        expected = self._expected[replica]
        for event in events:
            for block_hash in getattr(event, "block_hashes", ()):
                expected.pop(block_hash, None)

    def forget(self, replica: int) -> None:
        """A replica's events were missed, or it began anew: nothing is known of it."""
        self._held[replica] = BlockCounter()
        self._expected[replica].clear()

    def lose(self, replica: int) -> None:
        """A replica died: it gets no more requests, until it is `revive`-d."""
        self._alive[replica] = False
        self._pending[replica] = 0
        self.forget(replica)

    def revive(self, replica: int) -> None:
        """A lost replica answers again; nothing is known of what it holds."""
        self.forget(replica)
        self._given[replica] = min(self._given)
        self._alive[replica] = True

"""The receiving side: reads a request's blocks from the peers that computed them.

The blocks that are read into belong to the fetch until it is *over*: only then may they be shown to
a step, or be given back. A fetch ends ``done`` (every byte arrived and every source confirmed that
it had held them still) or ``failed``; it is over once no read can write any more.

    asked --held--> reading --arrived--> confirming --ok--> done
      |                |                    |
      +---- abort, time-out, unknown, error, gone ----> failed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from blocktable.core.errors import TransferError
from blocktable.transfer.layout import (
    CacheLayout,
    CacheView,
    Runs,
    check_convertible,
    plan_runs,
)
from blocktable.transfer.reader import Reader
from blocktable.transfer.source import PROTOCOL

PartState = Literal["asked", "reading", "confirming", "done", "failed"]


@dataclass
class _Peer:
    endpoint: str
    socket: Any
    layout: CacheLayout
    bases: list[int]
    device: int | None
    name: str


@dataclass
class _Part:
    """One source's share of a fetch."""

    peer: _Peer
    number: int
    state: PartState = "asked"
    lease: int | None = None
    handle: Any = None
    runs: Runs | None = None


@dataclass
class Fetch:
    """A request's blocks on their way. ``num_tokens``, the fewest that a source holds, is known
    once they have answered."""

    request_id: str
    rows: list[NDArray[np.int32]]
    first_token: int
    stop_token: int
    deadline: float
    parts: list[_Part] = field(default_factory=list)
    num_tokens: int | None = None
    error: str | None = None
    is_over: bool = False

    @property
    def is_done(self) -> bool:
        """Everything arrived and was confirmed: the blocks may be used."""
        return self.error is None and self.is_over

    @property
    def num_bytes(self) -> int:
        """Bytes planned so far."""
        return sum(part.runs.total_bytes for part in self.parts if part.runs is not None)

    @property
    def num_runs(self) -> int:
        """Contiguous runs planned so far, which is what a transfer costs to post."""
        return sum(len(part.runs.size) for part in self.parts if part.runs is not None)


class BlockFetcher:
    """Fetches into this rank's cache. Not thread-safe; `poll` is called from the engine's loop."""

    def __init__(
        self,
        reader: Reader,
        layout: CacheLayout,
        bases: Sequence[int],
        *,
        timeout: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._layout, self._bases = reader, layout, list(bases)
        self._timeout, self._clock = timeout, clock
        self._peers: dict[str, _Peer] = {}
        self._fetches: list[Fetch] = []
        self._numbers = 0

    def connect(self, endpoint: str) -> CacheLayout:
        """Shake hands with a source; returns its layout. Idempotent.

        Raises TransferError when it does not answer within the time-out, or when its KV cannot be
        converted exactly.
        """
        if endpoint in self._peers:
            return self._peers[endpoint].layout
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        try:
            peer = self._greet(endpoint, socket)
        except BaseException:
            socket.close()
            raise
        self._peers[endpoint] = peer
        return peer.layout

    def _greet(self, endpoint: str, socket: Any) -> _Peer:
        socket.send(msgspec.msgpack.encode(["hello", self._number(), PROTOCOL]))
        if not socket.poll(int(self._timeout * 1000)):
            raise TransferError(f"no answer from {endpoint} within {self._timeout:g} s")
        try:
            answer = msgspec.msgpack.decode(socket.recv())
            if answer[0] != "layout":
                raise TransferError(f"{endpoint} refused: {answer[2]}")
            _, _, values, bases, device, metadata = answer
        except (msgspec.DecodeError, TypeError, ValueError, IndexError) as error:
            raise TransferError(f"{endpoint} does not speak this protocol: {error}") from error
        layout = CacheLayout.from_dict(values)
        check_convertible(layout, self._layout)
        return _Peer(endpoint, socket, layout, bases, device, self._reader.add_peer(metadata))

    def fetch(
        self,
        request_id: str,
        endpoints: Sequence[str],
        rows: Sequence[NDArray[np.int32]],
        *,
        first_token: int = 0,
        stop_token: int | None = None,
        ask: Sequence[Any] | None = None,
    ) -> Fetch:
        """Begin to read a request's KV from position ``first_token`` on into ``rows`` (this rank's
        block ids, one array a group; earlier positions are not touched, nor those from
        ``stop_token`` on). ``ask`` are fields for the sources' ``on_ask``, told first.

        ``endpoints`` are sources that together hold this rank's heads. Raises TransferError when
        they do not, or when the handshake fails.
        """
        peers = []
        for endpoint in endpoints:
            self.connect(endpoint)
            peers.append(self._peers[endpoint])
        peers = self._cover(peers)
        kept = [np.array(row, np.int32) for row in rows]
        most = self._layout.block_size * min((len(row) for row in kept), default=0)
        stop = most if stop_token is None else min(stop_token, most)
        made = Fetch(request_id, kept, first_token, stop, self._clock() + self._timeout)
        for peer in peers:
            part = _Part(peer, self._number())
            made.parts.append(part)
            if ask is not None:
                self._send(part, ["ask", self._number(), request_id, *ask])
            self._send(part, ["take", part.number, request_id])
        self._fetches.append(made)
        return made

    def _cover(self, peers: list[_Peer]) -> list[_Peer]:
        """Peers that together hold this rank's heads, none of them for nothing."""
        mine = self._layout
        wanted = set(range(mine.first_head, mine.first_head + mine.held_heads))
        chosen = []
        for peer in peers:
            held = range(peer.layout.first_head, peer.layout.first_head + peer.layout.held_heads)
            if wanted & set(held):
                chosen.append(peer)
                wanted -= set(held)
        if wanted:
            raise TransferError(f"no source holds KV heads {sorted(wanted)}")
        return chosen

    def abort(self, fetch: Fetch, reason: str = "aborted") -> None:
        """Give a fetch up. It is over at once, or when its reads have ended (see `poll`)."""
        if not fetch.is_over and fetch.error is None:
            fetch.error = reason
        self._advance(fetch)

    def poll(self) -> list[Fetch]:
        """Move all fetches on; returns those that became over, done or failed. Never blocks."""
        for peer in self._peers.values():
            while peer.socket.poll(0):
                self._receive(peer, peer.socket.recv())
        now = self._clock()
        for fetch in self._fetches:
            if fetch.error is None and fetch.deadline <= now:
                fetch.error = f"no blocks within {self._timeout:g} s"
            self._advance(fetch)
        over = [fetch for fetch in self._fetches if fetch.is_over]
        self._fetches = [fetch for fetch in self._fetches if not fetch.is_over]
        return over

    def _receive(self, peer: _Peer, data: bytes) -> None:
        """An answer; one to a part that is no longer waiting (a late notice) is only undone."""
        try:
            answer = msgspec.msgpack.decode(data)
            kind, number = answer[0], answer[1]
        except (msgspec.DecodeError, TypeError, ValueError, IndexError):
            return
        for fetch in self._fetches:
            for part in fetch.parts:
                if part.number == number:
                    self._answered(fetch, part, kind, answer)
                    return
        if kind == "held":  # the fetch is over: let the source's blocks go
            drop = msgspec.msgpack.encode(["drop", self._number(), answer[2]])
            peer.socket.send(drop, zmq.NOBLOCK)

    def _answered(self, fetch: Fetch, part: _Part, kind: str, answer: list[Any]) -> None:
        if kind == "held":
            if part.state != "asked":
                self._send(part, ["drop", self._number(), answer[2]])
                return
            part.lease = answer[2]
            if fetch.error is None:
                self._begin(fetch, part, answer[3], answer[4])
        elif kind == "ok" and part.state == "confirming":
            part.state = "done"
        elif kind in ("unknown", "gone", "refused") and part.state in ("asked", "confirming"):
            told = {"unknown": "does not hold it", "gone": "let it go before it was read"}
            part.state, part.lease = "failed", None
            fetch.error = fetch.error or f"{part.peer.endpoint} {told.get(kind, str(answer[2:]))}"

    def _begin(self, fetch: Fetch, part: _Part, rows: list[bytes], num_tokens: int) -> None:
        try:
            theirs = [np.frombuffer(row, "<i4") for row in rows]
            part.runs = plan_runs(
                CacheView(part.peer.layout, part.peer.bases, theirs),
                CacheView(self._layout, self._bases, fetch.rows),
                fetch.first_token, min(int(num_tokens), fetch.stop_token),
            )  # fmt: skip
            known = fetch.num_tokens
            fetch.num_tokens = num_tokens if known is None else min(known, num_tokens)
            part.state = "reading"
            if len(part.runs.size):
                part.handle = self._reader.start(part.peer.name, part.peer.device, part.runs)
        except (TransferError, IndexError, ValueError, TypeError) as error:
            fetch.error = str(error)

    def _advance(self, fetch: Fetch) -> None:
        if fetch.is_over:
            return
        for part in fetch.parts:
            if part.state == "reading" and fetch.error is None:
                self._read_on(fetch, part)
        if fetch.error is not None:
            fetch.is_over = all([self._stopped(part) for part in fetch.parts])
        else:
            fetch.is_over = all(part.state == "done" for part in fetch.parts)

    def _read_on(self, fetch: Fetch, part: _Part) -> None:
        state = "done" if part.handle is None else self._reader.state(part.handle)
        if state == "failed":
            fetch.error = f"reading from {part.peer.endpoint} failed"
        elif state == "done":
            if part.handle is not None:
                self._reader.cancel(part.handle)
                part.handle = None
            part.state = "confirming"
            self._send(part, ["confirm", part.number, part.lease])

    def _stopped(self, part: _Part) -> bool:
        """Whether a part of a failed fetch can write no more; lets its lease go then."""
        if part.handle is not None:
            if not self._reader.cancel(part.handle):
                return False
            part.handle = None
        if part.lease is not None and part.state != "confirming":
            self._send(part, ["drop", self._number(), part.lease])
        part.state, part.lease = "failed", None
        return True

    def _send(self, part: _Part, message: list[Any]) -> None:
        try:
            part.peer.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return  # the peer is gone: the time-out ends the fetch

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def wait(self, seconds: float) -> None:
        """Return when a source has answered, or after ``seconds``."""
        poller = zmq.Poller()
        for peer in self._peers.values():
            poller.register(peer.socket, zmq.POLLIN)
        poller.poll(max(1, int(seconds * 1000)))

    def close(self) -> None:
        """Abort what runs and close."""
        for fetch in self._fetches:
            self.abort(fetch, "closed")
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()

"""The sending side: blocks of finished prefills, held until a peer has read them.

Control messages are msgpack arrays over ZeroMQ; the KV itself never passes through here (peers read
it from memory). A lease ends when the reader confirms, when it lets go, or after ``lease_seconds``,
whichever comes first, and its blocks are given back exactly once. A reader whose lease ended is
told so when it confirms, and discards what it read::

    reader  hello            -->  layout, addresses, NIXL metadata
    reader  take, request    -->  held: lease, rows of block ids, tokens     (or unknown; at once,
                                  or when an expected request is offered)
    reader  (reads memory)
    reader  confirm, lease   -->  ok: what was read is what was held         (or gone)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from blocktable.core.errors import TransferError
from blocktable.transfer.layout import CacheLayout
from blocktable.transfer.reader import Reader

PROTOCOL = 1


@dataclass
class _Offer:
    rows: list[NDArray[np.int32]]
    num_tokens: int
    on_released: Callable[[], None]
    deadline: float
    lease: int | None = None


class BlockSource:
    """Offers requests' blocks to peers. Not thread-safe; `poll` is called from the engine's loop.

    ``layout`` and ``bases`` (addresses of the memories) describe this rank's cache. ``on_ask`` gets
    what peers ask for beyond this protocol: a request id and their fields.
    """

    def __init__(
        self,
        reader: Reader,
        layout: CacheLayout,
        bases: Sequence[int],
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        lease_seconds: float = 60.0,
        device: int | None = None,
        on_ask: Callable[[str, list[Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_ask = on_ask
        self._waiting: dict[str, tuple[bytes, int] | None] = {}
        self._reader, self._layout, self._bases = reader, layout, list(bases)
        self._lease_seconds, self._device, self._clock = lease_seconds, device, clock
        self._offers: dict[str, _Offer] = {}
        self._leases: dict[int, str] = {}
        self._next_lease = 1
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_held(self) -> int:
        """Requests whose blocks are held for peers."""
        return len(self._offers)

    def offer(
        self,
        request_id: str,
        rows: Sequence[NDArray[np.int32]],
        num_tokens: int,
        on_released: Callable[[], None],
    ) -> None:
        """Hold a request's blocks (``rows``: block ids, one array a group) for a peer to read.

        ``on_released`` is called once, when nobody may read them any more: give them back then.
        """
        if request_id in self._offers:
            raise TransferError(f"request {request_id!r} is offered already")
        kept = [np.array(row, np.int32) for row in rows]
        deadline = self._clock() + self._lease_seconds
        self._offers[request_id] = _Offer(kept, num_tokens, on_released, deadline)
        waiter = self._waiting.pop(request_id, None)
        if waiter is not None:
            self._send(waiter[0], self._take(waiter[1], request_id))

    def expect(self, request_id: str) -> None:
        """The request will be offered: a peer that takes it early waits for its answer."""
        self._waiting.setdefault(request_id, None)

    def disappoint(self, request_id: str) -> None:
        """An expected request will not be offered after all."""
        waiter = self._waiting.pop(request_id, None)
        if waiter is not None:
            self._send(waiter[0], ["unknown", waiter[1], request_id])

    def _send(self, peer: bytes, answer: list[Any]) -> None:
        self._socket.send_multipart([peer, msgspec.msgpack.encode(answer)])

    def withdraw(self, request_id: str) -> bool:
        """Take an offer back, as for an aborted request; a reader that has it is told "gone".
        False when there is none (any more)."""
        return self._release(request_id)

    def poll(self, timeout: float = 0.0) -> None:
        """Answer peers and end leases that are too old. Waits ``timeout`` seconds for a message."""
        while self._socket.poll(int(timeout * 1000)):
            peer, data = self._socket.recv_multipart()[-2:]
            try:
                answer = self._answer(peer, msgspec.msgpack.decode(data))
            except (msgspec.DecodeError, TypeError, ValueError, IndexError, KeyError):
                answer = ["refused", 0, "not a message of this protocol"]
            if answer is not None:
                self._send(peer, answer)
            timeout = 0.0
        now = self._clock()
        for request_id in [r for r, offer in self._offers.items() if offer.deadline <= now]:
            self._release(request_id)

    def _answer(self, peer: bytes, message: list[Any]) -> list[Any] | None:
        kind, number = message[0], message[1]
        if kind == "hello":
            if message[2] != PROTOCOL:
                return ["refused", number, f"protocol {PROTOCOL}, not {message[2]}"]
            layout = self._layout.as_dict()
            return [
                "layout", number, layout, self._bases, self._device, self._reader.metadata(),
            ]  # fmt: skip
        if kind == "take":
            if message[2] in self._waiting:
                self._waiting[message[2]] = peer, number
                return None
            return self._take(number, message[2])
        if kind == "ask" and self._on_ask is not None:
            self._on_ask(str(message[2]), list(message[3:]))
            return None
        if kind in ("confirm", "drop"):
            request_id = self._leases.get(message[2])
            if request_id is not None:
                self._release(request_id)
            return [("ok" if request_id is not None else "gone"), number]
        return ["refused", number, f"unknown message {kind!r}"]

    def _take(self, number: int, request_id: str) -> list[Any]:
        offer = self._offers.get(request_id)
        if offer is None or offer.lease is not None:
            return ["unknown", number, request_id]
        offer.lease, self._next_lease = self._next_lease, self._next_lease + 1
        offer.deadline = self._clock() + self._lease_seconds
        self._leases[offer.lease] = request_id
        rows = [row.astype("<i4").tobytes() for row in offer.rows]
        return ["held", number, offer.lease, rows, offer.num_tokens]

    def _release(self, request_id: str) -> bool:
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return False
        if offer.lease is not None:
            del self._leases[offer.lease]
        offer.on_released()
        return True

    def close(self) -> None:
        """Give all held blocks back and close."""
        for request_id in list(self._offers):
            self._release(request_id)
        self._socket.close()

"""Publisher and subscriber of KV events over ZeroMQ; `events` has the format.

A subscriber sees every batch once and in order: a gap in the sequence is filled from the
publisher's replay socket, and what the publisher no longer holds is reported as ``missed``, upon
which a consumer must forget what it knows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import count
from typing import NamedTuple
from uuid import uuid4

import zmq

from blocktable.core.errors import ConfigError, WireError
from blocktable.parallel.connecting import ConnectionWatch
from blocktable.parallel.events import EventBatch, decode_batch, encode_batch

_END = b"\xff" * 8
_SEQUENCE_BYTES = 8


def endpoint_of_rank(endpoint: str, data_parallel_rank: int) -> str:
    """The endpoint of a data-parallel rank: the port (or the inproc name) moves with the rank."""
    if data_parallel_rank == 0:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{data_parallel_rank}"
    head, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp") or not colon or not port.isdigit():
        raise ConfigError(f"cannot derive rank {data_parallel_rank}'s endpoint from {endpoint!r}")
    return f"{head}:{int(port) + data_parallel_rank}"


def binds(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint; else it connects, and a subscriber must bind. As in
    vLLM: a wildcard host or port (``*``, ``::``), ``ipc://`` and ``inproc://`` are bound."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class EventPublisher:
    """Publishes batches from a thread of its own; keeps the last ``buffer_batches`` for replay.

    `publish` costs an append and a wake-up. ``endpoint`` and ``replay_endpoint`` name the sockets
    that are in use (a wildcard port is replaced by the one taken). An endpoint that names a host
    and a port is connected to (`binds`): a warning is logged if nobody listens there. The replay
    endpoint is always bound.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        buffer_batches: int = 10_000,
        high_water_mark: int = 100_000,
    ) -> None:
        self._context = zmq.Context.instance()
        self._topic, self._data_parallel_rank = topic.encode(), data_parallel_rank
        self._pending: deque[EventBatch] = deque()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._sequence = count()
        self._publish = self._context.socket(zmq.PUB)
        self._publish.set_hwm(high_water_mark)
        endpoint = endpoint_of_rank(endpoint, data_parallel_rank)
        bound = binds(endpoint)
        self._watch = None if bound else ConnectionWatch(self._publish, endpoint)
        self.endpoint = _open(self._publish, endpoint, bind=bound)
        self._replay: zmq.Socket | None = None
        self.replay_endpoint: str | None = None
        if replay_endpoint is not None:
            replay_endpoint = endpoint_of_rank(replay_endpoint, data_parallel_rank)
            router = self._context.socket(zmq.ROUTER)
            self.replay_endpoint = _open(router, replay_endpoint, bind=True)
            self._replay = router
        address = f"inproc://kv-events-{uuid4().hex}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(address)
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.connect(address)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-events")
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Send a batch after all earlier ones. Called from one thread."""
        if not self._thread.is_alive():
            raise ConfigError("this event publisher is closed")
        if batch.data_parallel_rank is None:
            batch.data_parallel_rank = self._data_parallel_rank
        self._pending.append(batch)
        self._wake.send(b"")

    def close(self, timeout: float = 2.0) -> None:
        """Send what is pending, then stop; idempotent."""
        if self._thread.is_alive():
            self._wake.send(b"stop")
            self._thread.join(timeout)
        self._wake.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        running = True
        while running:
            ready = dict(poller.poll(None if self._watch is None else self._watch.wait_ms))
            if self._woken in ready:
                running = self._woken.recv() != b"stop"
                self._send_pending()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._watch is not None:
                self._watch.look()
        if self._watch is not None:
            self._watch.close()
        for socket in (self._publish, self._replay, self._woken):
            if socket is not None:
                socket.close(linger=200)

    def _send_pending(self) -> None:
        while self._pending:
            payload = encode_batch(self._pending.popleft())
            sequence = next(self._sequence)
            self._buffer.append((sequence, payload))
            number = sequence.to_bytes(_SEQUENCE_BYTES, "big")
            self._publish.send_multipart((self._topic, number, payload))

    def _answer(self, replay: zmq.Socket) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            return  # not a replay request: nothing can be answered
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._buffer:
            if sequence >= start:
                number = sequence.to_bytes(_SEQUENCE_BYTES, "big")
                replay.send_multipart((peer, b"", number, payload))
        replay.send_multipart((peer, b"", _END, b""))


def _open(socket: zmq.Socket, endpoint: str, *, bind: bool) -> str:
    try:
        if bind:
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot open KV event endpoint {endpoint!r}: {error}") from error
    return endpoint


class Received(NamedTuple):
    """A batch in order. ``missed`` batches before it are lost for good (0 = none); ``restarted``
    says that the publisher began anew. After either, what was known must be forgotten."""

    sequence: int
    batch: EventBatch
    missed: int = 0
    restarted: bool = False


class EventSubscriber:
    """Receives batches in order, without gaps where the publisher can still replay them.

    ``first_sequence`` 0 asks for everything the publisher still holds; None takes the first batch
    that arrives as the beginning.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        first_sequence: int | None = None,
        replay_timeout: float = 2.0,
        bind: bool = False,
    ) -> None:
        self._context = zmq.Context.instance()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.endpoint = _open(self._socket, endpoint, bind=bind)
        self._replay_endpoint, self._replay_timeout = replay_endpoint, replay_timeout
        self._expected = first_sequence
        self._last = -1  # number of the last batch that came live
        self._ready: deque[Received] = deque()

    def receive(self, timeout: float) -> Received | None:
        """The next batch, or None after ``timeout`` seconds. WireError for foreign frames."""
        deadline = time.monotonic() + timeout
        while not self._ready:
            left = max(0.0, deadline - time.monotonic())
            if not self._socket.poll(int(left * 1000)):
                return None
            self._take(*_sequence_and_payload(self._socket.recv_multipart()[1:]))
        return self._ready.popleft()

    def _take(self, sequence: int, payload: bytes) -> None:
        """A batch that came live: queue it, behind those that are missing before it."""
        expected, last = self._expected, self._last
        self._last = sequence
        if expected is not None and last < sequence < expected:
            return  # older than what was asked for
        restarted = expected is not None and sequence < expected
        start = sequence if expected is None else 0 if restarted else expected
        self._fill(start, sequence)
        seen = self._ready[-1].sequence if self._ready else start - 1
        self._ready.append(Received(sequence, decode_batch(payload), sequence - seen - 1))
        if restarted:
            self._ready[0] = self._ready[0]._replace(restarted=True)
        self._expected = sequence + 1

    def _fill(self, start: int, stop: int) -> None:
        """Put the batches ``start .. stop - 1`` that the publisher still has into the queue."""
        if start >= stop:
            return
        expected = start
        for sequence, payload in self._replayed(start):
            if expected <= sequence < stop:
                missed = sequence - expected
                self._ready.append(Received(sequence, decode_batch(payload), missed))
                expected = sequence + 1

    def _replayed(self, start: int) -> list[tuple[int, bytes]]:
        if self._replay_endpoint is None:
            return []
        found: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start.to_bytes(_SEQUENCE_BYTES, "big")))
            deadline = time.monotonic() + self._replay_timeout
            while (left := deadline - time.monotonic()) > 0 and dealer.poll(int(left * 1000) + 1):
                frames = dealer.recv_multipart()[1:]
                if frames and frames[0] == _END:
                    break
                found.append(_sequence_and_payload(frames))
        return found

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close(linger=0)


def _sequence_and_payload(frames: list[bytes]) -> tuple[int, bytes]:
    if len(frames) != 2 or len(frames[0]) != _SEQUENCE_BYTES:
        raise WireError(f"not a KV event message: frames of {[len(f) for f in frames]} bytes")
    return int.from_bytes(frames[0], "big"), frames[1]

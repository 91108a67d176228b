"""Tells, once, when a socket that connects has found nobody at its endpoint."""

from __future__ import annotations

import logging
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

_LOG = logging.getLogger("blocktable")
SECONDS_TO_FIND = 3.0
"""A subscriber of the same deployment has bound its endpoint by then; ZeroMQ goes on trying."""


class ConnectionWatch:
    """Whether anybody answers where ``socket`` connects to.

    Made before the socket connects; the rest is called by the thread that owns the socket. What is
    sent while nobody listens is lost without a word from ZeroMQ, and the usual reason is an
    endpoint that was meant to be bound.
    """

    def __init__(self, socket: zmq.Socket, endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        self._deadline = time.monotonic() + SECONDS_TO_FIND
        self._monitor: zmq.Socket | None = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    @property
    def wait_ms(self) -> int | None:
        """How long a poll may wait before `look` is due; None once all is known."""
        if self._monitor is None:
            return None
        return max(0, round(1000 * (self._deadline - time.monotonic())))

    def look(self) -> None:
        """Take what happened; warn where nobody was found in time."""
        if self._monitor is None:
            return
        found = self._monitor.poll(0) != 0
        if found:
            recv_monitor_message(self._monitor)
        elif time.monotonic() < self._deadline:
            return
        else:
            _LOG.warning(
                "KV events are sent to %s and nobody listens there: an endpoint that names a host "
                "is connected to, and a subscriber must bind it. To bind it here, write "
                "tcp://*:PORT, or tcp://HOST:* for any free port", self._endpoint,
            )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None

"""Connections that cannot be held or filled without sending a request.

uvicorn waits for a request's head for ever and stores all of it. Here a head must come within
``read_seconds`` and ``max_head_bytes``; bodies are watched by the application (``app._Body``),
which answers in the API's own form.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


def guarded_protocol(read_seconds: float, max_head_bytes: int) -> type[asyncio.Protocol]:
    """A protocol class for ``uvicorn.Config(http=...)``."""

    class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            owner: Any = self
            if owner.cycle is not None and not owner.cycle.response_complete:
                self._head_is_here()
                return
            if self._timer is None:  # the next request on a connection that is kept
                self._wait_for_head()
            self._head_bytes += len(data)
            if self._head_bytes > max_head_bytes and not owner.transport.is_closing():
                owner.transport.write(_TOO_LARGE)
                owner.transport.close()

        def _wait_for_head(self) -> None:
            owner: Any = self
            self._timer = owner.loop.call_later(read_seconds, owner.transport.close)

        def _head_is_here(self) -> None:
            self._head_bytes = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Guarded

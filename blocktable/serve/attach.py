"""``blocktable inspect --events``: serve the inspector's page over another engine's events."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from blocktable.parallel.event_stream import EventSubscriber
from blocktable.serve.attached import AttachedSource, Follower
from blocktable.serve.config import ServerConfig
from blocktable.serve.errors import install
from blocktable.serve.inspector import add_pages, stopping


def build_attached(source: AttachedSource, follower: Follower, name: str) -> FastAPI:
    """The application that shows ``source``."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        follower.start()
        yield
        follower.stop()

    async def ask(question: Callable[[Any], Any]) -> Any:
        with source.lock:
            return question(source)

    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    app = FastAPI(title="blocktable inspector", lifespan=lifespan)
    install(app)
    add_pages(app, source, ask, decode, name, lambda: stopping(app))
    return app


def attach(events: str, replay: str | None, topic: str, config: ServerConfig) -> None:
    """Follow ``events`` (and fill gaps from ``replay``) and serve the page until a signal.

    With a replay endpoint everything the publisher still holds is asked for first.
    """
    import uvicorn

    from blocktable.serve.run import listen, opened

    listener = listen(config)
    first = 0 if replay is not None else None
    subscriber = EventSubscriber(events, replay, topic=topic, first_sequence=first)
    source = AttachedSource(config.ring_bytes, endpoint=events)
    app = build_attached(source, Follower(source, subscriber), f"events of {events}")
    page = f"http://{opened(listener)}/inspect"
    print(f"inspector of {events} at {page}", file=sys.stderr, flush=True)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on",
                              timeout_graceful_shutdown=2)  # fmt: skip
    app.state.server = server = uvicorn.Server(settings)
    server.run(sockets=[listener])

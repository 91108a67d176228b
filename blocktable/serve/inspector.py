"""The inspector's page and what it asks for: a snapshot, a stream of frames, lives of blocks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from blocktable.engine.engine import Engine
from blocktable.serve.bridge import EngineBridge
from blocktable.serve.config import ServerConfig
from blocktable.serve.errors import ApiError
from blocktable.serve.recorder import TableRecorder
from blocktable.serve.ring import FrameRing
from blocktable.serve.tree import prefix_tree

STATIC = Path(__file__).parent / "static"
_FILES = {"inspect.js": "text/javascript", "inspect.css": "text/css"}
_INTERVAL = 0.1  # seconds between two looks at the ring, for each open page
_BATCH = 400  # frames in one message at most
_LATE = 20_000  # frames that a page may be behind; one that is later sees a gap, and begins anew

T = TypeVar("T")


class Source(Protocol):
    """What the page shows: an engine's recorder, or the events of another engine."""

    ring: FrameRing
    sequence: int
    num_blocks: int

    @property
    def notice(self) -> dict[str, Any] | None:
        """What whoever looks must know: ``text`` ("" for nothing now), and ``time`` or None. None
        where there is never anything."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Everything a page needs to begin."""
        ...

    def block(self, block: int) -> dict[str, Any]:
        """Where a block stands."""
        ...

    def request(self, number: int) -> dict[str, Any] | None:
        """A request and its row."""
        ...

    def tree_arrays(self) -> tuple[Any, ...]:
        """Keyed blocks, parents, hits, references, places."""
        ...


Ask = Callable[[Callable[[Any], T]], Awaitable[T]]
"""Runs a question where the source may be read."""
Decode = Callable[[list[int]], str]


def add_inspector(app: FastAPI, bridge: EngineBridge, config: ServerConfig, name: str) -> None:
    """Record the engine's tables and serve them at /inspect."""
    recorder = TableRecorder(bridge.engine, config.ring_bytes)
    bridge.add_watcher(recorder.after_step)
    app.state.recorder = recorder

    def decode(ids: list[int]) -> str:
        detokenizer = bridge.engine.detokenizer
        return " ".join(map(str, ids)) if detokenizer is None else detokenizer.decode(ids, False)

    async def ask(question: Callable[[Any], Any]) -> Any:
        def in_engine_thread(_: Engine) -> Any:
            return question(recorder)

        return await bridge.ask(in_engine_thread)

    def over() -> bool:  # the last answers may still be watched
        return stopping(app) and not bridge.rows

    add_pages(app, recorder, ask, decode, name, over)


def stopping(app: FastAPI) -> bool:
    """Whether the server was told to stop. It would wait for open pages otherwise: whoever runs it
    puts itself into ``app.state.server``."""
    return bool(getattr(getattr(app.state, "server", None), "should_exit", False))


def add_pages(
    app: FastAPI, source: Source, ask: Ask[Any], decode: Decode, name: str,
    over: Callable[[], bool],
) -> None:  # fmt: skip
    """Routes under /inspect; they are no part of the API description. Streams of frames end when
    ``over`` says so."""

    @app.get("/inspect", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "inspect.html", media_type="text/html")

    @app.get("/inspect/static/{file}", include_in_schema=False)
    async def static(file: str) -> Response:
        if file not in _FILES:
            raise ApiError(404, f"no such file {file[:60]!r}")
        return FileResponse(STATIC / file, media_type=_FILES[file])

    @app.get("/inspect/state", include_in_schema=False)
    async def state(history: int = 2000) -> Response:
        """The pool now, and the frames that led here."""
        snapshot = await ask(lambda s: s.snapshot())
        frames = source.ring.since(0, max(0, min(history, 20_000)))
        last = snapshot["sequence"]
        snapshot["frames"] = [f.as_json() for f in frames if f.sequence <= last]
        return JSONResponse({**snapshot, "model": name, "notice": source.notice})

    @app.get("/inspect/events", include_in_schema=False)
    async def events(request: Request, since: int = 0) -> Response:
        """Frames as they come, by server-sent events."""
        return StreamingResponse(
            _stream(source, since, over), media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )  # fmt: skip

    @app.get("/inspect/block/{block}", include_in_schema=False)
    async def block_life(block: int) -> Response:
        """A block: where it stands, its tokens, its life in the ring."""
        facts = await ask(lambda s: _checked_block(s, block))
        facts["text"] = decode(facts["tokens"])
        life = await asyncio.to_thread(source.ring.life, block)
        return JSONResponse({**facts, "life": life})

    @app.get("/inspect/request/{number}", include_in_schema=False)
    async def one_request(number: int) -> Response:
        """A request: its row and its text."""
        facts = await ask(lambda s: s.request(number))
        if facts is None:
            raise ApiError(404, f"request number {number} is not remembered")
        tokens = facts.pop("tokens")
        return JSONResponse({**facts, "length": len(tokens), "text": decode(tokens[-400:])})

    @app.get("/inspect/tree", include_in_schema=False)
    async def tree() -> Response:
        """The prefix tree."""
        arrays, texts = await ask(lambda s: _tree_facts(s))

        def draw() -> list[dict[str, Any]]:
            blocks, parents, hits, references, places = arrays
            return prefix_tree(
                blocks, parents, hits, references, places, lambda run: decode(texts(run))
            )

        nodes = await asyncio.to_thread(draw)
        return JSONResponse(nodes)


def _checked_block(source: Source, block: int) -> dict[str, Any]:
    count = source.num_blocks
    if not 0 <= block < count:
        raise ApiError(404, f"block must be in [0, {count - 1}], got {block}")
    return source.block(block)


def _tree_facts(source: Source) -> tuple[tuple[Any, ...], Callable[[list[int]], list[int]]]:
    def texts(run: list[int]) -> list[int]:
        return [token for block in run for token in source.block(block)["tokens"]][:48]

    return source.tree_arrays(), texts


async def _stream(
    source: Source, since: int, over: Callable[[], bool] = lambda: False
) -> AsyncIterator[bytes]:
    """Messages with all frames that are new, in order and without a gap while the ring has them,
    and the notice where it is another; a comment now and then keeps the line open."""
    idle, last, told = 0, False, None
    while not last:
        last = over()  # what is new by then is told before the end
        if source.notice != told:
            told = source.notice
            yield f"event: notice\ndata: {json.dumps(told)}\n\n".encode()
        frames = source.ring.since(since, _LATE)
        for at in range(0, len(frames), _BATCH):
            some = frames[at : at + _BATCH]
            since, idle = some[-1].sequence, 0
            data = json.dumps([f.as_json() for f in some], separators=(",", ":"))
            yield f"data: {data}\n\n".encode()
        if not frames:
            idle += 1
            if idle % 50 == 1:  # well within the time after which a reader gives up
                yield b": nothing new\n\n"
        await asyncio.sleep(_INTERVAL)

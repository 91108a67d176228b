"""One address in front of several servers: requests go to the replica that holds their prefix.

::

    client --> router --(tokenize, hash, PrefixRouter)--> replica 0   key events ---+
                                                          replica 1   key events ---+--> router
                                                          replica 2   key events ---+

Bodies pass through unchanged, streams included. A replica that cannot be reached before it has
answered is taken out, and the request goes to another; once it answers again (or its successor,
where somebody can say where that is) it gets requests as before.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from blocktable.core.errors import ConfigError, WireError
from blocktable.parallel.event_stream import EventSubscriber, Received
from blocktable.parallel.events import external_hashes
from blocktable.prefix.keys import KeyHasher
from blocktable.prefix.sequence import TokenSequence
from blocktable.serve.routing import Choice, PrefixRouter

_GENERATING = ("/v1/completions", "/v1/chat/completions")
_POLL_SECONDS = 0.02
_REVIVE_SECONDS = 1.0
_HOP_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "content-encoding"}


@dataclass(frozen=True)
class Replica:
    """Where a server answers and where its cache events are."""

    url: str
    events: str
    replay: str | None = None


class Router:
    """The routes and state of a router; `app` serves it.

    ``block_size`` and ``seed`` are the replicas' own (a seed of the prefix keys is needed: without
    one each process draws a secret of its own, and no router could know the keys). ``find`` says
    where the successor of a lost replica is, or None while there is none; it may block. Without it
    a lost replica is asked where it was.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        block_size: int,
        seed: int,
        find: Callable[[int], Replica | None] | None = None,
    ) -> None:
        self.replicas = list(replicas)
        self._find = find or (lambda number: self.replicas[number])
        self.policy = PrefixRouter(len(self.replicas))
        self.sent = [0] * len(self.replicas)
        self._block_size = block_size
        self._keying = KeyHasher("sha256", seed, [block_size, block_size])
        self._subscribers = [_subscribe(replica) for replica in self.replicas]
        self._retired: list[EventSubscriber] = []
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0))

    async def follow_events(self) -> None:
        """Take what the replicas told since the last call. Asking for missed events waits, so it is
        done beside the loop."""
        while self._retired:  # nobody else reads them: a socket is for one thread at a time
            self._retired.pop().close()
        for number, subscriber in enumerate(list(self._subscribers)):
            told = await asyncio.to_thread(_received, subscriber)
            if subscriber is not self._subscribers[number]:
                continue
            for received in told:
                if received is None or received.missed or received.restarted:
                    self.policy.forget(number)
                if received is not None:
                    self.policy.apply(number, received.batch.events)

    async def revive(self) -> None:
        """Take lost replicas back that answer, where they were or in another place."""
        for number in set(range(len(self.replicas))) - set(self.policy.alive):
            place = await asyncio.to_thread(self._find, number)
            if place is None or not await self._answers(place):
                continue
            if place != self.replicas[number]:
                self.replicas[number] = place
                self._retired.append(self._subscribers[number])
                self._subscribers[number] = _subscribe(place)
            self.policy.revive(number)

    async def _answers(self, place: Replica) -> bool:
        try:
            answer = await self._client.get(place.url + "/health", timeout=2.0)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def hashes(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Hashes of the prompt's complete blocks; none where the prompt cannot be read."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
            tokens: Any = prompt
        else:
            key = "messages" if path.endswith("chat/completions") else "prompt"
            if not isinstance(body.get(key), str | list):
                return []
            tokens = await self._tokenize({"model": body.get("model"), key: body[key]})
        if len(tokens) < self._block_size:
            return []
        try:
            sequence = TokenSequence(
                tokens, self._keying, self._block_size, salt=body.get("cache_salt")
            )
            return external_hashes(sequence.keys())
        except (ValueError, TypeError):
            return []  # the replica will say what is wrong with it

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        for number in self.policy.alive:
            try:
                answer = await self._client.post(self.replicas[number].url + "/tokenize", json=body)
            except httpx.TransportError:
                self.policy.lose(number)
                continue
            return answer.json().get("tokens", []) if answer.status_code == 200 else []
        return []

    async def forward(self, request: Request) -> Response:
        """Send a request to a replica and its answer back."""
        data, path = await request.body(), request.url.path
        hashes: list[Any] = []
        if path in _GENERATING:
            try:
                body = json.loads(data)
                hashes = await self.hashes(path, body) if isinstance(body, dict) else []
            except ValueError:
                hashes = []
        while True:
            try:
                choice = self.policy.choose(hashes)
            except ConfigError:
                error = {"message": "no replica is alive", "type": "server_error", "code": 503}
                return JSONResponse({"error": error}, 503)
            answer = await self._try(request, data, choice, hashes)
            if answer is not None:
                return answer

    async def _try(
        self, request: Request, data: bytes, choice: Choice, hashes: list[Any]
    ) -> Response | None:
        """The replica's answer, or None where it is gone."""
        number = choice.replica
        work = self.policy.begin(choice, hashes)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_HEADERS}
        url = httpx.URL(self.replicas[number].url + request.url.path)
        outgoing = self._client.build_request(
            request.method, url.copy_with(query=request.url.query.encode()), content=data,
            headers=headers,
        )  # fmt: skip
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx.TransportError:
            self.policy.lose(number)
            return None
        self.sent[number] += 1

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            finally:
                self.policy.end(number, work)
                await answer.aclose()

        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_HEADERS}
        kept["x-blocktable-replica"] = str(number)
        return StreamingResponse(chunks(), answer.status_code, kept)

    async def close(self) -> None:
        """Close connections and subscriptions."""
        await self._client.aclose()
        for subscriber in [*self._subscribers, *self._retired]:
            subscriber.close()


def _subscribe(replica: Replica) -> EventSubscriber:
    return EventSubscriber(replica.events, replica.replay, first_sequence=0)


def _received(subscriber: EventSubscriber) -> list[Received | None]:
    """What has come since the last call; None for what could not be read."""
    told: list[Received | None] = []
    try:
        while (received := subscriber.receive(0.0)) is not None:
            told.append(received)
    except WireError:
        told.append(None)
    return told


def build_router(router: Router) -> FastAPI:
    """The application of a router: every path is a replica's, but ``/router`` shows its state."""

    async def repeat(what: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            try:
                await what()
            except Exception:  # the router outlives whatever a replica sends
                logging.getLogger("blocktable").exception("the router goes on")
            await asyncio.sleep(seconds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(repeat(router.follow_events, _POLL_SECONDS)),
            asyncio.create_task(repeat(router.revive, _REVIVE_SECONDS)),
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await router.close()

    app = FastAPI(title="blocktable router", lifespan=lifespan)

    @app.get("/router")
    async def state() -> dict[str, Any]:
        """Replicas that live, how many requests each was sent, and where each answers."""
        urls = [replica.url for replica in router.replicas]
        return {"alive": router.policy.alive, "sent": router.sent, "urls": urls}

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(request: Request) -> Response:
        """Whatever a replica answers."""
        return await router.forward(request)

    return app

"""``/v1/completions`` and ``/v1/chat/completions``: from a checked request to its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from blocktable.core.errors import RequestError
from blocktable.engine.params import SamplingParams
from blocktable.serve.answers import ChatShape, Shape
from blocktable.serve.bridge import Call, EngineBridge, Update
from blocktable.serve.config import ServerConfig
from blocktable.serve.errors import ApiError, error_body, from_request_error
from blocktable.serve.prompts import PromptReader
from blocktable.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    plain_messages,
    plain_tools,
)
from blocktable.serve.tools import ToolUse, format_of_template, use_of_tools

CLIENT_GONE = 499
_FIELDS = frozenset(CompletionRequest.model_fields) | frozenset(ChatCompletionRequest.model_fields)


def check_model(name: str | None, served: str) -> None:
    """404 for a model that is not served here."""
    if name is not None and name != served:
        raise ApiError(
            404, f"model {name[:100]!r} does not exist, served is {served!r}",
            param="model", code="model_not_found",
        )  # fmt: skip


class Generation:
    """Serves generation requests over one engine."""

    def __init__(
        self, config: ServerConfig, bridge: EngineBridge, reader: PromptReader, model: str
    ) -> None:
        self._config, self._bridge, self._reader, self.model = config, bridge, reader, model

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Answer a completions request."""
        check_model(body.model, self.model)
        self._check_completion(body)
        ids, texts = await self._reader.completions(
            body.prompt, body.add_special_tokens is not False
        )
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(scored or 0, body.logprobs)
        asked = 16 if body.max_tokens is None else max(1, body.max_tokens)
        changes = {"prompt_logprobs": scored}
        params = await self._params(
            body, ids, asked, body.max_tokens, body.logprobs, changes, _renames(body)
        )
        echoes: list[str] = []
        if body.echo:
            echoes = [
                t if t is not None else self._decode(i) for t, i in zip(texts, ids, strict=True)
            ]
        shape = Shape(self.model, params.n, self._bridge.engine.detokenizer, echoes)
        shape.prompts, shape.skips_special = ids, params.skip_special_tokens
        shape.echo_only = body.max_tokens == 0
        shape.scores_prompt = body.prompt_logprobs is not None
        return await self._respond(body, request, ids, params, shape)

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a chat request."""
        check_model(body.model, self.model)
        use = self._tool_use(body)
        options = body.template_options()
        tools = plain_tools(body.tools) if body.tool_choice != "none" else None
        messages = plain_messages(body.messages)
        ids = [await self._reader.run(self._reader.chat_ids, messages, tools, options)]
        newer = body.max_completion_tokens is not None
        wanted = body.max_completion_tokens if newer else body.max_tokens
        room = self._bridge.engine.max_model_len - len(ids[0])
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        changes: dict[str, Any] = {"prompt_logprobs": body.prompt_logprobs}
        if use is not None and use.schema is not None:
            changes["json_schema"] = use.schema
        if use is not None and use.keeps_special:
            changes["skip_special_tokens"] = False
        params = await self._params(
            body,
            ids,
            wanted or room,
            wanted,
            logprobs,
            changes,
            _renames(body, use),
            "max_completion_tokens" if newer else "max_tokens",
        )
        shape = ChatShape(self.model, params.n, self._bridge.engine.detokenizer, use)
        shape.scores_prompt = body.prompt_logprobs is not None
        return await self._respond(body, request, ids, params, shape)

    def _tool_use(self, body: ChatCompletionRequest) -> ToolUse | None:
        form = self._config.tool_call_parser
        if form == "auto":
            form = format_of_template(self._reader.chat_template)
        try:
            use = use_of_tools(body, None if form == "none" else form)
        except RecursionError:
            raise ApiError(400, "tools: a schema is nested too deeply", param="tools") from None
        if use is not None and use.schema is not None and body.guides():
            field = body.guides()[0].field
            raise ApiError(400, f"tool_choice cannot be combined with {field}", param="tool_choice")
        return use

    def _check_completion(self, body: CompletionRequest) -> None:
        if body.suffix:
            raise ApiError(400, "suffix is not supported, leave it out", param="suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(
                400, f"best_of must equal n ({body.n or 1}), got {body.best_of}", param="best_of"
            )
        if body.max_tokens == 0 and not body.echo:
            raise ApiError(
                400, "max_tokens must be at least 1 (0 is for echo), got 0", param="max_tokens"
            )

    async def _params(
        self, body: SamplingFields, prompts: list[list[int]], max_tokens: int, asked: int | None,
        logprobs: int | None, changes: dict[str, Any], renames: dict[str, str],
        most: str = "max_tokens",
    ) -> SamplingParams:  # fmt: skip
        """The checked parameters, with ``changes`` where they are not None; ``most`` is the field
        that ``asked`` came in. A guide is compiled here, in the
        tokenising thread, so that the engine does not wait for it."""
        engine = self._bridge.engine
        room = engine.max_model_len - max(map(len, prompts))
        if asked is not None and asked > room:
            raise ApiError(
                400, f"{most} must be at most {room} (max_model_len {engine.max_model_len} "
                f"less the prompt), got {asked}", param=most,
            )  # fmt: skip
        self._check_count(len(prompts), body.n or 1)
        self._check_salt(body.cache_salt)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        if body.prompt_logprobs is not None and body.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
        try:
            params = body.sampling(
                self._config.sampling, max_tokens=min(max_tokens, room), logprobs=logprobs
            )
            given = {name: value for name, value in changes.items() if value is not None}
            params = params.replace(**given) if given else params
            params.check_model(engine.limits.vocab_size)
            if params.guide is not None:
                await self._reader.run(engine.sampler.check, params)
            return params
        except RequestError as error:
            raise from_request_error(error, _FIELDS, renames) from None

    def _check_count(self, prompts: int, n: int) -> None:
        """Refuse what would not fit an idle server either: to wait and ask again is of no use."""
        most = self._bridge.max_rows
        if prompts * n > most:
            field = "n" if n > 1 else "prompt"
            raise ApiError(
                400, f"{field}: {prompts} prompts of n={n} completions are {prompts * n}, the "
                f"limit for all that run and wait is {most}", param=field,
            )  # fmt: skip

    def _check_salt(self, salt: str | None) -> None:
        if salt is None:
            return
        if len(salt) > self._config.max_salt:
            raise ApiError(
                400, f"cache_salt has {len(salt)} characters, the limit is "
                f"{self._config.max_salt}", param="cache_salt",
            )  # fmt: skip

    def _decode(self, ids: list[int]) -> str:
        detokenizer = self._bridge.engine.detokenizer
        return "" if detokenizer is None else detokenizer.decode(ids, False)

    async def _respond(
        self, body: SamplingFields, request: Request, prompts: list[list[int]],
        params: SamplingParams, shape: Shape,
    ) -> Response:  # fmt: skip
        call = self._bridge.submit(
            prompts, params, salt=body.cache_salt, priority=body.priority or 0,
            streaming=bool(body.stream),
        )  # fmt: skip
        call.renames = _renames(body, getattr(shape, "tools", None))
        if not body.stream:
            return await self._whole(request, call, shape)
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        first = await self._first(request, call)
        if first is None:
            return Response(status_code=CLIENT_GONE)
        return StreamingResponse(
            self._events(request, call, shape, first, with_usage),
            media_type="text/event-stream", headers={"Cache-Control": "no-cache"},
        )  # fmt: skip

    async def _whole(self, request: Request, call: Call, shape: Shape) -> Response:
        async with self._watched(request, call):
            while not call.finished and not call.gone:
                await self._changes(call)
        if call.gone:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(shape.whole([u for u in call.latest if u is not None]))

    async def _first(self, request: Request, call: Call) -> list[tuple[int, Update]] | None:
        """The first change of a stream, so that a refusal still has a status of its own."""
        async with self._watched(request, call, done=False):
            changes = await self._changes(call)
        return None if call.gone else changes

    async def _changes(self, call: Call) -> list[tuple[int, Update]]:
        try:
            return await call.changes()
        except RequestError as error:
            raise from_request_error(error, _FIELDS, call.renames) from None

    @asynccontextmanager
    async def _watched(
        self, request: Request, call: Call, done: bool = True
    ) -> AsyncIterator[None]:
        """Notice a client that hangs up; abort what is unfinished at the end (if ``done``)."""
        watcher = asyncio.create_task(_wait_for_hang_up(request, call))
        finished = False
        try:
            yield
            finished = True
        finally:
            watcher.cancel()
            if done or not finished or call.gone:
                self._bridge.cancel(call)

    async def _events(
        self, request: Request, call: Call, shape: Shape, changes: list[tuple[int, Update]],
        with_usage: bool,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        async with self._watched(request, call):
            while not call.gone:
                lines = [c for place, update in changes for c in shape.chunks(place, update)]
                if lines:
                    yield b"".join(map(_event, lines))
                if call.finished:
                    break
                try:
                    changes = await self._changes(call)
                except ApiError as error:  # the head is sent: all that is left is to say so
                    yield _event(error_body(error))
                    return
            if with_usage:
                yield _event(shape.usage_chunk([u for u in call.latest if u is not None]))
            yield b"data: [DONE]\n\n"


def _renames(body: SamplingFields, use: ToolUse | None = None) -> dict[str, str]:
    """The client's word for fields that the engine calls otherwise."""
    names = {guide.kind: guide.field for guide in body.guides()}
    if use is not None and use.schema is not None:
        names["json_schema"] = "tools"
    if isinstance(body, ChatCompletionRequest):
        names["logprobs"] = "top_logprobs"
    return names


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _wait_for_hang_up(request: Request, call: Call) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
    call.hang_up()

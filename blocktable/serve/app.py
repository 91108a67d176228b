"""The HTTP application: routes, access, body limits, life cycle."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

import blocktable
from blocktable.engine.engine import Engine
from blocktable.serve import metrics as prometheus
from blocktable.serve.bridge import EngineBridge
from blocktable.serve.config import ServerConfig
from blocktable.serve.errors import ApiError, install, respond
from blocktable.serve.generation import Generation, check_model
from blocktable.serve.heap import HeapTrimmer, find_trim
from blocktable.serve.prompts import PromptReader
from blocktable.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    plain_messages,
    plain_tools,
)

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field is wrong; the error names it and its limit"},
    401: {"description": "The API key is missing or wrong"},
    404: {"description": "No such model"},
    408: {"description": "The body did not come in time"},
    413: {"description": "The body is larger than the limit"},
    422: {"description": "A field is wrong"},
    429: {"description": "The queue is full; Retry-After says when to come back"},
    503: {"description": "The engine has stopped"},
}
_OPEN_PATHS = frozenset({"/health"})


def build_app(engine: Engine, config: ServerConfig, model: str) -> FastAPI:
    """The application that serves ``engine`` under the name ``model``."""
    name = config.served_name or model
    metrics = prometheus.Metrics(engine, name)
    bridge = EngineBridge(
        engine,
        max_rows=engine.scheduler.config.max_num_seqs + config.max_queue,
    )
    bridge.add_watcher(lambda _, seconds, outputs: metrics.observe(seconds, outputs))
    reader = PromptReader(engine, config.max_prompts)
    trimmer = HeapTrimmer(config.trim_seconds, find_trim())
    bridge.add_watcher(trimmer.after_step)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        bridge.start(asyncio.get_running_loop())
        trimmer.start()
        yield
        trimmer.stop()
        bridge.stop()
        reader.close()

    app = FastAPI(
        title="blocktable", version=blocktable.__version__, lifespan=lifespan,
        description="OpenAI-compatible serving over a paged KV cache.",
    )  # fmt: skip
    app.state.bridge, app.state.config, app.state.metrics = bridge, config, metrics
    install(app)
    _add_generation(app, Generation(config, bridge, reader, name), metrics)
    _add_models(app, engine, name)
    _add_tokens(app, engine, reader, name)
    _add_operations(app, bridge, metrics)
    if config.inspector:
        from blocktable.serve.inspector import add_inspector

        add_inspector(app, bridge, config, name)
    app.add_middleware(_Gate, config=config)
    return app


def _add_generation(app: FastAPI, generation: Generation, metrics: prometheus.Metrics) -> None:
    async def counted(answer: Awaitable[Response]) -> Response:
        try:
            return await answer
        except ApiError as error:
            metrics.rejected += error.status == 429
            raise

    @app.post("/v1/completions", responses=_REFUSALS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete a prompt or several."""
        return await counted(generation.completions(body, request))

    @app.post("/v1/chat/completions", responses=_REFUSALS)
    async def chat(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await counted(generation.chat(body, request))


def _add_models(app: FastAPI, engine: Engine, name: str) -> None:
    created = int(time.time())
    card = {
        "id": name, "object": "model", "created": created, "owned_by": "blocktable",
        "root": name, "parent": None, "max_model_len": engine.max_model_len,
    }  # fmt: skip

    @app.get("/v1/models", responses={401: _REFUSALS[401]})
    async def models() -> Response:
        """The model served here."""
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", responses={k: _REFUSALS[k] for k in (401, 404, 422)})
    async def one_model(model: str) -> Response:
        """The model served here, by name."""
        if model != name:
            raise ApiError(404, f"model {model[:100]!r} does not exist", code="model_not_found")
        return JSONResponse(card)


def _add_tokens(app: FastAPI, engine: Engine, reader: PromptReader, name: str) -> None:
    @app.post("/tokenize", responses=_REFUSALS)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of messages through the chat template."""
        check_model(body.model, name)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None:
            ids = await reader.run(reader.text_ids, body.prompt, body.add_special_tokens)
        else:
            messages = plain_messages(body.messages or [])
            ids = await reader.run(
                reader.chat_ids, messages, plain_tools(body.tools), body.template_options()
            )
        answer: dict[str, Any] = {
            "tokens": ids, "count": len(ids), "max_model_len": engine.max_model_len,
        }  # fmt: skip
        if body.return_token_strs and engine.detokenizer is not None:
            answer["token_strs"] = [engine.detokenizer.token_text(i) for i in ids]
        return JSONResponse(answer)

    @app.post("/detokenize", responses=_REFUSALS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        check_model(body.model, name)
        vocab, most = engine.limits.vocab_size, engine.max_model_len
        if len(body.tokens) > most:
            raise ApiError(
                400, f"tokens has {len(body.tokens)} entries, the limit is {most}", param="tokens"
            )
        for i, token in enumerate(body.tokens):
            if not 0 <= token < vocab:
                raise ApiError(
                    400, f"tokens[{i}] must be in [0, {vocab - 1}], got {str(token)[:40]}",
                    param="tokens",
                )  # fmt: skip
        if engine.detokenizer is None:
            raise ApiError(400, "this model has no tokenizer")
        text = await reader.run(engine.detokenizer.decode, body.tokens, False)
        return JSONResponse({"prompt": text})


def _add_operations(app: FastAPI, bridge: EngineBridge, metrics: prometheus.Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response, responses={503: _REFUSALS[503]})
    async def health() -> Response:
        """200 while the engine can take requests."""
        return Response(status_code=200 if bridge.alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses={401: _REFUSALS[401]})
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type=prometheus.CONTENT_TYPE)

    @app.get("/version", responses={401: _REFUSALS[401]})
    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": blocktable.__version__})


class _Gate:
    """API key and body size, before anything is read."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is not None:
            await respond(refusal)(scope, receive, send)
            return
        await self._app(scope, _Body(receive, self._config), send)

    def _too_large(self) -> ApiError:
        return ApiError(413, _too_large(self._config.max_body_bytes))

    def _refusal(self, request: Request) -> ApiError | None:
        key = self._config.api_key
        if key is not None and request.url.path not in _OPEN_PATHS:
            header = request.headers.get("authorization", "")
            given = header.removeprefix("Bearer ") or ""
            if not given and request.url.path.startswith("/inspect"):
                given = request.query_params.get("key", "")
            if not hmac.compare_digest(given.encode(), key.encode()):
                return ApiError(
                    401, "the API key is missing or wrong", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._config.max_body_bytes:
            return self._too_large()
        return None


def _too_large(limit: int) -> str:
    return f"the body must have at most {limit} bytes"


class _Body:
    """``receive`` that refuses, while it comes, a body that is too large or takes too long."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], config: ServerConfig) -> None:
        self._receive, self._limit, self._read = receive, config.max_body_bytes, 0
        self._seconds = config.read_seconds
        self._deadline: float | None = time.monotonic() + config.read_seconds

    async def __call__(self) -> Any:
        if self._deadline is None:  # all of it is here: what comes now is the client's leaving
            return await self._receive()
        try:
            left = max(0.0, self._deadline - time.monotonic())
            message = await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError:
            raise HTTPException(
                408, f"the body must come within {self._seconds:g} seconds",
                headers={"Connection": "close"},
            ) from None  # fmt: skip
        if not message.get("more_body", False):
            self._deadline = None
        self._read += len(message.get("body", b""))
        if self._read > self._limit:
            raise HTTPException(413, _too_large(self._limit), headers={"Connection": "close"})
        return message

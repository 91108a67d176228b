"""Every refusal as OpenAI's clients expect it: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from blocktable.core.errors import RequestError

_LONGEST = 600


class ApiError(Exception):
    """A refusal with its status; ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code, self.headers = code, headers


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of a refusal."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if error.status == 429:
        kind = "rate_limit_error"
    message = error.message
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + "..."
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def respond(error: ApiError) -> Response:
    """The refusal as a response. ASCII only, so that echoed input of any kind can be encoded."""
    return Response(
        json.dumps(error_body(error), ensure_ascii=True),
        status_code=error.status, headers=error.headers, media_type="application/json",
    )  # fmt: skip


def from_request_error(
    error: RequestError, fields: frozenset[str], renames: Mapping[str, str]
) -> ApiError:
    """A 400 for what sampler or engine refuse; the field is the message's first word. ``renames``
    has the client's word for fields that it calls otherwise."""
    message = str(error)
    first = message.split(" ", 1)[0].split("[")[0]
    if first in renames:
        message = renames[first] + message[len(first) :]
        first = renames[first].split(".")[0]
    return ApiError(400, message, param=first if first in fields else None)


def install(app: FastAPI) -> None:
    """Answer every kind of error in the same form."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


async def _api_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return respond(error)


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers) if error.headers else None
    return respond(ApiError(error.status_code, str(error.detail), headers=headers))


async def _validation_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return respond(ApiError(400, f"the body is not JSON: {reason}"))
    name = ".".join(p for p in place if not p.startswith(("function-", "lax-or-"))) or "body"
    got = "" if first["type"] == "missing" else f", got {_short(first.get('input'))}"
    return respond(ApiError(400, f"{name}: {first['msg']}{got}", param=place[0] if place else None))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."

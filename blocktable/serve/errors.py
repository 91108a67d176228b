"""Every refusal as OpenAI's clients expect it: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from blocktable.core.errors import RequestError

_LONGEST = 600
_UNREADABLE = "There was an error parsing the body"  # FastAPI's word for what is no text


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
    detail = str(error.detail)
    if error.status_code == 400 and detail == _UNREADABLE:
        coding = request.headers.get("content-encoding", "identity")
        detail = f"the body is not JSON in UTF-8 without compression, its encoding is {coding[:40]}"
    return respond(ApiError(error.status_code, detail, headers=headers))


async def _validation_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    errors = error.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", first["msg"])).removesuffix(" at")
        return respond(
            ApiError(400, f"the body is not JSON: {reason} at character {first['loc'][-1]}")
        )
    if isinstance(first.get("input"), bytes):
        given = request.headers.get("content-type", "none")
        return respond(
            ApiError(400, f"send the header Content-Type: application/json, got {given[:80]!r}")
        )
    place, first, reason = best_reason(errors, error.body)
    name = ".".join(place) or "body"
    got = "" if first["type"] == "missing" else f", got {_short(first.get('input'))}"
    return respond(ApiError(400, f"{name}: {reason}{got}", param=place[0] if place else None))


def best_reason(
    errors: Sequence[dict[str, Any]], body: object
) -> tuple[list[str], dict[str, Any], str]:
    """Of what a body was refused for: the place in it, the error, and the reason in words.

    Pydantic reports each form that a field may have, and puts the form's name into the place. The
    form that fits furthest says most; where none fits at all, the field must be one of them.
    """
    places = [_place(error, body) for error in errors]
    first, forms = errors[0], places[0][1]
    same = [0]
    if forms < len(first["loc"]):
        same = [i for i, e in enumerate(errors) if e["loc"][:forms] == first["loc"][:forms]]
    depths = [len(places[i][0]) for i in same]
    best = [i for i, depth in zip(same, depths, strict=True) if depth == max(depths)]
    reasons = list(dict.fromkeys(str(errors[i]["msg"]) for i in best))
    start = "Input should be "
    if min(depths) == max(depths) and all(reason.startswith(start) for reason in reasons):
        reasons = [start + " or ".join(reason[len(start) :] for reason in reasons)]
    return places[best[0]][0], errors[best[0]], reasons[0]


def _place(error: dict[str, Any], body: object) -> tuple[list[str], int]:
    """The keys and indices of an error's place, and how many parts of its ``loc`` come before the
    first that is the name of a form."""
    loc = error["loc"]
    if loc[0] != "body":
        return [str(part) for part in loc[1:]], len(loc)
    at: Any = body
    place: list[str] = []
    forms = len(loc)
    for i, part in enumerate(loc[1:], 1):
        missing = error["type"] == "missing" and i + 1 == len(loc)
        is_item = isinstance(at, list) and isinstance(part, int) and part < len(at)
        if is_item or (isinstance(at, dict) and part in at):
            at = at[part]
        elif not missing:  # no key of the body: a form, or what a check calls itself
            forms = min(forms, i)
            continue
        place.append(str(part))
    return place, forms


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."

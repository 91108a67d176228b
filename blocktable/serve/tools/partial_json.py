"""JSON objects as far as they have come, and where their members lie in the text."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_REST_OF_NUMBER = re.compile(r"[-+.eE0-9]*\Z")


class Member(NamedTuple):
    """Where a member's value begins and ends in the text; ``end`` None: not yet."""

    start: int
    end: int | None


class PartialObject(NamedTuple):
    """The members of an object by name; ``end`` is behind its closing brace, None: not yet."""

    members: dict[str, Member]
    end: int | None


def skip_space(text: str, at: int) -> int:
    """First place at or behind ``at`` that is not white space."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def read_object(text: str, start: int) -> PartialObject | None:
    """The JSON object at ``text[start]``, which may be cut off anywhere; None if there is none.

    Values are not checked until they are complete. O(text); nesting too deep for Python's parser
    reads as a value that never ends.
    """
    if text[start : start + 1] != "{":
        return None
    members: dict[str, Member] = {}
    at = skip_space(text, start + 1)
    if text[at : at + 1] == "}":
        return PartialObject(members, at + 1)
    while True:
        name = _value(text, at)
        if name is None:
            return PartialObject(members, None)
        at = skip_space(text, name[1])
        if not isinstance(name[0], str) or text[at : at + 1] not in ("", ":"):
            return None
        at = skip_space(text, at + 1)
        value = _value(text, at)
        if at < len(text):
            members[name[0]] = Member(at, None if value is None else value[1])
        if value is None:
            return PartialObject(members, None)
        at = skip_space(text, value[1])
        if text[at : at + 1] == "}":
            return PartialObject(members, at + 1)
        if text[at : at + 1] not in ("", ","):
            return None
        at = skip_space(text, at + 1)


def _value(text: str, at: int) -> tuple[object, int] | None:
    """A complete value and where it ends. A number at the very end may still grow: ``1`` to ``12``,
    ``1.`` or ``1e+`` (of which the decoder reads the ``1``) to ``1.5`` or ``1e+16``."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and _REST_OF_NUMBER.match(text, end):
        return None
    return value, end

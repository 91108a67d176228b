"""The forms in which models write tool calls, read from a text that may still grow.

::

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen
    llama3_json  {"name": ..., "parameters": {...}}                           Llama 3; may be
                 several with ; between and <|python_tag|> before
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]         Mistral
                 [TOOL_CALLS]name[ARGS]{...}                                  and its newer form

A reader is a function of the whole text so far. What it returns only ever grows: content that
might be the beginning of a call is held back, a call appears when its name is complete, and its
arguments are the model's own text. A text cut off inside a call gives the call as far as it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeAlias

from blocktable.serve.tools.partial_json import PartialObject, read_object, skip_space


class ToolCall(NamedTuple):
    """A call as far as it came; ``arguments`` is JSON text."""

    name: str
    arguments: str


class Reading(NamedTuple):
    """What stands outside of calls, and the calls in their order."""

    content: str
    calls: list[ToolCall]


Reader: TypeAlias = "Callable[[str, bool, Collection[str]], Reading]"
"""(text, whether it is complete, names of the tools) -> what is in it."""

_BARE_NAME = re.compile(r"([\w.\-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")


def read_hermes(text: str, done: bool, names: Collection[str]) -> Reading:
    """See the module."""
    opening, closing = "<tool_call>", "</tool_call>"
    content, calls, at = "", [], 0
    while True:
        begin = text.find(opening, at)
        if begin < 0:
            break
        content += text[at:begin]
        start = skip_space(text, begin + len(opening))
        found = read_object(text, start)
        call = None if found is None else _call(text, found)
        if start < len(text) and (found is None or (found.end is not None and call is None)):
            content += opening  # no call after all
            at = begin + len(opening)
            continue
        if call is not None:
            calls.append(call)
        elif done:
            content += text[begin:]
        if found is None or found.end is None:
            return _reading(content, calls, done)
        at = skip_space(text, found.end)
        if text.startswith(closing, at):
            at += len(closing)
        elif not done and closing.startswith(text[at:]):
            return _reading(content, calls, done)
    return _reading(content + _settled(text[at:], opening, done), calls, done)


def read_llama3_json(text: str, done: bool, names: Collection[str]) -> Reading:
    """See the module. Only objects that name one of the tools are calls: the model may have been
    asked for other JSON."""
    tag = "<|python_tag|>"
    start = skip_space(text, 0)
    if text.startswith(tag, start):
        start = skip_space(text, start + len(tag))
    if not done and tag.startswith(text[start:]):  # nothing yet, or the beginning of a tag
        return Reading("", [])
    calls, at = [], start
    while (found := read_object(text, at)) is not None:
        call = _call(text, found)
        if call is not None and call.name not in names:
            break
        if call is not None:
            calls.append(call)
        if found.end is None:
            if call is None and done and not calls:
                break
            return Reading("", calls)
        if call is None:
            break
        at = skip_space(text, found.end)
        if text[at : at + 1] in (";", ","):
            at = skip_space(text, at + 1)
    return Reading("", calls) if calls else Reading(text, [])


def read_mistral(text: str, done: bool, names: Collection[str]) -> Reading:
    """See the module."""
    tag = "[TOOL_CALLS]"
    begin = text.find(tag)
    if begin < 0:
        return _reading(_settled(text, tag, done), [], done)
    calls: list[ToolCall] = []
    at = skip_space(text, begin + len(tag))
    listed = text[at : at + 1] == "["
    while True:
        at = skip_space(text, at + 1 if text[at : at + 1] in ("[", ",", ";") else at)
        if text.startswith("TOOL_CALLS]", at):
            at = skip_space(text, at + len("TOOL_CALLS]"))
            listed = False
        end = _listed_call(text, at, calls) if listed else _bare_call(text, at, calls)
        if end is None:
            break
        at = skip_space(text, end)
    if not calls and done:
        return Reading(text, [])
    return _reading(text[:begin], calls, done)


def read_list(text: str, done: bool, names: Collection[str]) -> Reading:
    """The form that ``tool_choice`` "required" forces: a JSON list of calls."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    while text[at : at + 1] in ("[", ","):
        end = _listed_call(text, skip_space(text, at + 1), calls)
        if end is None:
            break
        at = skip_space(text, end)
    return Reading("" if calls or not done else text, calls)


FORMATS: dict[str, Reader] = {
    "hermes": read_hermes,
    "llama3_json": read_llama3_json,
    "mistral": read_mistral,
}
"""Readers by the name that ``--tool-call-parser`` takes."""


def format_of_template(template: str | None) -> str | None:
    """The form that a chat template asks the model for, by the words that mark it."""
    marks = {
        "hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>",
    }  # fmt: skip
    for name, mark in marks.items():
        if template and mark in template:
            return name
    if template and '"parameters": ' in template and '{"name": function name' in template:
        return "llama3_json"
    return None


def _listed_call(text: str, at: int, calls: list[ToolCall]) -> int | None:
    """Add the object at ``at``, if it is a call; where it ends, None if it does not."""
    found = read_object(text, at)
    call = None if found is None else _call(text, found)
    if call is not None:
        calls.append(call)
    return None if found is None or call is None else found.end


def _bare_call(text: str, at: int, calls: list[ToolCall]) -> int | None:
    match = _BARE_NAME.match(text, at)
    if match is None:
        return None
    found = read_object(text, match.end())
    end = None if found is None else found.end
    calls.append(ToolCall(match.group(1), text[match.end() : end].rstrip()))
    return end


def _call(text: str, found: PartialObject) -> ToolCall | None:
    """The call an object stands for, once its name is complete and its arguments began (or the
    object ended without any)."""
    name = found.members.get("name")
    if name is None or name.end is None:
        return None
    value = json.loads(text[name.start : name.end])
    if not isinstance(value, str) or not value:
        return None
    given = found.members.get("arguments") or found.members.get("parameters")
    if given is None:
        return None if found.end is None else ToolCall(value, "{}")
    raw = text[given.start : given.end]
    if raw.startswith("{"):
        return ToolCall(value, raw if given.end is not None else raw.rstrip())
    if given.end is None:
        return None
    decoded = json.loads(raw)  # some models quote the arguments once more
    return ToolCall(value, decoded if isinstance(decoded, str) else "{}")


def _settled(text: str, mark: str, done: bool) -> str:
    """The text without an end that may be the beginning of ``mark``."""
    if done:
        return text
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text


def _reading(content: str, calls: list[ToolCall], done: bool) -> Reading:
    """White space at the end of the content is no content beside calls."""
    return Reading(content if done and not calls else content.rstrip(), calls)

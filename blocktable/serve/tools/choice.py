"""What ``tools`` and ``tool_choice`` make of a chat request.

"auto" leaves the model free and reads its calls in its own form. "required" and a named function
are enforced: the output follows a JSON schema made of the tools' own.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from blocktable.serve.errors import ApiError
from blocktable.serve.protocol import ChatCompletionRequest, NamedTool
from blocktable.serve.tools.formats import FORMATS, Reader, Reading, ToolCall, read_list

_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class ToolUse(NamedTuple):
    """How a request's output is to be read.

    Attributes:
        names: of the tools that may be called.
        read: the reader of the model's form; None where ``forced`` says all.
        schema: JSON schema the output must follow, or None.
        forced: name of the one function whose arguments are the whole output.
        one_call: only the first call counts.
        short_ids: call ids as Mistral's templates want them back, 9 letters and digits.
        keeps_special: the form is marked by special tokens, which must stay in the text.
    """

    names: frozenset[str]
    read: Reader | None
    schema: str | None = None
    forced: str | None = None
    one_call: bool = False
    short_ids: bool = False
    keeps_special: bool = False

    def reading(self, text: str, done: bool) -> Reading:
        """Content and calls of a text so far."""
        if self.forced is not None:
            started = text.lstrip()
            return Reading("", [ToolCall(self.forced, started)] if started else [])
        if self.read is None:
            return Reading(text, [])
        found = self.read(text, done, self.names)
        return found._replace(calls=found.calls[:1]) if self.one_call else found


def use_of_tools(body: ChatCompletionRequest, form: str | None) -> ToolUse | None:
    """How to read the answer of a request; None where nothing is to be read. ``form`` is the
    model's, a key of FORMATS. ApiError 400 for a choice that the tools cannot meet."""
    choice = body.tool_choice
    names = frozenset(tool.function.name for tool in body.tools or ())
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice required needs tools", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ApiError(
            400, f"tool_choice names {choice.function.name[:64]!r}, which is not in tools",
            param="tool_choice",
        )  # fmt: skip
    if not names or choice == "none":
        return None
    one = body.parallel_tool_calls is False
    short = form == "mistral"
    if isinstance(choice, NamedTool):
        name = choice.function.name
        schema = _schema(_arguments_of(body)[name])
        return ToolUse(names, None, schema, name, short_ids=short)
    if choice == "required":
        return ToolUse(names, read_list, _schema(_list_schema(body, one)), None, one, short)
    if form is None:
        return None
    special = form in ("mistral", "llama3_json")
    return ToolUse(names, FORMATS[form], None, None, one, short, special)


def _arguments_of(body: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    """Schema of each tool's arguments."""
    return {
        tool.function.name: tool.function.parameters or _ANY_ARGUMENTS for tool in body.tools or ()
    }


def _list_schema(body: ChatCompletionRequest, one: bool) -> dict[str, Any]:
    """A list of calls. Each tool's schema becomes a definition, to which its own references are
    turned."""
    defined, calls = {}, []
    for name, schema in _arguments_of(body).items():
        at = f"#/$defs/{name}"
        defined[name] = _moved(schema, at)
        calls.append(
            {
                "type": "object", "required": ["name", "parameters"],
                "additionalProperties": False,
                "properties": {"name": {"const": name}, "parameters": {"$ref": at}},
            }
        )  # fmt: skip
    whole: dict[str, Any] = {
        "type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": defined,
    }  # fmt: skip
    return {**whole, "maxItems": 1} if one else whole


def _moved(schema: Any, at: str) -> Any:
    """The schema with its references to itself turned to its new place."""
    if isinstance(schema, dict):
        return {
            key: at + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, at)
            for key, value in schema.items()
        }
    return [_moved(item, at) for item in schema] if isinstance(schema, list) else schema


def _schema(schema: dict[str, Any]) -> str:
    return json.dumps(schema)

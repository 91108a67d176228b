"""Prompts from a file, the command line or standard input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktable.core.errors import RequestError

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request: chat messages, or plain text that no template touches."""

    messages: tuple[Message, ...] = ()
    text: str | None = None

    @property
    def title(self) -> str:
        """One line that tells requests apart: the last message, or the text."""
        source = self.text if self.text is not None else str(self.messages[-1].get("content", ""))
        return " ".join(source.split())


def chat_prompt(user: str, system: str | None) -> Prompt:
    """A single question, behind a system prompt if there is one."""
    before = ({"role": "system", "content": system},) if system else ()
    return Prompt(messages=(*before, {"role": "user", "content": user}))


def read_prompts(path: str, system: str | None = None) -> list[Prompt]:
    """Prompts of a JSON-lines file ("-" reads standard input).

    Each line is one of ``{"user": text}``, ``{"messages": [...]}``, ``{"prompt": text}`` (no chat
    template), or ``{"system": text}``, which stands before every ``user`` line after it. A file
    that ends in ``.txt`` has one user prompt a line instead.

    Raises:
        RequestError: naming file, line and what is wrong.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if path.endswith(".txt"):
            prompts.append(chat_prompt(line.strip(), system))
            continue
        record = _record(line, where)
        if "system" in record:
            system = _text(record, "system", where)
        elif "user" in record:
            prompts.append(chat_prompt(_text(record, "user", where), system))
        elif "prompt" in record:
            prompts.append(Prompt(text=_text(record, "prompt", where)))
        elif "messages" in record:
            prompts.append(Prompt(messages=_messages(record["messages"], where)))
        else:
            raise RequestError(f"{where}: expected user, system, messages or prompt")
    if not prompts:
        raise RequestError(f"{path} holds no prompts: at least 1 is needed")
    return prompts


def _lines(path: str) -> list[str]:
    import sys

    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"cannot read prompts from {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start})") from None


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise RequestError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{where}: {name} must be a text that is not empty, got {value!r}")
    return value


def _messages(value: object, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{where}: messages must be a list of at least 1 message")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where}: messages[{i}] must be an object with a role")
    return tuple(value)

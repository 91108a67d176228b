"""Scripts of cache operations: reading them, and saying clearly what is wrong with a broken one.

JSON lines: the configuration first, then one operation a line. Operations: ``new``, ``step``,
``sample``, ``preempt``, ``finish``, ``reset``, ``probe``; ``replay`` says what each does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktable.core.errors import BlocktableError

Operation = dict[str, Any]

_MOST = 2**31 - 1  # of every number: blocks, tokens and token ids are int32


class ScriptError(BlocktableError, ValueError):
    """A script that cannot be run; names the line and the field."""


@dataclass(frozen=True)
class ScriptConfig:
    """Line 1 of a script. ``num_blocks`` includes the null block; ``budget`` = tokens a step."""

    num_blocks: int
    block_size: int
    caching: bool
    max_model_len: int
    budget: int
    spec: str
    window: int | None
    watermark: float
    full_fit: bool


@dataclass(frozen=True)
class Script:
    """A checked script. ``places`` says where the configuration and each operation stand."""

    config: ScriptConfig
    operations: tuple[Operation, ...]
    places: tuple[str, ...]


def read_script(path: str | Path) -> Script:
    """Read and check a script file; ScriptError names file, line and fault."""
    try:
        with Path(path).open("r", encoding="utf-8") as lines:
            return parse_script(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"cannot read script {path}: {error}") from None


def parse_script(lines: Iterable[str], name: str = "script") -> Script:
    """Check the lines of a script; blank ones are skipped."""
    entries: list[tuple[str, Operation]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}, line {number}"
            entries.append((where, _parse_object(where, line)))
    if not entries:
        raise ScriptError(f"{name} is empty: its first line must be the configuration")
    config = _check_config(*entries[0])
    for where, entry in entries[1:]:
        _check_operation(where, entry)
    places = tuple(where for where, _ in entries)
    return Script(config, tuple(entry for _, entry in entries[1:]), places)


def _parse_object(where: str, line: str) -> Operation:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ScriptError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ScriptError(f"{where}: expected an object, got {type(entry).__name__}")
    return entry


def _check_config(where: str, entry: Operation) -> ScriptConfig:
    if entry.get("op") != "config":
        raise ScriptError(f"{where}: the first line must have op 'config', got {entry.get('op')!r}")
    for name, least in (("num_blocks", 2), ("block_size", 1), ("max_model_len", 1), ("budget", 1)):
        _whole(where, entry, name, least)
    for name in ("caching", "full_fit"):
        if not isinstance(entry.get(name), bool):
            raise ScriptError(f"{where}: {name} must be true or false, got {entry.get(name)!r}")
    spec = entry.get("spec")
    if spec not in ("full", "swa", "hybrid"):
        raise ScriptError(f"{where}: spec must be full, swa or hybrid, got {spec!r}")
    if spec != "full":
        _whole(where, entry, "window", 1)
    mark = entry.get("watermark", 0.0)
    if isinstance(mark, bool) or not isinstance(mark, int | float) or not 0 <= mark < 1:
        raise ScriptError(f"{where}: watermark must be in [0, 1), got {mark!r}")
    window = entry.get("window") if spec != "full" else None
    return ScriptConfig(
        entry["num_blocks"], entry["block_size"], entry["caching"], entry["max_model_len"],
        entry["budget"], spec, window, float(mark), entry["full_fit"],
    )  # fmt: skip


def _check_operation(where: str, entry: Operation) -> None:
    op = entry.get("op")
    if op in ("step", "reset"):
        return
    if op in ("new", "preempt", "finish"):
        if not isinstance(entry.get("id"), str):
            raise ScriptError(f"{where}: id must be a string, got {entry.get('id')!r}")
        if op == "new":
            _tokens(where, entry.get("tokens"), least=1)
            _whole(where, entry, "max_tokens", 1)
            _salt(where, entry)
    elif op == "probe":
        _tokens(where, entry.get("tokens"), least=0)
        _salt(where, entry)
    elif op == "sample":
        tokens = entry.get("tokens")
        if not isinstance(tokens, dict):
            raise ScriptError(f"{where}: tokens must map request ids to token lists")
        for ids in tokens.values():
            _tokens(where, ids, least=0)
    else:
        raise ScriptError(f"{where}: unknown op {op!r}")


def _whole(where: str, entry: Operation, name: str, least: int) -> None:
    value = entry.get(name)
    if type(value) is not int or value < least:
        raise ScriptError(f"{where}: {name} must be an integer >= {least}, got {value!r}")
    if value > _MOST:
        raise ScriptError(f"{where}: {name} must be at most {_MOST}, got {value}")


def _salt(where: str, entry: Operation) -> None:
    if not isinstance(entry.get("salt"), str | None):
        raise ScriptError(f"{where}: salt must be a string or null, got {entry.get('salt')!r}")


def _tokens(where: str, tokens: Any, least: int) -> None:
    if not isinstance(tokens, list) or len(tokens) < least:
        raise ScriptError(f"{where}: tokens must be a list of at least {least} ids")
    for token in tokens:
        if type(token) is not int or not 0 <= token <= _MOST:
            raise ScriptError(f"{where}: token id {token!r} is outside 0..{_MOST}")

"""Request traces: when requests came, how long they were, and which prefixes they shared.

A trace is JSON lines, each ``{"timestamp": ms, "input_length": tokens, "output_length": tokens,
"hash_ids": [int, ...]}``: one hash id for each started block of ``block_size`` prompt tokens;
equal ids at the start of two requests mean equal prefixes (Mooncake, FAST 2025).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import BlocktableError
from blocktable.core.specs import ceil_div

HASH_BLOCK = 512
"""Prompt tokens that one hash id of the published traces stands for."""


MAX_LENGTH = 2**23
"""Most prompt tokens, and most output tokens, of one request."""


class TraceError(BlocktableError, ValueError):
    """A trace line that cannot be read; names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Trace:
    """A trace in order of arrival. All arrays have one entry a request but ``hash_ids``."""

    arrival: NDArray[np.float64]  # [n] seconds
    input_length: NDArray[np.int64]  # [n] prompt tokens
    output_length: NDArray[np.int64]  # [n] generated tokens, >= 1
    hash_ids: NDArray[np.int32]  # [total] dense numbers 0.. of the ids, one request after another
    hash_start: NDArray[np.int64]  # [n + 1] where each request's ids begin
    block_size: int = HASH_BLOCK

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the whole trace."""
        return int(self.input_length.sum())

    @property
    def max_length(self) -> int:
        """Most tokens, prompt and output, of one request."""
        return int((self.input_length + self.output_length).max()) if len(self) else 0

    def prompt(self, index: int) -> NDArray[np.int32]:
        """int32 [input_length]: token ids that agree where the hash ids do. A stand-in: each
        block's id, repeated; the chain of keys tells blocks with another past apart."""
        ids = self.hash_ids[self.hash_start[index] : self.hash_start[index + 1]]
        return np.repeat(ids, self.block_size)[: self.input_length[index]]


def read_trace(path: str | Path, block_size: int = HASH_BLOCK, limit: int | None = None) -> Trace:
    """Read a trace file, at most ``limit`` requests of it; lines may be in any order of time.

    Raises TraceError, naming file and line, for a file that cannot be read or a line that is not
    of the form above; blank lines are skipped.
    """
    path = Path(path)
    arrival: list[float] = []
    lengths: list[tuple[int, int]] = []
    hashes: list[list[int]] = []
    try:
        with path.open("r", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(arrival) >= limit:
                    break
                if not line.strip():
                    continue
                entry = _parse_line(f"{path}, line {number}", line, block_size)
                arrival.append(entry["timestamp"] / 1000.0)
                lengths.append((entry["input_length"], max(1, entry["output_length"])))
                hashes.append(entry["hash_ids"])
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read trace {path}: {error}") from None
    if not arrival:
        raise TraceError(f"trace {path} holds no request")
    return _build(arrival, lengths, hashes, block_size)


def _build(
    arrival: list[float], lengths: list[tuple[int, int]], hashes: list[list[int]], block_size: int
) -> Trace:
    order = np.argsort(np.array(arrival), kind="stable")
    dense: dict[int, int] = {}
    ids = [dense.setdefault(h, len(dense)) for i in order.tolist() for h in hashes[i]]
    counts = np.array([len(hashes[i]) for i in order.tolist()], np.int64)
    table = np.array(lengths, np.int64)[order]
    return Trace(
        np.array(arrival)[order],
        table[:, 0],
        table[:, 1],
        np.array(ids, np.int32),
        np.concatenate(([0], np.cumsum(counts))),
        block_size,
    )


def _parse_line(where: str, line: str, block_size: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise TraceError(f"{where}: expected an object, got {type(entry).__name__}")
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        if name not in entry:
            raise TraceError(f"{where}: field {name!r} is missing")
        value = entry[name]
        whole = isinstance(value, int) or (name == "timestamp" and isinstance(value, float))
        if isinstance(value, bool) or not whole or not least <= value < 2**31 * 1000:
            raise TraceError(f"{where}: {name} must be a number >= {least}, got {value!r}")
        if name != "timestamp" and value > MAX_LENGTH:
            raise TraceError(f"{where}: {name} {value} is above {MAX_LENGTH}, the longest possible")
    if "hash_ids" not in entry:
        raise TraceError(f"{where}: field 'hash_ids' is missing")
    ids = entry["hash_ids"]
    if not isinstance(ids, list) or not all(type(h) is int for h in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers, got {str(ids)[:60]}")
    need = ceil_div(entry["input_length"], block_size)
    if len(ids) != need:
        raise TraceError(
            f"{where}: {len(ids)} hash_ids for input_length {entry['input_length']}, "
            f"but {block_size} tokens each make {need}"
        )
    return entry

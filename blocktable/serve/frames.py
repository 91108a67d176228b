"""What the inspector is told: frames, each the difference that one step made to the pool.

A block's state is one int32 code::

    bits 0-2   kind: 0 free, 1 cached (evictable), 2 fenced, 3 owned by one row, 4 shared
    bits 3-10  references, at most 255
    bits 11-30 number of the request that owns it, or owned it last (0: none)

A frame holds the old and the new code of every block that changed, so a reader can go forward and
back through time from any state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FREE, CACHED, FENCED, OWNED, SHARED = range(5)
MAX_NUMBER = (1 << 20) - 1
COUNTS = (
    "used", "free", "evictable", "fenced", "running", "waiting", "scheduled", "generated", "hits",
    "preemptions",
)  # fmt: skip


def pack(kind: NDArray, references: NDArray, number: NDArray) -> NDArray[np.int32]:
    """Codes of blocks; all arrays [n]."""
    return (kind | (np.minimum(references, 255) << 3) | (number << 11)).astype(np.int32)


def kind_of(codes: Any) -> Any:
    """Kind of each code."""
    return codes & 7


def number_of(codes: Any) -> Any:
    """Request number of each code."""
    return codes >> 11


class Frame(NamedTuple):
    """One step (or several short ones), as the inspector sees it."""

    sequence: int
    step: int
    time: float  # seconds since the epoch
    seconds: float  # its steps took
    steps: int  # it covers
    blocks: NDArray[np.int32]  # [k] that changed
    old: NDArray[np.int32]  # [k] codes before
    new: NDArray[np.int32]  # [k] codes after
    counts: tuple[int, ...]  # in the order of COUNTS
    started: tuple[tuple[Any, ...], ...] = ()  # (number, id, row, prompt tokens, cached tokens)
    ended: tuple[tuple[int, str], ...] = ()  # (number, reason; "preempted" leaves its row only)
    missed: int = 0  # batches lost before it, where the frames come from an event stream

    def as_json(self) -> dict[str, Any]:
        """The frame as the page takes it."""
        flat = np.stack([self.blocks, self.old, self.new], axis=1).ravel().tolist()
        return {
            "n": self.sequence, "s": self.step, "t": round(self.time, 3),
            "d": round(self.seconds, 6), "k": self.steps, "b": flat, "c": self.counts,
            "a": self.started, "e": self.ended, "m": self.missed,
        }  # fmt: skip


@dataclass(slots=True)
class SeenRequest:
    """What the inspector remembers of a request after it has gone."""

    number: int
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    row: int
    started: float
    ended: float | None = None
    reason: str | None = None
    source: Any = field(default=None, repr=False)  # while it may still come back into a row
    tokens: Any = field(default=(), repr=False)  # int32, once it has ended

    def as_json(self) -> dict[str, Any]:
        """Plain data for the page."""
        return {
            "number": self.number, "id": self.request_id, "prompt": self.prompt_tokens,
            "cached": self.cached_tokens, "row": self.row, "started": round(self.started, 3),
            "ended": None if self.ended is None else round(self.ended, 3), "reason": self.reason,
        }  # fmt: skip

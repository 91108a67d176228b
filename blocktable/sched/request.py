"""One request: what the caller asked for and where it stands.

A ``Request`` is a record at the border: the scheduler touches it when a request arrives, is
admitted, is preempted or ends, never in a plain decode step. While a request holds a row, its
tokens live in ``manager.tokens[row]``; they are copied back here when it gives the row up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from blocktable.core.errors import RequestError
from blocktable.core.types import TokenIds
from blocktable.groups.swap import SwappedRow
from blocktable.prefix.hints import Retention
from blocktable.prefix.sequence import TokenSequence, as_token_ids

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestStatus(IntEnum):
    """Life of a request. PREEMPTED and SWAPPED requests stand in the waiting queue."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Gave its blocks up; what it computed is recomputed (or hit in the prefix cache)."""
    SWAPPED = 3
    """Its blocks lie in host memory."""
    FINISHED = 4


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request for ``n`` continuations of ``prompt_token_ids``.

    ``max_tokens`` limits each continuation; a token of ``stop_token_ids`` (or ``eos_token_id``
    unless ``ignore_eos``) ends it, but not before ``min_tokens`` were generated. Lower
    ``priority`` runs first under the priority policy. ``drafts`` False: it is never given draft
    tokens. ``retention``: what its cached blocks are worth once it (or a continuation) has ended.
    ``salt``, ``adapter`` and ``media`` enter the prefix key as ``KVCacheManager.sequence`` says.
    ``arrival`` is in seconds of the scheduler's clock; ``params`` is carried for the engine and
    never read here.
    Raises RequestError for an empty prompt, a token id outside int32, or a negative limit.
    """

    request_id: str
    prompt_token_ids: TokenIds
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    priority: int = 0
    salt: str | None = None
    adapter: Any = None
    media: Any = None
    drafts: bool = True
    retention: Retention | None = None
    arrival: float = field(default_factory=time.monotonic)
    params: Any = None

    # Where it stands; written by the scheduler alone.
    status: RequestStatus = RequestStatus.WAITING
    row: int = -1
    """Row of every block table while it runs, else -1."""
    parent: str | None = None
    """Id of the request this one was forked from."""
    index: int = 0
    """Which of the parent's ``n`` continuations this is."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token id that ended it, with finish_reason "stop"."""
    num_cached_tokens: int = -1
    """Prompt tokens hit in the prefix cache at its first admission; -1 before."""
    num_preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    tokens: TokenIds = field(init=False, repr=False)
    """int32 [prompt + generated so far], while the request holds no row and once it has ended."""
    sequence: TokenSequence | None = field(default=None, init=False, repr=False)
    order: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), init=False, repr=False)
    """Its place in line: smaller goes first."""
    passed_over: int = field(default=0, init=False, repr=False)
    """Steps in which others were admitted past it."""
    swap: SwappedRow | None = field(default=None, init=False, repr=False)
    late: int = field(default=0, init=False, repr=False)
    """Tokens still to come from steps in flight when it was preempted."""
    forked: bool = field(default=False, init=False, repr=False)
    """Its ``n - 1`` children exist."""
    last_token_at: float = field(default=float("nan"), init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = token_array(self.request_id, self.prompt_token_ids)
        self.tokens = self.prompt_token_ids
        self.stop_token_ids = tuple(int(t) for t in self.stop_token_ids)
        _check_limit(self.request_id, "max_tokens", self.max_tokens, 1)
        _check_limit(self.request_id, "min_tokens", self.min_tokens, 0)
        _check_limit(self.request_id, "n", self.n, 1)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def stop_set(self) -> tuple[int, ...]:
        """Token ids that end this request, the end-of-sequence id included where it counts."""
        if self.eos_token_id is None or self.ignore_eos:
            return self.stop_token_ids
        return (self.eos_token_id, *self.stop_token_ids)

    @property
    def output_token_ids(self) -> TokenIds:
        """int32 [generated]: valid while the request holds no row and once it has ended."""
        return self.tokens[self.num_prompt_tokens :]


def token_array(request_id: str, tokens: Sequence[int] | TokenIds) -> TokenIds:
    """Token ids as an int32 array of its own; RequestError names the first id out of range.
    O(n), about 1 ms for a list of 128k ids."""
    try:
        ids = as_token_ids(tokens)
    except RequestError as error:
        raise RequestError(f"request {request_id!r}: {error}") from None
    if not len(ids):
        raise RequestError(f"request {request_id!r}: the prompt must hold at least 1 token")
    return ids.copy() if isinstance(tokens, np.ndarray) else ids


def _check_limit(request_id: str, name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"request {request_id!r}: {name} must be >= {least}, got {value!r}")

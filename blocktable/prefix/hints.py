"""What a request may ask for its cached blocks once it has ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocktable.core.errors import RequestError

MAX_PRIORITY = 3
"""Highest priority of a request's hint; the one above is the operator's (``pin``)."""
MAX_SECONDS = 86_400.0
DEFAULT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long a request's cached blocks are worth keeping after its end.

    ``priority`` 1 to 3: they are given up after all blocks of lower priority (blocks nobody asked
    for have 0), for ``seconds``. ``priority`` 0: they are not needed again and go first; this
    concerns only blocks that the request computed itself and nobody else uses or keeps.
    ``tokens``: only the first so many tokens of prompt and output; None = all.

    A hint moves blocks in the order of eviction, no more: it cannot keep another request out, and
    does not weaken what an operator pinned or another request asked for. Raises RequestError for
    a value that is out of range.
    """

    priority: int = 1
    seconds: float = DEFAULT_SECONDS
    tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("priority", self.priority, 0, MAX_PRIORITY)
        if self.tokens is not None:
            self._check_whole("tokens", self.tokens, 1, 2**31 - 1)
        seconds = self.seconds
        plain = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not plain or not math.isfinite(seconds) or not 0 < seconds <= MAX_SECONDS:
            raise RequestError(
                f"retention seconds must be in (0, {MAX_SECONDS:g}], got {seconds!r}"
            )

    def _check_whole(self, name: str, value: object, least: int, most: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RequestError(
                f"retention {name} must be an integer in [{least}, {most}], got {value!r}"
            )

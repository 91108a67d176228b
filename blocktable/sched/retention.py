"""A request has ended: its hint for the blocks it leaves in the prefix cache."""

from __future__ import annotations

from blocktable.manager import KVCacheManager
from blocktable.prefix.hints import Retention
from blocktable.prefix.sequence import TokenSequence
from blocktable.sched.request import Request


def leave_hint(
    manager: KVCacheManager, request: Request, hint: Retention, sequence: TokenSequence | None
) -> int:
    """Give ``hint`` for all tokens of a request that was released just now; returns how many
    blocks it concerns. ``sequence`` is the request's, which spares hashing what it has hashed.
    Without the prefix cache nothing is cached, and nothing is done. O(blocks)."""
    if manager.index is None:
        return 0
    if sequence is None:
        sequence = manager.sequence(
            request.tokens, salt=request.salt, adapter=request.adapter, media=request.media
        )
    else:
        sequence.extend(request.tokens[len(sequence) :])
    if hint.priority == 0:
        own = max(0, request.num_cached_tokens)
        return manager.expire(sequence, first_token=own, num_tokens=hint.tokens, weaken=False)
    return manager.retain(
        sequence, priority=hint.priority, seconds=hint.seconds, num_tokens=hint.tokens,
        weaken=False,
    )  # fmt: skip

"""The manager's retention hints: which cached prefixes to keep longest, and which not at all."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from blocktable.core.errors import ConfigError
from blocktable.core.pool import EVICTABLE, BlockPool
from blocktable.core.types import BlockIds
from blocktable.groups.base import Group
from blocktable.groups.keybook import KeyBook
from blocktable.prefix.index import PrefixIndex
from blocktable.prefix.retention import PRIORITIES, RetainingQueue
from blocktable.prefix.sequence import TokenSequence


class Retaining(ABC):
    """Hints on cached prefixes, over what `KVCacheManager` sets up. ``clock`` gives seconds."""

    pool: BlockPool
    index: PrefixIndex | None
    book: KeyBook | None
    groups: tuple[Group, ...]
    hash_block_size: int
    retain_share: float
    clock: Callable[[], float] = staticmethod(time.monotonic)
    _native: Any

    @abstractmethod
    def _attach_native(self, sink: Any) -> Any:
        """The compiled helper for the eviction order there is now; see KVCacheManager."""

    @abstractmethod
    def sequence(self, tokens: ArrayLike) -> TokenSequence:
        """A request's tokens; see KVCacheManager."""

    def pin(self, prefix: TokenSequence | ArrayLike) -> int:
        """Keep a cached prefix, in use or not, at the highest priority until `unpin`. Returns how
        many of its blocks are kept; fewer than are cached where ``retain_share`` is used up."""
        return self.retain(prefix, priority=PRIORITIES)

    def retain(
        self,
        prefix: TokenSequence | ArrayLike,
        *,
        priority: int = 1,
        seconds: float | None = None,
        steps: int | None = None,
        num_tokens: int | None = None,
        weaken: bool = True,
    ) -> int:
        """Give a cached prefix's blocks up after all others of lower priority (1 to 4; blocks
        without a hint have 0), for ``seconds`` or ``steps`` begun, whichever ends first; with
        ``num_tokens`` only the whole blocks of so many. A later hint replaces an earlier one,
        without ``weaken`` only a lower or shorter one. Returns how many blocks are kept.
        ConfigError for a priority or a time out of range, or without the prefix cache. O(blocks).
        """
        if not 1 <= priority <= PRIORITIES:
            raise ConfigError(f"priority is {priority}; hints have 1 to {PRIORITIES}")
        for name, value in (("seconds", seconds), ("steps", steps)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        blocks = self._cached_blocks(prefix, stop=num_tokens)
        if len(blocks) and not weaken:
            lasts = np.inf if seconds is None else seconds
            blocks = blocks[~self._retaining().stronger(blocks, priority, lasts)]
        if len(blocks) == 0:
            return 0
        return self._retaining().keep(blocks, priority, seconds, steps, self._waiting(blocks))

    def unpin(self, prefix: TokenSequence | ArrayLike) -> int:
        """Take the hints of a prefix away. Returns how many blocks had one."""
        queue = self.pool.eviction
        if not isinstance(queue, RetainingQueue):
            return 0
        blocks = self._cached_blocks(prefix)
        had = queue.loosen(blocks, self._waiting(blocks))
        self._settle()
        return had

    def expire(
        self,
        prefix: TokenSequence | ArrayLike,
        *,
        first_token: int = 0,
        num_tokens: int | None = None,
        weaken: bool = True,
    ) -> int:
        """A cached prefix, or the blocks that lie within its tokens ``first_token`` ..
        ``num_tokens`` - 1, is not needed again: they are given up first. A prefix shared with
        others loses them too, as a later request's cost, never its correctness; without ``weaken``
        blocks that somebody uses or keeps are left alone. Returns how many blocks that concerns."""
        blocks = self._cached_blocks(prefix, first_token, num_tokens)
        if len(blocks) and not weaken:
            kept = self._retaining().stronger(blocks, 0, 0.0)
            blocks = blocks[~kept & (self.pool.ref[blocks] == 0)]
        if len(blocks) == 0:
            return 0
        return self._retaining().expire(blocks, self._waiting(blocks))

    @property
    def num_retained(self) -> int:
        """Blocks kept by a hint now, at most ``retain_share`` of the usable ones."""
        queue = self.pool.eviction
        return queue.kept if isinstance(queue, RetainingQueue) else 0

    def _cached_blocks(
        self, prefix: TokenSequence | ArrayLike, start: int = 0, stop: int | None = None
    ) -> BlockIds:
        """Distinct blocks of the prefix, from its beginning on, in every group; only those that
        lie within tokens ``start`` .. ``stop`` - 1."""
        if self.index is None:
            raise ConfigError("retention hints need the prefix cache, which is off")
        made = prefix if isinstance(prefix, TokenSequence) else self.sequence(prefix)
        keys, found = made.keys(), [np.zeros(0, np.int32)]
        for group in self.groups:
            if group.caching:
                ratio = group.block_size // self.hash_block_size
                look = self.index.find_prefix if group.prefix_closed else self.index.find
                size = group.block_size
                own = look(keys[ratio - 1 :: ratio], group.group_id)
                found.append(own[-(-start // size) : None if stop is None else stop // size])
        blocks = np.concatenate(found)
        return blocks[blocks != 0]

    def _waiting(self, blocks: BlockIds) -> BlockIds:
        return blocks[self.pool.state[blocks] == EVICTABLE]

    def _retaining(self) -> RetainingQueue:
        """The order with hints, put around the pool's own by the first hint (the compiled helper
        knows the plain order only, and leaves evictions to NumPy from then on)."""
        queue, pool = self.pool.eviction, self.pool
        if isinstance(queue, RetainingQueue):
            return queue
        if self.index is None:
            raise ConfigError("retention hints need the prefix cache, which is off")
        limit = int(self.retain_share * pool.usable)
        made = RetainingQueue(
            queue, self.index, pool.keyed, limit, lambda: pool.steps_begun, lambda: self.clock()
        )
        self._replace_order(made)
        return made

    def _settle(self) -> None:
        """Without hints left, the plain order (and its compiled helper) is back."""
        queue = self.pool.eviction
        if isinstance(queue, RetainingQueue) and queue.idle:
            self._replace_order(queue.inner)

    def _replace_order(self, order: Any) -> None:
        self.pool.eviction = order
        self._native = self._attach_native(None if self.book is None else self.book.sink)

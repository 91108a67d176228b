"""Eviction orders other than plain least recently used, and their names."""

from __future__ import annotations

from blocktable.core.errors import ConfigError
from blocktable.core.eviction import EvictionPolicy, LRUQueue
from blocktable.core.pool import BlockPool

POLICIES = ("lru",)


def make_policy(name: str, pool: BlockPool) -> EvictionPolicy:
    """The policy of this name for a pool; ConfigError for an unknown one."""
    if name == "lru":
        return LRUQueue(pool.num_blocks, pool.place)
    raise ConfigError(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")

"""Small worlds for random traffic, in which everything goes wrong soon."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.sched.config import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """One world to run traffic in."""

    num_blocks: int = 16
    block_size: int = 4
    window: int | None = None
    local: bool = False
    """The window is a chunk that only its own positions attend to."""
    sinks: int = 0
    """First tokens that stay in sight beside the window."""
    hybrid: bool = False
    state: MambaCacheMode | None = None
    """How a recurrent state beside attention is cached, if there is one."""
    eviction: str = "lru"
    host_blocks: int = 0
    enable_caching: bool = True
    vocabulary: int = 5
    max_model_len: int = 40
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


def random_world(rng: random.Random) -> TrafficConfig:
    """A small world of any kind."""
    block, blocks = rng.choice([1, 2, 4, 8]), rng.choice([10, 16, 24, 40])
    kind = rng.choice(
        ["full", "full", "window", "hybrid", "local", "local hybrid", "sinks", "state", "state"]
    )
    plain = kind in ("full", "state")
    window = None if plain else rng.choice([2, block + 1, 3 * block])
    hybrid = "hybrid" in kind
    modes: list[MambaCacheMode] = ["none", "all", "align"]
    state = rng.choice(modes) if kind == "state" else None
    usable = (blocks - 1) // (2 if hybrid or state else 1)
    swap = rng.random() < 0.4
    flight = rng.choice([1, 1, 2])
    return TrafficConfig(
        num_blocks=blocks, block_size=block, window=window, hybrid=hybrid,
        local="local" in kind, sinks=rng.choice([1, block + 1]) if kind == "sinks" else 0,
        state=state, eviction=rng.choice(["lru", "reuse"]),
        host_blocks=rng.choice([4, 30]) if swap else 0, enable_caching=rng.random() < 0.85,
        vocabulary=rng.choice([2, 5, 40]), max_model_len=max(6, (usable - 1) * block),
        scheduler=SchedulerConfig(
            max_num_seqs=rng.choice([2, 4, 8]), max_num_batched_tokens=rng.choice([4, 16, 64]),
            policy=rng.choice(["fcfs", "priority"]), watermark=rng.choice([0.0, 0.2]),
            priority_head_start=rng.choice([0.0, 3.0]),
            full_sequence_must_fit=rng.random() < 0.6, lookahead=rng.choice([0, 2]),
            lookahead_patience=4, max_prefill_chunk=rng.choice([0, 0, 3]),
            preemption="swap" if swap else "recompute", max_steps_in_flight=flight,
            num_draft_tokens=rng.choice([0, 3]) if flight == 1 and state is None else 0,
            max_model_len_must_fit=False,
        ),
    )  # fmt: skip


def groups_of(world: TrafficConfig) -> tuple[KVCacheGroupSpec, ...]:
    """The KV cache groups of a world."""
    size = world.block_size
    specs: list[KVCacheSpec] = []
    if world.window is None or world.hybrid:
        specs.append(FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8))
    if world.window is not None and world.local:
        specs.append(
            ChunkedLocalAttentionSpec(
                block_size=size, num_kv_heads=1, head_size=8, attention_chunk_size=world.window
            )
        )
    elif world.window is not None:
        shape: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": 8}
        windowed = SlidingWindowSpec(**shape, sliding_window=world.window)
        if world.sinks:
            windowed = SinkWindowSpec(
                **shape, sliding_window=world.window, num_sink_tokens=world.sinks
            )
        specs.append(windowed)
    if world.state is not None:
        specs.append(
            MambaSpec(block_size=size, shapes=((1,),), dtypes=("uint8",), cache_mode=world.state)
        )
    return tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))

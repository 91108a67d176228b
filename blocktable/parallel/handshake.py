"""What ranks agree on before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.model_specs import kv_heads_per_rank
from blocktable.core.specs import AttentionSpec, KVCacheConfig
from blocktable.parallel.wire import VERSION


@dataclass(frozen=True)
class RankGeometry:
    """One rank's KV cache. All but ``num_blocks`` must be equal on all ranks."""

    num_blocks: int
    groups: tuple[dict[str, Any], ...]
    max_num_rows: int
    max_model_len: int
    wire_version: int = VERSION

    @classmethod
    def of(cls, config: KVCacheConfig, *, max_num_rows: int, max_model_len: int) -> RankGeometry:
        """From the config a rank built for its own shard."""
        groups = []
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            shape: dict[str, Any] = {
                "kind": spec.kind,
                "block_size": spec.block_size,
                "layers": len(group.layer_names),
                "page_bytes": spec.page_size_bytes,
            }
            if isinstance(spec, AttentionSpec):
                shape["kv_heads"] = spec.num_kv_heads
                shape["head_size"], shape["head_size_v"] = spec.head_size, spec.head_size_v
                shape["dtype"] = spec.dtype
            groups.append(shape)
        return cls(config.num_blocks, tuple(groups), max_num_rows, max_model_len)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `Communicator.gather_objects`."""
        return {**asdict(self), "groups": list(self.groups)}


def agree(geometries: Sequence[dict[str, Any]]) -> int:
    """Blocks that every rank has: the smallest rank's, null block included.

    ``geometries`` are `RankGeometry.as_dict` in rank order. Raises ConfigError, naming the ranks
    and what differs, for any other difference.
    """
    first = _facts(geometries[0])
    for rank, other in enumerate(geometries[1:], 1):
        facts = _facts(other)
        differ = sorted(name for name in first.keys() | facts.keys()
                        if first.get(name) != facts.get(name))  # fmt: skip
        if differ:
            told = "; ".join(
                f"{name} is {first.get(name)} on rank 0 and {facts.get(name)} on rank {rank}"
                for name in differ
            )
            raise ConfigError(f"ranks 0 and {rank} have KV caches of different geometry: {told}")
    return min(int(geometry["num_blocks"]) for geometry in geometries)


def _facts(geometry: dict[str, Any]) -> dict[str, Any]:
    facts = {k: v for k, v in geometry.items() if k not in ("num_blocks", "groups")}
    for index, group in enumerate(geometry["groups"]):
        facts |= {f"group {index} {name}": value for name, value in group.items()}
    return facts


def kv_head_map(num_q_heads: int, num_kv_heads: int, ranks: int, rank: int) -> NDArray[np.int32]:
    """The model's KV heads that one rank holds, in order.

    With at least as many KV heads as ranks each rank holds its share; with fewer, ranks whose query
    heads read the same KV head hold a copy of it each: query head h reads h // (Hq / Hkv).
    """
    held = kv_heads_per_rank(num_kv_heads, ranks)
    if num_q_heads % ranks or num_q_heads % num_kv_heads:
        raise ConfigError(
            f"{num_q_heads} query heads cannot be spread over {ranks} ranks and "
            f"{num_kv_heads} KV heads"
        )
    first_query = rank * (num_q_heads // ranks)
    first = first_query // (num_q_heads // num_kv_heads)
    return np.arange(first, first + held, dtype=np.int32)

"""KV events: which keyed blocks an engine holds, told to routers and shared caches.

Byte-compatible with what vLLM publishes, so that routers that read its events read ours:

    PUB     topic | sequence, 8 bytes big-endian | msgpack [ts, [event, ...], data_parallel_rank]
    ROUTER  a DEALER asks [b"", start]; the answer is [b"", sequence, payload] for each batch that
            is still buffered from start on, then [b"", ff * 8, b""]

An event is a map with its ``type`` first; optional fields equal to their default are left out.
A key appears as the low 64 bits of its big-endian digest, or as the digest's raw bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import WireError
from blocktable.core.specs import KVCacheConfig, SlidingWindowSpec
from blocktable.core.types import Keys

BlockHash: TypeAlias = int | bytes
HashForm: TypeAlias = Literal["int64", "bytes"]
MEDIUM_GPU = "GPU"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks of one chain became findable; ``parent_block_hash`` precedes the first of them."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks can no longer be found; one entry for each copy that was stored."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The prefix cache was emptied."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one step."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """The msgpack payload of a batch."""
    return _ENCODER.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in a payload; WireError when it is none."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a batch of KV events ({len(payload)} bytes): {error}") from error


def external_hashes(keys: Keys, form: HashForm = "int64") -> list[BlockHash]:
    """Keys (uint8 [n, K >= 8], big-endian digests) as consumers see them."""
    if form == "bytes":
        width = keys.shape[1]
        raw = np.ascontiguousarray(keys).tobytes()
        return [raw[at : at + width] for at in range(0, len(raw), width)]
    return np.ascontiguousarray(keys[:, -8:]).view(">u8").ravel().tolist()


class Stored(Protocol):
    """Blocks that became findable, as the manager tells its sink."""

    @property
    def group(self) -> int: ...
    @property
    def columns(self) -> NDArray: ...  # [n] block numbers in their sequences; 0 has no parent
    @property
    def keys(self) -> Keys: ...  # uint8 [n, K]
    @property
    def parents(self) -> Keys: ...  # uint8 [n, K]
    @property
    def tokens(self) -> NDArray: ...  # int32 [n, block_size]
    @property
    def sources(self) -> Sequence[Any]: ...  # [n] a KeySource or None, or none at all


class Removed(Protocol):
    """Blocks that can no longer be found."""

    @property
    def groups(self) -> NDArray: ...  # [n]
    @property
    def keys(self) -> Keys: ...  # uint8 [n, K]


class EventRecorder:
    """A sink for `KVCacheManager`: turns its bulk calls into events, a batch for each step.

    ``config`` says the block size and the kind of each group. Cost: O(blocks told), one event for
    each run of blocks of one chain.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        hash_form: HashForm = "int64",
        medium: str | None = MEDIUM_GPU,
        data_parallel_rank: int = 0,
    ) -> None:
        self._form: HashForm = hash_form
        self._medium = medium
        self._data_parallel_rank = data_parallel_rank
        self._specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._events: list[KVEvent] = []

    def _group_fields(self, group: int) -> dict[str, Any]:
        spec = self._specs[group]
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        return {
            "group_idx": group,
            "kv_cache_spec_kind": spec.kind,
            "kv_cache_spec_sliding_window": window,
        }

    def stored(self, event: Stored) -> None:
        """Blocks can be hit from now on."""
        keys, parents = event.keys, event.parents
        if not len(keys):
            return
        hashes = external_hashes(keys, self._form)
        above = external_hashes(parents, self._form)
        columns = np.asarray(event.columns)
        follows = (columns[1:] > 0) & (parents[1:] == keys[:-1]).all(axis=1)
        edges = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(keys)]
        group = int(event.group)
        fields = self._group_fields(group)
        sources = event.sources or [None] * len(keys)
        size = self._specs[group].block_size
        extra = [
            None if source is None else source.of_block(column * size, (column + 1) * size)
            for source, column in zip(sources, columns.tolist(), strict=True)
        ]
        for start, stop in pairwise(edges):
            self._events.append(
                BlockStored(
                    block_hashes=hashes[start:stop],
                    parent_block_hash=above[start] if columns[start] > 0 else None,
                    token_ids=event.tokens[start:stop].ravel().tolist(),
                    block_size=size,
                    lora_id=None,  # adapters have names here, no numbers
                    medium=self._medium,
                    lora_name=_adapter_name(sources[start]),
                    extra_keys=extra[start:stop],
                    **fields,
                )
            )

    def removed(self, event: Removed) -> None:
        """Blocks cannot be hit any more."""
        groups = np.asarray(event.groups)
        for group in np.unique(groups).tolist():
            hashes = external_hashes(event.keys[groups == group], self._form)
            self._events.append(BlockRemoved(hashes, self._medium, group))

    def cleared(self) -> None:
        """No block can be hit any more."""
        self._events.append(AllBlocksCleared())

    def take(self, now: float | None = None) -> EventBatch | None:
        """The events since the last call as a batch, or None when nothing happened."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return EventBatch(time.time() if now is None else now, events, self._data_parallel_rank)


def _adapter_name(source: Any) -> str | None:
    adapter = None if source is None else source.adapter
    return adapter.hex() if isinstance(adapter, bytes) else adapter


class BlockCounter:
    """What an engine holds, as a consumer of its events knows it: how many copies of each key."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, BlockHash], int] = {}

    def __len__(self) -> int:
        return len(self.counts)

    def holds(self, block_hash: BlockHash, group: int = 0) -> bool:
        """Whether at least one copy is there."""
        return (group, block_hash) in self.counts

    def apply(self, events: Sequence[KVEvent]) -> None:
        """Follow a batch. A removal of a key that was never stored is ignored."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.counts.clear()
                continue
            change = 1 if isinstance(event, BlockStored) else -1
            for block_hash in event.block_hashes:
                key = (event.group_idx or 0, block_hash)
                left = self.counts.get(key, 0) + change
                if left > 0:
                    self.counts[key] = left
                else:
                    self.counts.pop(key, None)

"""What the bytes of a KV cache mean, exchanged at the handshake, and copied between two of them.

A layout says where the key or value vector of (layer, head, position) lies. A transfer is planned
in addresses: every piece that is contiguous on both sides becomes one run, so that equal layouts
move whole neighbouring blocks, and caches with other block sizes, other head orders or other shares
of the heads move exactly the same values in smaller pieces::

    source, blocks 3 4 (16 tokens)   |t0 ........ t15|t16 ........ t31|
    target, blocks 9 2 5 1 (8)       |t0 .. t7|      |t16 .. t23| ...     4 runs a head and K or V
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError, TransferError
from blocktable.core.specs import dtype_bytes

HeadOrder = Literal["HTD", "THD"]


@dataclass(frozen=True)
class CacheLayout:
    """One rank's cache. A page (one block in one memory) holds K, then V, each ``order``:
    "HTD" = [head, token, dim], "THD" = [token, head, dim].

    ``memory[i]`` and ``group[i]`` say which memory layer i's pages lie in and which block table it
    reads. The rank holds heads ``first_head .. first_head + held_heads - 1`` of ``num_kv_heads``.
    """

    dtype: str
    block_size: int
    num_kv_heads: int
    first_head: int
    held_heads: int
    head_size: int
    head_size_v: int
    memory: tuple[int, ...]
    group: tuple[int, ...]
    page_bytes: int
    order: HeadOrder = "HTD"

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", tuple(self.memory))
        object.__setattr__(self, "group", tuple(self.group))
        numbers = (self.block_size, self.num_kv_heads, self.held_heads, self.head_size)
        if min(numbers) < 1 or self.head_size_v < 0 or self.first_head < 0:
            raise ConfigError(f"a cache layout needs positive sizes, got {self}")
        if self.first_head + self.held_heads > self.num_kv_heads or self.order not in (
            "HTD",
            "THD",
        ):
            raise ConfigError(f"a cache layout that cannot be: {self}")
        if len(self.memory) != len(self.group) or not self.memory:
            raise ConfigError("a cache layout names a memory and a group for each layer")
        if self.page_bytes < self.held_heads * self.block_size * self._vector_bytes:
            raise ConfigError(f"a page of {self.page_bytes} bytes is too small for {self}")

    @property
    def _vector_bytes(self) -> int:
        return (self.head_size + self.head_size_v) * dtype_bytes(self.dtype)

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return len(self.memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the handshake."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheLayout:
        """From a peer's `as_dict`; TransferError when it is none."""
        try:
            return cls(**values)
        except (TypeError, ValueError, ConfigError) as error:
            raise TransferError(f"the peer's cache layout cannot be read: {error}") from error


def check_convertible(source: CacheLayout, target: CacheLayout) -> None:
    """Raise TransferError naming what differs unless every value can be copied unchanged."""
    for name in ("dtype", "num_layers", "num_kv_heads", "head_size", "head_size_v"):
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise TransferError(
                f"KV caches cannot be converted exactly: {name} is {theirs} at the source and "
                f"{ours} here"
            )


class Runs(NamedTuple):
    """Contiguous pieces of a transfer, int64 [n] each: addresses on both sides and bytes."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    size: NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return int(self.size.sum())


class CacheView(NamedTuple):
    """A layout at its addresses, and a request's rows of block ids in it, one a group."""

    layout: CacheLayout
    bases: Sequence[int]  # address of each memory's first byte
    rows: Sequence[NDArray[np.int32]]


def plan_runs(source: CacheView, target: CacheView, first: int, stop: int) -> Runs:
    """Runs that copy the KV of positions ``first .. stop - 1`` for the heads both sides hold.

    Positions whose block is null on either side (outside a window) are left out. Raises
    TransferError when a row is too short. Cost: O(pieces), whole-array operations.
    """
    a, b = source.layout, target.layout
    check_convertible(a, b)
    low = max(a.first_head, b.first_head)
    high = min(a.first_head + a.held_heads, b.first_head + b.held_heads)
    if high <= low or stop <= first:
        none = np.zeros(0, np.int64)
        return Runs(none, none, none)
    tokens = _pieces(a, b, first, stop)
    heads = np.arange(low, high)
    parts: list[tuple[NDArray, NDArray, NDArray]] = []
    for layer in range(a.num_layers):
        blocks = [_blocks(view, layer, tokens.start) for view in (source, target)]
        live = (blocks[0] > 0) & (blocks[1] > 0)
        starts, counts = tokens.start[live], tokens.count[live]
        for values in (False, True):
            width = b.head_size_v if values else b.head_size
            if width == 0:
                continue
            where = [
                _addresses(view, layer, values, ids[live], heads, starts)
                for view, ids in zip((source, target), blocks, strict=True)
            ]
            size = counts[:, None] * width * dtype_bytes(b.dtype)
            size = np.broadcast_to(size, where[0].shape)
            parts.append((where[0].ravel(), where[1].ravel(), size.ravel()))
    return _coalesce(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class _Pieces(NamedTuple):
    start: NDArray[np.int64]
    count: NDArray[np.int64]


def _pieces(a: CacheLayout, b: CacheLayout, first: int, stop: int) -> _Pieces:
    """Intervals of positions that lie together for one head on both sides."""
    unit = math.gcd(a.block_size, b.block_size) if a.order == b.order == "HTD" else 1
    start = np.arange(first // unit * unit, stop, unit)
    end = np.minimum(start + unit, stop)
    start = np.maximum(start, first)
    return _Pieces(start, end - start)


def _blocks(view: CacheView, layer: int, positions: NDArray) -> NDArray[np.int64]:
    row = np.asarray(view.rows[view.layout.group[layer]], np.int64)
    columns = positions // view.layout.block_size
    if len(columns) and columns[-1] >= len(row):
        raise TransferError(
            f"position {int(positions[-1])} lies beyond a row of {len(row)} blocks of "
            f"{view.layout.block_size}"
        )
    return row[columns]


def _addresses(
    view: CacheView, layer: int, values: bool, blocks: NDArray, heads: NDArray, starts: NDArray
) -> NDArray[np.int64]:
    """int64 [pieces, heads]: where each piece begins."""
    layout = view.layout
    item = dtype_bytes(layout.dtype)
    width = layout.head_size_v if values else layout.head_size
    offset = starts % layout.block_size
    head = heads - layout.first_head
    if layout.order == "HTD":
        inside = (head[None, :] * layout.block_size + offset[:, None]) * width
    else:
        inside = (offset[:, None] * layout.held_heads + head[None, :]) * width
    if values:
        inside = inside + layout.held_heads * layout.block_size * layout.head_size
    base = view.bases[layout.memory[layer]] + blocks * layout.page_bytes
    return base[:, None] + inside * item


def _coalesce(source: NDArray, target: NDArray, size: NDArray) -> Runs:
    """Join pieces that follow each other on both sides."""
    order = np.argsort(target, kind="stable")
    source, target, size = source[order], target[order], size[order]
    follows = (source[1:] == source[:-1] + size[:-1]) & (target[1:] == target[:-1] + size[:-1])
    begins = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return Runs(source[begins], target[begins], np.add.reduceat(size, begins))

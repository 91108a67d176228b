"""The slot formula: where the KV of a position lies. One place, one NumPy oracle.

::

    position --(context parallel)--> owner rank, column of manager blocks, local offset in it
    manager block b of k kernel blocks --> kernel blocks b*k .. b*k + k-1   (what a row holds)
    slot = kernel_row[column * k + local // kernel_size] * kernel_size + local % kernel_size

With world C, interleave I and manager block size B (per rank), V = B * C positions share a
column: o = position mod V, owner = (o // I) mod C, local = (o // (C * I)) * I + o mod I. The
*manager* block size enters V, whatever the kernel's. Slots are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from blocktable.core.errors import ConfigError
from blocktable.core.specs import ceil_div
from blocktable.core.types import PAD_SLOT, BlockIds, Slots

WIDTH_UNIT = 128  # some kernels read rows of this many positions at a time


@dataclass(frozen=True)
class SlotGeometry:
    """How positions of one group map to slots on one rank.

    ``block_size`` positions a manager block holds on one rank; ``kernel_block_size`` (the same
    by default) what a kernel addresses; ``cp_world``, ``cp_rank``, ``cp_interleave`` say how
    positions are dealt out to ranks (a replicated group has world 1). Raises ConfigError.
    """

    block_size: int
    kernel_block_size: int | None = None
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "kernel_size", "cp_world", "cp_interleave"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.block_size % self.kernel_size:
            raise ConfigError(
                f"kernel block size {self.kernel_size} does not divide "
                f"the manager's block size {self.block_size}"
            )
        if not 0 <= self.cp_rank < self.cp_world:
            raise ConfigError(f"cp_rank {self.cp_rank} is not below cp_world {self.cp_world}")
        if self.cp_world > 1 and self.block_size % self.cp_interleave:
            raise ConfigError(
                f"interleave {self.cp_interleave} does not divide block size {self.block_size}"
            )

    @property
    def kernel_size(self) -> int:
        """Positions in one kernel block."""
        return self.block_size if self.kernel_block_size is None else self.kernel_block_size

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel blocks in one manager block."""
        return self.block_size // self.kernel_size

    @property
    def span(self) -> int:
        """Positions of the sequence that one column of manager blocks covers on all ranks."""
        return self.block_size * self.cp_world

    def row_width(self, max_model_len: int, *, align: bool = True) -> int:
        """Columns (manager blocks) a row needs; rounded up to a multiple of 128 // block_size
        where the block size is at most 128 and ``align`` is set."""
        width = ceil_div(max_model_len, self.span)
        unit = WIDTH_UNIT // self.block_size if align and self.block_size <= WIDTH_UNIT else 1
        return ceil_div(width, unit) * unit

    def to_kernel_blocks(self, block_ids: ArrayLike) -> BlockIds:
        """Manager block ids -> kernel block ids, [n] -> [n * blocks_per_kv_block] int32."""
        ids, k = np.asarray(block_ids, np.int32).reshape(-1), self.blocks_per_kv_block
        if k == 1:
            return ids
        return (ids[:, None] * np.int32(k) + np.arange(k, dtype=np.int32)).reshape(-1)

    def owner(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Rank that keeps the KV of each position."""
        offset = np.asarray(positions, np.int64) % self.span
        return offset // self.cp_interleave % self.cp_world

    def local_offset(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Offset of each position inside its manager block on its owner."""
        offset, step = np.asarray(positions, np.int64) % self.span, self.cp_interleave
        return offset // (self.cp_world * step) * step + offset % step

    def slots(
        self, kernel_rows: NDArray[np.int32], row_of_token: ArrayLike, positions: ArrayLike
    ) -> Slots:
        """Slot of each token, int64; PAD_SLOT where another rank owns the position, where the
        position lies beyond the row or is negative, and where the entry is null.

        ``kernel_rows`` int32 [rows, width] of kernel block ids; ``row_of_token`` and
        ``positions`` [tokens].
        """
        position = np.asarray(positions, np.int64)
        local = self.local_offset(position)
        column = position // self.span * self.blocks_per_kv_block + local // self.kernel_size
        inside = (position >= 0) & (column < kernel_rows.shape[1])
        if self.cp_world > 1:
            inside &= self.owner(position) == self.cp_rank
        block = kernel_rows[np.asarray(row_of_token), np.where(inside, column, 0)].astype(np.int64)
        slot = block * self.kernel_size + local % self.kernel_size
        live = block >= self.blocks_per_kv_block  # the null block's kernel blocks come first
        return np.where(inside & live, slot, np.int64(PAD_SLOT))

    def slot_mapping(
        self,
        kernel_rows: NDArray[np.int32],
        query_start_loc: ArrayLike,
        positions: ArrayLike,
        out: Slots,
    ) -> Slots:
        """Fill ``out`` int64 [max_num_batched_tokens]: slots of a ragged batch (request i's
        tokens are query_start_loc[i] .. [i+1], its row is i), PAD_SLOT behind the last token."""
        start = np.asarray(query_start_loc, np.int64)
        tokens = int(start[-1]) if start.size else 0
        rows = np.repeat(np.arange(len(start) - 1), np.diff(start))
        out[:tokens] = self.slots(kernel_rows, rows, np.asarray(positions)[:tokens])
        out[tokens:] = PAD_SLOT
        return out


def element_offset(slot: ArrayLike, elements_per_slot: int) -> NDArray[np.int64]:
    """Offset of a slot's first element in a cache tensor, in 64 bits whatever comes in."""
    return np.asarray(slot, np.int64) * np.int64(elements_per_slot)


def byte_offset(slot: ArrayLike, elements_per_slot: int, element_bytes: int) -> NDArray[np.int64]:
    """Byte offset of a slot in a cache tensor, in 64 bits whatever comes in."""
    return element_offset(slot, elements_per_slot) * np.int64(element_bytes)


def check_slots(slots: ArrayLike, num_slots: int) -> None:
    """Raises ConfigError naming the first slot outside 0 .. num_slots - 1 (PAD_SLOT allowed)."""
    found = np.asarray(slots, np.int64)
    bad = (found >= num_slots) | (found < PAD_SLOT)
    if bad.any():
        raise ConfigError(f"slot {found[bad].flat[0]} is outside a cache of {num_slots} slots")

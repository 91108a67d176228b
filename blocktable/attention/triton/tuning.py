"""Tile sizes of the attention kernel, by head size and element size; measured on an H200."""

from __future__ import annotations

from typing import NamedTuple


class KernelSizes(NamedTuple):
    """Keys in a tile, warps of a program, pipeline stages, programs that fit a multiprocessor."""

    block_n: int
    warps: int
    stages: int
    resident: int


class HeadSplit(NamedTuple):
    """A head size as two powers of two: d1 + d2 >= head size; d2 is 0 where d1 alone holds it."""

    d1: int
    d2: int


def next_power(value: int, least: int = 16) -> int:
    """Smallest power of two that is at least ``value`` and ``least``."""
    return max(least, 1 << max(value - 1, 0).bit_length())


def split_head(head_size: int) -> HeadSplit:
    """80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64, 576 = 512 + 64; 112 becomes 128."""
    whole = next_power(head_size)
    if whole == head_size or whole == 16:
        return HeadSplit(whole, 0)
    rest = next_power(head_size - whole // 2)
    return HeadSplit(whole // 2, rest) if whole // 2 + rest < whole else HeadSplit(whole, 0)


def small_sizes(
    head_size: int, value_size: int, cache_bytes: int, query_bytes: int, few: bool
) -> KernelSizes:
    """Sizes for items of 16 packed rows, which wait for memory: many loads in flight.

    few: so few keys that latency decides, not bandwidth (H200, 8 rows of 512 keys: 8.6 us instead
    of 11.2; but 16 rows of 32768: 500 instead of 487).
    """
    if query_bytes > 2:
        return KernelSizes(32 if head_size <= 128 else 16, 4, 2, 2)
    if head_size > 256:
        return KernelSizes(32, 4, 3, 1)
    if head_size > 128:
        return KernelSizes(32, 4, 3, 2)
    if few:
        return KernelSizes(64, 4, 3, 3)
    return KernelSizes(64 if cache_bytes == 1 else 32, 2, 3, 4)


def tile_sizes(
    block_m: int, head_size: int, value_size: int, cache_bytes: int, query_bytes: int
) -> KernelSizes:
    """Sizes for items of 64 or 128 packed rows, which wait for the tensor cores."""
    if query_bytes > 2:
        return KernelSizes(32 if head_size <= 128 else 16, 8, 1, 1)
    if head_size > 128:  # 128 heads over a latent of 576: 364 us, 424-1700 with other sizes
        return KernelSizes(64, 8, 2, 1)
    return KernelSizes(128, 8, 2, 1)


def tile_rows(head_size: int, query_bytes: int) -> tuple[int, ...]:
    """Packed rows of a tile: large heads fill the registers with 64. One size for all plans of a
    layer, so that a captured graph fits every one of them."""
    return (64,) if head_size > 128 or query_bytes > 2 else (128,)

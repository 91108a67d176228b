"""Columns of small non-negative integers at exactly ``bit_length(max)`` bits an entry.

A width is cut into planes of 16, 8, 4, 2 and 1 bits (18 bits = a 16-bit plane and a 2-bit plane),
low bits first, and the column is filled with zeros to a multiple of 8 entries, so that n entries of
w bits take ``ceil(n / 8) * w`` bytes. A plane is one or two whole-array operations in NumPy: 1,024
values pack in a few microseconds where shifting bit by bit takes fifty. The bytes are
little-endian and the same on every machine.

    width 13:  [ 8-bit plane: n bytes | 4-bit plane: n/2 bytes | 1-bit plane: n/8 bytes ]

Where the compiled helper was built it does the same in one pass a column (`native`).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_WIDTH = 32
_U8, _U16, _U32, _U64 = (np.dtype(code) for code in ("u1", "<u2", "<u4", "<u8"))

_PLANES: tuple[tuple[int, ...], ...] = tuple(
    (32,) if width == 32 else tuple(p for p in (16, 8, 4, 2, 1) if width & p)
    for width in range(MAX_WIDTH + 1)
)
# Bit fields of a byte, spread to one byte each: looked up as whole words when unpacking.
_BYTES = np.arange(256, dtype=_U8)
_SPREAD: dict[int, NDArray] = {
    4: np.stack([_BYTES & 15, _BYTES >> 4], 1).view(_U16).ravel(),
    2: np.stack([_BYTES >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(_U32).ravel(),
    1: np.stack([_BYTES >> shift & 1 for shift in range(8)], 1).view(_U64).ravel(),
}


@cache
def native() -> Any:
    """The compiled helper, or None: not built, switched off by BLOCKTABLE_NATIVE=0, or a machine
    whose integers are not little-endian."""
    if os.environ.get("BLOCKTABLE_NATIVE", "1") == "0" or sys.byteorder != "little":
        return None
    try:
        from blocktable.parallel import _bits  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return None
    return _bits


def packed_bytes(count: int, width: int) -> int:
    """Bytes of ``count`` entries of ``width`` bits."""
    return (count + 7 >> 3) * width


def width_of(values: NDArray[np.uint32]) -> int:
    """Bits of the largest value; 0 when all are 0. One reduction."""
    return int(np.bitwise_or.reduce(values)).bit_length()


def pack(values: NDArray[np.uint32], width: int) -> list[bytes]:
    """Cut ``values`` (uint32 [n], contiguous, each below ``2**width``) into the bytes of its
    planes, in order."""
    helper = native()
    if helper is not None:
        return [helper.pack(values, width)]
    short = -len(values) & 7
    if short:
        values = np.concatenate([values, np.zeros(short, np.uint32)])
    planes = _PLANES[width]
    parts = [_pack_plane(values, planes[0])] if planes else []
    for done, plane in pairwise(planes):
        values = np.right_shift(values, np.uint32(done))
        parts.append(_pack_plane(values, plane))
    return parts


def _pack_plane(values: NDArray[np.uint32], plane: int) -> bytes:
    """The low ``plane`` bits of each value. Casting to a narrower type keeps the low bits; the
    products gather the fields of a word in its top byte (they do not overlap, so nothing carries).
    """
    if plane >= 16:
        return values.astype(_U16 if plane == 16 else _U32).tobytes()
    low = values.astype(_U8)
    if plane == 8:
        return low.tobytes()
    if plane == 4:
        low &= 15
        return ((low.view(_U16) * np.uint16(0x110)) >> 8).astype(_U8).tobytes()
    if plane == 2:
        low &= 3
        return ((low.view(_U32) * np.uint32(0x01041040)) >> 24).astype(_U8).tobytes()
    low &= 1
    return np.packbits(low, bitorder="little").tobytes()


def unpack(data: memoryview | bytes, offset: int, count: int, width: int) -> NDArray[np.uint32]:
    """The inverse of `pack`: uint32 [count] from `packed_bytes` many bytes at ``offset``.

    The caller has checked that so many bytes are there.
    """
    padded = count + 7 & ~7
    helper = native()
    if helper is not None:
        made = np.zeros(padded, np.uint32)
        helper.unpack(data, offset, width, made)
        return made[:count]
    out: NDArray[np.uint32] | None = None
    shift = 0
    for plane in _PLANES[width]:
        values = _unpack_plane(data, offset, padded, plane)
        if out is None:
            out = values.astype(_U32)
        else:
            out |= np.left_shift(values, shift, dtype=_U32)
        offset += padded * plane >> 3
        shift += plane
    return np.zeros(count, np.uint32) if out is None else out[:count]


def _unpack_plane(data: memoryview | bytes, offset: int, padded: int, plane: int) -> NDArray:
    if plane >= 8:
        dtype = {8: _U8, 16: _U16, 32: _U32}[plane]
        return np.frombuffer(data, dtype, padded, offset)
    raw = np.frombuffer(data, _U8, padded * plane >> 3, offset)
    return _SPREAD[plane].take(raw).view(_U8)

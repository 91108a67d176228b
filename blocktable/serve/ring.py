"""The inspector's memory: the last frames, packed, in memory that is taken once.

A frame as Python objects is 1 KB in a dozen pieces of the heap, for hours; packed it is 140 bytes,
12 for each block that changed, and its notes. A server's size does not depend on how many it holds.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from blocktable.serve.frames import COUNTS, Frame

_HEAD = struct.Struct(f"<qqqddqi{len(COUNTS)}q")
"""sequence, missed, step, time, seconds, steps, blocks, counts."""
_SIZE = struct.Struct("<I")
_NOTES = msgspec.msgpack.Decoder(tuple[tuple[tuple[Any, ...], ...], tuple[tuple[int, str], ...]])


def pack_frame(frame: Frame) -> bytes:
    """A frame as bytes; `unpack_frame` gives it back."""
    head = _HEAD.pack(
        frame.sequence, frame.missed, frame.step, frame.time, frame.seconds, frame.steps,
        len(frame.blocks), *frame.counts,
    )  # fmt: skip
    notes = b""
    if frame.started or frame.ended:
        notes = msgspec.msgpack.encode((frame.started, frame.ended))
    arrays = (np.asarray(a, np.int32).tobytes() for a in (frame.blocks, frame.old, frame.new))
    return b"".join((head, *arrays, notes))


def unpack_frame(record: bytes) -> Frame:
    """The frame that `pack_frame` was given."""
    sequence, missed, step, time, seconds, steps, count, *counts = _HEAD.unpack_from(record)
    flat = np.frombuffer(record, np.int32, 3 * count, _HEAD.size)
    blocks, old, new = flat.reshape(3, count)
    notes = record[_HEAD.size + flat.nbytes :]
    started, ended = _NOTES.decode(notes) if notes else ((), ())
    return Frame(
        sequence, step, time, seconds, steps, blocks, old, new, tuple(counts), started, ended,
        missed,
    )  # fmt: skip


class FrameRing:
    """The last frames, within ``max_bytes``, which are taken at once and never more.

    One writer; any thread may read. Positions count all bytes ever written; a position's place in
    the memory is its remainder. Each record stands between two copies of its size, so that it is
    found from either side. A frame larger than the ring empties it: readers see a gap.
    """

    def __init__(self, max_bytes: int) -> None:
        self._memory = memoryview(bytearray(b"\1") * max_bytes)  # written: its pages are there
        self._first = self._end = 0
        self._lock = threading.Lock()

    def append(self, frame: Frame) -> None:
        """Add a frame and drop the oldest ones that no longer fit."""
        record = pack_frame(frame)
        size = _SIZE.pack(len(record))
        record = b"".join((size, record, size))
        with self._lock:
            if len(record) > len(self._memory):
                self._first = self._end
                return
            while self._end + len(record) - self._first > len(self._memory):
                self._first += self._size_at(self._first) + 2 * _SIZE.size
            self._write(record)

    def since(self, sequence: int, limit: int = 5000) -> list[Frame]:
        """Frames with a number above ``sequence``, the newest ``limit`` of them, oldest first."""
        found: list[bytes] = []
        with self._lock:
            end = self._end
            while end > self._first and len(found) < limit:
                size = self._size_at(end - _SIZE.size)
                end -= size + 2 * _SIZE.size
                record = self._read(end + _SIZE.size, size)
                if int.from_bytes(record[:8], "little", signed=True) <= sequence:
                    break
                found.append(record)
        return [unpack_frame(record) for record in reversed(found)]

    def life(self, block: int) -> list[dict[str, Any]]:
        """What happened to one block, oldest first: step, time, code before and after. O(frames),
        of which the writer waits for one copy of the ring."""
        events = []
        for record in self._records():
            count = _HEAD.unpack_from(record)[6]
            changed = np.frombuffer(record, np.int32, count, _HEAD.size)
            if not (changed == block).any():
                continue
            frame = unpack_frame(record)
            for i in np.flatnonzero(frame.blocks == block).tolist():
                events.append(
                    {"step": frame.step, "time": round(frame.time, 3),
                     "old": int(frame.old[i]), "new": int(frame.new[i])}
                )  # fmt: skip
        return events

    def _records(self) -> Iterator[bytes]:
        """All records, oldest first, as they are now."""
        with self._lock:
            copy = self._read(self._first, self._end - self._first)
        at = 0
        while at < len(copy):
            (size,) = _SIZE.unpack_from(copy, at)
            at += _SIZE.size
            yield copy[at : at + size]
            at += size + _SIZE.size

    def _size_at(self, position: int) -> int:
        return _SIZE.unpack(self._read(position, _SIZE.size))[0]

    def _read(self, position: int, count: int) -> bytes:
        start = position % len(self._memory)
        head = bytes(self._memory[start : start + count])
        return head if len(head) == count else head + bytes(self._memory[: count - len(head)])

    def _write(self, data: bytes) -> None:
        start = self._end % len(self._memory)
        head = min(len(data), len(self._memory) - start)
        self._memory[start : start + head] = data[:head]
        self._memory[: len(data) - head] = data[head:]
        self._end += len(data)

"""The step message: what every rank must do in one step, as compact bytes.

The scheduler decides once; the message carries the decision, never the state. A decode step of
1,024 requests is about 2.5 KiB, of which the token ids are most. ``docs/wire.md`` has the byte
layout. Nothing in a message is executed or names a type: it is a fixed header, a directory of
integer columns and their packed bits, all of it under one checksum.

A rank applies the parts of a group in the order of the fields: rows move, are cut, lose entries
(become null), have entries replaced, and grow; then blocks are swapped out, swapped in and copied
on the device, before the step's kernels.

Version 1. A reader refuses every other version: ranks of one engine run one release.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from blocktable.core.errors import WireError
from blocktable.parallel import bitpack

MAGIC = b"BTSM"
VERSION = 1
_HEADER = struct.Struct("<4sBBHIIQQ")
# magic, version, groups, columns, total bytes, sequence, step, digest
_COLUMN = struct.Struct("<BBBBII")  # field, group, mode, width, count, base
_CHECKSUM_BYTES = 8  # the message ends with XXH3-64 (big-endian) of all bytes before
_PACKED, _CONSTANT, _RANGE, _RUNS = range(4)
_MASK32 = 0xFFFFFFFF

Ints = NDArray[np.int32]
EMPTY: Ints = np.zeros(0, np.int32)
EMPTY.setflags(write=False)
_INT32 = np.dtype(np.int32)


class GroupDelta(NamedTuple):
    """How the block table of one KV cache group changes in a step. All arrays are int32.

    ``append_ids`` is the concatenation of ``append_counts[i]`` block ids for ``append_rows[i]``.
    """

    move_from: Ints = EMPTY  # [m] rows, empty afterwards unless they are in move_to
    move_to: Ints = EMPTY  # [m] rows whose earlier content is gone; all sources are read first
    truncate_rows: Ints = EMPTY  # [t] rows cut to
    truncate_counts: Ints = EMPTY  # [t] this many blocks; 0 clears the row
    null_rows: Ints = EMPTY  # [k] entries of these rows become null
    null_starts: Ints = EMPTY  # [k] from here
    null_stops: Ints = EMPTY  # [k] to before here
    set_rows: Ints = EMPTY  # [s] one entry each
    set_columns: Ints = EMPTY  # [s]
    set_ids: Ints = EMPTY  # [s] its new block id
    append_rows: Ints = EMPTY  # [a]
    append_counts: Ints = EMPTY  # [a]
    append_ids: Ints = EMPTY  # [sum(append_counts)]


class StepMessage(NamedTuple):
    """One step, as every rank must run it. Block ids are the driver's.

    ``digest`` is the driver's `TableDigest` after the step's changes: a rank that computes another
    one has diverged. ``sequence`` counts messages, so that one lost, repeated or overtaken is seen.
    """

    step: int  # 0 <= step < 2**64
    sequence: int  # modulo 2**32
    digest: int  # uint64
    groups: tuple[GroupDelta, ...] = ()
    rows: Ints = EMPTY  # [n] rows that run, in batch order
    num_scheduled: Ints = EMPTY  # [n] tokens each runs
    start_rows: Ints = EMPTY  # [k] rows whose position the reader cannot know (new, rolled back)
    start_positions: Ints = EMPTY  # [k] their first position
    token_ids: Ints = EMPTY  # [sum(num_scheduled)], or empty when each rank has them already
    sample_index: Ints = EMPTY  # [m] batch entries that sample; empty = all; -1 alone = none
    released: Ints = EMPTY  # rows given up since the last step
    fork_rows: Ints = EMPTY  # [f] rows that begin as a copy
    fork_parents: Ints = EMPTY  # [f] of these
    copy_from: Ints = EMPTY  # [c] blocks copied on the device before the step
    copy_to: Ints = EMPTY  # [c]
    swap_out_device: Ints = EMPTY  # [o] device blocks that go
    swap_out_host: Ints = EMPTY  # [o] to these host blocks
    swap_in_host: Ints = EMPTY  # [i] host blocks that go
    swap_in_device: Ints = EMPTY  # [i] to these device blocks
    dropped_ids: Ints = EMPTY  # blocks that hold nothing any more: a rank may unmap them
    user: Ints = EMPTY  # what an engine adds for its own use


class WireLimits(NamedTuple):
    """What a reader will allocate at most, whatever a message claims.

    ``max_values`` bounds the integers of all columns together: 4 bytes each when decoded.
    """

    max_values: int = 1 << 22


DEFAULT_LIMITS = WireLimits()
_GROUP_FIELDS = GroupDelta._fields
_STEP_FIELDS = StepMessage._fields[4:]
_STEP_BASE = 64  # field numbers of step columns begin here
_MAX_GROUPS = 255
_STEP_PAIRS = tuple(
    (StepMessage._fields.index(first), StepMessage._fields.index(second))
    for first, second in (
        ("rows", "num_scheduled"), ("start_rows", "start_positions"),
        ("fork_rows", "fork_parents"), ("copy_from", "copy_to"),
        ("swap_out_device", "swap_out_host"), ("swap_in_host", "swap_in_device"),
    )
)  # fmt: skip
_APPEND_IDS = _GROUP_FIELDS.index("append_ids")


def encode_step(message: StepMessage) -> bytes:
    """Bytes of ``message``. Cost: a few whole-array operations a non-empty column.

    Raises WireError for more than 255 groups or values outside int32.
    """
    directory: list[bytes] = []
    parts: list[bytes] = []
    if len(message.groups) > _MAX_GROUPS:
        raise WireError(f"{len(message.groups)} groups, but a message holds {_MAX_GROUPS}")
    for group, delta in enumerate(message.groups):
        for field, values in enumerate(delta):
            if values is not EMPTY and len(values):
                place = field, group
                directory.append(_COLUMN.pack(*place, *_encode_column(values, place, parts)))
    for field, values in enumerate(message[4:], _STEP_BASE):
        if values is not EMPTY and len(values):
            place = field, 0
            directory.append(_COLUMN.pack(*place, *_encode_column(values, place, parts)))
    num_columns = len(directory)
    body = b"".join(directory + parts)
    total = _HEADER.size + len(body) + _CHECKSUM_BYTES
    head = _HEADER.pack(
        MAGIC, VERSION, len(message.groups), num_columns, total,
        message.sequence & _MASK32, message.step, message.digest,
    )  # fmt: skip
    data = head + body
    return data + xxhash.xxh3_64_digest(data)


def _encode_column(
    values: NDArray, place: tuple[int, int], parts: list[bytes]
) -> tuple[int, int, int, int]:
    """Append the column to ``parts`` in the shortest mode that holds it: (mode, width, count,
    base)."""
    if values.dtype != _INT32:
        values = _to_int32(values)
    words, count = np.ascontiguousarray(values).view(np.uint32), len(values)
    mode, width, base = _classify(words)
    if mode != _PACKED:
        return mode, 0, count, base
    if place[0] == _APPEND_IDS and count > 64:
        found = _encode_runs(words, width, parts)
        if found is not None:
            return found
    parts += bitpack.pack(words, width)
    return _PACKED, width, count, 0


def _classify(words: NDArray[np.uint32]) -> tuple[int, int, int]:
    """(mode, width, base) of a column that is not cut into runs."""
    helper = bitpack.native()
    if helper is not None:
        return helper.classify(words)
    raw = words.tobytes()  # comparing bytes costs a tenth of comparing arrays at 1,024 values
    count, first, last = len(words), int(words[0]), int(words[-1])
    if first == last:
        if raw == raw[:4] * count:
            return _CONSTANT, 0, first
    elif last - first == count - 1 and raw == np.arange(first, last + 1, dtype="u4").tobytes():
        return _RANGE, 0, first
    return _PACKED, bitpack.width_of(words), 0


def _to_int32(values: NDArray) -> Ints:
    narrow = np.asarray(values).astype(np.int32)
    if narrow.ndim != 1 or not np.array_equal(narrow, values):
        raise WireError("a column must be one-dimensional and within int32")
    return narrow


def _encode_runs(
    words: NDArray[np.uint32], width: int, parts: list[bytes]
) -> tuple[int, int, int, int] | None:
    """Starts and lengths of ascending runs, or None when packing is as short.

    ``base`` holds the number of runs and, in its top 6 bits, the width of a length.
    """
    breaks = np.flatnonzero(words[1:] - words[:-1] != 1) + 1
    num_runs = len(breaks) + 1
    if num_runs * 2 > len(words) or num_runs >= 1 << 26:
        return None
    edges = np.empty(num_runs + 1, np.uint32)
    edges[0], edges[-1] = 0, len(words)
    edges[1:-1] = breaks
    lengths = (edges[1:] - edges[:-1] - 1).astype(np.uint32)
    length_width = bitpack.width_of(lengths)
    size = bitpack.packed_bytes(num_runs, width) + bitpack.packed_bytes(num_runs, length_width)
    if size >= bitpack.packed_bytes(len(words), width):
        return None
    starts = words[edges[:-1]]
    parts += bitpack.pack(starts, width) + bitpack.pack(lengths, length_width)
    return _RUNS, width, len(words), num_runs | length_width << 26


def decode_step(
    data: bytes | bytearray | memoryview, limits: WireLimits = DEFAULT_LIMITS
) -> StepMessage:
    """The message in ``data``.

    Raises WireError, and only that, for bytes that are truncated, corrupted, of another version or
    not ours, and for a message that claims more than ``limits`` allow. No column is allocated
    before the sizes of all columns are known to add up to the length of the message.
    """
    view = memoryview(data).cast("B")
    num_groups, num_columns, sequence, step, digest = _check_header(view)
    columns = _read_directory(view, num_columns, num_groups, limits)
    group_values = [list(_EMPTY_DELTA) for _ in range(num_groups)]
    step_values = list(_EMPTY_STEP)
    offset = _HEADER.size + num_columns * _COLUMN.size
    for field, group, mode, width, count, base, size in columns:
        values = _decode_column(view, offset, mode, width, count, base)
        offset += size
        if field >= _STEP_BASE:
            step_values[field - _STEP_BASE] = values
        else:
            group_values[group][field] = values
    groups = tuple(GroupDelta(*values) for values in group_values)
    message = StepMessage(step, sequence, digest, groups, *step_values)
    _check_lengths(message)
    return message


_EMPTY_DELTA = tuple(GroupDelta())
_EMPTY_STEP = tuple(EMPTY for _ in _STEP_FIELDS)


def _check_header(view: memoryview) -> tuple[int, int, int, int, int]:
    least = _HEADER.size + _CHECKSUM_BYTES
    if len(view) < least:
        raise WireError(f"{len(view)} bytes, but a step message has at least {least}")
    magic, version, groups, columns, total, sequence, step, digest = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"not a step message: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"step message of version {version}, this reader knows {VERSION}")
    if total != len(view):
        raise WireError(f"step message of {total} bytes, but {len(view)} arrived")
    if xxhash.xxh3_64_digest(view[:-_CHECKSUM_BYTES]) != view[-_CHECKSUM_BYTES:]:
        raise WireError(f"step message {step} is corrupted: its checksum does not match")
    if len(view) < least + columns * _COLUMN.size:
        raise WireError(f"{columns} columns do not fit in {len(view)} bytes")
    return groups, columns, sequence, step, digest


def _read_directory(
    view: memoryview, num_columns: int, num_groups: int, limits: WireLimits
) -> list[tuple[int, int, int, int, int, int, int]]:
    """The directory with each column's size in bytes, once all of it is known to be sound."""
    start = _HEADER.size
    end = start + num_columns * _COLUMN.size
    columns = []
    values, seen = 0, -1
    for field, group, mode, width, count, base in _COLUMN.iter_unpack(view[start:end]):
        place = field if field >= _STEP_BASE else field - (_MAX_GROUPS - group) * _STEP_BASE
        known = len(_GROUP_FIELDS) if field < _STEP_BASE else _STEP_BASE + len(_STEP_FIELDS)
        if field >= known or (field < _STEP_BASE and group >= num_groups):
            raise WireError(f"unknown column: field {field} of group {group}")
        if place <= seen and columns:
            raise WireError(f"field {field} of group {group} is repeated or out of order")
        size = _column_bytes(mode, width, count, base)
        columns.append((field, group, mode, width, count, base, size))
        values, seen = values + count, place
    if values > limits.max_values:
        raise WireError(f"{values} values, but this reader takes at most {limits.max_values}")
    total = end + sum(column[6] for column in columns) + _CHECKSUM_BYTES
    if total != len(view):
        raise WireError(f"the columns take {total} bytes, but the message has {len(view)}")
    return columns


def _column_bytes(mode: int, width: int, count: int, base: int) -> int:
    if width > bitpack.MAX_WIDTH or count == 0 or mode > _RUNS:
        raise WireError(f"impossible column: mode {mode}, width {width}, {count} values")
    if mode == _PACKED:
        return bitpack.packed_bytes(count, width)
    if mode in (_CONSTANT, _RANGE):
        return 0
    runs, length_width = base & (1 << 26) - 1, base >> 26
    if not 0 < runs <= count or length_width > bitpack.MAX_WIDTH:
        raise WireError(f"impossible column: {runs} runs of width {length_width}, {count} values")
    return bitpack.packed_bytes(runs, width) + bitpack.packed_bytes(runs, length_width)


def _decode_column(
    view: memoryview, offset: int, mode: int, width: int, count: int, base: int
) -> Ints:
    if mode == _PACKED:
        return bitpack.unpack(view, offset, count, width).view(np.int32)
    if mode == _CONSTANT:
        values = np.empty(count, np.uint32)
        values.fill(base)
        return values.view(np.int32)
    if mode == _RANGE:
        if base + count > 1 << 32:
            raise WireError(f"a range of {count} from {base} leaves 32 bits")
        return np.arange(base, base + count, dtype=np.uint32).view(np.int32)
    runs, length_width = base & (1 << 26) - 1, base >> 26
    starts = bitpack.unpack(view, offset, runs, width)
    offset += bitpack.packed_bytes(runs, width)
    lengths = bitpack.unpack(view, offset, runs, length_width).astype(np.int64) + 1
    ends = np.cumsum(lengths)
    if int(ends[-1]) != count:
        raise WireError(f"runs of {int(ends[-1])} values in a column of {count}")
    step = np.ones(count, np.uint32)
    step[0] = starts[0]
    step[ends[:-1]] = starts[1:] - (starts[:-1] + (lengths[:-1] - 1).astype(np.uint32))
    return np.cumsum(step, dtype=np.uint32).view(np.int32)


def _total(counts: Ints) -> int:
    helper = bitpack.native()
    if helper is not None:
        return helper.total(counts)
    return int(np.add.reduce(counts, dtype=np.int64)) if len(counts) else 0


def _check_lengths(message: StepMessage) -> None:
    """Columns that belong together must be of one length."""
    for group, delta in enumerate(message.groups):
        appended = _total(delta.append_counts)
        if (
            len(delta.truncate_rows) != len(delta.truncate_counts)
            or len(delta.move_from) != len(delta.move_to)
            or not len(delta.null_rows) == len(delta.null_starts) == len(delta.null_stops)
            or not len(delta.set_rows) == len(delta.set_columns) == len(delta.set_ids)
            or len(delta.append_rows) != len(delta.append_counts)
            or appended != len(delta.append_ids)
        ):
            raise WireError(f"the columns of group {group} have lengths that do not fit")
    columns = cast(tuple[Any, ...], message)
    for first, second in _STEP_PAIRS:
        if len(columns[first]) != len(columns[second]):
            names = f"{StepMessage._fields[first]} and {StepMessage._fields[second]}"
            raise WireError(f"{names} have lengths that do not fit")
    tokens = len(message.token_ids)
    if tokens and tokens != _total(message.num_scheduled):
        raise WireError(f"{tokens} token ids, but the rows run another number of tokens")

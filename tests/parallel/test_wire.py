"""The step message: round trips, its stated sizes, and how it treats unsound bytes."""

import contextlib
import pickle
import struct
import time
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blocktable.core.errors import WireError
from blocktable.parallel import bitpack
from blocktable.parallel.wire import (
    EMPTY,
    GroupDelta,
    StepMessage,
    WireLimits,
    decode_step,
    encode_step,
)

HEADER_BYTES = 32


def ints(*values):
    return np.array(values, np.int32)


def equal(a: StepMessage, b: StepMessage) -> bool:
    same = a[:3] == b[:3] and len(a.groups) == len(b.groups)
    pairs = [*zip(a[4:], b[4:], strict=True)]
    for x, y in zip(a.groups, b.groups, strict=True):
        pairs += zip(x, y, strict=True)
    return same and all(np.array_equal(x, y) and y.dtype == np.int32 for x, y in pairs)


def decode_step_of(rng, requests: int, crossing: int) -> StepMessage:
    """A decode step: one token for each request; ``crossing`` of them need a block."""
    rows = np.sort(rng.choice(requests, crossing, replace=False)).astype(np.int32)
    ids = rng.integers(1, 1 << 20, crossing).astype(np.int32)
    delta = GroupDelta(append_rows=rows, append_counts=np.ones(crossing, np.int32), append_ids=ids)
    tokens = rng.integers(0, 151_936, requests).astype(np.int32)
    all_rows = np.arange(requests, dtype=np.int32)
    ones = np.ones(requests, np.int32)
    return StepMessage(7, 9, 2**64 - 3, (delta,), all_rows, ones, token_ids=tokens)


def whole_table(ids: np.ndarray) -> StepMessage:
    rows, columns = ids.shape
    delta = GroupDelta(
        append_rows=np.arange(rows, dtype=np.int32),
        append_counts=np.full(rows, columns, np.int32),
        append_ids=ids.ravel().astype(np.int32),
    )
    return StepMessage(0, 0, 0, (delta,))


@given(st.integers(0, 32), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_bitpack_returns_what_went_in(width, count, seed):
    values = np.random.default_rng(seed).integers(0, 2**width, count).astype(np.uint32)
    data = b"abc" + b"".join(bitpack.pack(values, width))
    assert len(data) - 3 == bitpack.packed_bytes(count, width)
    assert np.array_equal(bitpack.unpack(data, 3, count, width), values)
    assert bitpack.width_of(values) <= width


@pytest.fixture(params=["compiled", "NumPy"])
def way(request, monkeypatch):
    """Both ways of packing; the compiled one where it was built."""
    if request.param == "NumPy":
        monkeypatch.setattr(bitpack, "native", lambda: None)
    elif bitpack.native() is None:
        pytest.skip("the compiled helper was not built")
    return request.param


columns = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda v: ints(*v))
runs = st.lists(st.tuples(st.integers(0, 2**31 - 100), st.integers(1, 90)), max_size=8).map(
    lambda pairs: np.concatenate([EMPTY, *(np.arange(a, a + n, dtype=np.int32) for a, n in pairs)])
)


@st.composite
def messages(draw):
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        m, t, n, s = (draw(columns) for _ in range(4))
        ids = draw(st.one_of(columns, runs))
        groups.append(GroupDelta(m, m, t, t, n, n, n, s, s, s, ints(3), ints(len(ids)), ids))
    rows = draw(columns)
    tokens = draw(st.sampled_from([EMPTY, rows]))
    numbers = [draw(st.integers(0, 2**bits - 1)) for bits in (64, 32, 64)]
    a, b, c = (draw(columns) for _ in range(3))
    ones = np.ones(len(rows), np.int32)
    return StepMessage(
        *numbers, tuple(groups), rows, ones, a, a, tokens, a, b, c, c, a, a, b, b, c, c, a, rows
    )


@given(messages())
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_round_trip(way, message):
    assert equal(message, decode_step(encode_step(message)))


@given(messages())
@settings(max_examples=200, deadline=None)
def test_the_compiled_helper_writes_the_same_bytes(message):
    if bitpack.native() is None:
        pytest.skip("the compiled helper was not built")
    data = encode_step(message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitpack, "native", lambda: None)
        assert encode_step(message) == data
        assert equal(decode_step(data), message)


@pytest.mark.parametrize("width", range(33))
def test_the_compiled_helper_packs_every_width_alike(width):
    helper = bitpack.native()
    if helper is None:
        pytest.skip("the compiled helper was not built")
    for count in (0, 1, 7, 8, 9, 64, 1023):
        values = np.random.default_rng(count).integers(0, 2**width, count).astype(np.uint32)
        packed = helper.pack(values, width)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bitpack, "native", lambda: None)
            assert b"".join(bitpack.pack(values, width)) == packed
        assert np.array_equal(bitpack.unpack(b"ab" + packed, 2, count, width), values)


def test_the_compiled_helper_refuses_what_does_not_fit():
    helper = bitpack.native()
    if helper is None:
        pytest.skip("the compiled helper was not built")
    room = np.zeros(8, np.uint32)
    for data, offset, width, out in [
        (b"1234567", 0, 8, room), (b"12345678", 1, 8, room), (b"12345678", -1, 1, room),
        (b"12345678", 9, 0, room), (b"", 0, 33, room), (b"", 0, -1, room),
        (bytes(99), 0, 8, np.zeros(7, np.uint32)), (bytes(99), 2**62, 8, room),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"do not fit|width"):
            helper.unpack(data, offset, width, out)
    for values in (np.zeros(3, np.uint8), b"abcde"):
        with pytest.raises(ValueError, match="32-bit"):
            helper.classify(values)
    with pytest.raises(ValueError, match="contiguous"):
        helper.pack(np.zeros((8, 2), np.uint32)[:, 0], 3)


def test_sizes_of_decode_steps():
    rng = np.random.default_rng(0)
    mean = np.mean([len(encode_step(decode_step_of(rng, 1024, 64))) for _ in range(16)])
    assert mean <= 4096
    worst = encode_step(decode_step_of(rng, 1024, 1024))
    assert len(worst) <= 7 * 1024


def test_sizes_of_whole_tables():
    rng = np.random.default_rng(0)
    contiguous = rng.permutation(16_000)[:1000, None] * 64 + 1 + np.arange(64)
    fours = (rng.permutation(1 << 18)[:16_000, None] * 4 + np.arange(4)).reshape(1000, 64)
    scattered = rng.permutation(1 << 20)[:64_000].reshape(1000, 64)
    for ids, limit in (
        (contiguous, 8 << 10),
        (fours, 70 << 10),
        (scattered, 1.05 * 64_000 * 20 / 8),
    ):
        data = encode_step(whole_table(ids))
        assert len(data) <= limit
        assert np.array_equal(decode_step(data).groups[0].append_ids, ids.ravel())


def test_first_version_is_pinned():
    """Bytes of version 1 as they are documented; a change of any of them needs a new version."""
    delta = GroupDelta(append_rows=ints(1), append_counts=ints(2), append_ids=ints(7, 9))
    data = encode_step(StepMessage(3, 4, 5, (delta,), token_ids=EMPTY))
    head = struct.pack("<4sBBHIIQQ", b"BTSM", 1, 1, 3, len(data), 4, 3, 5)
    directory = struct.pack("<BBBBII", 10, 0, 1, 0, 1, 1)
    directory += struct.pack("<BBBBII", 11, 0, 1, 0, 1, 2)
    directory += struct.pack("<BBBBII", 12, 0, 0, 4, 2, 0)
    body = head + directory + bytes([0x97, 0, 0, 0])
    assert data == body + xxhash.xxh3_64_digest(body)


def test_every_truncation_and_every_flipped_bit_is_refused():
    data = encode_step(decode_step_of(np.random.default_rng(1), 40, 9))
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode_step(data[:end])
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode_step(bytes(flipped))
    with pytest.raises(WireError, match="bytes"):
        decode_step(data + b"\0")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"GET / HTTP/1.1\r\n" * 8, pickle.dumps(list(range(99))), bytes(200)],
    ids=["empty", "json", "http", "pickle", "zeros"],
)
def test_foreign_bytes_are_refused(data):
    with pytest.raises(WireError):
        decode_step(data)


def test_another_version_is_refused_by_name():
    data = bytearray(encode_step(StepMessage(1, 1, 1)))
    data[4] = 2
    with pytest.raises(WireError, match="version 2, this reader knows 1"):
        decode_step(data)


def forge(data: bytearray) -> bytes:
    """Make length and checksum right again, as an attacker or a broken writer would."""
    data = data[: max(len(data) - 8, HEADER_BYTES)]
    struct.pack_into("<I", data, 8, len(data) + 8)
    return bytes(data) + xxhash.xxh3_64_digest(bytes(data))


@given(st.lists(st.tuples(st.integers(6, 400), st.integers(0, 255)), min_size=1, max_size=12),
       st.integers(0, 3))  # fmt: skip
@settings(max_examples=1500, deadline=None)
def test_forged_messages_raise_wire_error_or_decode(changes, kind):
    """Mutations whose checksum was made right again: no other exception, no large memory."""
    rng = np.random.default_rng(kind)
    base = [
        encode_step(decode_step_of(rng, 40, 9)),
        encode_step(whole_table(np.arange(1, 321).reshape(5, 64))),
        encode_step(whole_table((rng.permutation(80)[:, None] * 4 + np.arange(4)).reshape(5, 64))),
        encode_step(StepMessage(1, 2, 3, (GroupDelta(), GroupDelta(ints(1, 5), ints(0, 2))))),
    ][kind]
    data = bytearray(base)
    for at, value in changes:
        data[at % len(data)] = value
    tracemalloc.start()
    try:
        decode_step(forge(data), WireLimits(max_values=1 << 16))
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


@given(st.binary(max_size=600), st.booleans())
@settings(max_examples=600, deadline=None)
def test_random_bytes_raise_wire_error_or_decode(data, signed):
    """Noise behind a header of ours: length and checksum right, nothing else."""
    whole = struct.pack("<4sBBHIIQQ", b"BTSM", 1, data[0] if data else 0, len(data) // 16,
                        0, 1, 2, 3) + data  # fmt: skip
    began = time.perf_counter()
    with contextlib.suppress(WireError):
        decode_step(forge(bytearray(whole + bytes(8))) if signed else data)
    assert time.perf_counter() - began < 1.0


def test_a_small_message_cannot_claim_a_large_column():
    ones = np.ones(1000, np.int32)
    data = bytearray(encode_step(StepMessage(1, 1, 1, (), ones, ones)))
    struct.pack_into("<I", data, HEADER_BYTES + 4, 2**32 - 1)
    with pytest.raises(WireError, match="at most 4194304"):
        decode_step(forge(data))


def test_values_outside_int32_are_refused_when_encoding():
    with pytest.raises(WireError, match="int32"):
        encode_step(StepMessage(1, 1, 1, (), np.array([2**31]), ints(1)))


def test_column_lengths_must_fit():
    delta = GroupDelta(append_rows=ints(1), append_counts=ints(3), append_ids=ints(7, 9))
    with pytest.raises(WireError, match="group 0"):
        decode_step(encode_step(StepMessage(1, 1, 1, (delta,))))

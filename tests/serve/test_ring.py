"""The ring of frames: what goes in comes out, the newest that fit are there, within its bytes."""

import sys
import threading
from collections import deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from blocktable.serve.frames import Frame
from blocktable.serve.ring import FrameRing, pack_frame, unpack_frame

WORDS = st.text(max_size=12)
NUMBERS = st.integers(0, 2**40)
STARTED = st.tuples(NUMBERS, WORDS, NUMBERS, NUMBERS, NUMBERS)
ENDED = st.tuples(NUMBERS, WORDS)


@st.composite
def frames(draw, blocks=20):
    """A frame without a number."""
    count = draw(st.integers(0, blocks))
    arrays = [np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)),
                       np.int32) for _ in range(3)]  # fmt: skip
    return Frame(
        0, draw(NUMBERS), draw(st.floats(0, 2e9)), draw(st.floats(0, 10)), draw(st.integers(1, 99)),
        *arrays, tuple(draw(st.lists(NUMBERS, min_size=10, max_size=10))),
        tuple(draw(st.lists(STARTED, max_size=2))), tuple(draw(st.lists(ENDED, max_size=2))),
        draw(st.integers(0, 5)),
    )  # fmt: skip


@given(frames())
def test_a_packed_frame_comes_out_as_it_was(frame):
    assert same(unpack_frame(pack_frame(frame)), frame)


@given(st.lists(frames(), max_size=30), st.integers(1, 4000), st.integers(-1, 31),
       st.integers(0, 31))  # fmt: skip
def test_the_newest_frames_that_fit_are_there(made, size, since, limit):
    """Against a plain queue of frames and their sizes."""
    ring, model = FrameRing(size), deque()
    for number, frame in enumerate(made):
        frame = frame._replace(sequence=number)
        ring.append(frame)
        model.append((frame, len(pack_frame(frame)) + 8))
        while model and sum(cost for _, cost in model) > size:
            model.popleft()
        assert_same(ring.since(-1), [kept for kept, _ in model])
    wanted = [kept for kept, _ in model if kept.sequence > since]
    assert_same(ring.since(since, limit), wanted[max(0, len(wanted) - limit) :])
    for block in {b for kept, _ in model for b in kept.blocks.tolist()}:
        steps = [kept.step for kept, _ in model for b in kept.blocks.tolist() if b == block]
        assert [event["step"] for event in ring.life(block)] == steps


def test_it_holds_no_more_when_it_is_full():
    """Neither bytes nor Python objects grow with the frames."""
    ring = FrameRing(100_000)
    fill(ring, range(1000))
    before = sys.getallocatedblocks()
    fill(ring, range(1000, 20_000))
    assert sys.getallocatedblocks() - before < 50
    assert 100 < len(ring.since(0)) < 100_000 // 130


def test_a_reader_beside_the_writer_sees_whole_frames():
    ring, done = FrameRing(20_000), threading.Event()

    def write():
        fill(ring, range(20_000))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        seen = ring.since(-1)
        numbers = [frame.sequence for frame in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert all(frame.blocks.tolist() == [frame.sequence] for frame in seen)
    thread.join()


def fill(ring, numbers):
    for number in numbers:
        one = np.array([number], np.int32)
        ended = ((number, "stop"),) if number % 3 == 0 else ()
        ring.append(Frame(number, number, 0.0, 0.0, 1, one, one, one, (0,) * 10, (), ended))


def same(a, b):
    arrays = all(np.array_equal(x, y) for x, y in zip(a[5:8], b[5:8], strict=True))
    return arrays and a[:5] == b[:5] and a[8:] == b[8:]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))

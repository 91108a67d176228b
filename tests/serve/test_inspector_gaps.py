"""Frames reach every reader in order; a reader that missed some notices, and begins anew."""

import asyncio
import contextlib
import json
import threading
import time

import httpx
import numpy as np
import pytest
from serving import running

from blocktable.cli import inspect as terminal
from blocktable.serve import inspector
from blocktable.serve.config import ServerConfig
from blocktable.serve.frames import Frame
from blocktable.serve.inspector import FrameRing

NONE = np.zeros(0, np.int32)


class Recorded:
    """A source with a number of frames."""

    def __init__(self, count, ring_bytes=2**24):
        self.ring, self.sequence = FrameRing(ring_bytes), 0
        self.add(count)

    def add(self, count):
        for _ in range(count):
            self.sequence += 1
            self.ring.append(
                Frame(self.sequence, self.sequence, 0.0, 0.0, 1, NONE, NONE, NONE, (0,) * 10)
            )


def told(source, since, until):
    """Numbers of the frames in the stream behind ``since`` up to ``until``."""

    async def read():
        numbers = []
        stream = inspector._stream(source, since)
        async for message in stream:
            if message.startswith(b"data: "):
                numbers += [frame["n"] for frame in json.loads(message[6:])]
            if numbers and numbers[-1] >= until:
                await stream.aclose()
                return numbers

    return asyncio.run(asyncio.wait_for(read(), 20))


@pytest.mark.parametrize("late", [1, 399, 400, 401, 1000, 5000])
def test_a_late_reader_gets_every_frame_in_order(late):
    """However many steps ran since it looked last."""
    source = Recorded(late + 7)
    assert told(source, 7, late + 7) == list(range(8, late + 8))


def test_what_the_ring_dropped_is_a_gap_in_the_numbers():
    numbers = told(Recorded(500, ring_bytes=10_000), 3, 500)
    assert numbers[0] > 4 and numbers == list(range(numbers[0], 501))


def complete(server, prompt):
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


def agrees(state, server):
    deadline = time.monotonic() + 15
    while True:
        with state.lock:
            if np.array_equal(state.codes, server.app.state.recorder.codes):
                return
        assert time.monotonic() < deadline, "the terminal shows another pool than there is"
        time.sleep(0.05)


@contextlib.contextmanager
def followed(url):
    state = terminal.RemoteState(url, None)
    threading.Thread(target=state.follow, daemon=True).start()
    yield state


def test_the_terminal_notices_a_gap(server):
    with followed(server.url) as state:
        complete(server, "before the gap")
        agrees(state, server)
        with state.lock:
            state._since -= 2
            state.codes[:] = 1
        complete(server, "after the gap")
        agrees(state, server)


def test_the_terminal_finds_a_server_that_restarts():
    with running(ServerConfig(port=0)) as first:
        for i in range(4):
            complete(first, f"many steps of the first server {i}")
        with followed(first.url) as state:
            agrees(state, first)
            port = first.port
            first.stop()
            deadline = time.monotonic() + 15
            while state.problem is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with running(ServerConfig(port=0), port=port, num_blocks=300) as second:
                complete(second, "one of the second")
                deadline = time.monotonic() + 15
                while len(state.codes) != 300 or state.problem is not None:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                agrees(state, second)
                assert list(state.requests) == [1]


def test_an_idle_server_is_not_taken_for_a_lost_one(monkeypatch):
    """What it says meanwhile comes long before readers give up."""
    source = Recorded(0)
    looks, real = [], source.ring.since
    monkeypatch.setattr(source.ring, "since", lambda *a: looks.append(a) or real(*a))
    pause = inspector._INTERVAL
    monkeypatch.setattr(inspector, "_INTERVAL", 0.0)

    async def looks_between_words():
        stream = inspector._stream(source, 0)
        await anext(stream)
        before = len(looks)
        await anext(stream)
        await stream.aclose()
        return len(looks) - before

    assert 2 * pause * asyncio.run(looks_between_words()) < terminal._TIMEOUT

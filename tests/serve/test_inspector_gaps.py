"""Frames reach every reader in order; a reader that missed some notices, and begins anew."""

import asyncio
import contextlib
import io
import json
import threading
import time

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from rich.console import Console
from serving import run_app, running

from blocktable.cli import inspect as terminal
from blocktable.cli import run
from blocktable.serve import inspector
from blocktable.serve.config import ServerConfig
from blocktable.serve.frames import Frame
from blocktable.serve.inspector import FrameRing

NONE = np.zeros(0, np.int32)


class Recorded:
    """A source with a number of frames."""

    notice = None

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
            if message.startswith(b"data: ["):
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


def ask(server, prompt, tokens):
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


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


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 15)])
def test_the_terminal_fits_its_window_and_names_the_letters(server, width, height, monkeypatch):
    """Each request that runs has the sign of its blocks; nothing is drawn past the window."""
    runner, seen = server.llm.engine.runner, threading.Event()
    execute = runner.execute

    def slowly(*arguments):  # so that all six run until they have been seen
        seen.wait(0.1)
        return execute(*arguments)

    monkeypatch.setattr(runner, "execute", slowly)
    threads = [
        threading.Thread(target=ask, args=(server, f"request number {i}", 400)) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while True:
        state = terminal.RemoteState(server.url, None)
        running = [r for r in state.requests.values() if r["reason"] is None]
        own = state.own_blocks()  # told a step after the request
        if len([r for r in running if r["number"] in own]) == 6 or time.monotonic() > deadline:
            break
    seen.set()
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(terminal.view(state, width, height))
    lines = console.file.getvalue().rstrip("\n").split("\n")
    for thread in threads:
        thread.join()
    assert len(lines) <= height and max(map(len, lines)) <= width
    table = [line for line in lines if line.rstrip().endswith("running") and "req-" in line]
    assert len(table) >= min(6, height - 12)
    picture = "".join(lines)
    for line in table:
        sign, request = line.split()[:2]
        (number,) = [r["number"] for r in running if r["id"] == request]
        assert sign == terminal.letter(number - 1)[0]
        assert str(own[number]) == line.split()[3] and sign in picture


@pytest.mark.parametrize("form", ["{}/v1", "{}/inspect/", "{}/"])
def test_any_address_of_the_server_will_do(server, form, capsys):
    assert run(["inspect", form.format(server.url), "--once"]) == 0
    assert "399 blocks" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["not a url", "http://127.0.0.1:9", "ftp://x", "http://[", ""])
def test_a_wrong_address_is_one_line(url, capsys):
    assert run(["inspect", url, "--once"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "cannot read" in told


def test_another_program_is_told_as_such(capsys):
    app = FastAPI()
    app.add_api_route("/inspect/state", lambda: {"some": "thing"})
    with run_app(app) as url:
        assert run(["inspect", url, "--once"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "is no inspector" in told


def test_a_missing_key_is_told(capsys):
    with running(ServerConfig(port=0, api_key="right")) as server:
        assert run(["inspect", server.url, "--once"]) == 2
        assert "--api-key" in capsys.readouterr().err
        assert run(["inspect", server.url, "--once", "--api-key", "right"]) == 0


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

"""The server as a process: SIGTERM drains, a taken port is told before the model is loaded."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from blocktable.serve.config import ServerConfig
from blocktable.serve.run import listen, opened

SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from serving import make_llm
import blocktable.llm, blocktable.serve.run as run
from blocktable.serve.config import ServerConfig
blocktable.llm.LLM = lambda model, **options: make_llm()
run.serve("tiny", ServerConfig(port=int(sys.argv[2]), drain_seconds=20), {})
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def start(port):
    """A server process that answers."""
    here = os.path.dirname(__file__)
    made = subprocess.Popen(
        [sys.executable, "-c", SERVER, here, str(port)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            assert made.poll() is None, made.stderr.read()
            time.sleep(0.1)
    try:
        yield made
    finally:
        if made.poll() is None:
            made.kill()
        made.wait()
        made.stderr.close()


@pytest.fixture
def process():
    port = free_port()
    with start(port) as made:
        yield made, port


def test_sigterm_finishes_what_is_under_way_and_takes_nothing_new(process):
    made, port = process
    body = {"model": "tiny", "prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        made.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=1)
        lines = [line for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["usage"]["completion_tokens"] == 400
    assert made.wait(timeout=20) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("busy", [False, True])
def test_an_open_inspector_does_not_hold_the_server(process, busy):
    """It is told the last frames, and then let go: the server would wait for it till the end."""
    made, port = process
    if busy:
        body = {"model": "tiny", "prompt": "go", "max_tokens": 300, "ignore_eos": True}
        answer = threading.Thread(target=lambda: post(port, body).read())
        answer.start()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/inspect/events", timeout=60) as pages:
        while busy and not pages.readline().startswith(b"data: "):
            pass
        made.send_signal(signal.SIGTERM)
        start = time.monotonic()
        told = pages.read().decode()
        assert made.wait(timeout=20) in (0, -signal.SIGTERM)
        assert time.monotonic() - start < 10  # of the 20 seconds that it may wait for answers
    if busy:
        answer.join()
        frames = [json.loads(line[6:]) for line in told.split("\n") if line.startswith("data: ")]
        assert frames[-1][-1]["e"] and frames[-1][-1]["c"][0] == 0  # the last request has ended


def test_a_taken_port_is_one_line_and_exit_code_2():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "blocktable", "serve", "no-such-model", "--port", str(port)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert done.stderr.count("\n") == 1


def post(port, body, **how):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    return urllib.request.urlopen(request, timeout=60, **how)


def test_after_kill_9_and_a_restart_only_what_was_in_flight_is_lost(process):
    made, port = process
    whole = {"model": "tiny", "prompt": "before", "max_tokens": 8, "temperature": 0}
    before = json.load(post(port, whole))["choices"][0]["text"]
    endless = {"model": "tiny", "prompt": "go", "max_tokens": 500, "ignore_eos": True, "n": 4,
               "repetition_penalty": 1.1}  # fmt: skip
    failed = []

    def ask(stream):
        try:
            with post(port, {**endless, "stream": stream}) as answer:
                text = answer.read().decode()
            failed.append(stream and "[DONE]" not in text)
        except (OSError, http.client.HTTPException):
            failed.append(True)

    clients = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False) * 3]
    for client in clients:
        client.start()
    time.sleep(0.5)
    made.kill()
    made.wait()
    for client in clients:
        client.join(timeout=20)
    assert failed == [True] * 6  # each was told, by a broken connection
    with start(port):  # the same port, at once
        assert json.load(post(port, whole))["choices"][0]["text"] == before
        state = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/inspect/state"))
        assert [r["ended"] is not None for r in state["requests"]] == [True]  # nothing came back


def test_whoever_is_told_the_address_may_come_at_once():
    """Between the line that names it and the server's first look, connections wait."""
    listener = listen(ServerConfig(port=0))
    try:
        with pytest.raises(OSError):
            socket.create_connection(listener.getsockname(), timeout=5)
        host, _, port = opened(listener).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as early:
            early.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    finally:
        listener.close()

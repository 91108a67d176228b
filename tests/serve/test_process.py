"""The server as a process: SIGTERM drains, a taken port is told before the model is loaded."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

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


@pytest.fixture
def process():
    port = free_port()
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
    yield made, port
    if made.poll() is None:
        made.kill()
    made.wait()
    made.stderr.close()


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

"""``serve --role prefill`` and ``--role decode``: two processes, the undivided server's text."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig
from blocktable.serve.run import serve_role

MAIN = "from blocktable.cli import main; main()"
PROMPT = (
    "The block table maps logical blocks of a sequence to physical blocks of the pool. " * 6
    + "In short, it is"
)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(*arguments):
    command = [sys.executable, "-c", MAIN, "serve", "smollm2", "--dtype", "float32",
               "--num-blocks", "200", "--max-model-len", "1024", *arguments]  # fmt: skip
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def wait_for(port, process):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            return
        except OSError:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.2)
    raise AssertionError("the server did not come up")


def complete(port):
    body = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_text_equals_the_undivided_server():
    ports = [free_port() for _ in range(3)]
    endpoint = f"tcp://127.0.0.1:{ports[0]}"
    made = [start("--role", "prefill", "--transfer-endpoint", endpoint)]
    try:
        assert "prefill at" in made[0].stderr.readline()
        made.append(start("--role", "decode", "--prefill", endpoint, "--port", str(ports[1])))
        wait_for(ports[1], made[1])
        split = complete(ports[1])
        made[0].terminate()
        assert made[0].wait(20) == 0
        made.append(start("--port", str(ports[2])))
        wait_for(ports[2], made[2])
        whole = complete(ports[2])
        assert split["choices"][0]["text"] == whole["choices"][0]["text"]
        cached = split["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (split["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0
        assert complete(ports[1])["choices"][0]["text"] == whole["choices"][0]["text"]
    finally:
        for process in made:
            process.kill()
            process.wait()
            process.stderr.close()


@pytest.mark.parametrize(
    ("role", "prefill", "message"),
    [("both", ["tcp://x"], "--prefill"), ("decode", [], "--prefill"), ("cook", [], "'cook'")],
)
def test_roles_that_make_no_sense(role, prefill, message):
    with pytest.raises(ConfigError, match=message):
        serve_role("smollm2", role, ServerConfig(), {}, prefill=prefill)

"""Connections that never finish a request, or fill it without end, are closed in time."""

import asyncio
import json
import socket
import time

import httpx
import pytest
from serving import running

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig
from blocktable.serve.run import listen

READ_SECONDS = 1.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def small():
    with running(ServerConfig(port=0, read_seconds=READ_SECONDS)) as server:
        yield server


def still_serves(server):
    body = {"prompt": "ok", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    server.wait_idle()


def closed_after(server, pieces, every=0.2, upto=READ_SECONDS + 4):
    """What the server said before it closed the connection, and after how many seconds."""
    start, said = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(every)
        pieces = iter(pieces)
        while time.monotonic() - start < upto:
            try:
                sock.sendall(next(pieces, b""))
                got = sock.recv(65536)
                if not got:
                    return said, time.monotonic() - start
                said += got
            except TimeoutError:
                continue
            except ConnectionError:
                return said, time.monotonic() - start
    raise AssertionError(f"still open after {upto} s: {said[:200]!r}")


def endless(piece):
    while True:
        yield piece


@pytest.mark.parametrize(
    "pieces",
    [
        [], [b"POST /v1/comp"], [HEAD], endless(b"P"), [HEAD, *[b"X-A: b\r\n"] * 1000],
    ],
    ids=["silent", "half a line", "half a head", "a byte at a time", "headers at a time"],
)  # fmt: skip
def test_a_head_that_does_not_come_closes_the_connection(small, pieces):
    _, seconds = closed_after(small, pieces)
    assert seconds < READ_SECONDS + 2
    still_serves(small)


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"Content-Length: 100\r\n\r\n" + b'{"prompt'],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b'2\r\n{"\r\n'],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 1000],
    ],
    ids=["short", "chunked", "chunk by chunk"],
)
def test_a_body_that_does_not_end_is_answered_408(small, pieces):
    said, seconds = closed_after(small, pieces)
    assert said.startswith(b"HTTP/1.1 408") and b'"error"' in said
    assert READ_SECONDS - 0.3 < seconds < READ_SECONDS + 3
    still_serves(small)


def test_a_head_without_end_is_answered_431(small):
    flood = endless(b"X-Flood: " + b"x" * 8000 + b"\r\n")
    said, seconds = closed_after(small, (p for p in [HEAD, *[next(flood)] * 40]), every=0.01)
    assert said.startswith(b"HTTP/1.1 431") or not said
    assert seconds < READ_SECONDS
    still_serves(small)


def test_a_connection_that_is_kept_must_send_its_next_head_in_time(small):
    body = json.dumps({"prompt": "ok", "max_tokens": 2}).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    said, _ = closed_after(small, [whole, b"", b"", b"", HEAD, *[b"X-A: b\r\n"] * 1000])
    assert said.startswith(b"HTTP/1.1 200")
    still_serves(small)


@pytest.mark.parametrize(
    "head",
    [
        b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\r\n" * 10,
        HEAD + b"Content-Length: -5\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", HEAD + b"Bad Header\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\nContent-Length: 50\r\n\r\n",
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=lambda head: repr(head[-30:]),
)  # fmt: skip
def test_what_is_no_http_is_answered_or_closed(small, head):
    said, _ = closed_after(small, [head], upto=15)  # 5 s: a connection that is kept open
    assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 100"))
    still_serves(small)


def test_a_long_answer_is_not_cut_by_the_read_limit(small):
    body = {"prompt": "go", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": True,
            "temperature": 1, "repetition_penalty": 1.1}  # fmt: skip
    start = time.monotonic()
    with httpx.stream("POST", f"{small.url}/v1/completions", json=body, timeout=60) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if time.monotonic() - start < 2 * READ_SECONDS:
                time.sleep(0.02)  # a slow reader
    assert lines[-2] == "data: [DONE]"
    assert time.monotonic() - start > READ_SECONDS


@pytest.mark.parametrize("options", [{"read_seconds": 0}, {"max_head_bytes": 0}])
def test_limits_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerConfig(**options)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_pieces_are_sent_at_once(host):
    """Under asyncio's own loop too (uvloop always does): a head and a body, and each token of a
    stream, would wait 40 ms for the client's acknowledgement."""
    try:
        listener = listen(ServerConfig(port=0, host=host))
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    seen = []

    async def accept(reader, writer):
        sock = writer.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect():
        async with await asyncio.start_server(accept, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert seen and all(seen)

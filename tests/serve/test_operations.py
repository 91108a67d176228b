"""Hang-ups, overload, keys, health, metrics: what an operator relies on."""

import json
import socket
import threading
import time

import httpx
import pytest
from serving import running

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig

LONG = {"model": "tiny", "prompt": "go", "max_tokens": 500, "ignore_eos": True}


def post_raw(server, fields, path="/v1/completions"):
    """A connection whose request is sent and whose answer nobody reads."""
    body = json.dumps(fields).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def wait_for(condition, seconds=5.0):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.002)


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 4}])
def test_a_client_that_hangs_up_frees_its_blocks_within_two_steps(server, fields):
    server.wait_idle()
    sock = post_raw(server, {**LONG, **fields})
    wait_for(lambda: server.used_blocks() > 3)
    engine = server.llm.engine
    aborted, seen = threading.Event(), {}
    original = server.bridge.cancel

    def cancel(call):
        seen.setdefault("steps", engine.scheduler.stats.steps)
        original(call)
        aborted.set()

    server.bridge.cancel = cancel
    try:
        sock.close()
        assert aborted.wait(5)
        wait_for(lambda: not server.used_blocks())
    finally:
        server.bridge.cancel = original
    assert engine.scheduler.stats.steps - seen["steps"] <= 2
    server.wait_idle()


def test_a_queued_request_that_hangs_up_leaves_the_queue():
    with running(max_num_seqs=1) as server:
        first = post_raw(server, LONG)
        wait_for(lambda: server.used_blocks() > 0)
        queued = post_raw(server, {**LONG, "stream": True})
        wait_for(lambda: server.bridge.rows == 2)
        queued.close()
        wait_for(lambda: server.bridge.rows == 1)
        first.close()
        server.wait_idle()


def test_a_full_queue_is_answered_429_with_retry_after():
    with running(ServerConfig(port=0, max_queue=1), max_num_seqs=1) as server:
        held = [post_raw(server, LONG), post_raw(server, LONG)]
        wait_for(lambda: server.bridge.rows == 2)
        with httpx.Client(base_url=server.url) as http:
            for fields in (LONG, {**LONG, "stream": True}):
                answer = http.post("/v1/completions", json=fields)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
                assert "the limit is 2" in answer.json()["error"]["message"]
            assert "blocktable:rejected_requests_total{" in http.get("/metrics").text
            for sock in held:
                sock.close()
            server.wait_idle()
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).is_success


def test_a_slow_reader_holds_nobody_up(server):
    slow = post_raw(server, {**LONG, "stream": True, "n": 4})
    with httpx.Client(base_url=server.url, timeout=20) as http:
        answer = http.post("/v1/completions", json={**LONG, "max_tokens": 30})
        assert answer.json()["usage"]["completion_tokens"] == 30
    slow.close()
    server.wait_idle()


def test_the_api_key_guards_everything_but_health():
    with (
        running(ServerConfig(port=0, api_key="secret")) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/inspect", "/docs", "/openapi.json"):
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "secre"}):
                assert http.get(path, headers=headers).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert http.get("/v1/models", headers=good).status_code == 200


def test_the_server_binds_to_loopback_and_refuses_bad_options():
    assert ServerConfig().host == "127.0.0.1"
    for options in ({"port": 65536}, {"max_queue": -1}, {"max_body_bytes": 0}, {"api_key": " "}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            ServerConfig(**options)


def test_metrics_have_the_names_that_dashboards_use(server):
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/completions", json={**LONG, "max_tokens": 3, "n": 2})
        text = http.get("/metrics").text
    label = 'engine="0",model_name="tiny"'
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_count",
        "vllm:request_prompt_tokens_bucket", "vllm:request_success_total",
        "blocktable:blocks_used", "blocktable:step_seconds_count",
    ):  # fmt: skip
        assert any(line.startswith(name + "{") for line in text.splitlines()), name
    assert label in text.replace('model_name="tiny",engine="0"', label)


def test_a_failed_step_is_told_to_every_client():
    with running() as server, httpx.Client(base_url=server.url, timeout=10) as http:

        def broken(output):
            raise RuntimeError("device lost")

        server.llm.engine.runner.execute = broken
        answer = http.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert "device lost" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=LONG).status_code == 503


def test_many_clients_at_once_get_what_one_alone_gets(server):
    fields = [
        {"model": "tiny", "prompt": f"prompt {i} of several", "max_tokens": 20, "seed": i}
        for i in range(24)
    ]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        alone = [http.post("/v1/completions", json=f).json()["choices"][0]["text"] for f in fields]
        together = [""] * len(fields)

        def ask(i):
            answer = http.post("/v1/completions", json=fields[i]).json()
            together[i] = answer["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(fields))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone
    server.wait_idle()

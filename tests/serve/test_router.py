"""A router before three servers: conversations stay with their replica, a dead one is passed by."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
import uvicorn
from serving import make_llm, make_tokenizer

from blocktable.serve.app import build_app
from blocktable.serve.config import ServerConfig
from blocktable.serve.router import Replica, Router, build_router
from blocktable.serve.run import listen


class Running:
    """A server in a thread."""

    def __init__(self, app):
        listener = listen(ServerConfig(port=0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture
def world():
    """(client of the router, the servers)"""
    with contextlib.ExitStack() as stack:
        servers, places = [], []
        for _ in range(3):
            llm = make_llm(
                kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*", seed=7
            )
            app = build_app(llm.engine, ServerConfig(port=0, inspector=False), "tiny")
            servers.append(Running(app))
            stack.callback(servers[-1].stop)
            publisher = llm.engine.publisher
            places.append(Replica(servers[-1].url, publisher.endpoint, publisher.replay_endpoint))
        router = Router(places, block_size=4, seed=7)
        front = Running(build_router(router))
        stack.callback(front.stop)
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=30))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                client.get("/router")
                break
            time.sleep(0.05)
        yield client, servers


def complete(client, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-blocktable-replica"]), cached, answer.json()


def test_turns_of_a_conversation_go_where_its_prefix_is(world):
    client, _ = world
    talks = {i: f"talk {i}: " + chr(97 + i) * 40 for i in range(6)}
    homes = {i: complete(client, text)[0] for i, text in talks.items()}
    assert set(homes.values()) == {0, 1, 2}
    for turn in range(3):
        for i in talks:
            talks[i] += f" turn {turn} of the talk"
            replica, cached, _ = complete(client, talks[i])
            assert replica == homes[i] and cached >= 40
    assert sum(client.get("/router").json()["sent"]) == 24


def test_chat_streams_and_other_paths_pass_through(world):
    client, _ = world
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 50}],
            "max_tokens": 5, "stream": True}  # fmt: skip
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "data: [DONE]"
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.post("/v1/completions", content=b"{").status_code in (400, 422)
    assert client.post("/v1/completions", json={"model": "tiny", "prompt": [-1]}).status_code in (
        400, 422,
    )  # fmt: skip


def test_a_dead_replica_is_passed_by(world):
    client, servers = world
    text = "a conversation that has a home " * 3
    home, _, before = complete(client, text)
    servers[home].stop()
    replica, _, after = complete(client, text)
    assert replica != home
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert client.get("/router").json()["alive"] == [r for r in range(3) if r != home]
    for server in servers:
        server.stop()
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": text})
    assert answer.status_code == 503 and "no replica" in answer.text


RAY = """
import sys, httpx, threading, uvicorn, ray
from ray import serve
from blocktable.serve.ray_serve import start_replicas
from blocktable.serve.router import Router, build_router
from blocktable.serve.run import listen
from blocktable.serve.config import ServerConfig
ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
options = dict(block_size=4, num_blocks=200, max_model_len=256, dtype="float32", seed=3)
made = start_replicas(sys.argv[1], options, 3)
router = Router([place for _, place in made], block_size=4, seed=3)
listener = listen(ServerConfig(port=0))
server = uvicorn.Server(uvicorn.Config(build_router(router), log_level="error"))
threading.Thread(target=server.run, args=([listener],), daemon=True).start()
client = httpx.Client(base_url="http://127.0.0.1:%d" % listener.getsockname()[1], timeout=60)
def ask(text):
    body = {"model": sys.argv[1], "prompt": text, "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-blocktable-replica"]), answer.json()["choices"][0]["text"]
homes = [ask("talk %d " % i + chr(97 + i) * 40)[0] for i in range(6)]
assert set(homes) == {0, 1, 2}, homes
home, text = ask("talk 0 " + "a" * 40)
assert home == homes[0]
made[home][0].die.remote()
import time; time.sleep(2)
other, again = ask("talk 0 " + "a" * 40)
assert other != home and again == text, (other, home)
print("RAY OK", flush=True)
server.should_exit = True
serve.shutdown(); ray.shutdown()
"""


def test_ray_replicas_and_the_death_of_one(tmp_path):
    llm = make_llm()
    llm.engine.runner.model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    environment = os.environ | {"RAY_DEDUP_LOGS": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", RAY, str(tmp_path)], capture_output=True, text=True, timeout=200,
        env=environment, check=False,
    )  # fmt: skip
    assert "RAY OK" in run.stdout, json.dumps([run.stdout[-1500:], run.stderr[-3000:]])

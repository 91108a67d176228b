"""A router before three servers: conversations stay with their replica, a dead one is passed by."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import psutil
import pytest
import uvicorn
from fastapi import FastAPI
from serving import make_llm, make_tokenizer

from blocktable.parallel.event_stream import EventPublisher
from blocktable.parallel.events import BlockStored, EventBatch
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


def batch(*hashes):
    return EventBatch(0.0, [BlockStored(list(hashes), None, [], 4, None, "GPU", None)])


def test_what_is_known_before_a_gap_in_the_events_is_forgotten():
    """Of what a replica told before the router listened only the last batch can be had again."""
    publisher = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_batches=1)
    dead_end = EventPublisher("tcp://127.0.0.1:*")  # its batches cannot be asked for
    places = [
        Replica("http://127.0.0.1:9", publisher.endpoint, publisher.replay_endpoint),
        Replica("http://127.0.0.1:9", dead_end.endpoint, "tcp://127.0.0.1:9"),
    ]

    async def follow(router, until):
        deadline = time.monotonic() + 10
        while not until(router.policy) and time.monotonic() < deadline:
            await router.follow_events()
            await asyncio.sleep(0.01)
        return until(router.policy)

    async def run():
        router = Router(places, block_size=4, seed=0)
        router.policy.begin(router.policy.choose([1, 2]), [1, 2])  # expected of replica 0
        for hashes in ([1], [2], [3]):
            publisher.publish(batch(*hashes))
        await asyncio.sleep(0.3)
        publisher.publish(batch(4))
        assert await follow(router, lambda policy: policy.matched(0, [4]) == 1)
        assert router.policy.matched(0, [1, 2]) in (0, 2)  # live from the start, or forgotten
        for hashes in ([5], [6]):
            dead_end.publish(batch(*hashes))
            await asyncio.sleep(0.3)
        assert await follow(router, lambda policy: policy.matched(1, [6]) == 1)
        ticks, task = 0, asyncio.create_task(router.follow_events())
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks  # the loop runs on
        await router.close()

    asyncio.run(run())
    publisher.close()
    dead_end.close()


def test_a_lost_replica_comes_back_at_another_place():
    app = FastAPI()
    app.get("/health")(lambda: {})
    events = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    server = Running(app)
    gone = Replica("http://127.0.0.1:9", events.endpoint)
    found = [None, Replica("http://127.0.0.1:9", events.endpoint),
             Replica(server.url, events.endpoint, events.replay_endpoint)]  # fmt: skip

    async def run():
        router = Router([gone, gone], block_size=4, seed=0, find=lambda number: found.pop(0))
        router.policy.apply(1, batch(1, 2).events)
        router.policy.lose(1)
        for lives in (False, False, True):  # nowhere, somewhere silent, somewhere that answers
            await router.revive()
            assert (1 in router.policy.alive) == lives
        assert router.replicas[1].url == server.url
        assert router.policy.matched(1, [1, 2]) == 0
        events.publish(batch(7))
        deadline = time.monotonic() + 10
        while router.policy.matched(1, [7, 8]) < 2 and time.monotonic() < deadline:
            await router.follow_events()
            await asyncio.sleep(0.05)
            events.publish(batch(8))  # a subscription takes a moment; the replay has the rest
        assert router.policy.matched(1, [7, 8]) == 2
        await router.close()

    try:
        asyncio.run(run())
    finally:
        server.stop()
        events.close()


@pytest.fixture
def ray_server(tmp_path):
    """``blocktable serve --ray`` with three replicas: (its OpenAI address, the model's path)."""
    llm = make_llm()
    llm.engine.runner.model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    command = [
        sys.executable, "-m", "blocktable", "serve", str(tmp_path), "--ray", "--replicas", "3",
        "--port", "0", "--block-size", "4", "--num-blocks", "200", "--max-model-len", "256",
        "--dtype", "float32",
    ]  # fmt: skip
    environment = os.environ | {"RAY_DEDUP_LOGS": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    said = []
    watchdog = threading.Timer(480, process.kill)  # against hangs; a busy machine takes minutes
    watchdog.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if "routing to 3 replicas at " in line:
                break
        else:
            raise AssertionError("".join(said)[-3000:])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield said[-1].split(" at ")[1].strip(), str(tmp_path)
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def kill_listener(url):
    """Kill the process that listens at the port of a URL."""
    port = httpx.URL(url).port
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
            os.kill(one.pid, signal.SIGKILL)
            return
    raise AssertionError(f"nobody listens at {url}")


def test_ray_replicas_and_the_death_of_one(ray_server):
    """The command line, the OpenAI client, and a replica killed between two turns."""
    address, model = ray_server
    client = openai.OpenAI(base_url=address, api_key="none", timeout=60, max_retries=0)
    router = address.removesuffix("/v1") + "/router"

    def ask(text):
        answer = client.completions.with_raw_response.create(
            model=model, prompt=text, max_tokens=4, temperature=0
        )
        return int(answer.headers["x-blocktable-replica"]), answer.parse().choices[0].text

    talks = [f"talk {i} " + chr(97 + i) * 40 for i in range(6)]
    homes = [ask(talk)[0] for talk in talks]
    assert set(homes) == {0, 1, 2}
    home, text = ask(talks[0])
    assert home == homes[0]
    urls = httpx.get(router).json()["urls"]
    kill_listener(urls[home])
    for talk in talks:
        other, again = ask(talk)
        assert other != home
        assert talk != talks[0] or again == text
    deadline = time.monotonic() + 90  # Ray starts another, and the router finds it
    while home not in httpx.get(router).json()["alive"] and time.monotonic() < deadline:
        time.sleep(0.5)
    state = httpx.get(router).json()
    assert state["alive"] == [0, 1, 2] and state["urls"][home] != urls[home]
    answer = httpx.post(
        state["urls"][home] + "/v1/completions", timeout=60,
        json={"model": model, "prompt": talks[0], "max_tokens": 4, "temperature": 0},
    )  # fmt: skip
    assert answer.json()["choices"][0]["text"] == text

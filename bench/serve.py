"""Load on the server: time to first token, time between tokens, throughput, beside a peer.

    python bench/serve.py                       # blocktable alone
    python bench/serve.py --peer                # and `transformers serve`, same weights, same load
    python bench/serve.py --overhead            # 32 streams through HTTP against the bare engine

Requests arrive as a Poisson process; all have the shared system prompt of examples/prompts.jsonl.
Each server runs in a process of its own, one after the other, and gets the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parent.parent


class Load(NamedTuple):
    """What the clients do."""

    requests: int
    rate: float  # arrivals a second; 0 sends all at once
    max_tokens: int
    seed: int


class Times(NamedTuple):
    """One answer: seconds from sending to each token, and their number."""

    first: float
    gaps: list[float]
    tokens: int


def messages() -> list[list[dict[str, str]]]:
    """The example chats."""
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    system = {"role": "system", "content": records[0]["system"]}
    return [[system, {"role": "user", "content": r["user"]}] for r in records[1:]]


async def one(client: httpx.AsyncClient, model: str, chat: Any, load: Load) -> Times:
    """Stream one answer."""
    body = {"model": model, "messages": chat, "max_tokens": load.max_tokens, "stream": True,
            "temperature": 0}  # fmt: skip
    start = time.perf_counter()
    stamps: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if (choices[0].get("delta") or {}).get("content"):
                stamps.append(time.perf_counter() - start)
    gaps = [b - a for a, b in pairwise(stamps)]
    return Times(stamps[0] if stamps else float("nan"), gaps, len(stamps))


async def drive(url: str, model: str, load: Load) -> tuple[list[Times], float]:
    """All requests of a load, and how long they took."""
    rng = random.Random(load.seed)
    chats = messages()
    async with httpx.AsyncClient(base_url=url, timeout=900) as client:
        start, tasks = time.perf_counter(), []
        for i in range(load.requests):
            tasks.append(asyncio.create_task(one(client, model, chats[i % len(chats)], load)))
            if load.rate:
                await asyncio.sleep(rng.expovariate(load.rate))
        return list(await asyncio.gather(*tasks)), time.perf_counter() - start


def drive_seconds(url: str, load: Load) -> float:
    """Seconds that a load took; a process of its own runs this."""
    return asyncio.run(drive(url, "smollm2", load))[1]


async def loop_cpu() -> float:
    """CPU seconds of the thread that runs the event loop."""
    return time.thread_time()


def quantile(values: list[float], share: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(name: str, results: list[Times], seconds: float) -> None:
    """One line for a server."""
    first = [r.first for r in results]
    gaps = [gap for r in results for gap in r.gaps]
    pieces = sum(r.tokens for r in results)
    print(
        f"{name:14} {pieces / seconds:8.1f} pieces/s in {seconds:6.1f} s | first piece p50 "
        f"{statistics.median(first) * 1e3:7.0f} ms, p99 {quantile(first, 0.99) * 1e3:7.0f} ms | "
        f"between pieces p50 {quantile(gaps, 0.5) * 1e3:6.1f} ms, p99 "
        f"{quantile(gaps, 0.99) * 1e3:6.1f} ms"
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def with_server(command: list[str], port: int, model: str, load: Load, name: str) -> None:
    """Start a server, warm it with one request, drive it, stop it."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process)
        asyncio.run(drive(url, model, Load(1, 0, 4, 0)))
        report(name, *asyncio.run(drive(url, model, load)))
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers anything."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            httpx.get(f"{url}/health", timeout=1)
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise SystemExit("the server did not answer within 2 minutes")


def saved_model(folder: str) -> str:
    """The weights of smollm2 as a Hugging Face directory, for the peer."""
    from blocktable.engine.loader import begin

    loaded = begin("smollm2").finish("float32", "cpu", None)
    if loaded.tokenizer is None:
        raise SystemExit("smollm2 came without its tokenizer")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def overhead(load: Load, rounds: int = 3) -> None:
    """The same requests at once, in turn through the bare engine and through HTTP; best of each."""
    import threading

    import uvicorn

    from blocktable import LLM, SamplingParams
    from blocktable.serve.app import build_app
    from blocktable.serve.config import ServerConfig

    llm = LLM("smollm2", dtype="float32")
    params = SamplingParams(max_tokens=load.max_tokens, temperature=0)
    chats = [messages()[i % 16] for i in range(load.requests)]
    prompts = [llm.encode_chat(chat) for chat in chats]

    def bare(_: object) -> float:
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    app = build_app(llm.engine, ServerConfig(port=0), "smollm2")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[sock])), daemon=True
    )
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    alone, served, own = [], [], []
    clients = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    for _ in range(rounds + 1):
        asked = asyncio.run_coroutine_threadsafe(app.state.bridge.ask(bare), loop)
        alone.append(asked.result())
        before = asyncio.run_coroutine_threadsafe(loop_cpu(), loop).result()
        served.append(clients.submit(drive_seconds, url, load).result())
        own.append(asyncio.run_coroutine_threadsafe(loop_cpu(), loop).result() - before)
    share = app.state.recorder.cost_share
    clients.shutdown()
    server.should_exit = True
    thread.join(timeout=20)
    best, reached = min(alone[1:]), min(served[1:])  # the first round warms the cache
    print(
        f"{load.requests} streams of {load.max_tokens} tokens, best of {rounds}: engine alone "
        f"{best:.2f} s, through HTTP with the client on the same cores {reached:.2f} s "
        f"({reached / best - 1:+.1%}); the server's own thread used {min(own[1:]):.2f} s of CPU "
        f"({min(own[1:]) / best:.1%}), recording {share:.2%} of the engine's time"
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second, 0: at once")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--peer", action="store_true", help="also transformers serve")
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args()
    load = Load(options.requests, options.rate, options.max_tokens, 0)
    if options.overhead:
        overhead(load._replace(rate=0.0))
        return
    port = free_port()
    command = [sys.executable, "-m", "blocktable", "serve", "smollm2", "--port", str(port)]
    with_server([*command, "--dtype", "float32"], port, "smollm2", load, "blocktable")
    if options.peer:
        with tempfile.TemporaryDirectory() as folder:
            model = saved_model(folder)
            port = free_port()
            peer = [
                str(Path(sys.executable).parent / "transformers"), "serve", "--port", str(port),
                "--continuous-batching", "--dtype", "float32",
            ]  # fmt: skip
            with_server(peer, port, model, load, "transformers")


if __name__ == "__main__":
    main()

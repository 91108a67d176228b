"""Load on the server: time to first token, time between tokens, throughput, beside a peer.

    python bench/serve.py                       # blocktable alone
    python bench/serve.py --peer                # and `transformers serve`, same weights, same load
    python bench/serve.py --overhead            # 32 streams through HTTP against the bare engine

Requests arrive as a Poisson process; all have the shared system prompt of examples/prompts.jsonl,
and no two the same question. With --peer both servers run, each in a process of its own, and the
load goes to one and the other in turn; the figures are medians of the rounds, with the smallest and
the largest.
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
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


def asked(chats: list[list[dict[str, str]]], i: int, round: int) -> list[dict[str, str]]:
    """The ``i``-th chat of a round: its question is asked nowhere else."""
    system, user = chats[i % len(chats)]
    return [system, {**user, "content": f"{user['content']} ({round}.{i})"}]


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
            tasks.append(asyncio.create_task(one(client, model, asked(chats, i, load.seed), load)))
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


def spread(values: list[float], digits: int = 1) -> str:
    """Median, and the smallest and largest."""
    low, middle, high = (
        f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def figures(results: list[Times], seconds: float) -> dict[str, float]:
    """What a round of a load came to; times in milliseconds."""
    first = [r.first for r in results]
    gaps = [gap for r in results for gap in r.gaps]
    return {
        "pieces/s": sum(r.tokens for r in results) / seconds,
        "first piece p50": statistics.median(first) * 1e3,
        "first piece p99": quantile(first, 0.99) * 1e3,
        "between pieces p50": quantile(gaps, 0.5) * 1e3,
        "between pieces p99": quantile(gaps, 0.99) * 1e3,
    }


def report(rounds: dict[str, list[dict[str, float]]]) -> None:
    """A line for each figure: every server, and the last beside the first."""
    names = list(rounds)
    print(
        f"{'':20} "
        + " ".join(f"{name:>28}" for name in names)
        + (" ratio" if len(names) > 1 else "")
    )
    for key in rounds[names[0]][0]:
        columns = [[r[key] for r in rounds[name]] for name in names]
        line = f"{key:20} " + " ".join(f"{spread(column):>28}" for column in columns)
        if len(columns) > 1:
            line += f" {statistics.median(columns[0]) / statistics.median(columns[1]):5.2f}"
        print(line)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def server_of(command: list[str], url: str, model: str) -> Iterator[None]:
    """A server in a process of its own, warmed with one request."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_ready(url, process)
        asyncio.run(drive(url, model, Load(1, 0, 4, 0)))
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def compare(load: Load, rounds: int, peer: bool) -> None:
    """The load on our server, and in turn on the peer's."""
    with ExitStack() as stack:
        places: dict[str, tuple[str, str]] = {}
        port = free_port()
        own = [sys.executable, "-m", "blocktable", "serve", "smollm2", "--port", str(port)]
        places["blocktable"] = f"http://127.0.0.1:{port}", "smollm2"
        stack.enter_context(server_of([*own, "--dtype", "float32"], *places["blocktable"]))
        if peer:
            model, port = (
                saved_model(stack.enter_context(tempfile.TemporaryDirectory())),
                free_port(),
            )
            other = [
                str(Path(sys.executable).parent / "transformers"), "serve", "--port", str(port),
                "--continuous-batching", "--dtype", "float32",
            ]  # fmt: skip
            places["transformers serve"] = f"http://127.0.0.1:{port}", model
            stack.enter_context(server_of(other, *places["transformers serve"]))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in places}
        for i in range(rounds):
            for name, place in places.items():
                found[name].append(figures(*asyncio.run(drive(*place, load._replace(seed=i + 1)))))
        print(f"{load.requests} requests of {load.max_tokens} tokens, {load.rate:g}/s, "
              f"{rounds} rounds: median (smallest to largest)", flush=True)  # fmt: skip
        report(found)


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


def overhead(load: Load, rounds: int) -> None:
    """The same requests at once, in turn through the bare engine and through HTTP."""
    import threading

    import uvicorn

    from blocktable import LLM, SamplingParams
    from blocktable.serve.app import build_app
    from blocktable.serve.config import ServerConfig
    from blocktable.serve.run import listen

    llm = LLM("smollm2", dtype="float32")
    params = SamplingParams(max_tokens=load.max_tokens, temperature=0)
    chats = [asked(messages(), i, load.seed) for i in range(load.requests)]
    prompts = [llm.encode_chat(chat) for chat in chats]

    def bare(_: object) -> float:
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    sock = listen(ServerConfig(port=0))
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
        pending = asyncio.run_coroutine_threadsafe(app.state.bridge.ask(bare), loop)
        alone.append(pending.result())
        before = asyncio.run_coroutine_threadsafe(loop_cpu(), loop).result()
        served.append(clients.submit(drive_seconds, url, load).result())
        own.append(asyncio.run_coroutine_threadsafe(loop_cpu(), loop).result() - before)
    share = app.state.recorder.cost_share
    clients.shutdown()
    server.should_exit = True
    thread.join(timeout=20)
    ratios = [with_http / bare - 1 for with_http, bare in zip(served, alone, strict=True)][1:]
    shares = [used / bare for used, bare in zip(own, alone, strict=True)][1:]
    print(
        f"{load.requests} streams of {load.max_tokens} tokens, {rounds} rounds: "
        f"median (smallest to largest)\n"
        f"engine alone                          {spread(alone[1:], 2)} s\n"
        f"through HTTP, client on the same cores {spread(served[1:], 2)} s, "
        f"{spread([100 * r for r in ratios])}% more\n"
        f"CPU of the server's own thread        {spread(own[1:], 2)} s, "
        f"{spread([100 * share for share in shares])}% of the engine's time\n"
        f"recording for the inspector           {share:.2%} of the engine's time"
    )  # the first round, which warms the cache, is left out


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second, 0: at once")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--peer", action="store_true", help="also transformers serve")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = Load(options.requests, options.rate, options.max_tokens, 0)
    if options.overhead:
        overhead(load._replace(rate=0.0), options.rounds)
    else:
        compare(load, options.rounds, options.peer)


if __name__ == "__main__":
    main()

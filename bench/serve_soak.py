"""Mixed traffic on a server for minutes: nothing leaks, nothing hangs, nothing is answered 500.

    python bench/serve_soak.py --minutes 10

Starts `blocktable serve smollm2` with a pool that is too small for its traffic, and lets clients do
what clients do: stream, wait, ask for four at once, for JSON, for tools, for scores; hang up at a
random moment, before the first token or in the queue; send requests that are wrong. At the end the
server must be idle with every block free. At half time, when every block of the pool has been
written, the clients rest for a moment: idle at the end, the server must be as large as it was then.
What it takes under load moves by tens of MiB with the requests that a step happens to hold, so
there the middle of what was seen in the third quarter stands beside that in the last.
Exits with 1 and the reasons if any of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import httpx
from serve import wait_ready

WORDS = ["the", "river", "keeps", "its", "own", "time", "and", "nobody", "asks", "about", "it"]
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 9}},
    "required": ["name"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
BAD = [
    {"n": 0}, {"max_tokens": -1}, {"temperature": "hot"}, {"logit_bias": {"x": 1}},
    {"stop": [""]}, {"prompt": []}, {"prompt": [10**9]}, {"response_format": {"type": "xml"}},
    {"guided_regex": "((("}, {"guided_json": {"$ref": "#"}}, {"cache_salt": ""},
]  # fmt: skip
SECONDS_TO_ANSWER = 180.0
SECONDS_OF_REST = 12.0  # the server gives back what it holds free every 10


class Check(NamedTuple):
    """Something that must hold at the end."""

    name: str
    holds: bool
    detail: str


class Memory(NamedTuple):
    """Resident bytes of the server."""

    load: list[tuple[float, int]]  # (minutes since the start, bytes) while clients ask
    rest: list[int]  # bytes at half time and at the end, while none does


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a random request that is right."""
    prompt = text(random.Random(rng.randrange(6)), 60) + text(rng, rng.randrange(1, 80))
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 4, 16, 48]), "temperature": rng.choice([0, 1]),
        "stream": rng.random() < 0.5, "seed": rng.randrange(1000),
    }  # fmt: skip
    body |= rng.choice(
        [
            {}, {}, {}, {"n": 4}, {"logprobs": 2, "echo": True}, {"guided_regex": "[a-z ]{1,20}"},
            {"stop": ["e"]}, {"repetition_penalty": 1.2}, {"cache_salt": "mine"},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"priority": 1}, {"ignore_eos": True},
        ]
    )  # fmt: skip
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": prompt}
    for name in ("echo", "logprobs"):
        body.pop(name, None)
    if rng.random() < 0.3 and "response_format" not in body and "guided_regex" not in body:
        body |= {"tools": [TOOL], "tool_choice": rng.choice(["auto", "required"])}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}


class Clients:
    """What was asked and what came of it."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest = 0.0  # seconds of an answer that was waited for

    async def run(self, number: int, until: float) -> None:
        """One client, one request after the other."""
        async with httpx.AsyncClient(base_url=self.url, timeout=SECONDS_TO_ANSWER) as http:
            while time.monotonic() < until:
                kind = self.rng.random()
                try:
                    if kind < 0.15:
                        await self.wrong(http)
                    elif kind < 0.5:
                        await self.hang_up(http)
                    else:
                        await self.whole(http)
                except httpx.HTTPError as error:
                    self.faults.append(f"client {number}: {type(error).__name__}: {error}")

    async def wrong(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "max_tokens": 2} | self.rng.choice(BAD)
        answer = await http.post("/v1/completions", json=body)
        self.take(answer.status_code, answer.text, wanted=400)

    async def whole(self, http: httpx.AsyncClient) -> None:
        path, body = request(self.rng)
        start = time.monotonic()
        async with http.stream("POST", path, json=body) as answer:
            content = (await answer.aread()).decode()
        self.slowest = max(self.slowest, time.monotonic() - start)
        self.take(answer.status_code, content, wanted=200)
        streamed = answer.status_code == 200 and body["stream"]
        if streamed and not content.endswith("data: [DONE]\n\n"):
            self.faults.append(f"a stream ended with {content[-200:]!r}")

    async def hang_up(self, http: httpx.AsyncClient) -> None:
        """Leave after a random time, from at once to in the middle of the answer."""
        path, body = request(self.rng)
        body["max_tokens"] = 200
        patience = self.rng.choice([0.001, 0.05, 0.3, 1.5])
        try:
            answer = await asyncio.wait_for(http.post(path, json=body), patience)
            self.take(answer.status_code, answer.text, wanted=200)
        except asyncio.TimeoutError:
            self.counts["left"] += 1

    def take(self, status: int, content: str, wanted: int) -> None:
        """Count an answer; 429 is right at any time, nothing else that was not wanted is."""
        self.counts[str(status)] += 1
        if status not in (wanted, 429):
            self.faults.append(f"{status} instead of {wanted}: {content[:300]}")


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def watch(pid: int, start: float, until: float, seen: list[tuple[float, int]]) -> None:
    """Add (minutes since the start, resident bytes) twice a second; tell some of them."""
    told = 0.0
    while (now := time.monotonic()) < until:
        seen.append(((now - start) / 60, resident(pid)))
        if now >= told:
            print(f"minute {seen[-1][0]:5.1f}: {seen[-1][1] / 2**20:7.1f} MiB", flush=True)
            told = now + max(2.0, (until - start) / 20)
        await asyncio.sleep(0.5)


def idle_state(url: str, seconds: float = 60.0) -> dict[str, float]:
    """The server's gauges once nothing runs, or as they are after so many seconds."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline, values = time.monotonic() + seconds, {}
    while time.monotonic() < deadline:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        values = {
            name: float(line.rsplit(" ", 1)[1])
            for name in names
            for line in lines
            if line.startswith(name + "{")
        }
        if len(values) == len(names) and not any(values.values()):
            break
        time.sleep(0.5)
    return values


def under_load(memory: Memory, first: float, end: float) -> float:
    """Median of the resident bytes in a part of the time."""
    minutes = memory.load[-1][0]
    return median(size for minute, size in memory.load if first <= minute / minutes <= end)


def judge(clients: Clients, memory: Memory, idle: dict[str, float], alive: bool) -> list[Check]:
    """What must hold."""
    half, end = memory.rest
    third, last = under_load(memory, 0.5, 0.75), under_load(memory, 0.75, 1.0)
    counts = clients.counts
    return [
        Check("no fault", not clients.faults, f"{len(clients.faults)}: {clients.faults[:3]}"),
        Check("no request stuck", clients.slowest < SECONDS_TO_ANSWER,
              f"the slowest answer took {clients.slowest:.1f} s"),
        Check("answers of every kind", all(counts[k] for k in ("200", "400", "left")),
              str(dict(counts))),
        Check("idle, every block free", len(idle) == 3 and not any(idle.values()), str(idle)),
        Check("memory flat since half time", end / half - 1 < 0.02,
              f"{half / 2**20:.1f} MiB, then {end / 2**20:.1f} ({end / half - 1:+.1%})"),
        Check("memory flat under load", last / third - 1 < 0.02,
              f"third quarter {third / 2**20:.1f} MiB, last {last / 2**20:.1f} "
              f"({last / third - 1:+.1%}), most {max(s for _, s in memory.load) / 2**20:.1f}"),
        Check("the server lives and ends when told", alive, ""),
    ]  # fmt: skip


async def soak(
    url: str, pid: int, minutes: float, width: int, seed: int
) -> tuple[Clients, Memory, dict[str, float]]:
    """Traffic by ``width`` clients at once, in two halves with a rest after each; what was seen,
    and the server's gauges in the last rest."""
    clients, memory, idle = Clients(url, seed), Memory([], []), {}
    start = time.monotonic()
    for _ in range(2):
        until = time.monotonic() + minutes * 30
        tasks = [clients.run(i, until) for i in range(width)]
        await asyncio.gather(watch(pid, start, until, memory.load), *tasks)
        idle = await asyncio.to_thread(idle_state, url)
        await asyncio.sleep(SECONDS_OF_REST)
        memory.rest.append(resident(pid))
        print(f"at rest:     {memory.rest[-1] / 2**20:7.1f} MiB", flush=True)
    return clients, memory, idle


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server, soak it, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not 0.1 <= options.minutes <= 1e5:
        parser.error(f"--minutes must be in [0.1, 1e5], got {options.minutes}")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "blocktable", "serve", "smollm2", "--port", str(port),
        "--num-blocks", "520", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--max-queue", "12",
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready(url, server)
        clients, memory, idle = asyncio.run(
            soak(url, server.pid, options.minutes, options.clients, options.seed)
        )
        server.send_signal(signal.SIGTERM)
        alive = server.wait(timeout=60) in (0, -signal.SIGTERM)
    finally:
        if server.poll() is None:
            server.kill()
    checks = judge(clients, memory, idle, alive)
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'} {check.name} {check.detail}")
    print(json.dumps({"minutes": options.minutes, "answers": dict(clients.counts)}))
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())

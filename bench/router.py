"""Replicas behind a router: the hit rate they keep on a trace, and what the death of one costs.

    python bench/router.py --trace conversation_trace.jsonl      # three Ray replicas, 600 requests

Everything runs as a user would run it: ``blocktable serve --ray`` in a process of its own, requests
through the OpenAI client. Prompts are the trace's, a block of 16 tokens for each of its blocks of
512, drawn with seed 0; the model is tiny, with random weights, but engine, cache and events are the
real ones.

    one cache     one server with the blocks of all replicas
    round robin   the replicas, asked in turn
    prefix        the replicas through the router
    death         the router again; half way through, one replica's process is killed
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import psutil

BLOCK, TRACE_BLOCK = 16, 512


def prompts(path: Path, count: int) -> list[list[int]]:
    """The trace's prompts, scaled to one block of ours for each of its blocks."""
    rng = np.random.default_rng(0)
    blocks: dict[int, list[int]] = {}
    made = []
    with path.open() as file:
        for _, line in zip(range(count), file, strict=False):
            tokens: list[int] = []
            for name in json.loads(line)["hash_ids"]:
                if name not in blocks:
                    blocks[name] = rng.integers(3, 990, BLOCK).tolist()
                tokens += blocks[name]
            made.append(tokens + rng.integers(3, 990, 5).tolist())
    return made


def write_model(path: Path, longest: int) -> None:
    """A model small enough that the trace takes a minute on two cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=longest,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


class Server(NamedTuple):
    """A running ``blocktable serve``: its address, and those of its replicas."""

    url: str
    replicas: list[str]


@contextmanager
def serving(model: Path, blocks: int, longest: int, replicas: int) -> Iterator[Server]:
    """Serve by the command line; one plain server where ``replicas`` is 1."""
    command = [
        sys.executable, "-m", "blocktable", "serve", str(model), "--port", "0",
        "--num-blocks", str(blocks + 1), "--block-size", str(BLOCK), "--dtype", "float32",
        "--max-model-len", str(longest),
    ]  # fmt: skip
    command += ["--ray", "--replicas", str(replicas)] if replicas > 1 else ["--no-inspector"]
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield _announced(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()


def _announced(process: subprocess.Popen[str]) -> Server:
    said = []
    for line in process.stdout or ():
        said.append(line)
        if " at http" in line and line.rstrip().endswith("/v1"):
            break
    else:
        raise SystemExit("the server did not start:\n" + "".join(said)[-2000:])
    threading.Thread(target=lambda: list(process.stdout or ()), daemon=True).start()
    url = said[-1].rsplit(" at ", 1)[1].strip()
    root = url.removesuffix("/v1")
    deadline = time.monotonic() + 60
    while True:
        try:
            state = httpx.get(root + "/router", timeout=10)
            break
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    found = state.json().get("urls", []) if state.status_code == 200 else []
    return Server(url, [f"{one}/v1" for one in found])


def run(
    asked: list[list[int]], model: Path, address: Callable[[int], str], workers: int,
    before: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:  # fmt: skip
    """Ask all prompts in order, ``workers`` at a time; which share of their tokens was cached."""
    clients: dict[str, openai.OpenAI] = {}
    lock = threading.Lock()

    def ask(number: int) -> int | None:
        before(number)
        url = address(number)
        with lock:
            client = clients.setdefault(
                url, openai.OpenAI(base_url=url, api_key="none", timeout=120, max_retries=0)
            )
        try:
            answer: Any = client.completions.create(
                model=str(model), prompt=asked[number], max_tokens=2, temperature=0
            )
        except openai.OpenAIError as error:
            print(f"request {number}: {error}", file=sys.stderr)
            return None
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        hits = list(pool.map(ask, range(len(asked))))
    answered = [hit for hit in hits if hit is not None]
    return {
        "hit_rate": round(sum(answered) / sum(map(len, asked)), 4),
        "failed": len(hits) - len(answered), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def kill_listener(url: str) -> None:
    """Kill the process that listens at a URL's port."""
    port = httpx.URL(url).port
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.pid and getattr(one.laddr, "port", 0) == port:
            os.kill(one.pid, signal.SIGKILL)
            return
    raise SystemExit(f"nobody listens at {url}")


def compare(asked: list[list[int]], model: Path, longest: int, options: Any) -> dict[str, Any]:
    """The four runs of the module's docstring, each on servers of its own."""
    count, blocks, workers = options.replicas, options.blocks, options.workers
    found: dict[str, Any] = {}

    def note(name: str, result: dict[str, Any]) -> None:
        found[name] = result
        print(f"{name:<12} {json.dumps(result)}", flush=True)

    with serving(model, count * blocks, longest, 1) as server:
        note("one cache", run(asked, model, lambda _: server.url, workers))
    with serving(model, blocks, longest, count) as server:
        note("round robin", run(asked, model, lambda i: server.replicas[i % count], workers))
    with serving(model, blocks, longest, count) as server:
        result = run(asked, model, lambda _: server.url, workers)
        state = httpx.get(server.url.removesuffix("/v1") + "/router").json()
        note("prefix", result | {"sent": state["sent"]})
    with serving(model, blocks, longest, count) as server:

        def kill(number: int) -> None:
            if number == len(asked) // 2:
                kill_listener(server.replicas[0])

        note("death", run(asked, model, lambda _: server.url, workers, kill))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=3000, help="usable blocks of a replica")
    parser.add_argument("--workers", type=int, default=3, help="requests at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked = prompts(options.trace, options.requests)
    longest = max(map(len, asked)) + 16
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), longest)
        found = compare(asked, Path(folder), longest, options)
    kept = found["prefix"]["hit_rate"] / found["one cache"]["hit_rate"]
    print(f"the router keeps {kept:.3f} of one cache's hit rate")
    if options.out:
        options.out.write_text(json.dumps(found | {"kept": round(kept, 4)}, indent=1) + "\n")
    if kept < 0.9 or any(result["failed"] for result in found.values()):
        raise SystemExit("below 0.9, or a request failed")


if __name__ == "__main__":
    main()

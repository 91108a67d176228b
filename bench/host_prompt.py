"""Host time of prompts: hashing, admission of a 128k-token prompt, churn of the cache, release.

Ours runs twice, in NumPy alone and with the compiled helper, and beside it vLLM's own classes where
they can be imported (see peer_cache.py). Times of prompts are CPU time of the one thread that does
all the work; churn is wall time. Medians over repetitions, with p10 and p90.

    python bench/host_prompt.py [--json bench/results/host_prompt.json]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import peer_cache
from peer_cache import BLOCK, spread, times_of

from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager

TOKENS = 131072
REPEATS = 15
CPU = time.thread_time
TARGETS = {  # NumPy, compiled
    "admit 128k cold, us": (3200, 2000), "admit 128k cached, us": (2600, 1800),
    "hash a block, us": (0.25, 0.15), "free 128k, us": (60, 60),
    "churn of 1024, us a block": (0.2, 0.2), "churn of 1, us a block": (1.5, 1.5),
}  # fmt: skip


def make(blocks: int) -> KVCacheManager:
    """A manager of one full-attention group."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128)
    config = KVCacheConfig(blocks, (KVCacheGroupSpec((), spec),))
    return KVCacheManager(config, max_num_rows=2, max_model_len=TOKENS + BLOCK, seed=0)


def prompt(seed: int) -> list[int]:
    """A long prompt as a Python list."""
    return np.random.default_rng(seed).integers(0, 150000, TOKENS).tolist()


def ours() -> dict[str, dict[str, float]]:
    """All measurements of this process."""
    manager, row = make(4 * TOKENS // BLOCK), np.array([0])
    manager.admit(1, manager.find_hit(manager.sequence([1] * 100)), 100)
    found: dict[str, list[float]] = {name: [] for name in TARGETS}

    def admit(tokens: list[int]) -> None:
        hit = manager.find_hit(manager.sequence(tokens))
        manager.admit(0, hit, len(tokens) - hit.num_tokens)

    for i in range(REPEATS):
        tokens = prompt(i)
        found["admit 128k cold, us"] += times_of(lambda _, t=tokens: admit(t), 1, CPU)
        found["free 128k, us"] += times_of(lambda _: manager.release(row), 1, CPU)
        found["admit 128k cached, us"] += times_of(lambda _, t=tokens: admit(t), 1, CPU)
        manager.release(row)
        sequence = manager.sequence(tokens)
        hashing = times_of(lambda _, s=sequence: s.keys(), 1, CPU)
        found["hash a block, us"] += [t / (TOKENS // BLOCK) for t in hashing]
    for size in (1024, 1):
        churn = _churn(manager, size)
        name = f"churn of {size}, us a block"
        found[name] = [t / size for t in churn]
    return {name: spread(values) for name, values in found.items()}


def _churn(manager: KVCacheManager, size: int) -> list[float]:
    """Evict + take + index (keys ready) + release of ``size`` blocks at a time, pool full."""
    pool, index, rng = manager.pool, manager.index, np.random.default_rng(0)
    if index is None:
        raise SystemExit("prefix caching is off")
    keys = rng.integers(0, 256, (400, size, 32), dtype=np.uint8)
    while pool.free:
        ids = pool.take(min(1000, pool.free))
        index.insert(ids, rng.integers(0, 256, (len(ids), 32), dtype=np.uint8))
        pool.mark_keyed(ids)
        pool.release(ids)
    times, held = [], []
    for batch in keys:
        begin = time.perf_counter()
        ids = pool.take(size)
        index.insert(ids, batch)
        pool.mark_keyed(ids)
        times.append(1e6 * (time.perf_counter() - begin))
        held.append(ids)
        if len(held) == 8:
            pool.release(np.concatenate(held))
            held = []
    return times[20:]


def theirs() -> dict[str, dict[str, float]]:
    """The same of vLLM's classes."""
    cache = peer_cache.PeerCache(4 * TOKENS // BLOCK, 2, TOKENS + BLOCK)
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    for i in range(5):
        tokens = prompt(i)
        for name in ("admit 128k cold, us", "admit 128k cached, us"):
            held = []

            def admit(_: int, t: list[int] = tokens, out: list = held, n: str = name) -> None:
                out.append(cache.request(n + str(len(t)), t))
                cache.admit(out[0], 0)

            found[name] += times_of(admit, 1, CPU)
            freeing = times_of(lambda _, h=held: cache.manager.free(h[0]), 1, CPU)
            if name.endswith("cold, us"):
                found["free 128k, us"] += freeing
        hashing = times_of(lambda _, t=tokens: cache.request("h", t), 1, CPU)
        found["hash a block, us"] += [t / (TOKENS // BLOCK) for t in hashing]
    for size in (1024, 1):
        found[f"churn of {size}, us a block"] = _peer_churn(cache, size)
    return {name: spread(values) for name, values in found.items()}


def _peer_churn(cache: peer_cache.PeerCache, size: int) -> list[float]:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    pool, times, held = cache.manager.block_pool, [], []

    def index(blocks: list, keys: list[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            block.set_block_hash(key, BLOCK)
            pool.cached_block_hash_to_block.insert(key, block)

    def fresh(count: int) -> list[bytes]:
        return [make_block_hash_with_group_id(os.urandom(32), 0) for _ in range(count)]

    every = pool.get_new_blocks(pool.get_num_free_blocks())
    index([b for b in every if b.block_hash is None], fresh(len(every)))
    pool.free_blocks(every)
    for _ in range(100):
        keys = fresh(size)
        begin = time.perf_counter()
        blocks = pool.get_new_blocks(size)
        index(blocks, keys)
        times.append(1e6 * (time.perf_counter() - begin) / size)
        held.append(blocks)
        if len(held) == 8:
            pool.free_blocks([b for part in held for b in part])
            held = []
    return times[10:]


def main() -> None:
    """Print a table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    peer = peer_cache.available()
    if options.only:
        gc.collect()
        gc.freeze()
        print(json.dumps(theirs() if options.only == "vllm" else ours()))
        return
    results = {}
    for which in ("numpy", "compiled", *(["vllm"] if peer else [])):
        environment = os.environ | {"BLOCKTABLE_NATIVE": str(int(which == "compiled"))}
        command = [sys.executable, __file__, "--only", which]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        results[which] = json.loads(done.stdout.splitlines()[-1])
    print(f"{'median (p10-p90)':<28} {'NumPy':>24} {'compiled':>24} {'vLLM':>24} targets")
    for name, target in TARGETS.items():
        cells = [_cell(results.get(w, {}).get(name)) for w in ("numpy", "compiled", "vllm")]
        print(f"{name:<28} {cells[0]:>24} {cells[1]:>24} {cells[2]:>24} {target}")
    if options.json:
        about = {"date": datetime.date.today().isoformat(),
                 "device": f"CPU, {os.cpu_count()} cores", "python": platform.python_version(),
                 "numpy_version": np.__version__, "command": "python bench/host_prompt.py",
                 "targets": TARGETS}  # fmt: skip
        options.json.write_text(json.dumps(about | results, indent=1) + "\n")


def _cell(value: dict[str, float] | None) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.4g} ({value['p10']:.4g}-{value['p90']:.4g})"


if __name__ == "__main__":
    main()

"""Host memory of the pool with every block keyed, and the time to build it.

Resident memory is measured in a fresh process for each size: build, take every block in steps of
65,536, key all of them, release all. vLLM's BlockPool beside ours where it can be imported
(peer_cache.py; 1,000,000 blocks unless --peer-blocks says otherwise).

    python bench/pool_memory.py [--json bench/results/pool_memory.json]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import peer_cache
import psutil

from blocktable.core.pool import BlockPool
from blocktable.prefix.index import PrefixIndex

STEP = 1 << 16


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return psutil.Process().memory_info().rss


def ours(blocks: int) -> dict[str, float]:
    """Bytes a block and milliseconds to build."""
    pool, index = BlockPool(1000), PrefixIndex(1000, 32)  # imports and first calls are not counted
    index.insert(pool.take(10), np.zeros((10, 32), np.uint8))
    before = resident()
    begin = time.perf_counter()
    pool, index = BlockPool(blocks), PrefixIndex(blocks, 32)
    built = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    for start in range(1, blocks, STEP):
        ids = pool.take(min(STEP, blocks - start))
        index.insert(ids, rng.integers(0, 256, (len(ids), 32), dtype=np.uint8))
        pool.mark_keyed(ids)
        pool.release(ids)
        del ids
    return {"bytes_per_block": (resident() - before) / blocks, "build_ms": 1e3 * built}


def theirs(blocks: int) -> dict[str, float]:
    """The same for vLLM's BlockPool; keys are inserted as its cache_full_blocks does."""
    from vllm.v1.core.block_pool import BlockPool as PeerPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    before = resident()
    begin = time.perf_counter()
    pool = PeerPool(blocks, True, 16)
    built = time.perf_counter() - begin
    held = pool.get_new_blocks(blocks - 1)
    for block in held:
        key = make_block_hash_with_group_id(os.urandom(32), 0)
        block.set_block_hash(key, 16)
        pool.cached_block_hash_to_block.insert(key, block)
    pool.free_blocks(held)
    del held
    return {"bytes_per_block": (resident() - before) / blocks, "build_ms": 1e3 * built}


def in_a_process(which: str, blocks: int) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--only", which, str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="*", default=[1_000_000, 4_000_000])
    parser.add_argument("--peer-blocks", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    peer = peer_cache.available()
    if options.only:
        which, blocks = options.only[0], int(options.only[1])
        print(json.dumps((theirs if which == "vllm" else ours)(blocks)))
        return
    cases = [("blocktable", n) for n in options.blocks]
    if peer:
        cases.append(("vllm", options.peer_blocks))
    rows = []
    for which, blocks in cases:
        runs = [in_a_process(which, blocks) for _ in range(3 if which != "vllm" else 1)]
        row = {
            "which": which, "blocks": blocks,
            "bytes_per_block": statistics.median(r["bytes_per_block"] for r in runs),
            "build_ms": statistics.median(r["build_ms"] for r in runs),
            "build_ms_spread": [min(r["build_ms"] for r in runs), max(r["build_ms"] for r in runs)],
        }  # fmt: skip
        print(f"{which:>10} {blocks:>9} blocks: {row['bytes_per_block']:6.1f} B a block, "
              f"built in {row['build_ms']:.2f} ms", flush=True)  # fmt: skip
        rows.append(row)
    if options.json:
        about = {"date": datetime.date.today().isoformat(),
                 "device": f"CPU, {os.cpu_count()} cores", "targets": {"bytes_per_block": 64,
                 "build_ms": 10}, "command": "python bench/pool_memory.py"}  # fmt: skip
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

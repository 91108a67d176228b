"""Host time of a decode step's bookkeeping: one token for each of R requests, new blocks into the
rows, keys of completed blocks hashed and indexed, the table committed.

Ours runs twice, in NumPy alone and with the compiled helper, and beside it vLLM's KVCacheManager
and BlockTable where they can be imported (see peer_cache.py; its hashing is left out of its time,
ours is inside ours). Its table lies in CPU memory here, so its commit is a host copy of whole rows;
ours drains the record of changed entries. Medians of single steps; the spread is p10 and p90.

    python bench/host_step.py [--json bench/results/host_step.json]
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
from pathlib import Path

import numpy as np
import peer_cache
from peer_cache import BLOCK, spread, times_of

from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager

LENGTH = 4096
NUMPY = {1: 8, 16: 30, 64: 45, 256: 55, 1024: 110, 4096: 330}  # microseconds to reach
COMPILED = {1: 5, 16: 10, 64: 14, 256: 22, 1024: 55, 4096: 190}


def prompts(count: int) -> list[list[int]]:
    """Prompts of 64 to 191 tokens, so that rows cross block borders at different steps."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32000, rng.integers(64, 192)).tolist() for _ in range(count)]


def blocks_for(count: int, steps: int) -> int:
    return count * (-(-(200 + steps) // BLOCK)) + 2


def ours(count: int, steps: int) -> list[float]:
    """Microseconds of each step."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128)
    config = KVCacheConfig(blocks_for(count, steps), (KVCacheGroupSpec((), spec),))
    manager = KVCacheManager(config, max_num_rows=count, max_model_len=LENGTH, seed=0)
    for row, prompt in enumerate(prompts(count)):
        manager.admit(row, manager.find_hit(manager.sequence(prompt)), len(prompt))
    rows, table = np.arange(count), manager.tables[0]
    tokens = np.random.default_rng(1).integers(0, 32000, (steps, count)).astype(np.int32)
    table.drain()

    def step(i: int) -> None:
        manager.append_tokens(rows, tokens[i])
        manager.allocate(rows, 1)
        if table.is_dirty:
            table.drain()

    return times_of(step, steps)


def theirs(count: int, steps: int) -> list[float]:
    """Microseconds of each step of vLLM's classes, hashing left out."""
    cache = peer_cache.PeerCache(blocks_for(count, steps), count, LENGTH)
    requests = [cache.request(str(i), prompt) for i, prompt in enumerate(prompts(count))]
    for row, request in enumerate(requests):
        cache.admit(request, row)
    manager, table, found = cache.manager, cache.table, []
    tokens = np.random.default_rng(1).integers(0, 32000, (steps, count)).tolist()

    def step(_: int) -> None:
        for row, request in enumerate(requests):
            new = manager.allocate_slots(request, 1)
            ids = new.get_block_ids(allow_none=True)
            if ids is not None:
                table.append_row(ids[0], row)
        table.commit_block_table(count)

    for i in range(steps):
        for request, token in zip(requests, tokens[i], strict=True):
            request.append_output_token_ids(token)  # hashes
        found += times_of(step, 1)
        for request in requests:
            request.num_computed_tokens += 1
    return found


def measure(which: str, count: int) -> dict[str, float]:
    """One measurement in this process."""
    steps = 480 if count <= 64 else 144 if which != "vllm" else 48
    gc.collect()
    gc.freeze()
    gc.disable()
    times = (theirs if which == "vllm" else ours)(count, steps)
    gc.enable()
    return spread(times[16:])


def main() -> None:
    """Print a table and, with --json, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, nargs="*", default=list(NUMPY))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    peer = peer_cache.available()
    if options.only:
        print(json.dumps(measure(options.only[0], int(options.only[1]))))
        return
    rows = []
    print(f"{'R':>5} {'NumPy us':>18} {'compiled us':>18} {'vLLM us':>22} {'ratio':>6}")
    for count in options.requests:
        row: dict[str, object] = {"requests": count, "target_numpy": NUMPY.get(count),
                                  "target_compiled": COMPILED.get(count)}  # fmt: skip
        for which in ("numpy", "compiled", *(["vllm"] if peer else [])):
            environment = os.environ | {"BLOCKTABLE_NATIVE": str(int(which == "compiled"))}
            command = [sys.executable, __file__, "--only", which, str(count)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            row[which] = json.loads(done.stdout.splitlines()[-1])
        print(_line(row), flush=True)
        rows.append(row)
        if options.json:
            _write(options.json, rows)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    about = {
        "date": datetime.date.today().isoformat(), "device": f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(), "numpy": np.__version__,
        "command": "python bench/host_step.py", "unit": "microseconds a step",
    }  # fmt: skip
    path.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def _line(row: dict) -> str:
    def cell(which: str, width: int) -> str:
        if which not in row:
            return "-".rjust(width)
        v = row[which]
        return f"{v['median']:.1f} ({v['p10']:.0f}-{v['p90']:.0f})".rjust(width)

    ratio = row["vllm"]["median"] / row["compiled"]["median"] if "vllm" in row else float("nan")
    return (
        f"{row['requests']:>5} {cell('numpy', 18)} {cell('compiled', 18)} {cell('vllm', 22)} "
        f"{ratio:>5.0f}x"
    )


if __name__ == "__main__":
    main()

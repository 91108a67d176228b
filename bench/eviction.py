"""Hit rates of the eviction policies on a request trace, through the real manager and scheduler.

    python bench/eviction.py TRACE.jsonl [--blocks 5000,20000] [--devices 4] [--json FILE]
    python bench/eviction.py made-up [--blocks 2000,5000]      several kinds of traffic, bare

"bare" is the same cache driven by the sequence of prompts alone, one request at a time and no
output. The last column is perfect foresight (Belady, IBM Systems Journal 1966): the block whose
next use is farthest away goes first, in a bare list too. No policy reaches it.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import platform
from pathlib import Path

import numpy as np
from made_traces import KINDS, make_trace

from blocktable.core.errors import OutOfBlocks
from blocktable.core.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from blocktable.manager import KVCacheManager
from blocktable.sim.simulator import SimOptions, simulate
from blocktable.sim.step_time import StepTimeModel
from blocktable.sim.trace import Trace, read_trace

POLICIES = ("lru", "reuse")


def next_uses(trace: Trace) -> list[int]:
    """For each id of the trace, where it is used next (past the end: never)."""
    ids = trace.hash_ids.tolist()
    seen: dict[int, int] = {}
    after = [0] * len(ids)
    for at in range(len(ids) - 1, -1, -1):
        after[at] = seen.get(ids[at], len(ids) + at)
        seen[ids[at]] = at
    return after


def foresight(trace: Trace, num_blocks: int) -> float:
    """Share of prompt tokens hit with perfect foresight."""
    after, ids = next_uses(trace), trace.hash_ids.tolist()
    held: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for i in range(len(trace)):
        start, length = int(trace.hash_start[i]), int(trace.input_length[i])
        cap = start + (length - 1) // trace.block_size
        at = start
        while at < cap and ids[at] in held:
            at += 1
        hits += at - start
        for k in range(start, start + length // trace.block_size):
            held[ids[k]] = after[k]
            heapq.heappush(heap, (-after[k], ids[k]))
        while len(held) > num_blocks:
            use, block = heapq.heappop(heap)
            if held.get(block) == -use:
                del held[block]
    return hits * trace.block_size / trace.prompt_tokens


def bare(trace: Trace, num_blocks: int, policy: str) -> float:
    """Share of prompt tokens hit when requests come one at a time and generate nothing."""
    spec = FullAttentionSpec(block_size=trace.block_size, num_kv_heads=1, head_size=1)
    manager = KVCacheManager(
        KVCacheConfig(num_blocks + 1, (KVCacheGroupSpec(("kv",), spec),)),
        max_num_rows=1, max_model_len=trace.max_length + 1, eviction=policy, seed=0,
    )  # fmt: skip
    row, hits = np.zeros(1, np.int32), 0
    for i in range(len(trace)):
        prompt = trace.prompt(i)
        hit = manager.find_hit(manager.sequence(prompt))
        with contextlib.suppress(OutOfBlocks):  # longer than the cache
            manager.admit(0, hit, len(prompt) - hit.num_tokens)
            manager.release(row)
            hits += hit.num_tokens
    return hits / trace.prompt_tokens


def measure(trace: Trace, blocks: int, devices: int) -> dict[str, float | int]:
    """Hit rates in percent at one pool size."""
    row: dict[str, float | int] = {"blocks": blocks}
    for policy in POLICIES:
        options = SimOptions(
            num_blocks=blocks, eviction=policy, step_time=StepTimeModel(devices=devices)
        )
        report = simulate(trace, options)
        row[policy] = round(100 * report.hit_tokens / report.query_tokens, 2)
        row[f"bare {policy}"] = round(100 * bare(trace, blocks, policy), 2)
    row["foresight"] = round(100 * foresight(trace, blocks), 2)
    return row


def compare_kinds(sizes: list[int]) -> None:
    """LRU's hits in percent and what reuse gains, on made-up traces."""
    print(f"{'kind':12}" + "".join(f"{size:>16}" for size in sizes))
    for kind in KINDS:
        trace = make_trace(kind)
        cells = []
        for size in sizes:
            lru, reuse = (100 * bare(trace, size, policy) for policy in POLICIES)
            cells.append(f"{lru:8.2f} {reuse - lru:+7.2f}")
        print(f"{kind.__name__:12}" + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", default="5000,20000,40000,60000")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if str(args.trace) == "made-up":
        compare_kinds([int(size) for size in args.blocks.split(",")])
        return
    trace = read_trace(args.trace)
    rows = []
    print(f"{'blocks':>8} {'lru %':>8} {'reuse %':>8} {'gain':>7} {'bare lru %':>11} "
          f"{'bare reuse %':>13} {'gain':>7} {'foresight %':>12}")  # fmt: skip
    for blocks in map(int, args.blocks.split(",")):
        row = measure(trace, blocks, args.devices)
        rows.append(row)
        print(
            f"{blocks:8} {row['lru']:8.2f} {row['reuse']:8.2f} {row['reuse'] - row['lru']:+7.2f} "
            f"{row['bare lru']:11.2f} {row['bare reuse']:13.2f} "
            f"{row['bare reuse'] - row['bare lru']:+7.2f} {row['foresight']:12.2f}",
            flush=True,
        )
    if args.json:
        result = {
            "trace": args.trace.name, "requests": len(trace), "block_size": trace.block_size,
            "devices": args.devices, "python": platform.python_version(), "hit_percent": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

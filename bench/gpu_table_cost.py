"""What the block table costs inside a decode kernel, and what four tricks against it give.

    python bench/gpu_table_cost.py [--out FILE] [--walk]

A decode kernel without masks reads the same keys and values five ways; only the way it learns the
block ids differs. ``none`` computes them (the table is the identity here), so its time is the floor
and the difference to it is the table's share. A pointer chase gives the latencies themselves.
``--walk`` runs only the look-ups, one kernel per length, for a profiler to count cache hits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from gpu_attention import Run, microseconds

BS, D, HKV, GROUP, TILE = 16, 128, 8, 4, 64
MODES = ("none", "vector", "scalar", "shared", "ahead", "in item")
TOKENS = 1 << 20


@triton.jit
def _blocks(pages, key, row, kv_start, first_id, staged, MODE: tl.constexpr, WIDTH: tl.constexpr,
            STAGED: tl.constexpr, TILE: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """Block ids of one tile, int64 [TILE]."""
    if MODE == 0:  # none: the table is the identity
        block = row * WIDTH + key // BS
    elif MODE == 1:  # vector: entries of a tile loaded together
        block = tl.load(pages + key // BS)
    elif MODE == 2:  # scalar: an entry at a time, one dependent load per page
        block = key * 0
        for page in tl.static_range(TILE // BS):
            entry = tl.load(pages + tl.min(key, 0) // BS + page, volatile=True)
            block = tl.where((key - tl.min(key, 0)) // BS == page, entry, block)
    elif MODE == 3:  # shared: the row's entries staged on chip, picked from there
        # a pipelined loop also picks for tiles past the end: stay inside what is staged
        block = tl.gather(staged, tl.minimum((key - kv_start) // BS, STAGED - 1), 0)
    else:  # in item: ids of short rows come with the work item
        block = first_id + (key - kv_start) // BS
    return block.to(tl.int64)


@triton.jit
def decode(
    query, cache, table, first_ids, out, length, piece,
    MODE: tl.constexpr, WIDTH: tl.constexpr, STAGED: tl.constexpr, HKV: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, TILE: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """A piece of a row for one KV head; grid (HKV, pieces of a row, rows)."""
    head, row = tl.program_id(0), tl.program_id(2)
    kv_start = tl.program_id(1) * piece
    item = row * tl.num_programs(1) + tl.program_id(1)
    m, n, d = tl.arange(0, 16), tl.arange(0, TILE), tl.arange(0, D)
    pages = table + row.to(tl.int64) * WIDTH
    staged = tl.zeros([STAGED], tl.int32)
    if MODE == 3:
        staged = tl.load(pages + kv_start // BS + tl.arange(0, STAGED),
                         mask=tl.arange(0, STAGED) < piece // BS, other=0)  # fmt: skip
    first_id = tl.load(first_ids + item) if MODE == 5 else 0
    rows = (row * HKV + head) * GROUP + m
    q = tl.load(query + rows[:, None] * D + d[None, :], mask=(m < GROUP)[:, None], other=0.0)
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    seen = tl.zeros([TILE], tl.int64)
    ahead = tl.load(pages + (kv_start + n) // BS) if MODE == 4 else n
    for start in tl.range(kv_start, kv_start + piece, TILE, num_stages=3):
        key = start + n
        if MODE == 4:  # ahead: the next tile's entries are loaded while this one is computed
            block = ahead.to(tl.int64)
            ahead = tl.load(pages + tl.minimum(key + TILE, length - 1) // BS)
        else:
            block = _blocks(
                pages, key, row, kv_start, first_id, staged, MODE, WIDTH, STAGED, TILE, BS
            )
        if WALK:
            seen += block
        else:
            place = block * (2 * HKV * BS * D) + head * (BS * D) + key % BS * D
            k = tl.load(cache + place[:, None] + d[None, :])
            scores = tl.dot(q, tl.trans(k)) * 0.12
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(cache + HKV * BS * D + place[:, None] + d[None, :])
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None])
            top = new_top
    result = acc / total[:, None] if not WALK else acc + tl.sum(seen, 0).to(tl.float32)
    to = (item * HKV + head) * GROUP + m
    tl.store(out + to[:, None] * D + d[None, :], result, mask=(m < GROUP)[:, None])


CHASE = r"""
extern "C" __global__ void chase(
    const int* next, long long* out, int warm, int steps, int shared_words) {
    extern __shared__ int near[];
    for (int i = 0; i < shared_words; ++i) near[i] = next[i];
    int at = 0;
    for (int i = 0; i < warm; ++i) at = next[at];
    long long start = clock64();
    if (shared_words) for (int i = 0; i < steps; ++i) at = near[at];
    else for (int i = 0; i < steps; ++i) at = next[at];
    out[0] = clock64() - start;
    out[1] = at;
}
"""


CHAINS = {  # words of the chain, step between its links, loads before the clock starts
    "shared memory": (2048, 33, 64),
    "L1": (2048, 33, 4096),
    "L2": (4 << 20, 32 * 1031, 64),
    "device memory": (256 << 20, 32 * 65537, 64),
}
"""The cached chains lie within their level; a launch starts with an empty L1, and the last chain is
too long for the L2."""


def latencies(steps: int = 2048) -> dict[str, float]:
    """Cycles of one dependent load, by where the chain lies. Needs CuPy (its run-time compiler)."""
    try:
        import cupy
    except ImportError:
        return {}
    kernel = cupy.RawKernel(CHASE, "chase")
    found = {}
    for name, (words, stride, warm) in CHAINS.items():
        chain = ((torch.arange(words, device="cuda") + stride) % words).int()
        out = torch.zeros(2, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        size = words if name == "shared memory" else 0
        near = cupy.from_dlpack(chain), cupy.from_dlpack(out)
        for _ in range(2 if name == "L2" else 1):
            kernel(
                (1,), (1,), (*near, cupy.int32(warm), cupy.int32(steps), cupy.int32(size)),
                shared_mem=size * 4,
            )  # fmt: skip
        cupy.cuda.Device().synchronize()
        found[name] = out[0].item() / steps
    return found


class Problem:
    """A length, with as many rows as make TOKENS tokens in all."""

    def __init__(self, length: int) -> None:
        self.length, self.rows, self.width = length, TOKENS // length, length // BS
        self.piece = min(length, 4096)
        self.items = TOKENS // self.piece
        blocks = TOKENS // BS
        self.table = torch.arange(blocks, device="cuda", dtype=torch.int32).view(self.rows, -1)
        self.shuffled = torch.randperm(blocks, device="cuda").int().view(self.rows, -1)
        self.first_ids = (torch.arange(self.items, device="cuda") * (self.piece // BS)).int()
        shape = (self.rows * HKV * GROUP, D)
        self.query = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def run(self, cache: torch.Tensor, mode: int, table: torch.Tensor, walk: bool = False) -> Run:
        """A launch in one mode."""
        shape = (self.items * HKV * GROUP, D)
        out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)

        def run() -> torch.Tensor:
            decode[(HKV, self.items // self.rows, self.rows)](
                self.query, cache, table, self.first_ids, out, self.length, self.piece, MODE=mode,
                WIDTH=self.width, STAGED=max(triton.next_power_of_2(self.piece // BS), 16), HKV=HKV,
                GROUP=GROUP, D=D, BS=BS, TILE=min(TILE, self.length), WALK=walk, num_warps=2,
            )  # fmt: skip
            return out

        return run


def measure(problem: Problem, cache: torch.Tensor) -> dict[str, object]:
    """All modes at one length; their results must be the same to the bit."""
    row: dict[str, object] = {"tokens a row": problem.length, "rows": problem.rows}
    floor = problem.run(cache, 0, problem.table)
    for mode, name in enumerate(MODES):
        run = problem.run(cache, mode, problem.table)
        same = torch.equal(run(), floor())
        print(f"{problem.length} tokens, {name}: same {same}", flush=True)
        if not same:
            raise SystemExit(f"{name} at {problem.length} tokens differs from none")
        row[name] = microseconds([run], 0.05)
    row["vector, shuffled blocks"] = microseconds([problem.run(cache, 1, problem.shuffled)], 0.05)
    return row


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu_table_cost.json"))
    parser.add_argument("--walk", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = (TOKENS // BS, 2, HKV, BS, D)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    record: dict[str, object] = {
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv), "unit": "microseconds",
    }  # fmt: skip
    if not options.walk:
        record["cycles of a dependent load"] = latencies()
        print(record["cycles of a dependent load"], flush=True)
    rows = []
    for length in (32, 256, 1024, 4096, 16384, 65536, 262144, 1048576):
        problem = Problem(length)
        if options.walk:
            problem.run(cache, 1, problem.shuffled, walk=True)()
            torch.cuda.synchronize()
            continue
        rows.append(measure(problem, cache))
        print(rows[-1], flush=True)
    if options.walk:
        return
    record["rows"] = rows
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

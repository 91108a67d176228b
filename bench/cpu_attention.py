"""Paged attention on a CPU beside what people use instead, in one run.

    python bench/cpu_attention.py [--quick] [--threads 1 --clock cpu] [--json FILE]

Every round times each contender once, in turn, on the same KV; a ratio is taken within its round,
so that a machine that slows down slows both. Contenders: contiguous SDPA (queries packed per KV
head as [B, Hkv, G, D], keys already in one piece: what paging is measured against), gather + SDPA
(pages copied into one piece at every step), our Numba path and our compiled kernel, both in place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from blocktable.attention.cpu import paged_attention, plan_step
from blocktable.attention.cpu.backend import backend_name, native_available

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Shape:
    """One workload: ``batch`` requests of ``length`` tokens, the last ``queries`` of them new."""

    heads: int
    kv_heads: int
    size: int
    batch: int
    length: int
    queries: int = 1
    dtype: str = "float32"

    @property
    def kv_bytes(self) -> int:
        width = getattr(torch, self.dtype).itemsize
        return 2 * self.batch * self.length * self.kv_heads * self.size * width


@dataclass(frozen=True)
class Row:
    """Median microseconds of each contender, and ours against contiguous SDPA (quartiles)."""

    shape: Shape
    microseconds: dict[str, float]
    speedup_over_sdpa: tuple[float, float, float]


SMOL = {"heads": 9, "kv_heads": 3, "size": 64}
LLAMA = {"heads": 32, "kv_heads": 8, "size": 128}
SHAPES = [
    *(Shape(**SMOL, batch=b, length=n) for b, n in [(1, 512), (1, 8192), (8, 512), (32, 512)]),
    *(Shape(**SMOL, batch=b, length=n) for b, n in [(64, 512), (64, 2048), (64, 8192)]),
    *(Shape(**SMOL, batch=b, length=n, dtype="bfloat16") for b, n in [(64, 512), (64, 2048)]),
    *(Shape(**LLAMA, batch=b, length=n) for b, n in [(1, 2048), (8, 2048), (64, 2048)]),
    *(Shape(**LLAMA, batch=b, length=n, dtype="bfloat16") for b, n in [(8, 2048), (64, 2048)]),
    Shape(**SMOL, batch=1, length=512, queries=512),
    Shape(**SMOL, batch=1, length=2048, queries=512),
    Shape(**SMOL, batch=1, length=2048, queries=2048, dtype="bfloat16"),
    Shape(**LLAMA, batch=1, length=2048, queries=512),
]


def contenders(shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """Closures over one random problem; outputs agree up to rounding (checked)."""
    torch.manual_seed(0)
    dtype, heads, kv, size = getattr(torch, shape.dtype), shape.heads, shape.kv_heads, shape.size
    group, per_row = heads // kv, -(-shape.length // BLOCK_SIZE)
    blocks = 1 + shape.batch * per_row
    cache = torch.randn(blocks, 2, kv, BLOCK_SIZE, size).to(dtype)
    table = (torch.randperm(blocks - 1) + 1).int().view(shape.batch, per_row)
    query = torch.randn(shape.batch * shape.queries, heads, size).to(dtype)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries
    lens = torch.full((shape.batch,), shape.length, dtype=torch.int32)
    k_cache, v_cache = cache[:, 0], cache[:, 1]
    plan = plan_step(table, starts, lens)

    def gather(half: torch.Tensor) -> torch.Tensor:
        pages = half[table.long()]  # [B, W, Hkv, bs, D]
        return pages.transpose(1, 2).reshape(shape.batch, kv, -1, size)[:, :, : shape.length]

    k, v = gather(k_cache).contiguous(), gather(v_cache).contiguous()
    # [B, T, Hkv, G, D] -> [B, Hkv, T * G, D]
    q = query.view(shape.batch, shape.queries, kv, group, size).permute(0, 2, 1, 3, 4)
    packed = q.reshape(shape.batch, kv, -1, size).contiguous()
    mask = None
    if shape.queries > 1:
        position = torch.arange(shape.length - shape.queries, shape.length).repeat_interleave(group)
        mask = torch.where(torch.arange(shape.length)[None] <= position[:, None], 0.0, -torch.inf)
        mask = mask.to(dtype)[None, None]

    def sdpa(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(packed, keys, values, mask)

    def paged(name: str) -> torch.Tensor:
        os.environ["BLOCKTABLE_CPU_KERNEL"] = name
        backend_name.cache_clear()
        return paged_attention(  # type: ignore[return-value]
            query, k_cache, v_cache, table, starts, lens, scale=size**-0.5,
            plan=plan if name == "native" else None,
        )  # fmt: skip

    runs: dict[str, Callable[[], torch.Tensor]] = {"sdpa": lambda: sdpa(k, v)}
    if native_available():
        runs["ours"] = lambda: paged("native")
    runs["gather+sdpa"] = lambda: sdpa(gather(k_cache), gather(v_cache))
    runs["numba"] = lambda: paged("numba")
    out = sdpa(k, v).view(shape.batch, kv, shape.queries, group, size).permute(0, 2, 1, 3, 4)
    expected = out.reshape(query.shape)
    torch.testing.assert_close(paged("native"), expected, rtol=2e-2, atol=2e-2)
    return runs


def measure(shape: Shape, seconds: float, clock: Callable[[], float]) -> Row:
    """Rounds of one call each until ``seconds`` are over, at least 5."""
    runs = contenders(shape)
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["sdpa"]) < 5:
        for name, run in runs.items():
            started = clock()
            run()
            times[name].append(clock() - started)
    ratios = [a / b for a, b in zip(times["sdpa"], times["ours"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Row(
        shape, {n: statistics.median(t) * 1e6 for n, t in times.items()}, (low, middle, high)
    )


def show(row: Row) -> str:
    s, t = row.shape, row.microseconds
    kind = f"{s.batch}x{s.length}" + (f" prefill {s.queries}" if s.queries > 1 else "")
    columns = "".join(
        f"{name} {t[name]:9.0f} us {s.kv_bytes / t[name] / 1e3:5.1f} GB/s  " for name in t
    )
    low, middle, high = row.speedup_over_sdpa
    return (
        f"{s.heads}/{s.kv_heads}x{s.size} {s.dtype:8} {kind:20} {columns}"
        f"ours/sdpa speed {middle:5.2f} ({low:.2f}..{high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller batches, shorter rounds")
    parser.add_argument("--only", type=int, nargs="*", help="indices of the shapes to run")
    parser.add_argument("--threads", type=int, help="threads of every contender")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu, with --threads 1: for a machine that others use too",
    )  # fmt: skip
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    shapes = [s for s in SHAPES if not options.quick or s.kv_bytes < 300e6]
    if options.only:
        shapes = [SHAPES[i] for i in options.only]
    rows = []
    for shape in shapes:
        rows.append(measure(shape, 0.5 if options.quick else 3.0, clock))
        print(show(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()

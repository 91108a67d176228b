"""Attention on the GPU: ours beside FlashInfer (where installed) and contiguous SDPA, in one run.

    python bench/gpu_attention.py [--out FILE] [--only TEXT] [--peers none|sdpa|all]

Every result is checked against float64 on random data. Times are medians of CUDA graph replays;
each graph holds enough launches, over copies of the problem in different memory where it is small,
that neither launch gaps nor the cache decide.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_cases import DECODE, KINDS, PREFILL, SHARED, Built, Case, build, error_against_float64
from torch.nn.attention import SDPBackend, sdpa_kernel

from blocktable.attention.plan import plan_attention
from blocktable.attention.triton import paged_attention, plan_config, upload_plan, write_kv

Run = Callable[[], torch.Tensor]
L2_BYTES = 60 << 20
LIMIT = 1e-2


def microseconds(runs: list[Run], seconds: float = 0.25) -> float:
    """Median time of one run, by replaying a CUDA graph that holds all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[0]()
        end.record()
    torch.cuda.synchronize()
    once = max(start.elapsed_time(end), 0.02)
    rounds = max(1, min(50, int(2.0 / (once * len(runs)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    graph.replay()
    times = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(runs)))
    return sorted(times)[len(times) // 2]


def ours(built: Built, *, share: bool = True) -> Run:
    """Our kernels with a plan made beforehand, as a decode step makes one for all layers."""
    k, v = built.k_cache, built.v_cache
    config = plan_config(built.query, k, v, share=share)
    host = plan_attention(config, built.starts, built.lens, built.host_table)
    plan = upload_plan(host, config, v.shape[3], built.query.device)
    out = built.query.new_empty((*built.query.shape[:2], v.shape[3]))
    starts = torch.from_numpy(built.starts).cuda()
    lens = torch.from_numpy(built.lens).cuda()
    scale = built.case.head_size**-0.5

    def run() -> torch.Tensor:
        paged_attention(built.query, k, v, built.table, starts, lens, scale=scale, out=out,
                        plan=plan)  # fmt: skip
        return out

    return run


def plan_ms(built: Built, share: bool = True) -> float:
    """Median host time of making the plan, with or without looking for shared prefixes."""
    config = plan_config(built.query, built.k_cache, built.v_cache, share=share)
    times = []
    for _ in range(9):
        before = time.perf_counter()
        plan_attention(config, built.starts, built.lens, built.host_table)
        times.append(1e3 * (time.perf_counter() - before))
    return sorted(times)[len(times) // 2]


def contiguous(case: Case) -> Run | None:
    """SDPA over contiguous keys and values: no pages at all. None where it cannot say the case."""
    odd = case.latent or case.kv_dtype != torch.bfloat16
    if odd or not case.uniform or case.shared or 1 < case.queries < case.lens[0]:
        return None
    rows, length = len(case.lens), case.lens[0]
    q = torch.randn(rows, case.heads, case.queries, case.head_size, device="cuda").bfloat16()
    k, v = (
        torch.randn(rows, case.kv_heads, length, case.head_size, device="cuda").bfloat16()
        for _ in range(2)
    )

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.queries > 1, enable_gqa=case.heads != case.kv_heads
            )

    return run


def flashinfer(built: Built) -> Run | None:
    """FlashInfer over the same pages; None where it is not installed."""
    try:
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
        )
    except ImportError:
        return None
    case, size = built.case, built.case.block_size
    if case.latent or case.kv_dtype != torch.bfloat16:
        return None
    counts = -(-built.lens // size)
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = torch.from_numpy(counts).cumsum(0)
    indices = torch.cat([built.table[row, :count] for row, count in enumerate(counts)])
    last = torch.from_numpy((built.lens - 1) % size + 1).int()
    memory = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    shape = (case.heads, case.kv_heads, case.head_size, size)
    if case.queries == 1:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(memory, "HND", use_tensor_cores=True)
        wrapper.plan(indptr.cuda(), indices, last.cuda(), *shape, q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16)  # fmt: skip
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(memory, "HND")
        wrapper.plan(torch.from_numpy(built.starts).cuda(), indptr.cuda(), indices, last.cuda(),
                     *shape, causal=True, q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16)  # fmt: skip
    return lambda: wrapper.run(built.query, built.cache)


def measure(case: Case, peers: str) -> dict[str, object]:
    """One line of the table."""
    copies = max(1, min(16, -(-4 * L2_BYTES // case.kv_bytes)))
    if case.queries > 1 or "in the cache" in case.name:
        copies = 1
    built = build(case, copies=copies)
    row: dict[str, object] = {"case": case.name, "target": case.target, "copies": copies}
    runs = [ours(each) for each in built]
    row["error"] = error_against_float64(built[0], runs[0]())
    if not row["error"] < LIMIT:
        raise SystemExit(f"{case.name}: error {row['error']} against float64")
    row["ours"] = microseconds(runs)
    if case.queries == 1:
        row["plan ms"], row["plan ms, not sharing"] = plan_ms(built[0]), plan_ms(built[0], False)
    if case.shared:
        row["ours, not sharing"] = microseconds([ours(each, share=False) for each in built])
    if peers == "all" and (peer := [flashinfer(each) for each in built])[0] is not None:
        theirs = [run for run in peer if run is not None]
        row["flashinfer error"] = error_against_float64(built[0], theirs[0]())
        row["flashinfer"] = microseconds(theirs)
    if peers != "none" and (run := contiguous(case)) is not None:
        row["contiguous SDPA"] = microseconds([run])
    return row


def measure_write(tokens: int) -> dict[str, object]:
    """Cache write of ``tokens`` new tokens into random slots, 8 heads x 128, bfloat16."""
    blocks = 16384
    cache = torch.zeros((blocks, 2, 8, 16, 128), device="cuda", dtype=torch.bfloat16)
    runs: list[Run] = []
    for _ in range(max(1, min(64, (256 << 20) // (tokens * 8192)))):
        slots = torch.randperm(blocks * 16, device="cuda")[:tokens]
        key, value = torch.randn((2, tokens, 8, 128), device="cuda").bfloat16()

        def run(key: torch.Tensor = key, value: torch.Tensor = value,
                slots: torch.Tensor = slots) -> torch.Tensor:  # fmt: skip
            write_kv(key, value, cache[:, 0], cache[:, 1], slots)
            return key

        runs.append(run)
    runs[-1]()
    by_slot = cache.permute(1, 0, 3, 2, 4).reshape(2, -1, 8, 128)
    exact = torch.equal(by_slot[0][slots], key) and torch.equal(by_slot[1][slots], value)
    us = microseconds(runs)
    target = {256: 5, 8192: 18}.get(tokens, 0)
    print(f"cache write {tokens} tokens: target {target} us, ours {us:.1f} us, "
          f"{tokens * 8192 / us / 1e6:.2f} TB/s, exact {exact}", flush=True)  # fmt: skip
    if not exact:
        raise SystemExit("cache write stored wrong values")
    return {"case": f"cache write {tokens}", "target": target, "ours": us}


def show(case: Case, row: dict[str, object]) -> None:
    """Print a line: microseconds and TB/s of necessary bytes, or TFLOP/s."""
    parts = [f"{case.name:32s} target {case.target:6.0f}"]
    for name in ("ours", "ours, not sharing", "flashinfer", "contiguous SDPA"):
        if name in row:
            us = float(str(row[name]))
            rate = case.flops / us / 1e6 if case.queries > 1 else case.kv_bytes / us / 1e6
            row[f"{name} rate"] = rate
            parts.append(f"{name} {us:8.1f} us {rate:6.2f} {'TF' if case.queries > 1 else 'TB'}/s")
    print("  ".join(parts), f" error {row['error']:.1e}", flush=True)


def main() -> None:
    """Run all cases, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu_attention.json"))
    parser.add_argument("--only", default="")
    parser.add_argument("--peers", choices=("none", "sdpa", "all"), default="all")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for case in (*DECODE, *KINDS, *SHARED, *PREFILL):
        if options.only in case.name:
            row = measure(case, options.peers)
            show(case, row)
            rows.append(row)
            torch.cuda.empty_cache()
    rows += [measure_write(tokens) for tokens in (256, 8192) if options.only in "cache write"]
    record = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv),
        "torch": torch.__version__,
        "unit": "microseconds; rate in TB/s of necessary KV bytes, TFLOP/s for prefill",
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

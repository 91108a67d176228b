"""Block copies on the GPU: swaps in runs beside one large pinned copy, and copy-on-write batches.

    python bench/gpu_copies.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from blocktable.device.copies import BlockCopier, make_host_caches

LAYERS, BLOCKS, BLOCK_SHAPE = 32, 2048, (2, 8, 16, 128)  # Llama-3-8B, 64 KiB a block and layer


def median_ms(run: Callable[[], None], repeats: int = 9) -> float:
    """Median wall time of a run that ends on the device; copies overlap launching them."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu_copies.json"))
    options = parser.parse_args()
    caches = [torch.randn((BLOCKS, *BLOCK_SHAPE), device="cuda").bfloat16() for _ in range(LAYERS)]
    host = make_host_caches(caches, 512)
    copier = BlockCopier(caches, host)
    block_bytes = caches[0][0].numel() * 2
    rows: list[dict[str, object]] = []
    moved = 256
    size = moved * block_bytes * LAYERS
    large_host = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True)
    large = torch.empty(size // 2, dtype=torch.bfloat16, device="cuda")
    pinned = {
        "out": size / median_ms(lambda: large_host.copy_(large, non_blocking=True)) / 1e6,
        "in": size / median_ms(lambda: large.copy_(large_host, non_blocking=True)) / 1e6,
    }
    for run in (1, 4, 16, 64, 256):
        starts = np.random.default_rng(run).permutation(BLOCKS // 256)[0] * 256
        order = np.random.default_rng(run).permutation(moved // run)
        blocks = (starts + order[:, None] * run + np.arange(run)[None]).ravel()
        slots = np.arange(moved)
        for way, swap in (
            ("out", lambda b=blocks, s=slots: copier.swap_out(b, s).wait()),
            ("in", lambda b=blocks, s=slots: copier.swap_in(s, b).wait()),
        ):
            rate = size / median_ms(swap) / 1e6
            rows.append({"swap": way, "run of blocks": run, "GB/s": rate,
                         "of one pinned copy": rate / pinned[way]})  # fmt: skip
            print(f"swap {way:3s} runs of {run:3d} blocks: {rate:6.1f} GB/s, "
                  f"{rate / pinned[way]:.1%} of one pinned copy", flush=True)  # fmt: skip
    check = [cache[:moved].clone() for cache in caches]
    copier.swap_out(np.arange(moved), np.arange(moved)).wait()
    for cache in caches:
        cache[:moved] = float("nan")
    copier.swap_in(np.arange(moved), np.arange(moved)).wait()
    exact = all(torch.equal(c[:moved], k) for c, k in zip(caches, check, strict=True))
    for pairs in (1, 16, 256):
        ids = np.random.default_rng(pairs).permutation(BLOCKS)[: 2 * pairs]
        took = median_ms(lambda ids=ids, n=pairs: copier.copy(ids[:n], ids[n:]))
        rate = 2 * pairs * block_bytes * LAYERS / took / 1e6
        rows.append({"copy on write": pairs, "ms": took, "GB/s read and written": rate})
        print(f"copy on write, {pairs} blocks x {LAYERS} layers: {took * 1e3:.0f} us", flush=True)
    if not exact:
        raise SystemExit("swapped blocks came back changed")
    record = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
              "command": "python " + " ".join(sys.argv), "one pinned copy GB/s": pinned,
              "bit exact": exact, "rows": rows}  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

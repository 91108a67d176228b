"""Bytes and host time of a table commit in a decode step, and those of copying whole rows.

    python bench/table_upload.py [--rows 1024] [--max-len 1048576] [--steps 256]

Every request decodes one token a step, each at its own place in its block, so a step crosses
``rows / block_size`` block borders on average; one more step is made in which every row crosses.
Bytes are those of the packed plan that the upload kernel reads. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from blocktable.core.table import HostTable
from blocktable.device import upload


def decode_steps(rows: int, width: int, steps: int, block: int) -> dict[str, float]:
    """Commit ``steps`` decode steps of a table of ``rows`` requests; bytes and microseconds."""
    rng = np.random.default_rng(0)
    table, tables = HostTable(rows, width), upload.DeviceTables(rows, [width], "cpu")
    lengths = rng.integers(1, (width - steps // block - 2) * block // 64 + 2, rows)
    held = -(-lengths // block)
    table.append(np.arange(rows), held, np.arange(1, held.sum() + 1))
    table.drain()
    out = np.zeros(1 << 16, np.int32)
    sizes, times = [], []
    for step in range(steps + 1):
        crossing = np.flatnonzero(lengths % block == 0) if step < steps else np.arange(rows)
        table.append_one(crossing.astype(np.int32), rng.integers(1, 10**6, len(crossing), np.int32))
        lengths += 1
        start = time.perf_counter()
        if table.is_dirty:
            plan = tables.plan([(0, table)])
            plan.pack(out)
            sizes.append(4 * plan.num_ints)
        else:
            sizes.append(0)
        times.append(1e6 * (time.perf_counter() - start))
    return {
        "mean_bytes": float(np.mean(sizes[:-1])),
        "worst_bytes": float(max(sizes)),
        "host_us_median": float(np.median(times[:-1])),
        "host_us_worst_step": times[-1],
        "whole_rows_bytes": float(4 * rows * width),
    }


def main() -> None:
    """Print one JSON line for each table length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--max-len", type=int, nargs="+", default=[8192, 131072, 1048576])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--no-helper", action="store_true", help="plan in NumPy")
    options = parser.parse_args()
    if options.no_helper:
        upload.take_entries = None
    for max_len in options.max_len:
        width = -(-max_len // options.block_size)
        found = decode_steps(options.rows, width, options.steps, options.block_size)
        helper = upload.take_entries is not None
        print(json.dumps({"rows": options.rows, "max_len": max_len, "helper": helper, **found}))


if __name__ == "__main__":
    main()

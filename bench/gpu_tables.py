"""Slot mapping and table upload on a GPU, beside a plain kernel a group and whole-row copies.

    python bench/gpu_tables.py [--json FILE]

Device times are medians of CUDA-graph replays of 20 launches each, host times medians of calls
that only enqueue. Everything is checked against the NumPy oracle before it is timed. Peers: a
plain kernel with one program a request, launched once a group (what engines do today), and the
copy of all rows from pinned memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from blocktable.device import slot_kernel, upload_kernel
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.upload_plan import GroupDelta, plan_upload

REPEATS = 20
DEVICE = torch.device("cuda")


@triton.jit(do_not_specialize=["num_tokens", "max_tokens"])
def plain_slots(
    num_tokens, max_tokens, starts, positions, table, stride, block_size, slots,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program a request, the last one pads: the usual kernel, for comparison."""
    request = tl.program_id(0)
    if request == tl.num_programs(0) - 1:
        for first in range(num_tokens, max_tokens, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(slots + at, -1, mask=at < max_tokens)
    else:
        begin = tl.load(starts + request)
        end = tl.load(starts + request + 1)
        for first in range(begin, end, TILE):
            at = first + tl.arange(0, TILE)
            position = tl.load(positions + at, mask=at < end, other=0)
            block = tl.load(table + request * stride + position // block_size)
            slot = block.to(tl.int64) * block_size + position % block_size
            tl.store(slots + at, slot, mask=at < end)


def device_us(fn: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median device microseconds of one call, from replays of a graph of ``repeats`` calls."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            fn()
    times = []
    for _ in range(30):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / repeats)
    return statistics.median(times)


def host_us(fn: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median host microseconds of one call that only enqueues; ``before`` is not counted."""
    times = []
    for turn in range(300):
        before()
        if turn % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times[50:])


def slot_case(name: str, lens: np.ndarray, groups: int, width: int = 1024) -> dict[str, object]:
    """One ragged batch through our kernel and the plain one."""
    rng, reqs = np.random.default_rng(0), len(lens)
    tokens = max(8192, int(lens.sum()))
    table = MultiGroupBlockTable(reqs, width * 16, tokens, DEVICE, [16] * groups)
    ids = rng.integers(1, 2**20, reqs * width)
    table.add_rows(np.arange(reqs), [np.full(reqs, width)] * groups, [ids] * groups)
    table.commit_block_table(reqs)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    places = rng.integers(0, width * 16 - lens.max(), reqs)
    positions = np.repeat(places, lens) + np.arange(starts[-1]) - np.repeat(starts[:-1], lens)
    on_starts, on_positions = (torch.from_numpy(a).to(DEVICE) for a in (starts, positions))
    table.compute_slot_mapping(reqs, on_starts, on_positions)
    for one in table.block_tables:
        want = one.geometry.slot_mapping(
            one.get_numpy_array(), starts, positions, np.zeros(tokens, np.int64)
        )
        np.testing.assert_array_equal(one.slot_mapping.cpu().numpy(), want)
    plain_out = torch.empty((groups, tokens), dtype=torch.int64, device=DEVICE)

    def plain() -> None:
        for g, one in enumerate(table.block_tables):
            rows = one.get_device_tensor()
            plain_slots[(reqs + 1,)](
                len(positions), tokens, on_starts, on_positions, rows, rows.stride(0), 16,
                plain_out[g], TILE=1024,
            )  # fmt: skip

    def ours() -> None:
        table.compute_slot_mapping(reqs, on_starts, on_positions)

    found: dict[str, object] = {
        "case": f"slots {name}", "groups": groups, "plain_us": device_us(plain),
        "ours_us": device_us(ours), "ours_host_us": host_us(ours), "plain_host_us": host_us(plain),
    }  # fmt: skip
    np.testing.assert_array_equal(plain_out[0].cpu().numpy(), table[0].slot_mapping.cpu().numpy())
    return found


def upload_case(rows: int, max_len: int) -> dict[str, object]:
    """A decode step of ``rows`` requests at a table of that length: our commit, and whole rows."""
    rng, width = np.random.default_rng(0), max_len // 16
    table = MultiGroupBlockTable(rows, max_len, 8192, DEVICE, [16])
    held = rng.integers(1, width // 2, rows)
    table.add_rows(np.arange(rows), [held], [rng.integers(1, 2**20, held.sum())])
    table.commit_block_table(rows)
    host, tables = table[0].host_rows, table.device_tables
    crossing = rng.permutation(rows)[: rows // 16].astype(np.int32)

    def change() -> None:
        if host.counts.max() >= width - 1:
            host.truncate(np.arange(rows), 1)
            table.commit_block_table(rows)
        host.append_one(crossing, rng.integers(1, 2**20, len(crossing)))

    def commit() -> None:
        table.commit_block_table(rows)

    host_time = host_us(commit, change)
    np.testing.assert_array_equal(table[0].get_device_tensor().cpu().numpy(), host.rows)
    change()
    plan = plan_upload([GroupDelta(host.drain(), host.flat, host.max_blocks_per_row, 0)])
    packed = torch.zeros(plan.num_ints, dtype=torch.int32, pin_memory=True)
    plan.pack(packed.numpy())
    entries = len(plan.cells)
    whole = torch.from_numpy(host.rows).pin_memory()
    target = tables.tables[0]
    return {
        "case": f"upload R{rows} at {max_len}",
        "bytes": 4 * plan.num_ints,
        "whole_rows_bytes": whole.nbytes,
        "ours_us": device_us(
            lambda: upload_kernel.launch(tables.arena, packed, entries, entries, 0, 0, 0)
        ),
        "whole_rows_us": device_us(lambda: target.copy_(whole, non_blocking=True), 4),
        "ours_host_us": host_time,
        "whole_rows_host_us": host_us(lambda: target.copy_(whole, non_blocking=True))
        if whole.nbytes < 2**26
        else None,
    }


def move_case(rows: int, max_len: int) -> dict[str, object]:
    """Swap two long rows: a copy on the device instead of an upload."""
    rng, width = np.random.default_rng(0), max_len // 16
    table = MultiGroupBlockTable(rows, max_len, 8192, DEVICE, [16])
    table.add_rows([0, 1], [[width, width]], [rng.integers(1, 2**20, 2 * width)])
    table.commit_block_table(rows)

    def swap() -> None:
        table.swap_row(0, 1)
        table.commit_block_table(rows)

    times = []
    for _ in range(40):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        swap()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    np.testing.assert_array_equal(
        table[0].get_device_tensor().cpu().numpy(), table[0].get_numpy_array()
    )
    return {
        "case": f"swap two rows of {width}",
        "bytes": table.device_tables.last_commit.bytes,
        "host_and_device_us": statistics.median(times),
    }


def builds_case() -> dict[str, object]:
    """Builds of the kernels before and after 40 steps of changing token and request counts."""
    rng = np.random.default_rng(0)
    table = MultiGroupBlockTable(512, 4096, 8192, DEVICE, [16, 32])
    table.add_rows(np.arange(512), [np.full(512, 9)] * 2, [np.arange(1, 9 * 512 + 1)] * 2)

    def step() -> None:
        n = int(rng.integers(1, 513))
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 16, n))]).astype(np.int32)
        table.append_rows([n - 1], [[1]] * 2, [[5]] * 2)
        table.commit_block_table(512)
        where = torch.zeros(int(starts[-1]) + 1, dtype=torch.int64, device=DEVICE)[1:]
        table.compute_slot_mapping(n, torch.from_numpy(starts).to(DEVICE), where)

    step()
    kernels = (slot_kernel.slot_mapping_kernel, upload_kernel.upload_kernel)
    before = [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]
    for _ in range(40):
        step()
    after = [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]
    if before != after:
        raise RuntimeError(f"token counts compiled kernels anew: {before} -> {after}")
    return {"case": "builds after 40 step sizes", "slot_and_upload": after}


def graph_case() -> dict[str, object]:
    """Capture a slot mapping, change rows, replay, compare."""
    rng = np.random.default_rng(0)
    table = MultiGroupBlockTable(64, 4096, 256, DEVICE, [16, 32])
    starts = torch.arange(65, dtype=torch.int32, device=DEVICE)
    positions = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    table.compute_slot_mapping(64, starts, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.compute_slot_mapping(64, starts, positions)
    for _ in range(20):
        counts = rng.integers(1, 100, 64)
        table.add_rows(
            np.arange(64), [counts] * 2, [rng.integers(1, 2**20, counts.sum()) for _ in range(2)]
        )
        table.swap_row(*rng.permutation(64)[:2].tolist())
        table.commit_block_table(64)
        where = rng.integers(0, 4096, 64)
        positions.copy_(torch.from_numpy(where))
        graph.replay()
        for one in table.block_tables:
            want = one.geometry.slots(one.get_numpy_array(), np.arange(64), where)
            np.testing.assert_array_equal(one.slot_mapping[:64].cpu().numpy(), want)
    return {"case": "capture, change rows, replay", "equal": True}


def main() -> None:
    """Print one JSON line a case; write them to ``--json`` too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [graph_case(), builds_case()]
    for groups in (1, 4):
        results.append(slot_case("R256", np.ones(256, int), groups))
        results.append(slot_case("R4096", np.ones(4096, int), groups, 256))
        results.append(slot_case("prefill 8192", np.array([8192]), groups))
        results.append(
            slot_case("mixed 255 + 2048", np.array([1] * 200 + [2048] + [1] * 55), groups)
        )
    results += [upload_case(256, n) for n in (8192, 131072, 1048576)]
    results += [upload_case(1024, 131072), move_case(8, 1048576)]
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results.append({"case": "machine", **machine, "triton": triton.__version__})
    for result in results:
        print(json.dumps(result))
    if options.json:
        options.json.write_text("".join(json.dumps(result) + "\n" for result in results))


if __name__ == "__main__":
    main()

"""Bytes of a commit follow the changes, not the table; token counts compile nothing new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from blocktable.core.table import HostTable
from blocktable.device import upload
from blocktable.device.upload import DeviceTables

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("helper", [True, False])
def test_decode_steps_of_a_million_token_table(
    monkeypatch: pytest.MonkeyPatch, helper: bool
) -> None:
    """1,024 rows: on average 1,024 / 16 rows cross a border (512 bytes); all of them, 8 KiB."""
    if not helper:
        monkeypatch.setattr(upload, "take_entries", None)
    rng, rows, width = np.random.default_rng(0), 1024, 2**20 // 16
    host, tables = HostTable(rows, width), DeviceTables(rows, [width], "cpu")
    lengths = rng.integers(0, 16, rows)
    host.append(np.arange(rows), 3, rng.integers(1, 99, 3 * rows))
    tables.plan([(0, host)])
    sizes = []
    for _ in range(64):
        crossing = np.flatnonzero(lengths % 16 == 0)
        host.append_one(crossing, rng.integers(1, 2**20, len(crossing)))
        sizes.append(4 * tables.plan([(0, host)]).num_ints)
        lengths += 1
    assert np.mean(sizes) <= 1024
    host.append_one(np.arange(rows), rng.integers(1, 2**20, rows))
    assert 4 * tables.plan([(0, host)]).num_ints <= 8 * 1024 + 64
    assert not host.is_dirty


@pytest.mark.parametrize("helper", [True, False])
def test_moving_long_rows_uploads_a_few_bytes(
    monkeypatch: pytest.MonkeyPatch, helper: bool
) -> None:
    if not helper:
        monkeypatch.setattr(upload, "take_entries", None)
    host, tables = HostTable(8, 2**16), DeviceTables(8, [2**16], "cpu")
    for row in range(4):
        host.append([row], [2**16 - row], np.arange(1, 2**16 + 1 - row))
    tables.plan([(0, host)])
    host.swap(0, 1)
    host.move(2, 7)
    host.move_rows([0, 1, 3], [1, 3, 0])
    assert 4 * tables.plan([(0, host)]).num_ints < 400


SPECIALISATIONS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from blocktable.device.gather_kernel import gather_rows_kernel
from blocktable.device.slot_kernel import slot_mapping_kernel
from blocktable.device.upload_kernel import upload_kernel

backend = make_backend(GPUTarget("cuda", 90, 32))

def seen(kernel, calls):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return len({str(bind(*call)[1]) for call in calls})

ints, longs = torch.zeros(4096, dtype=torch.int32), torch.zeros(4096, dtype=torch.int64)
counts = (0, 1, 2, 15, 16, 17, 1000, 4096)
print(
    seen(slot_mapping_kernel, [
        (ints, longs, ints[n % 3:], longs[n % 5:], ints[n % 7:], longs, n, n, n, n % 13, n, True,
         256)
        for n in counts
    ]),
    seen(upload_kernel, [(ints, ints[n % 3:], n, n, n, n, n, 128, 512) for n in counts]),
    seen(gather_rows_kernel, [(ints, ints, ints[n % 3:], longs, n, 256) for n in counts]),
)
"""


def test_changing_counts_compile_nothing_new() -> None:
    """Triton's own specialisation sees one kernel each, for any count and any slice."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SPECIALISATIONS],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["1", "1", "1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for the GPU at hand")
def test_changing_counts_compile_nothing_on_the_gpu() -> None:
    from blocktable.device import slot_kernel, upload_kernel
    from blocktable.device.block_table import MultiGroupBlockTable

    device, rng = torch.device("cuda"), np.random.default_rng(0)
    table = MultiGroupBlockTable(64, 1024, 777, device, [16, 32])
    table.add_rows(np.arange(64), [np.full(64, 9)] * 2, [np.arange(1, 9 * 64 + 1)] * 2)
    kernels = (slot_kernel.slot_mapping_kernel, upload_kernel.upload_kernel)
    builds = []
    for _ in range(20):
        n = int(rng.integers(1, 65))
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 9, n))]).astype(np.int32)
        table.append_row([[5], [6]], n - 1)
        table.commit_block_table(64)
        where = torch.zeros(int(starts[-1]) + 1, dtype=torch.int64, device=device)
        table.compute_slot_mapping(n, torch.from_numpy(starts).to(device), where[1:])
        builds.append([sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels])
    assert builds[0] == builds[-1]

"""A step in flight sees the table as it was committed for it, however far the host runs ahead."""

from __future__ import annotations

import numpy as np
import torch

from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import StaticInputs


def keep_busy(device: torch.device) -> None:
    """Make the device lag behind by some milliseconds, so that the host really runs ahead."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


def test_commits_in_flight_do_not_change(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    table = MultiGroupBlockTable(16, 2048, 64, device, [16, 32], [16, 16])
    keep_busy(device)
    snapshots = []
    for step in range(12):
        for _ in range(3):
            count = int(rng.integers(1, 60))
            table.add_row(
                [rng.integers(1, 2**20, count).tolist() for _ in range(2)], int(rng.integers(16))
            )
        a, b = rng.permutation(16)[:2].tolist()
        (table.swap_row if step % 2 else table.move_row)(a, b)
        table.commit_block_table(16)
        snapshots.append(
            [
                (t.get_device_tensor().clone(), t.get_numpy_array().copy())
                for t in table.block_tables
            ]
        )
    for step in snapshots:
        for on_device, on_host in step:
            np.testing.assert_array_equal(on_device.cpu().numpy(), on_host)


def test_staged_inputs_in_flight_do_not_change(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    inputs = StaticInputs(8, 64, device)
    keep_busy(device)
    seen = []
    for _ in range(10):
        n = int(rng.integers(1, 9))
        query = rng.integers(1, 9, n)
        ids = rng.integers(0, 10**6, int(query.sum()))
        step = inputs.stage(rng.permutation(8)[:n], query, query + 5, ids)
        seen.append((step.input_ids.clone(), ids, step.seq_lens.clone(), query + 5))
    for got_ids, ids, got_lens, lens in seen:
        assert got_ids.tolist() == ids.tolist() and got_lens.tolist() == lens.tolist()

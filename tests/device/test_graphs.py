"""Padded sizes, static inputs and graph replay (captured where there is CUDA)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.errors import ConfigError
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.graphs import GraphPool, StaticInputs, capture_sizes, padded_size
from blocktable.device.staging import StagingRing


@pytest.mark.parametrize("largest", [1, 2, 7, 8, 9, 100, 256, 257, 1000, 1024])
def test_capture_sizes_cover_with_little_padding(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == 1
    for size in range(1, largest + 1):
        padded = padded_size(size, sizes)
        assert padded is not None and size <= padded < size + 16
    assert padded_size(largest + 1, sizes) is None
    with pytest.raises(ConfigError):
        capture_sizes(0)


def test_static_inputs_are_padded_and_stay_where_they_are(device: torch.device) -> None:
    inputs, rng, addresses = StaticInputs(7, 50, device), np.random.default_rng(0), set()
    for _ in range(12):
        n = int(rng.integers(0, 8))
        query = rng.integers(0, 8, n)
        done = rng.integers(0, 90, n)
        ids = rng.integers(0, 10**6, int(query.sum()))
        rows = rng.permutation(20)[:n]
        reqs, tokens = int(rng.integers(n, 8)), int(rng.integers(len(ids), 51))
        step = inputs.stage(
            rows, query, done + query, ids, num_reqs_padded=reqs, num_tokens_padded=tokens
        )
        starts = np.concatenate([[0], np.cumsum(query)])
        want = [done[i] + j for i in range(n) for j in range(query[i])]
        assert step.positions.tolist() == want + [0] * (tokens - len(ids))
        assert step.input_ids.tolist() == ids.tolist() + [0] * (tokens - len(ids))
        assert step.query_start_loc.tolist() == starts.tolist() + [len(ids)] * (reqs - n)
        assert step.seq_lens.tolist() == (done + query).tolist() + [0] * (reqs - n)
        assert step.rows.tolist() == rows.tolist() + [-1] * (reqs - n)
        assert step.query_start_loc_cpu.tolist() == step.query_start_loc.tolist()
        assert step.seq_lens_cpu.tolist() == step.seq_lens.tolist()
        addresses.add(step.query_start_loc.data_ptr())
    assert len(addresses) == 1


def test_static_inputs_refuse_what_does_not_fit(device: torch.device) -> None:
    inputs = StaticInputs(2, 4, device)
    for rows, query, ids, options in [
        ([0, 1, 2], [1, 1, 1], 3, {}),
        ([0], [5], 5, {}),
        ([0], [2], 3, {}),
        ([0, 1], [1, 1], 2, {"num_reqs_padded": 1}),
        ([0], [2], 2, {"num_tokens_padded": 1}),
        ([0], [2], 2, {"num_tokens_padded": 5}),
    ]:
        with pytest.raises(ValueError):
            inputs.stage(np.array(rows), np.array(query), np.array(query), np.zeros(ids), **options)


def test_staging_grows_and_takes_turns(device: torch.device) -> None:
    ring = StagingRing(16, device)
    seen = []
    for size in (8, 16, 17, 1000, 4, 4):
        with ring.next(size) as slot:
            assert len(slot.array) >= size
            seen.append(slot)
    assert seen[0] is not seen[1] and len({id(slot) for slot in ring.slots}) == 3


def test_a_padded_decode_step_runs_as_one_graph(device: torch.device) -> None:
    """Rows change between replays; every replay sees them, padded lanes stay harmless."""
    rng, sizes = np.random.default_rng(0), capture_sizes(6)
    table = MultiGroupBlockTable(6, 160, 16, device, [16, 8], [16, 8])
    inputs, graphs = StaticInputs(6, 16, device), GraphPool(sizes, device)
    lens = np.zeros(6, int)

    def step(padded: int) -> tuple[torch.Tensor, ...]:
        fixed = inputs.at(padded, padded)
        table.compute_slot_mapping(padded, fixed.query_start_loc, fixed.positions, fixed.rows)
        return tuple(one.slot_mapping * 1 for one in table.block_tables)

    for _ in range(25):
        n = int(rng.integers(1, 7))
        rows = rng.permutation(6)[:n]
        for row in rows.tolist():
            lens[row] = lens[row] % 150 + 1
            blocks = [-(-int(lens[row]) // size) for size in (16, 8)]
            table.add_row([rng.integers(1, 999, count) for count in blocks], row)
        table.commit_block_table(6)
        padded = padded_size(n, sizes)
        ones = np.ones(n, int)
        staged = inputs.stage(
            rows, ones, lens[rows], ones, num_reqs_padded=padded, num_tokens_padded=padded
        )
        assert staged.rows.shape == (padded,)
        outputs = graphs.run(n, step)
        for one, got in zip(table.block_tables, outputs, strict=True):
            want = one.geometry.slots(one.get_numpy_array(), rows, lens[rows] - 1)
            assert got[:n].tolist() == want.tolist() and (want >= 0).all()
            assert (got[n:] == -1).all()
    assert (len(graphs.captured) > 2) == (device.type == "cuda")
    assert graphs.run(99, lambda size: size) == 99

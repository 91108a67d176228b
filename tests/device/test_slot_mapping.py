"""Slots against a per-token loop that follows the formula, and against the NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.errors import ConfigError
from blocktable.device.block_table import BlockTable, MultiGroupBlockTable
from blocktable.device.slot_mapping import context_parallel_rank


def naive_slot(
    entries: np.ndarray, position: int, block: int, kernel: int, world: int, rank: int, step: int
) -> int:
    """One token's slot, written from the definition: manager column, owner, local offset."""
    span = block * world
    offset = position % span
    if position < 0 or (offset // step) % world != rank:
        return -1
    local = offset // (world * step) * step + offset % step
    column = position // span * (block // kernel) + local // kernel
    if column >= len(entries) or entries[column] < block // kernel:
        return -1  # beyond the row, or the null block
    return int(entries[column]) * kernel + local % kernel


def int_tensor(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


def long_tensor(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int64, device=device)


def ragged(rng: np.random.Generator, lens: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(lens)])
    positions = np.concatenate(
        [np.arange(n) + rng.integers(0, limit) for n in lens] or [np.zeros(0)]
    )
    return starts, positions.astype(np.int64)


@pytest.mark.parametrize(
    "block, kernel, world, step",
    [
        (16, 16, 1, 1), (7, 7, 1, 1), (32, 16, 1, 1), (128, 64, 4, 128), (128, 64, 4, 1),
        (128, 32, 2, 16), (16, 16, 8, 4), (48, 16, 3, 8), (1, 1, 1, 1),
    ],
)  # fmt: skip
def test_every_geometry(
    device: torch.device, block: int, kernel: int, world: int, step: int
) -> None:
    rng = np.random.default_rng(block + world)
    rows, columns, tokens = 6, 9, 700
    for rank in range(world):
        table = BlockTable(block, rows, columns, tokens, device, kernel, world, rank, step)
        for row in range(rows):
            table.add_row(rng.integers(1, 1000, int(rng.integers(0, columns + 1))), row)
        table.commit_block_table(rows)
        lens = rng.integers(0, 120, rows)
        starts, positions = ragged(rng, lens, block * world * columns + 5)
        table.compute_slot_mapping(rows, int_tensor(starts, device), long_tensor(positions, device))
        got = table.slot_mapping.cpu().numpy()
        entries = table.get_numpy_array()
        want = np.full(tokens, -1, np.int64)
        for row in range(rows):
            for at in range(starts[row], starts[row + 1]):
                want[at] = naive_slot(
                    entries[row], int(positions[at]), block, kernel, world, rank, step
                )
        np.testing.assert_array_equal(got, want)
        oracle = table.geometry.slot_mapping(entries, starts, positions, np.zeros(tokens, np.int64))
        np.testing.assert_array_equal(got, oracle)


def test_ranks_share_out_every_position_once(device: torch.device) -> None:
    """Manager block 128, kernel block 64, world 4, interleave 128: each of 2,048 positions has one
    owner and no two of a rank share a slot (a formula in kernel blocks is wrong for 1,024)."""
    positions = np.arange(2048)
    seen = np.zeros(2048, int)
    for rank in range(4):
        table = BlockTable(128, 1, 4, 2048, device, 64, 4, rank, 128)
        table.add_row([5, 2, 9, 4], 0)
        table.commit_block_table(1)
        table.compute_slot_mapping(1, int_tensor([0, 2048], device), long_tensor(positions, device))
        slots = table.slot_mapping.cpu().numpy()
        mine = slots >= 0
        seen += mine
        assert mine.sum() == 512 and len(np.unique(slots[mine])) == 512
    assert (seen == 1).all()


def test_all_groups_in_one_call_and_replicated_groups(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    table = MultiGroupBlockTable(
        4, 400, 300, device, [16, 32, 8], [16, 16, 8], cp_world_size=2, cp_rank=1, cp_interleave=4,
        replicated=[False, False, True],
    )  # fmt: skip
    assert [t.geometry.cp_world for t in table.block_tables] == [2, 2, 1]
    for row in range(4):
        table.add_row([rng.integers(1, 99, n) for n in (12, 6, 50)], row)
    table.commit_block_table(4)
    starts, positions = ragged(rng, np.array([70, 1, 0, 100]), 200)
    order = np.array([2, 0, 3, 1])
    table.compute_slot_mapping(
        4, int_tensor(starts, device), long_tensor(positions, device), int_tensor(order, device)
    )
    for g, one in enumerate(table.block_tables):
        rows = np.repeat(order, np.diff(starts))
        want = one.geometry.slots(one.get_numpy_array(), rows, positions)
        np.testing.assert_array_equal(one.slot_mapping[: len(want)].cpu().numpy(), want, f"{g}")
        assert (one.slot_mapping[len(want) :] == -1).all()


def test_one_group_alone_leaves_the_others(device: torch.device) -> None:
    table = MultiGroupBlockTable(2, 64, 8, device, [16, 16, 16], [16, 16, 16])
    table.add_row([[1], [2], [3]], 0)
    table.commit_block_table(2)
    table[1].compute_slot_mapping(1, int_tensor([0, 2], device), long_tensor([0, 3], device))
    assert table[1].slot_mapping.tolist() == [32, 35] + [-1] * 6
    assert (table[0].slot_mapping == -1).all() and (table[2].slot_mapping == -1).all()


def test_positions_beyond_a_narrow_row_are_padded(device: torch.device) -> None:
    """A row of two blocks of 4 and positions 0..9: the last two have no slot."""
    table = BlockTable(4, 2, 2, 12, device)
    table.add_row([5, 9], 0)
    table.add_row([7, 8], 1)  # what an index past the row would read
    table.commit_block_table(2)
    table.compute_slot_mapping(1, int_tensor([0, 10], device), long_tensor(np.arange(10), device))
    assert table.slot_mapping.tolist() == [20, 21, 22, 23, 36, 37, 38, 39, -1, -1, -1, -1]


@pytest.mark.parametrize("position", [-1, 2**31 - 1, 2**31, 2**40, -(2**40)])
def test_absurd_positions_are_padded(device: torch.device, position: int) -> None:
    table = BlockTable(16, 1, 4, 4, device)
    table.add_row([1, 2, 3, 4], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping(1, int_tensor([0, 2], device), long_tensor([position, 17], device))
    assert table.slot_mapping.tolist() == [-1, 33, -1, -1]


def test_slots_are_64_bit(device: torch.device) -> None:
    """Block ids near 2**31: slot = id * 16 passes 2**34."""
    last = 2**31 - 1
    table = BlockTable(16, 1, 2, 4, device)
    table.add_row([last, last - 1], 0)
    table.commit_block_table(1)
    table.compute_slot_mapping(1, int_tensor([0, 2], device), long_tensor([3, 31], device))
    assert table.slot_mapping.dtype == torch.int64
    assert table.slot_mapping.tolist()[:2] == [last * 16 + 3, (last - 1) * 16 + 15]


def test_the_null_block_gets_no_slot(device: torch.device) -> None:
    """Nulls inside a row (left its window), also where the null block is two kernel blocks."""
    for kernel in (16, 8):
        table = BlockTable(16, 1, 3, 4, device, kernel)
        table.add_row([0, 3], 0)
        table.commit_block_table(1)
        table.compute_slot_mapping(
            1, int_tensor([0, 4], device), long_tensor([0, 9, 15, 16], device)
        )
        assert table.slot_mapping.tolist() == [-1, -1, -1, 48]
        oracle = table.geometry.slots(table.get_numpy_array(), np.zeros(4, int), [0, 9, 15, 16])
        assert oracle.tolist() == [-1, -1, -1, 48]


def test_padding_of_requests_and_tokens(device: torch.device) -> None:
    """Padded to 4 requests and 6 tokens: only live tokens get slots, whatever was there before."""
    table = BlockTable(16, 4, 4, 8, device)
    table.add_row([3], 0)
    table.add_row([4, 6], 1)
    table.commit_block_table(4)
    starts = int_tensor([0, 1, 2, 2, 2], device)
    table.slot_mapping.fill_(77)
    table.compute_slot_mapping(4, starts, long_tensor([5, 16, 0, 0, 0, 0], device))
    assert table.slot_mapping.tolist() == [53, 96, -1, -1, -1, -1, -1, -1]
    absent = int_tensor([4, 2**31 - 1, -5, 0], device)  # rows that the table does not have
    table.compute_slot_mapping(4, starts, long_tensor([16, 5, 0, 0, 0, 0], device), absent)
    assert (table.slot_mapping == -1).all()
    padded = int_tensor([1, 0, -1, -1], device)
    table.compute_slot_mapping(4, starts, long_tensor([16, 5, 0, 0, 0, 0], device), padded)
    assert table.slot_mapping.tolist() == [96, 53, -1, -1, -1, -1, -1, -1]
    table.compute_slot_mapping(0, int_tensor([0], device), long_tensor([], device))
    assert (table.slot_mapping == -1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 255, 256, 257, 600])
def test_mixed_and_pure_decode_batches(device: torch.device, count: int) -> None:
    """Every size around the kernel's tile; a batch whose requests have one token each, and one
    whose first has many (token i is not request i)."""
    rng = np.random.default_rng(count)
    table = BlockTable(16, count, 4, 2048, device)
    table.add_rows(np.arange(count), np.full(count, 4), rng.integers(1, 10**6, 4 * count))
    table.commit_block_table(count)
    for first in (1, 60):
        lens = np.ones(count, int)
        lens[0] = first
        starts, positions = ragged(rng, lens, 64)
        table.compute_slot_mapping(
            count, int_tensor(starts, device), long_tensor(positions, device)
        )
        want = table.geometry.slot_mapping(
            table.get_numpy_array(), starts, positions, np.zeros(2048, np.int64)
        )
        np.testing.assert_array_equal(table.slot_mapping.cpu().numpy(), want)


def test_errors_name_the_limit(device: torch.device) -> None:
    table = BlockTable(16, 2, 2, 4, device)
    for reqs, starts, positions in [(2, [0, 1], [0]), (1, [0, 5], [0] * 5), (3, [0] * 4, [])]:
        with pytest.raises(ValueError):
            table.compute_slot_mapping(
                reqs, int_tensor(starts, device), long_tensor(positions, device)
            )
    with pytest.raises(ValueError, match=r"128.*16|16.*128"):
        BlockTable(16, 2, 2, 4, device, kernel_block_size=128)


def test_context_parallel_groups_combine() -> None:
    ranks = {context_parallel_rank(2, p, 3, d) for p in range(2) for d in range(3)}
    assert ranks == {(6, r) for r in range(6)}
    assert context_parallel_rank(2, 1, 3, 2) == (6, 1 * 3 + 2)
    assert context_parallel_rank() == (1, 0)
    with pytest.raises(ConfigError):
        context_parallel_rank(2, 2)

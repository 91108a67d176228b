"""Faults that tables and slot mappings of other systems had, each with the right values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.errors import ConfigError, RowError
from blocktable.core.geometry import byte_offset, check_slots, element_offset
from blocktable.device.block_table import BlockTable, MultiGroupBlockTable


@pytest.mark.parametrize("how", ["move", "add", "swap", "clear", "truncate", "condense"])
@pytest.mark.parametrize("short", [0, 1, 43, 53, 54])
def test_no_id_of_an_earlier_occupant_remains(device: torch.device, how: str, short: int) -> None:
    """Row 0 held blocks 1..54, then another request's ``short`` blocks from 55 on."""
    table = BlockTable(16, 3, 54, 8, device)
    first, second = list(range(1, 55)), list(range(55, 55 + short))
    table.add_row(first, 0)
    table.add_row(second, 1)
    table.commit_block_table(3)
    want = {0: second, 1: []}
    if how == "move":
        table.move_row(1, 0)
    elif how == "add":
        table.add_row(second, 0)
        want[1] = second
    elif how == "swap":
        table.swap_row(0, 1)
        want[1] = first
    elif how == "clear":
        table.clear_row(0)
        table.append_row(second, 0)
        want[1] = second
    elif how == "truncate":
        table.truncate_row(0, 0)
        table.append_row(second, 0)
        table.clear_row(1)
    else:
        table.clear_row(0)
        table.move_rows([1], [0])
    table.commit_block_table(3)
    for rows in (table.get_numpy_array(), table.get_device_tensor().cpu().numpy()):
        for row, ids in want.items():
            assert rows[row].tolist() == ids + [0] * (54 - len(ids))
    assert table.num_blocks_per_row.tolist() == [len(want[0]), len(want[1]), 0]


def test_last_position_of_a_length_that_is_no_multiple(device: torch.device) -> None:
    """Length 9,416 in blocks of 32: 295 blocks, rows of 296 (a multiple of 128 / 32)."""
    table = MultiGroupBlockTable(1, 9416, 8, device, [32])
    assert table[0].max_num_blocks_per_req == 296
    table.add_row([list(range(1, 296))], 0)
    table.commit_block_table(1)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    table.compute_slot_mapping(1, starts, torch.tensor([9415], device=device))
    assert table[0].slot_mapping[0] == 295 * 32 + 7
    assert table[0].get_device_tensor()[0, 295] == 0


@pytest.mark.parametrize(
    "size, length, width",
    [(32, 9416, 296), (16, 1, 8), (128, 129, 2), (256, 600, 3), (1, 100, 128), (7, 100, 18)],
)
def test_row_widths(device: torch.device, size: int, length: int, width: int) -> None:
    assert MultiGroupBlockTable(1, length, 8, device, [size])[0].max_num_blocks_per_req == width


def test_a_full_row_refuses_draft_tokens_blocks(device: torch.device) -> None:
    """625 blocks of 128 are 80,000 tokens; a further block, or a position there, has no place."""
    table = BlockTable(128, 1, 625, 8, device)
    table.add_row(np.arange(1, 626), 0)
    with pytest.raises(RowError, match=r"626.*625"):
        table.append_row([700], 0)
    table.commit_block_table(1)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    table.compute_slot_mapping(1, starts, torch.arange(79_999, 80_003, device=device))
    assert table.slot_mapping.tolist() == [625 * 128 + 127] + [-1] * 7


def test_kernel_blocks_of_a_manager_block(device: torch.device) -> None:
    table = BlockTable(1024, 1, 4, 8, device, kernel_block_size=128)
    table.add_row([3], 0)
    assert table.get_numpy_array()[0, :9].tolist() == [*range(24, 32), 0]
    assert table.map_to_kernel_blocks([0, 1, 2]).tolist() == list(range(24))
    split = BlockTable(32, 1, 4, 8, device, kernel_block_size=16)
    assert split.map_to_kernel_blocks([0, 1, 2]).tolist() == [0, 1, 2, 3, 4, 5]
    for size, kernel in [(16, 128), (48, 32), (100, 16)]:
        with pytest.raises(ValueError, match=rf"{kernel}.*{size}"):
            BlockTable(size, 1, 4, 8, device, kernel_block_size=kernel)


def test_lists_of_unequal_length_are_refused(device: torch.device) -> None:
    for options in (
        {"kernel_block_sizes": [16]},
        {"max_num_blocks": [4]},
        {"replicated": [True, False, True]},
    ):
        with pytest.raises(ValueError):
            MultiGroupBlockTable(2, 64, 8, device, [16, 16], **options)
    with pytest.raises(ValueError):
        MultiGroupBlockTable(2, 64, 8, device, [])


def test_ids_whose_kernel_blocks_pass_31_bits_are_refused(device: torch.device) -> None:
    table = BlockTable(32, 1, 4, 8, device, kernel_block_size=16)
    table.add_row([2**30 - 1], 0)
    assert table.get_numpy_array()[0, :2].tolist() == [2**31 - 2, 2**31 - 1]
    with pytest.raises(RowError, match=str(2**30)):
        table.add_row([2**30], 0)


def test_offsets_are_formed_in_64_bits() -> None:
    """32 heads x 128 x 16-token blocks: slot 524,288 begins at element 2**31."""
    per_slot = 32 * 128
    assert element_offset(np.int32(524_288), per_slot) == 2_147_483_648
    assert byte_offset(np.int32(524_288), per_slot, 2) == 4_294_967_296
    assert element_offset(np.int32(3_728_271), 576) == 2_147_484_096


def test_slots_outside_the_pool_are_refused() -> None:
    check_slots([16_383, 0, -1], 16_384)
    for slot in (16_384, -2):
        with pytest.raises(ConfigError, match=str(slot)):
            check_slots([0, slot], 16_384)


def test_tables_too_large_to_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2147483648"):
        BlockTable(16, 2**20, 2**11, 8, torch.device("meta"))

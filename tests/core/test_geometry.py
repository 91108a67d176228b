"""The slot formula, 64-bit offsets, kernel blocks, row widths, context parallel."""

import numpy as np
import pytest

from blocktable.core.errors import ConfigError
from blocktable.core.geometry import SlotGeometry, byte_offset, check_slots, element_offset
from blocktable.core.runs import block_runs
from blocktable.core.specs import FullAttentionSpec, MambaSpec
from blocktable.groups.pages import unify_page_sizes


def test_positions_beyond_a_narrow_row_get_no_slot() -> None:  # case B06
    rows = np.array([[5, 9]], np.int32)
    slots = SlotGeometry(4).slots(rows, np.zeros(10, int), np.arange(10))
    assert slots.tolist() == [20, 21, 22, 23, 36, 37, 38, 39, -1, -1] and slots.dtype == np.int64


def test_slots_outside_the_cache_are_named() -> None:  # case B06, token pool
    check_slots([16383, -1], 16384)
    for bad in (16384, -2):
        with pytest.raises(ConfigError, match=f"slot {bad} "):
            check_slots([0, bad], 16384)


def test_offsets_are_64_bit() -> None:  # case B10
    slot = np.int32(524288)
    assert element_offset(slot, 32 * 128) == 2147483648
    assert byte_offset(slot, 32 * 128, 2) == 4294967296
    assert element_offset(np.array([3728271], np.int32), 576)[0] == 2147484096
    rows = np.array([[2**31 - 2]], np.int32)
    assert SlotGeometry(16).slots(rows, [0], [15])[0] == (2**31 - 2) * 16 + 15


@pytest.mark.parametrize(
    ("length", "size", "width"),
    [(9416, 32, 296), (9440, 32, 296), (1, 16, 8), (8192, 128, 64), (1000, 256, 4), (51, 17, 7)],
)
def test_row_width(length: int, size: int, width: int) -> None:  # case B12
    assert SlotGeometry(size).row_width(length) == width


def test_last_position_of_an_odd_length() -> None:  # case B12
    geometry = SlotGeometry(32)
    assert geometry.row_width(9416, align=False) == 295
    rows = np.zeros((1, 296), np.int32)
    rows[0, :295] = np.arange(1, 296)
    assert geometry.slots(rows, [0], [9415])[0] == 295 * 32 + 7
    assert geometry.slots(rows, [0], [9440])[0] == -1  # the extra column is null


def test_kernel_blocks() -> None:  # case B14
    assert SlotGeometry(1024, 128).to_kernel_blocks([3]).tolist() == list(range(24, 32))
    assert SlotGeometry(32, 16).to_kernel_blocks([5, 1]).tolist() == [10, 11, 2, 3]
    with pytest.raises(ConfigError, match=r"128 .* 16"):
        SlotGeometry(16, 128)


@pytest.mark.parametrize(("granularity", "size", "padding"), [(16, 1056, 0), (64, 1088, 16384)])
def test_attention_page_meets_the_state(granularity: int, size: int, padding: int) -> None:  # B14
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=128, dtype="bfloat16")
    state = MambaSpec(block_size=16, shapes=((540672,),), dtypes=("int8",))
    grown, padded = unify_page_sizes([attention, state], granularity)
    assert grown.block_size == size
    assert grown.page_size_bytes == padded.page_size_bytes == size * 512
    assert padded.page_size_bytes - 540672 == padding


@pytest.mark.parametrize("heads", [(1, 2), (2, 3), (4, 4), (1, 6, 3)])
def test_attention_pages_without_states(heads: tuple[int, ...]) -> None:
    specs = [FullAttentionSpec(block_size=16, num_kv_heads=h, head_size=8) for h in heads]
    pages = {s.page_size_bytes for s in unify_page_sizes(specs)}
    assert pages == {specs[int(np.argmax(heads))].page_size_bytes}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("size", "kernel", "interleave"), [(4, 4, 1), (8, 4, 2), (128, 64, 128)])
def test_ranks_share_out_every_position_once(
    world: int, size: int, kernel: int, interleave: int
) -> None:
    geometries = [SlotGeometry(size, kernel, world, rank, interleave) for rank in range(world)]
    columns = 3
    blocks = np.array([7, 2, 9])
    rows = geometries[0].to_kernel_blocks(blocks)[None]
    positions = np.arange(columns * size * world)
    slots = np.stack([g.slots(rows, np.zeros_like(positions), positions) for g in geometries])
    owned = slots >= 0
    assert (owned.sum(axis=0) == 1).all()
    for rank in range(world):  # each rank fills its blocks exactly
        mine = slots[rank][owned[rank]]
        assert len(np.unique(mine)) == len(mine) == columns * size
        assert set(mine // size) == set(blocks)
        assert (geometries[rank].owner(positions)[owned[rank]] == rank).all()


def test_slot_mapping_pads_its_tail() -> None:
    rows = np.array([[3, 4], [1, 0]], np.int32)
    out = np.full(8, 99, np.int64)
    SlotGeometry(2).slot_mapping(rows, [0, 3, 4], [0, 1, 2, 1], out)
    assert out.tolist() == [6, 7, 8, 3, -1, -1, -1, -1]


@pytest.mark.parametrize("bad", [
    {"block_size": 0}, {"block_size": 4, "cp_world": 2, "cp_rank": 2},
    {"block_size": 4, "cp_world": 2, "cp_interleave": 3},
])  # fmt: skip
def test_impossible_geometries(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SlotGeometry(**bad)


def test_runs_of_a_row() -> None:
    runs = block_runs(np.array([5, 6, 7, 2, 9, 10], np.int32))
    assert runs.first.tolist() == [5, 2, 9] and runs.length.tolist() == [3, 1, 2]
    assert runs.column.tolist() == [0, 3, 4]
    assert block_runs(np.zeros(0, np.int32)).length.size == 0

"""What back ends are told about a step, per group and per kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.specs import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.metadata import (
    CommonAttentionMetadata,
    CSRMetadataBuilder,
    EncoderOnlyMetadataBuilder,
    MambaMetadataBuilder,
    PagedMetadataBuilder,
    build_for_groups,
    common_metadata,
    cross_attention_seq_lens,
    encoder_only_tables,
    mamba_state_indices,
)


def two_groups(device: torch.device) -> tuple[MultiGroupBlockTable, list[CommonAttentionMetadata]]:
    table = MultiGroupBlockTable(4, 64, 32, device, [4, 4], [4, 4])
    table.add_row([[1, 2], [3, 4]], 0)
    table.add_row([[5, 6, 7], [8, 9, 10]], 1)
    table.commit_block_table(4)
    starts = torch.tensor([0, 1, 4, 4], dtype=torch.int32)
    lens = torch.tensor([7, 10, 0], dtype=torch.int32)
    positions = torch.tensor([6, 7, 8, 9], device=device)
    table.compute_slot_mapping(3, starts.to(device), positions)
    commons = common_metadata(table, starts.to(device), lens.to(device), starts, lens)
    return table, commons


def test_common_metadata_per_group(device: torch.device) -> None:
    table, commons = two_groups(device)
    for g, common in enumerate(commons):
        assert (common.num_reqs, common.num_actual_tokens) == (3, 4)
        assert (common.max_query_len, common.max_seq_len) == (3, 10)
        assert common.query_lens_cpu.tolist() == [1, 3, 0]
        assert common.num_computed_tokens_cpu.tolist() == [6, 7, 0]
        assert common.block_table_tensor.data_ptr() == table[g].get_device_tensor().data_ptr()
        assert common.slot_mapping.data_ptr() == table[g].slot_mapping.data_ptr()
        assert common.block_table_tensor[2].cpu().tolist() == [0] * table[g].max_num_blocks_per_req
    assert commons[0].slot_mapping[:5].tolist() == [10, 27, 28, 29, -1]
    assert commons[1].slot_mapping[:5].tolist() == [18, 39, 40, 41, -1]
    assert commons[0].seq_lens is commons[1].seq_lens


def test_rows_in_any_order(device: torch.device) -> None:
    table, _ = two_groups(device)
    starts = torch.tensor([0, 3, 4, 4], dtype=torch.int32)
    lens = torch.tensor([10, 7, 0], dtype=torch.int32)
    rows = np.array([1, 0, -1], np.int32)
    commons = common_metadata(
        table, starts.to(device), lens.to(device), starts, lens,
        rows=torch.from_numpy(rows).to(device), rows_cpu=torch.from_numpy(rows),
    )  # fmt: skip
    width = table[0].max_num_blocks_per_req
    for common, first in zip(commons, ([5, 6, 7], [8, 9, 10]), strict=True):
        got = common.block_table_tensor.cpu()
        assert got[0].tolist() == first + [0] * (got.shape[1] - 3) and got.shape[1] <= width
        assert not got[2].any()
    again = common_metadata(
        table, starts.to(device), lens.to(device), starts, lens,
        rows=torch.from_numpy(rows).to(device), rows_cpu=torch.from_numpy(rows),
    )  # fmt: skip
    for a, b in zip(commons, again, strict=True):
        assert a.block_table_tensor.data_ptr() == b.block_table_tensor.data_ptr()


class CountingBuilder(PagedMetadataBuilder):
    def __init__(self) -> None:
        self.built = 0

    def build(self, common: CommonAttentionMetadata):
        self.built += 1
        return super().build(common)


def test_equal_specs_build_once_and_swap_their_table(device: torch.device) -> None:
    _, commons = two_groups(device)
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8)
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, sliding_window=8)
    one = CountingBuilder()
    first, second = build_for_groups([one, one], [spec, spec], commons)
    assert one.built == 1 and first.seq_lens is second.seq_lens
    assert second.block_table is commons[1].block_table_tensor
    assert second.slot_mapping is commons[1].slot_mapping
    build_for_groups([one, one], [spec, window], commons)
    assert one.built == 3
    with pytest.raises(ValueError):
        build_for_groups([one], [spec, spec], commons)


def test_csr_builder_swaps_tables_and_keeps_lengths(device: torch.device) -> None:
    table, commons = two_groups(device)
    builder = CSRMetadataBuilder(4)
    host = [
        common.with_block_table(
            torch.from_numpy(table[g].get_numpy_array()[:3]), common.slot_mapping
        )
        for g, common in enumerate(commons)
    ]
    first = builder.build(host[0])
    second = builder.update_block_table(first, host[1].block_table_tensor, host[1].slot_mapping)
    assert first.table.indptr.tolist() == second.table.indptr.tolist() == [0, 2, 5, 5]
    assert first.table.indices.tolist() == [1, 2, 5, 6, 7]
    assert second.table.indices.tolist() == [3, 4, 8, 9, 10]
    assert second.table.last_page_len.tolist() == [3, 2, 0]


def test_encoder_only_has_a_zero_table(device: torch.device) -> None:
    table, slots = encoder_only_tables(5, 7, device)
    assert table.shape == (5, 1) and not table.any() and table.dtype == torch.int32
    assert slots.tolist() == [-1] * 7
    _, commons = two_groups(device)
    built = EncoderOnlyMetadataBuilder().build(commons[0])
    assert built.block_table.shape == (3, 1) and not built.causal
    assert (built.slot_mapping == -1).all() and built.seq_lens is commons[0].seq_lens


@pytest.mark.parametrize("spec_blocks", [0, 2])
def test_state_indices_by_mode(device: torch.device, spec_blocks: int) -> None:
    rng = np.random.default_rng(0)
    host = rng.integers(1, 99, (6, 9)).astype(np.int32)
    table = torch.from_numpy(host).to(device)
    lens = np.array([0, 1, 16, 17, 9 * 16, 40], np.int32)
    on_device = torch.from_numpy(lens).to(device)
    for mode in ("none", "all"):
        assert mamba_state_indices(table, on_device, 16, mode, spec_blocks) is table
    got = mamba_state_indices(table, on_device, 16, "align", spec_blocks).cpu()
    assert got.shape == (6, 1 + spec_blocks) and got.dtype == torch.int32
    for row, length in enumerate(lens.tolist()):
        first = max(length - 1, 0) // 16
        for j in range(1 + spec_blocks):
            want = int(host[row, first + j]) if first + j < 9 else 0
            assert int(got[row, j]) == want
    with pytest.raises(ValueError):
        mamba_state_indices(table, on_device, 16, "some")  # type: ignore[arg-type]


def test_mamba_builder_marks_initial_states(device: torch.device) -> None:
    _, commons = two_groups(device)
    spec = MambaSpec(block_size=4, shapes=((2,),), dtypes=("float32",), cache_mode="align")
    builder = MambaMetadataBuilder(spec)
    built = builder.build(commons[0])
    assert built.state_indices.flatten().tolist() == [2, 7, 0]
    assert built.has_initial_state.tolist() == [True, True, False]
    other = builder.update_block_table(built, commons[1].block_table_tensor, built.seq_lens)
    assert other.state_indices.flatten().tolist() == [4, 10, 0]


def test_cross_attention_lengths_must_fit_their_rows() -> None:
    """An encoder that always emits 1,500 positions needs 47 blocks of 32, not 32."""
    assert cross_attention_seq_lens(np.array([1500, 0]), 32, 47).tolist() == [1500, 0]
    with pytest.raises(ValueError, match=r"47 blocks.*32"):
        cross_attention_seq_lens(np.array([1500]), 32, 32)

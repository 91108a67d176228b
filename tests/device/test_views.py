"""One table in the shapes other kernels read: dense, CSR, per token, DLPack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blocktable.core.types import NULL_BLOCK
from blocktable.device.block_table import BlockTable
from blocktable.device.views import csr_view, dense_view, dlpack, token_view


def filled(device: torch.device, rng: np.random.Generator) -> BlockTable:
    table = BlockTable(4, 8, 16, 64, device)
    for row in range(8):
        table.add_row(rng.integers(1, 99, int(rng.integers(0, 17)) if row else 0), row)
    table.commit_block_table(8)
    return table


@pytest.mark.parametrize("rows", [[3], [2, 3, 4], [7, 0, 7, 1], [0], []])
def test_dense_rows_in_any_order(device: torch.device, rows: list[int]) -> None:
    table = filled(device, np.random.default_rng(0))
    counts, host = table.num_blocks_per_row, table.get_numpy_array()
    width = max([1, *(int(counts[row]) for row in rows)])
    buffer = torch.full((8, 16), 9, dtype=torch.int32, device=device)
    for view in (
        dense_view(table.get_device_tensor(), counts, np.array(rows, np.int32)),
        dense_view(table.get_device_tensor(), counts, np.array(rows, np.int32), out=buffer),
    ):
        want = host[np.array(rows, int), :width]
        np.testing.assert_array_equal(view.block_table.cpu().numpy(), want)
        np.testing.assert_array_equal(view.counts.cpu().numpy(), counts[np.array(rows, int)])
    assert not rows or buffer.data_ptr() == view.block_table.data_ptr()


def test_neighbouring_rows_are_not_copied(device: torch.device) -> None:
    table = filled(device, np.random.default_rng(0))
    whole = table.get_device_tensor()
    view = dense_view(whole, table.num_blocks_per_row, np.array([2, 3, 4], np.int32))
    assert view.block_table.data_ptr() == whole[2:].data_ptr()


@pytest.mark.parametrize("page", [1, 3, 16])
def test_csr_and_tokens_agree_with_loops(page: int) -> None:
    rng = np.random.default_rng(page)
    rows = rng.integers(1, 1000, (9, 7)).astype(np.int32)
    even = np.array([0, 1, page, page + 1, page * 7, page * 7 - 1, 0, 2 * page - 1, 2 * page])
    one_long = np.array([1, 0, 0, page * 7, 0, 0, 1, 0, 0])
    for lens in (even, one_long, even[:0]):
        check_views(rows[: len(lens)], lens, page)
    for build in (csr_view, token_view):
        with pytest.raises(ValueError, match=r"8 pages.*7"):
            build(rows[:1], np.array([7 * page + 1]), page)


def check_views(rows: np.ndarray, lens: np.ndarray, page: int) -> None:
    csr, (indptr, slots) = csr_view(rows, lens, page), token_view(rows, lens, page)
    assert csr.indptr.dtype == csr.indices.dtype == csr.last_page_len.dtype == np.int32
    for i, length in enumerate(lens.tolist()):
        pages = -(-length // page)
        assert csr.indices[csr.indptr[i] : csr.indptr[i + 1]].tolist() == rows[i, :pages].tolist()
        assert csr.last_page_len[i] == (length - (pages - 1) * page if pages else 0)
        want = [int(rows[i, p // page]) * page + p % page for p in range(length)]
        assert slots[indptr[i] : indptr[i + 1]].tolist() == want


def test_dlpack_shares_the_memory(device: torch.device) -> None:
    table = filled(device, np.random.default_rng(1))
    seen = torch.utils.dlpack.from_dlpack(dlpack(table.get_device_tensor()))
    assert seen.data_ptr() == table.get_device_tensor().data_ptr()
    if device.type == "cpu":
        other = np.from_dlpack(table.get_device_tensor())
        table.add_row([5, 6], 0)
        table.commit_block_table(1)
        assert other[0, :3].tolist() == [5, 6, NULL_BLOCK]

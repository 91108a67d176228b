"""One table, seen the way other kernels want it.

    host rows            dense(rows [2, 0])     CSR                       per token, page 4
    0: 7 8 .             9 0                    indptr  0 2 2 3           28 29 30 31 32
    1: . . .             7 8                    indices 7 8 9             36
    2: 9 . .                                    last    1 0 1
    (lengths 5, 0, 1)

The CSR and per-token views are built on the host from the host table: planning a kernel
needs no device sync.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.types import BlockIds, Counts, RowIds, Slots


class CSRTable(NamedTuple):
    """A batch's pages as one flat list (FlashInfer's names)."""

    indptr: NDArray[np.int32]  # [num_reqs + 1], pages of request i are indptr[i]..indptr[i+1]
    indices: BlockIds  # [pages]
    last_page_len: Counts  # [num_reqs], tokens in the last page, 0 for an empty request


class DenseView(NamedTuple):
    """Any rows in any order, as wide as the longest of them."""

    block_table: torch.Tensor  # int32 [num_reqs, width]
    counts: torch.Tensor  # int32 [num_reqs], entries in each row


def dense_view(
    table: torch.Tensor,  # int32 [max_rows, max_width]
    counts: Counts,
    rows: RowIds,
    *,
    out: torch.Tensor | None = None,
) -> DenseView:
    """Rows ``rows`` of a table, in that order, cut to their longest count.

    Contiguous ascending rows give a view of ``table`` without a copy; others one gather kernel
    (into ``out`` [>= len(rows), max_width] when given, at its fixed address).
    """
    picked = np.asarray(rows, dtype=np.int64)
    lengths = counts[picked]
    width = max(1, int(lengths.max(initial=0)))
    on_device = torch.from_numpy(lengths.astype(np.int32)).to(table.device)
    n = len(picked)
    if n and out is None and bool((np.diff(picked) == 1).all()):
        first = int(picked[0])
        return DenseView(table[first : first + n, :width], on_device)
    index = torch.from_numpy(picked).to(table.device)
    source = table[:, :width]
    if out is None:
        return DenseView(source.index_select(0, index), on_device)
    target = out[:n, :width]
    target.copy_(source.index_select(0, index))
    return DenseView(target, on_device)


def csr_view(table: BlockIds, seq_lens: Counts, page_size: int) -> CSRTable:
    """Pages of each row that hold its first ``seq_lens`` tokens, as FlashInfer wants them.

    ``table`` int32 [num_reqs, width], ``seq_lens`` [num_reqs]; ValueError when a sequence is
    longer than its row. O(pages), host only.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    pages = -(-lens // page_size)
    _check_width(pages, table.shape[1])
    indptr = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(pages, out=indptr[1:])
    last = np.where(pages > 0, lens - (pages - 1) * page_size, 0).astype(np.int32)
    return CSRTable(indptr, _pick(table, pages), last)


def token_view(table: BlockIds, seq_lens: Counts, page_size: int) -> tuple[NDArray, Slots]:
    """Slot of every token of every sequence: (indptr int32 [num_reqs + 1], slots int64 [tokens]).

    What token-granular kernels (page size 1) read. ValueError when a sequence is longer than its
    row. O(tokens), host only.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    pages = -(-lens // page_size)
    _check_width(pages, table.shape[1])
    indptr = np.zeros(len(lens) + 1, dtype=np.int64)
    np.cumsum(lens, out=indptr[1:])
    request = np.repeat(np.arange(len(lens)), lens)
    position = np.arange(int(indptr[-1])) - indptr[request]
    block = table[request, position // page_size].astype(np.int64)
    return indptr.astype(np.int32), block * page_size + position % page_size


def dlpack(table: torch.Tensor) -> object:
    """The tensor as a DLPack capsule: another framework reads the same memory, no copy."""
    return table.__dlpack__()


def _pick(table: BlockIds, pages: NDArray[np.int64]) -> BlockIds:
    """First ``pages[i]`` entries of row i, rows one behind another."""
    width = int(pages.max(initial=0))
    if len(pages) * width <= 4 * int(pages.sum()):  # a mask over them all: 4 times as fast
        cut = table[:, :width]
        return cut[np.arange(width) < pages[:, None]].astype(np.int32, copy=False)
    request = np.repeat(np.arange(len(pages)), pages)
    starts = np.cumsum(pages) - pages
    column = np.arange(int(pages.sum())) - starts[request]
    return table[request, column].astype(np.int32, copy=False)


def _check_width(pages: NDArray[np.int64], width: int) -> None:
    longest = int(pages.max(initial=0))
    if longest > width:
        raise ValueError(f"a sequence needs {longest} pages, but rows hold {width}")

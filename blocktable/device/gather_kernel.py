"""The Triton kernel that puts table rows into batch order, for all groups in one launch."""

import torch
import triton
import triton.language as tl

from blocktable.device.compile_cases import CompileCase
from blocktable.device.launching import FixedLaunch

TILE = 256
"""Entries of a row that a program copies."""


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["rows"],
)
def gather_rows_kernel(
    source,  # int32, all groups' tables
    target,  # int32, the same layout
    rows,  # int32 [num_reqs], -1 a null row
    layout,  # int64 [groups, 3]: first cell, row stride, entries to copy
    num_rows,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    group = tl.program_id(2)
    base = tl.load(layout + 3 * group)
    stride = tl.load(layout + 3 * group + 1)
    width = tl.load(layout + 3 * group + 2)
    row = tl.load(rows + request)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    entries = tl.where((row >= 0) & (row < num_rows), width, 0)
    read = source + base + row.to(tl.int64) * stride + column
    value = tl.load(read, mask=column < entries, other=0)
    write = target + base + request.to(tl.int64) * stride + column
    tl.store(write, value, mask=column < width)


_launch = FixedLaunch(gather_rows_kernel)


def launch(
    source: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    layout: torch.Tensor,
    num_rows: int,
    max_width: int,
) -> None:
    """Rows ``rows`` of every group's table to rows 0 .. len(rows) - 1 of ``target``."""
    grid = (rows.shape[0], triton.cdiv(max_width, TILE), layout.shape[0])
    _launch(grid, (source.device, rows.dtype), source, target, rows, layout, num_rows, TILE)


COMPILE_CASES = [
    CompileCase(
        gather_rows_kernel,
        {"source": "*i32", "target": "*i32", "rows": "*i32", "layout": "*i64", "num_rows": "i32"},
        {"TILE": TILE},
    )
]

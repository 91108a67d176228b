"""The Triton kernel behind ``slot_mapping``: every token of every group in one launch."""

import torch
import triton
import triton.language as tl

from blocktable.device.compile_cases import CompileCase
from blocktable.device.launching import FixedLaunch

TILE = 256
"""Tokens a program maps. 256 keeps 8,192 tokens on 32 programs a group."""

GEOMETRY_FIELDS = 8
"""int64 values a group: arena offset, row stride, position limit, kernel block size, kernel blocks
in a manager block, context-parallel world, rank, interleave."""


@triton.jit(
    do_not_specialize=["num_reqs", "num_positions", "max_tokens", "search_steps", "num_rows"],
    do_not_specialize_on_alignment=["starts", "positions", "rows"],
)
def slot_mapping_kernel(
    arena,  # int32, all groups' tables
    geometry,  # int64 [groups, 8]
    starts,  # int32 [num_reqs + 1]
    positions,  # int64 [num_positions]
    rows,  # int32 [num_reqs], read only with HAS_ROWS
    slots,  # int64 [groups, max_tokens]
    num_reqs,
    num_positions,
    max_tokens,
    search_steps,  # ceil(log2(num_reqs))
    num_rows,
    HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    first = tl.program_id(0) * TILE
    group = tl.program_id(1)
    token = first + tl.arange(0, TILE)
    # Loads that depend on nothing come first, so that their latencies overlap.
    end = tl.minimum(tl.load(starts + num_reqs), num_positions)
    position = tl.load(positions + token, mask=token < num_positions, other=0).to(tl.int64)
    # a decode step has one token a request: then token i belongs to request i
    request = tl.minimum(token, num_reqs - 1)
    begin = tl.load(starts + request, mask=request >= 0, other=0)
    behind = tl.load(starts + request + 1, mask=request >= 0, other=0)
    field = geometry + group * 8
    base = tl.load(field)
    stride = tl.load(field + 1)
    limit = tl.load(field + 2)
    kernel_block = tl.load(field + 3).to(tl.int32)
    split = tl.load(field + 4).to(tl.int32)
    world = tl.load(field + 5).to(tl.int32)
    rank = tl.load(field + 6).to(tl.int32)
    interleave = tl.load(field + 7).to(tl.int32)
    live = token < end
    slot = tl.full([TILE], -1, tl.int64)
    if first < end:
        missed = live & ((token < begin) | (token >= behind))
        if tl.max(missed.to(tl.int32), axis=0) > 0:  # pyright: ignore[reportOperatorIssue]
            request = tl.zeros([TILE], tl.int32)
            beyond = tl.zeros([TILE], tl.int32) + num_reqs
            for _ in range(search_steps):
                middle = (request + beyond) // 2
                reached = tl.load(starts + middle) <= token
                request = tl.where(reached, middle, request)
                beyond = tl.where(reached, beyond, middle)
        row = request
        if HAS_ROWS:
            row = tl.load(rows + request)
        # Checked in 64 bits, divided in 32: limit is at most 2**31 - 1.
        inside = live & (position >= 0) & (position < limit)
        inside = inside & (row >= 0) & (row < num_rows)
        short = tl.where(inside, position, 0).to(tl.int32)
        virtual = kernel_block * split * world
        block = short // virtual
        offset = short - block * virtual
        lane = offset // interleave
        mine = inside & (lane % world == rank)
        offset = (lane // world) * interleave + offset % interleave
        part = offset // kernel_block
        column = block.to(tl.int64) * split + part
        where = base + row.to(tl.int64) * stride + column
        entry = tl.load(arena + where, mask=mine, other=0)
        mapped = entry.to(tl.int64) * kernel_block + (offset - part * kernel_block)
        # kernel blocks below ``split`` are the null block's
        slot = tl.where(mine & (entry >= split), mapped, slot)
    tl.store(slots + group.to(tl.int64) * max_tokens + token, slot, mask=token < max_tokens)


_launch = FixedLaunch(slot_mapping_kernel)


def launch(
    arena: torch.Tensor,
    geometry: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    num_reqs: int,
    num_rows: int,
) -> None:
    """Fill ``slots`` int64 [groups, max_tokens] on the current stream: one launch, no sync."""
    groups, max_tokens = slots.shape
    grid = (triton.cdiv(max_tokens, TILE), groups, 1)
    types = positions.dtype, query_start_loc.dtype, None if rows is None else rows.dtype
    _launch(
        grid, (positions.device, *types),
        arena, geometry, query_start_loc, positions,
        query_start_loc if rows is None else rows, slots,
        num_reqs, positions.shape[0], max_tokens, max(0, num_reqs - 1).bit_length(), num_rows,
        rows is not None, TILE,
    )  # fmt: skip


_SIGNATURE = {
    "arena": "*i32", "geometry": "*i64", "starts": "*i32", "positions": "*i64", "rows": "*i32",
    "slots": "*i64", "num_reqs": "i32", "num_positions": "i32", "max_tokens": "i32",
    "search_steps": "i32", "num_rows": "i32",
}  # fmt: skip
COMPILE_CASES = [
    CompileCase(slot_mapping_kernel, _SIGNATURE, {"HAS_ROWS": has_rows, "TILE": TILE})
    for has_rows in (False, True)
]

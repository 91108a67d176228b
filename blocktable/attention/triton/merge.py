"""Merging partial results of attention by their log-sum-exp."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finish(acc, top, total, sink, HAS_SINK: tl.constexpr):
    """Normalised result and base-2 log denominator of running sums; zeros where no key was seen."""
    if HAS_SINK:
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink[:, None]
        top = new_top
    seen = total > 0
    lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    return acc / tl.where(seen, total, 1.0)[:, None], lse


@triton.jit
def merge_pieces(
    part_out, part_lse, first_row, pieces, piece_rows, dims, live, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Running sums over the partial results of every packed row, for few pieces.

    first_row: [BLOCK_M] row of a token's first slot in part_out [slots * Hq, DV]; its pieces lie
    piece_rows apart. Loads of UNROLL pieces are in flight together.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    dim_mask = (dims < DV)[None, :]
    n = tl.arange(0, UNROLL)
    for i in range(0, pieces, UNROLL):
        rows = first_row[:, None] + (i + n)[None, :] * piece_rows
        use = live[:, None] & (i + n < pieces)[None, :]
        lse = tl.load(part_lse + rows, mask=use, other=float("-inf"), cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        for j in tl.static_range(UNROLL):
            row = first_row + (i + j) * piece_rows
            here = live & (tl.zeros([BLOCK_M], tl.int32) + (i + j) < pieces)
            part = tl.load(
                part_out + row[:, None] * DV + dims[None, :], mask=here[:, None] & dim_mask,
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            weight = tl.sum(tl.where((n == j)[None, :], weights, 0.0), 1)
            acc += part * weight[:, None]
        top = new_top
    return acc, top, total


@triton.jit
def merge_row(
    part_out, part_lse, first_row, pieces, piece_rows, dims, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Running sums of one packed row over many pieces, BLOCK_P of them in flight together."""
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    n = tl.arange(0, BLOCK_P)
    for i in range(0, pieces, BLOCK_P):
        use = i + n < pieces
        rows = first_row + (i + n) * piece_rows
        lse = tl.load(part_lse + rows, mask=use, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_out + rows[:, None] * DV + dims[None, :],
            mask=use[:, None] & (dims < DV)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - safe_top)
        shrink = tl.exp2(top - safe_top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        top = new_top
    return acc, top, total


@triton.jit
def finish_row(acc, top, total, sink, HAS_SINK: tl.constexpr):
    """``finish`` for a single row: the result [DV] and its base-2 log denominator."""
    if HAS_SINK:
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        acc = acc * shrink
        top = new_top
    safe_total = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, top + tl.log2(safe_total), float("-inf"))
    return acc / safe_total, lse


@triton.jit
def merge_kernel(
    merges, part_out, part_lse, out, lse_out, sinks, v_scale, o_token, o_head, v_scale_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SINK: tl.constexpr, V_SCALED: tl.constexpr, HAS_LSE: tl.constexpr, MERGE_P: tl.constexpr,
):  # fmt: skip
    """Merge shared and own pieces of one token and head; grid (HQ, tokens). merges: int32 [k, 4] of
    token, first slot, pieces; 0 pieces = nothing to do."""
    head = tl.program_id(0)
    entry = merges + tl.program_id(1) * 4
    pieces = tl.load(entry + 2)
    if pieces > 0:
        token = tl.load(entry).to(tl.int64)
        dims = tl.arange(0, BLOCK_DV)
        first = tl.load(entry + 1).to(tl.int64) * HQ + head
        acc, top, total = merge_row(
            part_out, part_lse, first, pieces, HQ, dims, DV, BLOCK_DV, MERGE_P
        )
        sink = 0.0
        if HAS_SINK:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        result, lse = finish_row(acc, top, total, sink, HAS_SINK)
        if V_SCALED:
            result = result * tl.load(v_scale + head // (HQ // HKV) * v_scale_stride)
        place = out + token * o_token + head * o_head + dims
        tl.store(place, result.to(out.dtype.element_ty), mask=dims < DV)
        if HAS_LSE:
            tl.store(lse_out + token * HQ + head, lse * LN2)

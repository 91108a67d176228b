"""Tile items on Hopper: the copy engine brings pages, two warp groups multiply, one warp steers.

The plain kernel waits for its own loads and computes addresses in the warps that multiply. Here one
warp looks the pages up and has the copy engine (TMA) bring them, sub-block by sub-block, into the
place where a contiguous tile would lie; two warp groups of 64 packed rows each read the same keys::

    producer   table -> K pages -> [k_full] ......... [k_empty] -> next
               table -> V pages -> [v_full] ......... [v_empty] -> next
    consumer   S(i) = Q K(i)  |  O += P(i-1) V(i-1)  |  softmax of S(i) while O is still running

Tiles go from the last key to the first, so the masked ones come first. Pages past the end are
loaded from outside the tensor, which gives zeros; unused slots of the last page (they may hold NaN)
are set to zero by the producer before anyone multiplies.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
OUTSIDE = gl.constexpr(0x7FFF0000)
# Triton 3.6 and 3.9 differ in these names
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
group_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _tile(panels, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """The panels of one stage as the tile [BLOCK_N, D] that they are."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if REINTERPRETS:
        return panels.reinterpret(panels.dtype, [BLOCK_N, D], layout)
    else:
        return panels._reinterpret(panels.dtype, [BLOCK_N, D], layout)


@gluon.jit
def _load_pages(
    desc, pages, first, kv_end, block_rows, head_row, head_col, smem, bar,
    BS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Have the copy engine fetch keys first .. first + BLOCK_N - 1 in sub-blocks of ROWS keys.

    A tile [BLOCK_N, 64 * HALVES] lies in shared memory as HALVES panels of 64 elements (128 bytes,
    the widest swizzle), so a sub-block is one box per panel.
    """
    mbarrier.expect(bar, BLOCK_N * HALVES * 64 * 2)
    for p in gl.static_range(BLOCK_N // ROWS):
        key = first + p * ROWS
        block = gl.load(pages + key // BS, mask=key < kv_end, other=0)
        row = block * block_rows + head_row + key % BS
        row = gl.where(key < kv_end, row, OUTSIDE)
        for half in gl.static_range(HALVES):
            box = smem.slice(half * BLOCK_N + p * ROWS, ROWS, 0)
            async_load(desc, [row, head_col + half * 64], bar, box)


@gluon.jit
def _clear_tail(
    smem, first, kv_end, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr
):
    """Zero the values behind the last key in its sub-block; their slots may hold anything.

    16 keys at a time, which fits the few registers of the steering warp.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, layout))
    for p in gl.static_range(BLOCK_N // 16):
        used = kv_end - first - p * 16
        if (used < 16) & (used + p * 16 > p * 16 // ROWS * ROWS):
            for half in gl.static_range(HALVES):
                box = smem.slice(half * BLOCK_N + p * 16, 16, 0)
                values = box.load(layout)
                box.store(gl.where((row < used)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _produce(
    k_desc, v_desc, pages, first_key, kv_end, tiles, k_rows, k_head_row, k_head_col, v_rows,
    v_head_row, v_head_col, k_smem, v_smem, k_full, k_empty, v_full, v_empty, tail_bar,
    BS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The steering warp: all tiles, last first."""
    for i in range(tiles):
        stage = i % STAGES
        free = (i // STAGES + 1) & 1
        first = first_key + (tiles - 1 - i) * BLOCK_N
        mbarrier.wait(k_empty.index(stage), free)
        _load_pages(
            k_desc, pages, first, kv_end, k_rows, k_head_row, k_head_col,
            k_smem.index(stage), k_full.index(stage), BS, ROWS, BLOCK_N, HALVES,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(stage), free)
        if i == 0:
            _load_pages(
                v_desc, pages, first, kv_end, v_rows, v_head_row, v_head_col,
                v_smem.index(stage), tail_bar, BS, ROWS, BLOCK_N, HALVES,
            )  # fmt: skip
            mbarrier.wait(tail_bar, 0)
            _clear_tail(v_smem.index(stage), first, kv_end, ROWS, BLOCK_N, HALVES)
            fence_async_shared()
            mbarrier.arrive(v_full.index(stage), count=1)
        else:
            _load_pages(
                v_desc, pages, first, kv_end, v_rows, v_head_row, v_head_col,
                v_smem.index(stage), v_full.index(stage), BS, ROWS, BLOCK_N, HALVES,
            )  # fmt: skip


@gluon.jit
def _softmax(
    scores, start, top, total, low, high, clear_start, clear_end, scale, softcap,
    BLOCK_N: gl.constexpr, SOFTCAP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Weights of one tile and the running maximum and sum. scale: to base-2 scores."""
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (gl.exp2(scores * scale) + 1.0))
        factor = LOG2E
    else:
        factor = scale
    if (start < clear_start) | (start + BLOCK_N > clear_end):
        key = (start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout)))[None, :]
        seen = (key >= low[:, None]) & (key < high[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    safe_top = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * factor - safe_top[:, None])
    shrink = gl.exp2(top - safe_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _consume(
    INDEX: gl.constexpr, query, out, lse_out, part_out, part_lse, tokens, sinks, item, kv_head,
    kv_start, kv_end, first_key, tiles, scale, softcap, q_token, q_head, o_token, o_head,
    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    HQ: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 packed rows against all tiles, then their result."""
    dtype: gl.constexpr = query.dtype.element_ty
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, s_layout)

    packed_rows = gl.load(item + 5)
    packed_start = gl.load(item + 4)
    query_start = gl.load(item + 3)
    gathered = gl.load(item + 7)
    m = INDEX * 64 + gl.arange(0, 64, gl.SliceLayout(1, q_layout))
    live = m < packed_rows
    token = query_start + (packed_start + m) // GROUP
    token = gl.where(
        gathered != 0, gl.load(tokens + token * 4, mask=live & (gathered != 0), other=0), token
    )
    head = kv_head * GROUP + (packed_start + m) % GROUP
    offset = token.to(gl.int64) * q_token + head * q_head
    dims = gl.arange(0, D, gl.SliceLayout(0, q_layout))
    q = gl.load(query + offset[:, None] + dims[None, :], mask=live[:, None], other=0.0)
    q_tile = q_smem.index(INDEX)
    q_tile.store(q)
    fence_async_shared()
    group_barrier()

    m = INDEX * 64 + gl.arange(0, 64, rows)
    live = m < packed_rows
    local = (packed_start + m) // GROUP
    head = kv_head * GROUP + (packed_start + m) % GROUP
    entry = tokens + (query_start + local) * 4
    pick = live & (gathered != 0)
    token = gl.where(gathered != 0, gl.load(entry, mask=pick, other=0), query_start + local)
    position = gl.where(
        gathered != 0, gl.load(entry + 2, mask=pick, other=0), gl.load(item + 6) + local
    )
    low = gl.full([64], 0, gl.int32, rows) + kv_start
    high = gl.full([64], 0, gl.int32, rows) + kv_end
    if CAUSAL:
        high = gl.minimum(high, position + 1)
    if WINDOW > 0:
        low = gl.maximum(low, position - WINDOW + 1)
        high = gl.minimum(high, position + WINDOW)
    if CHUNK > 0:
        low = gl.maximum(low, position // CHUNK * CHUNK)
        high = gl.minimum(high, (position // CHUNK + 1) * CHUNK)
    clear_start = gl.max(gl.where(live, low, kv_start), 0)
    clear_end = gl.min(gl.where(live, high, kv_end), 0)

    top = gl.full([64], float("-inf"), gl.float32, rows)
    total = gl.full([64], 0.0, gl.float32, rows)
    acc = gl.zeros([64, D], gl.float32, o_layout)
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, s_layout)

    mbarrier.wait(k_full.index(0), 0)
    k = _tile(k_smem.index(0), BLOCK_N, D)
    scores = warpgroup_mma(q_tile, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    group_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    start = first_key + (tiles - 1) * BLOCK_N
    weights, shrink, top, total = _softmax(
        scores, start, top, total, low, high, clear_start, clear_end, scale, softcap,
        BLOCK_N, SOFTCAP, s_layout,
    )  # fmt: skip
    p = gl.convert_layout(weights.to(dtype), p_layout)
    for i in range(1, tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = _tile(k_smem.index(stage), BLOCK_N, D)
        scores = warpgroup_mma(q_tile, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        v = _tile(v_smem.index(before), BLOCK_N, D)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        group_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        start -= BLOCK_N
        weights, shrink, top, total = _softmax(
            scores, start, top, total, low, high, clear_start, clear_end, scale, softcap,
            BLOCK_N, SOFTCAP, s_layout,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, [acc])
        group_barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(weights.to(dtype), p_layout)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    v = _tile(v_smem.index(last), BLOCK_N, D)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    slot = gl.load(item + 8)
    direct = (slot < 0) & (gathered == 0)
    if HAS_SINK:  # noqa: SIM102 - one is known to the compiler, the other is not
        if direct:
            sink = gl.load(sinks + head, mask=live, other=0.0).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            total = total * gl.exp2(top - new_top) + gl.exp2(sink - new_top)
            acc = acc * gl.convert_layout(
                gl.exp2(top - new_top), gl.SliceLayout(1, o_layout)
            )[:, None]  # fmt: skip
            top = new_top
    seen = total > 0
    lse = gl.where(seen, top + gl.log2(gl.where(seen, total, 1.0)), float("-inf"))
    inverse = 1.0 / gl.where(seen, total, 1.0)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
    dims = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    wide_live = gl.convert_layout(live, gl.SliceLayout(1, o_layout))[:, None]
    if direct:
        to = token.to(gl.int64) * o_token + head * o_head
        to = gl.convert_layout(to, gl.SliceLayout(1, o_layout))
        gl.store(out + to[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=wide_live)
        if HAS_LSE:
            gl.store(lse_out + token.to(gl.int64) * HQ + head, lse * LN2, mask=live)
    else:
        first_slot = gl.where(
            gathered != 0, gl.load(entry + 1, mask=pick, other=0),
            slot + local * gl.load(item + 9),
        )  # fmt: skip
        row = (first_slot + gl.load(item + 10)).to(gl.int64) * HQ + head
        gl.store(part_lse + row, lse, mask=live)
        row = gl.convert_layout(row, gl.SliceLayout(1, o_layout))
        gl.store(part_out + row[:, None] * D + dims[None, :], acc, mask=wide_live)


@gluon.jit
def tile_kernel(
    k_desc, v_desc, query, block_table, items, tokens, out, lse_out, part_out, part_lse, sinks,
    scale, softcap, q_token, q_head, table_row, o_token, o_head,
    k_rows, k_head_rows, k_head_cols, v_rows, v_head_rows, v_head_cols,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, BS: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, SOFTCAP: gl.constexpr, HAS_SINK: gl.constexpr, HAS_LSE: gl.constexpr,
    STARTS_NEXT: gl.constexpr,
):  # fmt: skip
    """One tile item of 128 packed rows for one KV head; grid (items, HKV). Never merges."""
    if STARTS_NEXT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    HALVES: gl.constexpr = D // 64
    item = items + gl.program_id(0) * 16
    kv_head = gl.program_id(1)
    kv_start, kv_end = gl.load(item + 1), gl.load(item + 2)
    first_key = kv_start // ROWS * ROWS
    tiles = gl.maximum((kv_end - first_key + BLOCK_N - 1) // BLOCK_N, 1)
    pages = block_table + gl.load(item).to(gl.int64) * table_row

    panel: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = query.dtype.element_ty
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, D], panel)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, HALVES * BLOCK_N, 64], panel)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, HALVES * BLOCK_N, 64], panel)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tail_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), 2)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), 2)
    mbarrier.init(tail_bar, 1)
    fence_async_shared()

    # NOTE: the arguments stand here in full: a tuple held in a name loses its constants.
    gl.warp_specialize([
        (_consume, (
            0,
            query, out, lse_out, part_out, part_lse, tokens, sinks, item, kv_head, kv_start,
            kv_end, first_key, tiles, scale, softcap, q_token, q_head, o_token, o_head,
            q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, HQ, HQ // HKV, D, BLOCK_N,
            STAGES, CAUSAL, WINDOW, CHUNK, SOFTCAP, HAS_SINK, HAS_LSE,
        )),
        (_consume, (
            1,
            query, out, lse_out, part_out, part_lse, tokens, sinks, item, kv_head, kv_start,
            kv_end, first_key, tiles, scale, softcap, q_token, q_head, o_token, o_head,
            q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, HQ, HQ // HKV, D, BLOCK_N,
            STAGES, CAUSAL, WINDOW, CHUNK, SOFTCAP, HAS_SINK, HAS_LSE,
        )),
        (_produce, (
            k_desc, v_desc, pages, first_key, kv_end, tiles, k_rows, kv_head * k_head_rows,
            kv_head * k_head_cols, v_rows, kv_head * v_head_rows, kv_head * v_head_cols,
            k_smem, v_smem, k_full, k_empty, v_full, v_empty, tail_bar,
            BS, ROWS, BLOCK_N, HALVES, STAGES,
        )),
    ], [4, 1], [240, 24])  # fmt: skip

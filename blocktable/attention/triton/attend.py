"""The attention kernel: one program per item of a plan and KV head.

The same code decodes (16 packed rows), reads shared prefixes and prefills (64 or 128 packed rows);
only the sizes differ. A program walks its key range in tiles of BLOCK_N, looks the pages of a tile
up as one vector, keeps a running softmax, and writes its result or, for a piece of a longer row, a
partial result with its log-sum-exp. The last piece of a token to finish merges all of them, so a
batch without shared prefixes needs no merge launch.

Packed rows: the ``GROUP`` query heads that share a KV head lie beside each other, so row m of an
item is token ``m // GROUP``, head ``kv_head * GROUP + m % GROUP``: the keys are read once for all.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from blocktable.attention.triton.merge import (
    LN2,
    LOG2E,
    finish,
    finish_row,
    merge_pieces,
    merge_row,
)


@triton.jit
def _load_rows(base, rows, dims, row_mask, D: tl.constexpr, PADDED: tl.constexpr):
    """[rows, dims] of a cache; masked rows and padded dimensions are zeros, never loaded."""
    mask = row_mask[:, None]
    if PADDED:
        mask = mask & (dims < D)[None, :]
    return tl.load(base + rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _as_half(q):
    """A query for products with an fp8 cache: fp8 becomes float16 in one instruction for two
    numbers and exactly, bfloat16 by way of float32 (H200, 64 x 4096 keys: half the time)."""
    return tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, WIDE: tl.constexpr):
    """acc + a @ b in float32. WIDE: operands as float32, for the interpreter, whose own product
    takes bfloat16 for integers."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def attend_kernel(
    query, k_cache, v_cache, block_table, items, tokens, out, lse_out,
    part_out, part_lse, counters, sinks, slopes, k_scale, v_scale,
    scale, softcap,
    q_token, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot, table_row, o_token, o_head,
    k_scale_stride, v_scale_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_ALIBI: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, HAS_LSE: tl.constexpr, V_IN_K: tl.constexpr, GATHERS: tl.constexpr,
    SKIP_MASK: tl.constexpr, AS_HALF: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    STARTS_NEXT: tl.constexpr, FOLLOWS: tl.constexpr, MERGE_P: tl.constexpr,
):  # fmt: skip
    """One item for one KV head; grid (HKV, items). Items: plan_items.ITEM_FIELDS.

    D1 + D2 cover D, BLOCK_DV covers DV. WINDOW and CHUNK are 0 when off. V_IN_K: values are the
    first DV of a key (latent attention), read once. STARTS_NEXT and FOLLOWS chain two launches
    that overlap: the second ends only when the first has.
    """
    if STARTS_NEXT:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = HQ // HKV
    UNROLL: tl.constexpr = 4 if BLOCK_M * BLOCK_DV <= 4096 else 1
    item = items + tl.program_id(1) * 16
    kv_head = tl.program_id(0)
    packed_rows = tl.load(item + 5)
    if packed_rows > 0:
        row = tl.load(item).to(tl.int64)
        kv_start, kv_end = tl.load(item + 1), tl.load(item + 2)
        query_start, packed_start = tl.load(item + 3), tl.load(item + 4)
        slot, piece = tl.load(item + 8), tl.load(item + 10)

        m = tl.arange(0, BLOCK_M)
        live = m < packed_rows
        local = (packed_start + m) // GROUP
        head = kv_head * GROUP + (packed_start + m) % GROUP
        token = query_start + local
        position = tl.load(item + 6) + local
        first_slot = slot + local * tl.load(item + 9)
        gathered = False
        if GATHERS:
            gathered = tl.load(item + 7) != 0
            if gathered:
                entry = tokens + token * 4
                first_slot = tl.load(entry + 1, mask=live, other=0)
                position = tl.load(entry + 2, mask=live, other=0)
                token = tl.load(entry, mask=live, other=0)

        dims1 = tl.arange(0, D1)
        dims2 = D1 + tl.arange(0, D2 if D2 > 0 else 16)
        dims_v = tl.arange(0, BLOCK_DV)
        q_rows = token.to(tl.int64) * q_token + head * q_head
        q1 = _load_rows(query, q_rows, dims1, live, D, D1 > D)
        if AS_HALF:
            q1 = _as_half(q1)
        if D2 > 0:
            q2 = _load_rows(query, q_rows, dims2, live, D, D1 + D2 > D)
            if AS_HALF:
                q2 = _as_half(q2)

        # Keys a packed row sees: [low, high), one run whatever the options.
        low = tl.zeros([BLOCK_M], tl.int32)
        high = tl.zeros([BLOCK_M], tl.int32) + kv_end
        if CAUSAL:
            high = tl.minimum(high, position + 1)
        if WINDOW > 0:
            low = tl.maximum(low, position - WINDOW + 1)
            high = tl.minimum(high, position + WINDOW)
        if CHUNK > 0:
            low = tl.maximum(low, position // CHUNK * CHUNK)
            high = tl.minimum(high, (position // CHUNK + 1) * CHUNK)
        # Tiles inside [clear_start, clear_end) need no mask.
        clear_start = tl.max(tl.where(live, low, 0), 0)
        clear_end = tl.min(tl.where(live, high, kv_end), 0)

        score_scale = scale
        if K_SCALED:
            score_scale = scale * tl.load(k_scale + kv_head * k_scale_stride)
        if HAS_ALIBI:
            slope = tl.load(slopes + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        k_base = k_cache + kv_head.to(tl.int64) * k_head
        v_base = v_cache + kv_head.to(tl.int64) * v_head
        pages = block_table + row * table_row
        n = tl.arange(0, BLOCK_N)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

        # Block ids are looked up a tile ahead, so that no load waits for another.
        next_block = tl.load(pages + (kv_start + n) // BS, mask=kv_start + n < kv_end, other=0)
        for start in tl.range(kv_start, kv_end, BLOCK_N, num_stages=STAGES):
            key = start + n
            inside = key < kv_end
            block = next_block.to(tl.int64)
            later = key + BLOCK_N
            next_block = tl.load(pages + later // BS, mask=later < kv_end, other=0)
            k_rows = block * k_block + (key % BS) * k_slot
            k1 = _load_rows(k_base, k_rows, dims1, inside, D, D1 > D).to(q1.dtype)
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = _dot(q1, tl.trans(k1), scores, PRECISION, WIDE)
            if D2 > 0:
                k2 = _load_rows(k_base, k_rows, dims2, inside, D, D1 + D2 > D).to(q1.dtype)
                scores = _dot(q2, tl.trans(k2), scores, PRECISION, WIDE)
            if SOFTCAP:
                scaled = scores * (score_scale * (2.0 * LOG2E) / softcap)
                scores = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(scaled) + 1.0))
            elif HAS_ALIBI:
                scores = scores * (score_scale * LOG2E)
            if HAS_ALIBI:
                scores += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
            if SKIP_MASK:
                if (start < clear_start) | (start + BLOCK_N > clear_end):
                    seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                    scores = tl.where(seen, scores, float("-inf"))
            else:
                seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            if SOFTCAP or HAS_ALIBI:
                new_top = tl.maximum(top, tl.max(scores, 1))
                safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(scores - safe_top[:, None])
            else:  # one multiply-add per score
                new_top = tl.maximum(top, tl.max(scores, 1) * (score_scale * LOG2E))
                safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(scores * (score_scale * LOG2E) - safe_top[:, None])
            shrink = tl.exp2(top - safe_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            if V_IN_K:
                v = k1
            else:
                v_rows = block * v_block + (key % BS) * v_slot
                v = _load_rows(v_base, v_rows, dims_v, inside, DV, BLOCK_DV > DV).to(q1.dtype)
            acc = _dot(weights.to(q1.dtype), v, acc, PRECISION, WIDE)
            top = new_top

        out_factor = 1.0
        if V_SCALED:
            out_factor = tl.load(v_scale + kv_head * v_scale_stride).to(tl.float32)
        sink = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SINK:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        o_rows = token.to(tl.int64) * o_token + head * o_head
        o_mask = live[:, None] & (dims_v < DV)[None, :]
        lse_rows = token.to(tl.int64) * HQ + head
        if (slot < 0) & (gathered == 0):
            result, lse = finish(acc, top, total, sink, HAS_SINK)
            stored = (result * out_factor).to(out.dtype.element_ty)
            tl.store(out + o_rows[:, None] + dims_v[None, :], stored, mask=o_mask)
            if HAS_LSE:
                tl.store(lse_out + lse_rows, lse * LN2, mask=live)
        else:
            part, lse = finish(acc, top, total, sink, False)
            part_row = first_slot.to(tl.int64) * HQ + head
            mine = part_row + piece * HQ
            tl.store(part_out + mine[:, None] * DV + dims_v[None, :], part, mask=o_mask)
            tl.store(part_lse + mine, lse, mask=live)
            own_pieces = tl.load(item + 11)
            if own_pieces > 0:
                counter = counters + tl.load(item + 12) * HKV + kv_head
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel") == own_pieces - 1:
                    tl.store(counter, 0)
                    pieces = tl.load(item + 9)
                    if (BLOCK_M > 16) | (pieces <= 4):
                        whole, whole_top, whole_total = merge_pieces(
                            part_out, part_lse, part_row, pieces, HQ, dims_v, live, DV,
                            BLOCK_M, BLOCK_DV, UNROLL,
                        )  # fmt: skip
                        merged, merged_lse = finish(whole, whole_top, whole_total, sink, HAS_SINK)
                        final = (merged * out_factor).to(out.dtype.element_ty)
                        tl.store(out + o_rows[:, None] + dims_v[None, :], final, mask=o_mask)
                        if HAS_LSE:
                            tl.store(lse_out + lse_rows, merged_lse * LN2, mask=live)
                    else:
                        for r in range(0, packed_rows):
                            packed = packed_start + r
                            r_head = kv_head * GROUP + packed % GROUP
                            r_token = (query_start + packed // GROUP).to(tl.int64)
                            r_slot = (slot + packed // GROUP * pieces).to(tl.int64)
                            r_acc, r_top, r_total = merge_row(
                                part_out, part_lse, r_slot * HQ + r_head, pieces, HQ, dims_v, DV,
                                BLOCK_DV, MERGE_P,
                            )  # fmt: skip
                            r_sink = 0.0
                            if HAS_SINK:
                                r_sink = tl.load(sinks + r_head).to(tl.float32) * LOG2E
                            r_out, r_lse = finish_row(r_acc, r_top, r_total, r_sink, HAS_SINK)
                            tl.store(
                                out + r_token * o_token + r_head * o_head + dims_v,
                                (r_out * out_factor).to(out.dtype.element_ty), mask=dims_v < DV,
                            )  # fmt: skip
                            if HAS_LSE:
                                tl.store(lse_out + r_token * HQ + r_head, r_lse * LN2)
    if FOLLOWS:
        # One waiting program is enough to keep this launch open until the one before has ended.
        last = (tl.program_id(1) == tl.num_programs(1) - 1) & (kv_head == 0)
        if last:
            tl.extra.cuda.gdc_wait()

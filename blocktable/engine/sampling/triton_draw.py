"""Drawing from softmax(logits / temperature) on a GPU, in one kernel.

``draw.draw_plain`` does the same with a dozen tensor operations, each of which writes the whole
[rows, vocabulary] matrix again: 0.77 ms for 256 rows of 152k logits on an H200, where reading the
logits twice takes 0.04 ms. A program takes a row::

    pass 1   the largest logit
    pass 2   the sum of exp((logit - largest) / temperature), tile by tile
    then     the tile in which uniform * total falls, and the place inside it

``min_p`` drops tokens less likely than that share of the most likely one. Temperature 0 takes the
largest logit. Sums of a tile are float32, sums of tiles float64.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blocktable.core.specs import ceil_div
from blocktable.device.compile_cases import CompileCase

_TILE = 4096


@triton.jit
def draw_kernel(
    logits, temperatures, min_ps, uniforms, tokens, sums, logits_row, vocab, num_tiles,
    TILE: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """One row a program; logits [n, vocab], sums float64 [n, MAX_TILES] scratch."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    base = logits + row * logits_row
    top = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.zeros([TILE], tl.int32)
    for tile in range(num_tiles):
        index = tile * TILE + at
        x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        where = tl.where(x > top, index, where)
        top = tl.maximum(top, x)
    largest = tl.max(top, 0)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        token = tl.min(tl.where(top == largest, where, vocab), 0)
    else:
        floor = tl.load(min_ps + row)
        for tile in range(num_tiles):
            index = tile * TILE + at
            x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.exp((x - largest) / temperature)
            mass = tl.sum(tl.where(weight < floor, 0.0, weight), 0)
            tl.store(sums + row * MAX_TILES + tile, mass.to(tl.float64))
        tl.debug_barrier()
        tiles = tl.arange(0, MAX_TILES)
        mass = tl.load(sums + row * MAX_TILES + tiles, mask=tiles < num_tiles, other=0.0)
        cdf = tl.cumsum(mass, 0)
        total = tl.sum(mass, 0)
        target = tl.load(uniforms + row) * total
        last = tl.max(tl.where(mass > 0, tiles, 0), 0)
        chosen = tl.minimum(tl.sum((cdf <= target).to(tl.int32), 0), last)
        before = tl.sum(tl.where(tiles < chosen, mass, 0.0), 0)
        index = chosen * TILE + at
        x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - largest) / temperature)
        weight = tl.where(weight < floor, 0.0, weight).to(tl.float64)
        inside = tl.cumsum(weight, 0)
        place = tl.sum((inside <= target - before).to(tl.int32), 0)
        last_place = tl.max(tl.where(weight > 0, at, 0), 0)
        token = chosen * TILE + tl.minimum(place, last_place)
    tl.store(tokens + row, token.to(tl.int64))


def draw_rows(
    logits: torch.Tensor, temperatures: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """One token a row: int64 [n].

    logits [n, V] of any float type, rows contiguous; temperatures float32 [n], 0 = the most
    likely; min_ps float32 [n], 0 drops nothing; uniforms float64 [n] in [0, 1).
    One launch, no sync; reads the logits twice.
    """
    rows, vocab = logits.shape
    tiles = ceil_div(vocab, _TILE)
    room = triton.next_power_of_2(tiles)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, room), dtype=torch.float64, device=logits.device)
    draw_kernel[(rows,)](
        logits, temperatures, min_ps, uniforms, tokens, sums, logits.stride(0), vocab, tiles,
        TILE=_TILE, MAX_TILES=room, num_warps=16,
    )  # fmt: skip
    return tokens


COMPILE_CASES = [
    CompileCase(
        draw_kernel,
        {
            "logits": "*bf16", "temperatures": "*fp32", "min_ps": "*fp32", "uniforms": "*fp64",
            "tokens": "*i64", "sums": "*fp64", "logits_row": "i64", "vocab": "i32",
            "num_tiles": "i32",
        },
        {"TILE": _TILE, "MAX_TILES": 64},
        num_warps=16,
    )
]  # fmt: skip

"""One launch that copies many blocks of many layers, within the device or to pinned host memory.

A copy engine takes 2-3 us for each copy it is given, as long as 150 KB take on the bus. A kernel
has no such cost, so it moves scattered blocks; it reads and writes pinned host memory in place.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

CHUNK = 2048
"""64-bit words that a program has in flight."""


@triton.jit
def copy_blocks_kernel(
    source_bases, target_bases, pairs, num_units, num_layers, source_stride, target_stride, words,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Units are (pair, layer); program p takes units p, p + programs, ... Strides and ``words`` (of
    a block) count 64-bit words; bases are addresses; pairs int64 [n, 2]."""
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        pair, layer = unit // num_layers, unit % num_layers
        source = tl.load(source_bases + layer).to(tl.pointer_type(tl.int64))
        target = tl.load(target_bases + layer).to(tl.pointer_type(tl.int64))
        source = tl.multiple_of(source + tl.load(pairs + 2 * pair) * source_stride, 2)
        target = tl.multiple_of(target + tl.load(pairs + 2 * pair + 1) * target_stride, 2)
        for start in range(0, words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            value = tl.load(source + word, mask=word < words)
            tl.store(target + word, value, mask=word < words)


def launch_copy(
    source_bases: torch.Tensor, target_bases: torch.Tensor, pairs: torch.Tensor,
    strides: tuple[int, int], words: int, programs: int,
) -> None:  # fmt: skip
    """Copy ``pairs`` of blocks in every layer on the current stream; see the kernel."""
    units = pairs.shape[0] * source_bases.numel()
    kernel: Any = copy_blocks_kernel
    kernel[(min(programs, units),)](
        source_bases, target_bases, pairs, units, source_bases.numel(), *strides, words,
        CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip

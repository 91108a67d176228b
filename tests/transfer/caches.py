"""Caches in host memory whose every value says where it belongs."""

import ctypes

import numpy as np

from blocktable.transfer.layout import CacheLayout


def layout(block_size=16, heads=(0, 4), order="HTD", layers=2, size=8, size_v=8, dtype="float32",
           num_kv_heads=4, groups=None, padding=0):  # fmt: skip
    groups = groups or [0] * layers
    held = heads[1] - heads[0]
    item = {"float32": 4, "float16": 2}[dtype]
    page = held * block_size * (size + size_v) * item + padding
    return CacheLayout(
        dtype, block_size, num_kv_heads, heads[0], held, size, size_v, tuple(range(layers)),
        tuple(groups), page, order,
    )  # fmt: skip


class Cache:
    """Memories of one rank; `get` and `put` reach the vector of (layer, K or V, head, position)."""

    def __init__(self, made: CacheLayout, num_blocks: int, fill: float = -1.0):
        self.layout = made
        self.memories = [
            np.full(num_blocks * made.page_bytes // 4, fill, np.float32)
            for _ in range(made.num_layers)
        ]

    @property
    def bases(self):
        return [memory.ctypes.data for memory in self.memories]

    @property
    def regions(self):
        return [(memory.ctypes.data, memory.nbytes) for memory in self.memories]

    def vector(self, layer, values, head, block, offset):
        m = self.layout
        local, width = head - m.first_head, m.head_size_v if values else m.head_size
        at = block * m.page_bytes // 4
        if values:
            at += m.held_heads * m.block_size * m.head_size
        if m.order == "HTD":
            at += (local * m.block_size + offset) * width
        else:
            at += (offset * m.held_heads + local) * width
        return self.memories[m.memory[layer]][at : at + width]

    def fill_request(self, rows, num_tokens, seed=0):
        for args, vector in self.vectors(rows, num_tokens):
            vector[:] = value(*args, len(vector), seed)

    def vectors(self, rows, num_tokens):
        m = self.layout
        for layer in range(m.num_layers):
            row = rows[m.group[layer]]
            for position in range(num_tokens):
                block = int(row[position // m.block_size])
                if block == 0:
                    continue
                for head in range(m.first_head, m.first_head + m.held_heads):
                    for values in (False, True):
                        yield (
                            (layer, values, head, position),
                            self.vector(layer, values, head, block, position % m.block_size),
                        )


def value(layer, values, head, position, width, seed=0):
    return (((layer * 2 + values) * 64 + head) * 4096 + position) + np.arange(width) / 64 + seed


def copy_runs(runs):
    """Do what a reader does, in this process."""
    for source, target, size in zip(*runs, strict=True):
        ctypes.memmove(int(target), int(source), int(size))

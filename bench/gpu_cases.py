"""Attention problems of the GPU benchmarks: measured, built, and checked against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 16


@dataclass(frozen=True)
class Case:
    """A batch. lens: keys of each row; queries: query tokens of each row; shared: leading keys that
    all rows have in common; target: microseconds (decode) or TFLOP/s (prefill) to reach."""

    name: str
    lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    queries: int = 1
    shared: int = 0
    target: float = 0.0
    block_size: int = BLOCK
    kv_dtype: torch.dtype = torch.bfloat16
    latent: int = 0  # values are the first so many elements of the keys (MLA); 0: their own tensor

    @property
    def uniform(self) -> bool:
        return len(set(self.lens)) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that must be read once."""
        keys = self.shared + sum(n - self.shared for n in self.lens)
        tensors = 1 if self.latent else 2
        return keys * self.kv_heads * self.head_size * tensors * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """Multiply-adds x 2 of both products, causal half left out."""
        pairs = sum(self.queries * n - self.queries * (self.queries - 1) / 2 for n in self.lens)
        return 4.0 * pairs * self.heads * self.head_size


def _ragged(rows: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(0).integers(low, high + 1, rows).tolist())


DECODE = (
    Case("B64 x 4096, 32/8", (4096,) * 64, target=250),
    Case("B256 x 1024, 32/8", (1024,) * 256, target=255),
    Case("B16 x 32768, 32/8", (32768,) * 16, target=494),
    Case("B1 x 131072, 32/8", (131072,), target=138),
    Case("B128 ragged 128-8192, 32/8", _ragged(128, 128, 8192), target=550),
    Case("B64 x 4096, 32/32", (4096,) * 64, kv_heads=32, target=965),
    Case("B64 x 8192, 64/8", (8192,) * 64, heads=64, target=490),
    Case("B8 x 512, 32/8", (512,) * 8, target=8),
    Case("B8 x 512, 32/8, in the cache", (512,) * 8, target=8),
    Case("B64 x 4096, 32/8, page 128", (4096,) * 64, block_size=128, target=250),
)
KINDS = (
    Case("B64 x 4096, 32/8, fp8 cache", (4096,) * 64, kv_dtype=torch.float8_e4m3fn),
    Case("B64 x 4096, 128/1, latent 576/512", (4096,) * 64, heads=128, kv_heads=1, head_size=576,
         latent=512),
    Case("B64 x 4096, 32/8, head 64", (4096,) * 64, head_size=64),
    Case("B64 x 4096, 32/8, head 256", (4096,) * 64, head_size=256),
    Case("B64 x 4352, 32/8, page 544", (4352,) * 64, block_size=544),
)  # fmt: skip
"""Kinds without a target, to see that none falls off."""
SHARED = (
    Case("B256: 4096 shared + 512", (4608,) * 256, shared=4096, target=180),
    Case("B64: 16384 shared + 256", (16640,) * 64, shared=16384, target=80),
    Case("B32: 1024 shared + 1024", (2048,) * 32, shared=1024, target=45),
)
PREFILL = (
    Case("prefill B1 x 8192", (8192,), queries=8192, target=492),
    Case("prefill B4 x 2048 after 6144", (8192,) * 4, queries=2048, target=509),
    Case("prefill B16 x 512 after 3584", (4096,) * 16, queries=512, target=476),
)


@dataclass
class Built:
    """Tensors of a case on the device, the table on the host too."""

    case: Case
    k_cache: torch.Tensor  # [N, Hkv, bs, D]
    v_cache: torch.Tensor  # [N, Hkv, bs, Dv]
    cache: torch.Tensor  # both in one: [N, 2, Hkv, bs, D]
    table: torch.Tensor  # int32 [n, W]
    host_table: np.ndarray
    query: torch.Tensor  # [T, Hq, D]
    starts: np.ndarray
    lens: np.ndarray


def build(case: Case, device: str = "cuda", *, copies: int = 1) -> list[Built]:
    """``copies`` instances of a case in one cache, blocks dealt in random order."""
    rng = np.random.default_rng(1)
    lens = np.array(case.lens)
    size = case.block_size
    shared = case.shared // size
    counts = -(-lens // size)
    width = int(counts.max())
    each = shared + int((counts - shared).sum())
    blocks = 1 + each * copies
    shape = (blocks, 1 if case.latent else 2, case.kv_heads, size, case.head_size)
    cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
    cache[0] = float("nan")
    cache = cache.to(case.kv_dtype)
    k_cache = cache[:, 0]
    v_cache = k_cache[..., : case.latent] if case.latent else cache[:, 1]
    ids = rng.permutation(np.arange(1, blocks)).astype(np.int32).reshape(copies, each)
    made = []
    for copy in range(copies):
        table = np.zeros((len(lens), width), np.int32)
        table[:, :shared] = ids[copy, :shared]
        at = shared
        for row, count in enumerate(counts):
            table[row, shared:count] = ids[copy, at : at + count - shared]
            at += count - shared
        query = torch.randn(
            (len(lens) * case.queries, case.heads, case.head_size),
            device=device, dtype=torch.bfloat16,
        )  # fmt: skip
        starts = np.arange(len(lens) + 1, dtype=np.int32) * case.queries
        made.append(
            Built(case, k_cache, v_cache, cache, torch.from_numpy(table).to(device), table, query,
                  starts, lens.astype(np.int32))
        )  # fmt: skip
    return made


def error_against_float64(built: Built, out: torch.Tensor) -> float:
    """Largest relative error over some rows, tokens and all heads; NaN counts as infinite."""
    case, worst = built.case, 0.0
    group = case.heads // case.kv_heads
    rows = sorted({0, len(case.lens) // 3, len(case.lens) - 1})
    for row in rows:
        length = case.lens[row]
        at = torch.arange(length, device=out.device)
        blocks = built.table[row].long()[at // case.block_size]
        keys = built.k_cache[blocks, :, at % case.block_size].double()  # [L, Hkv, D]
        values = built.v_cache[blocks, :, at % case.block_size].double()
        for i in sorted({0, case.queries // 2, case.queries - 1}):
            token = int(built.starts[row]) + i
            seen = length - case.queries + i + 1
            q = built.query[token].double().view(case.kv_heads, group, -1)
            scores = torch.einsum("hgd,lhd->hgl", q, keys[:seen]) * case.head_size**-0.5
            want = torch.einsum("hgl,lhd->hgd", torch.softmax(scores, -1), values[:seen])
            got = out[token].double().view_as(want)
            error = float((got - want).norm() / want.norm())
            worst = max(worst, error if error == error else float("inf"))
    return worst

"""The Triton cache write: right slots, nothing else touched, saturating fp8."""

from __future__ import annotations

import pytest
import torch

from tests.attention.triton_device import DEVICE  # isort: skip - before the kernels

from blocktable.attention.reference import as_float64, write_kv_reference
from blocktable.attention.triton import paged_attention, write_kv, write_kv_by_table
from blocktable.core.errors import ConfigError

GUARD = 77.0


def guarded_cache(
    blocks: int, heads: int, block_size: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose heads and blocks have guard values between them, and the memory around it."""
    whole = torch.full((blocks, heads + 1, block_size, size + 16), GUARD).to(dtype).to(DEVICE)
    return whole[:, :heads, :, :size], whole


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_head_size_leaves_guards_alone(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    size_v = 512 if size == 576 else size
    k, k_whole = guarded_cache(5, 2, 16, size, dtype)
    v, v_whole = guarded_cache(5, 2, 16, size_v, dtype)
    key = torch.randn(6, 2, size, generator=generator).to(dtype).to(DEVICE)
    value = torch.randn(6, 2, size_v, generator=generator).to(dtype).to(DEVICE)
    slots = torch.tensor([79, -1, 16, 17, 64, 31], device=DEVICE)
    want_k, want_v = as_float64(k_whole), as_float64(v_whole)
    write_kv_reference(key, value, want_k[:, :2, :, :size], want_v[:, :2, :, :size_v], slots)
    write_kv(key, value, k, v, slots)
    assert (as_float64(k_whole) == want_k).all() and (as_float64(v_whole) == want_v).all()


def test_slots_from_the_table() -> None:
    table = torch.tensor([[3, 1, 0, 0], [2, 4, 0, 0]], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([0, 0, 1, 1, -1, 1, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 17, 15, 16, 3, 32, 64], device=DEVICE)  # null block, past the row
    key = torch.randn(7, 2, 64, device=DEVICE)
    value = torch.randn(7, 2, 64, device=DEVICE)
    k, k_whole = guarded_cache(5, 2, 16, 64, torch.float32)
    v, v_whole = guarded_cache(5, 2, 16, 64, torch.float32)
    slots = torch.tensor([48, 17, 47, 64, -1, -1, -1], device=DEVICE)
    want_k, want_v = as_float64(k_whole), as_float64(v_whole)
    write_kv_reference(key, value, want_k[:, :2, :, :64], want_v[:, :2, :, :64], slots)
    write_kv_by_table(key, value, k, v, table, rows, positions)
    assert (as_float64(k_whole) == want_k).all() and (as_float64(v_whole) == want_v).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_fp8_is_scaled_and_saturates(heads: int) -> None:
    scale = torch.tensor([0.5, 4.0][:heads])
    key = torch.tensor([1.0, 1e4, -1e5, 0.3, 447.0, 480.0, -1e30, 0.0]).repeat(3, 2, 8)
    k = torch.zeros(2, 2, 16, 64, dtype=torch.float8_e4m3fn, device=DEVICE)
    v = torch.zeros_like(k)
    slots = torch.tensor([16, 20, -1], device=DEVICE)
    write_kv(key.to(DEVICE), key.to(DEVICE), k, v, slots, scale.to(DEVICE), 2.0)
    for cache, factor in ((k, scale.expand(2)), (v, torch.tensor([2.0, 2.0]))):
        stored = cache.float().cpu()
        wanted = (key[0] / factor[:, None]).clamp(-448, 448)
        assert torch.isfinite(stored).all()
        assert torch.allclose(stored[1, :, 0], wanted, rtol=0.07, atol=2e-3)
        assert torch.equal(stored[1, :, 0], stored[1, :, 4])
        assert not stored[0].any()


def test_more_tokens_than_a_program_and_short_slot_mapping() -> None:
    key = torch.randn(2600, 1, 16, device=DEVICE)
    k, v = (torch.zeros(200, 1, 16, 16, device=DEVICE) for _ in range(2))
    slots = torch.randperm(3184)[:2500].to(DEVICE) + 16
    write_kv(key, key, k, v, slots)
    flat = k.transpose(1, 2).reshape(-1, 16)
    assert torch.equal(flat[slots], key[:2500, 0]) and torch.equal(k, v)
    assert int((flat != 0).any(1).sum()) == 2500


def test_a_slot_past_the_cache_writes_nothing() -> None:
    key = torch.ones(3, 1, 16, device=DEVICE)
    whole = torch.zeros(6, 1, 4, 16, device=DEVICE)
    slots = torch.tensor([16, 15, 2**40], device=DEVICE)
    write_kv(key, key, whole[:4], whole[:4].clone(), slots)
    assert int(whole.sum()) == 16 and bool(whole[3, 0, 3].all())


def test_poisoned_null_block_and_pad_lanes() -> None:
    """B08: NaN in block 0, in pad lanes and in unused slots of live blocks changes nothing."""
    nan = float("nan")
    for dtype in (torch.float16, torch.float8_e4m3fn):
        k = torch.full((4, 1, 16, 64), nan).to(dtype).to(DEVICE)
        v = torch.full((4, 1, 16, 64), nan).to(dtype).to(DEVICE)
        before = k[0].clone().view(torch.uint8)
        table = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]], device=DEVICE).int()
        slots = torch.cat((torch.arange(16, 33), torch.arange(48, 53), torch.tensor([-1, -1])))
        key = torch.randn(24, 1, 64).to(dtype).half().to(DEVICE)  # stored exactly
        key[22:] = nan
        write_kv(key, key, k, v, slots.to(DEVICE))
        assert torch.equal(k[0].view(torch.uint8), before)
        query = torch.randn(4, 2, 64, device=DEVICE, dtype=torch.float16)
        out = paged_attention(
            query, k, v, table, torch.tensor([0, 1, 2, 2, 2], device=DEVICE).int(),
            torch.tensor([17, 5, 0, 0], device=DEVICE).int(), scale=0.125,
        )  # fmt: skip
        for row, tokens in ((0, key[:17]), (1, key[17:22])):
            rows = tokens[:, 0].to(dtype).double().cpu()
            scores = torch.softmax(query[row].double().cpu() @ rows.T * 0.125, -1)
            assert torch.allclose(out[row].double().cpu(), scores @ rows, atol=5e-3)
        assert not out[2:].any()


def test_wide_offsets() -> None:
    """B10: a slot whose element offset passes 2**31, through a cache with far-apart blocks."""
    stride = 2**26 + 64  # 33 blocks pass 2**31; only pages that are touched get memory
    base = torch.zeros(34 * stride, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    k = base.as_strided((34, 1, 16, 64), (stride, 1024, 64, 1))
    v = base.as_strided((34, 1, 16, 64), (stride, 1024, 64, 1), 2048)
    key = torch.randint(1, 8, (1, 1, 64), device=DEVICE).half()
    write_kv(key, -key, k, v, torch.tensor([33 * 16 + 3], device=DEVICE))
    assert 33 * stride > 2**31
    assert torch.equal(k[33, 0, 3].half(), key[0, 0])
    assert torch.equal(v[33, 0, 3].half(), -key[0, 0])
    assert not k[:33].view(torch.uint8).any() and not v[:33].view(torch.uint8).any()
    write_kv(key, -key, k, v, torch.tensor([33 * 16], device=DEVICE))
    out = paged_attention(
        torch.randn(1, 1, 64, device=DEVICE).half(), k, v,
        torch.tensor([[33]], device=DEVICE).int(), torch.tensor([0, 1], device=DEVICE).int(),
        torch.tensor([1], device=DEVICE).int(), scale=1.0,
    )  # fmt: skip
    assert torch.equal(out[0, 0], -key[0, 0])


def test_what_does_not_fit_is_refused() -> None:
    key = torch.zeros(2, 1, 64, device=DEVICE)
    cache = torch.zeros(3, 1, 16, 64, device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ConfigError, match="int32, not"):
        write_kv(key, key, cache, cache, slots.int())
    with pytest.raises(ConfigError, match="does not fit a cache"):
        write_kv(key, key, cache[..., :32], cache, slots)

"""KV writes of every CPU back end: right slots, right rounding, nothing beside them touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_backends import cpu_backends, forced

from blocktable.attention import paged_attention, write_kv
from blocktable.core.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=cpu_backends())
def backend(request: pytest.FixtureRequest) -> Any:
    with forced(request.param):
        yield request.param


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 64, 112])
def test_rows_land_in_their_slots_and_guards_stay(
    backend: str, size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    """A guard behind each head's row and between blocks, and the null block, keep their bits."""
    generator = torch.Generator().manual_seed(size)
    room = torch.full((6, 2, 3, 17, size + 5), -77.0).to(cache_dtype)
    k_cache, v_cache = room[:, 0, :2, :16, :size], room[:, 1, :2, :16, :size]
    before = room.clone()
    key = torch.randn(5, 2, size, generator=generator).to(dtype)
    value = torch.randn(5, 2, size, generator=generator).to(dtype)
    slots = torch.tensor([17, -1, 95, 16, 40])
    write_kv(key, value, k_cache, v_cache, slots)
    expected = before.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, 0, :2, slot % 16, :size] = key[token].to(cache_dtype)
            expected[slot // 16, 1, :2, slot % 16, :size] = value[token].to(cache_dtype)
    assert torch.equal(bits(room), bits(expected))
    assert torch.equal(bits(room[0]), bits(before[0]))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_torchs(backend: str, cache_dtype: torch.dtype) -> None:
    """Every exponent, ties, subnormals, overflow to inf, inf itself, and NaN."""
    exponents = torch.arange(-150, 128, dtype=torch.float64)
    mantissas = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 1.9999999])
    numbers = (mantissas[None].double() * 2.0 ** exponents[:, None]).float().flatten()
    special = torch.tensor([0.0, torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 3.4e38])
    values = torch.cat([numbers, -numbers, special, -special])
    key = values.view(1, 1, -1)
    k_cache = torch.zeros(2, 1, 1, values.numel(), dtype=cache_dtype)
    v_cache = torch.zeros_like(k_cache)
    write_kv(key, key, k_cache, v_cache, torch.tensor([1]))
    expected = values.to(cache_dtype)
    nan = expected.isnan()
    assert torch.equal(k_cache[1, 0, 0].isnan(), nan)
    assert torch.equal(bits(k_cache[1, 0, 0][~nan]), bits(expected[~nan]))


def test_scales_divide_what_is_stored(backend: str) -> None:
    k_cache, v_cache = torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)
    ones = torch.ones(1, 2, 8)
    write_kv(ones, ones, k_cache, v_cache, torch.tensor([6]), 2.0, torch.tensor([4.0, 8.0]))
    assert bool((k_cache[1, :, 2] == 0.5).all())
    assert bool((v_cache[1, 0, 2] == 0.25).all()) and bool((v_cache[1, 1, 2] == 0.125).all())


@pytest.mark.parametrize("slot", [32, -2, 2**40])
def test_slot_outside_the_cache_is_named_and_nothing_written(backend: str, slot: int) -> None:
    k_cache, v_cache = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 8)
    ones = torch.ones(2, 2, 8)
    with pytest.raises(ConfigError, match=f"slot {slot} of token 1 is outside a cache of 2 blocks"):
        write_kv(ones, ones, k_cache, v_cache, torch.tensor([17, slot]))
    assert not bool(k_cache.any()) and not bool(v_cache.any())


def test_shapes_that_do_not_fit_are_named(backend: str) -> None:
    cache, ones = torch.zeros(2, 2, 16, 8), torch.ones(2, 2, 7)
    with pytest.raises(ConfigError, match=r"stores \[T, 2, 8\], got \(2, 2, 7\)"):
        write_kv(ones, ones, cache, cache, torch.tensor([17, 18]))
    with pytest.raises(ConfigError, match="2 slots for 1 tokens"):
        write_kv(cache[:1, :, 0], cache[:1, :, 0], cache, cache, torch.tensor([17, 18]))


def test_offsets_past_32_bits(backend: str) -> None:
    """B10: block 32768 of a float16 cache of 65536 elements a block starts at byte 2^32.

    The two blocks live in one sparse buffer whose strides reach past 2^31 elements; only the pages
    written are ever backed by memory.
    """
    size, heads, block_size, blocks = 128, 32, 16, 32769
    room = torch.empty(blocks * 65536, dtype=torch.float16)  # 4.3 GB of address space
    cache = room.view(blocks, heads, block_size, size)
    cache[0] = 0
    key = torch.randn(1, heads, size).half()
    write_kv(key, key, cache, cache, torch.tensor([524288]))
    assert torch.equal(cache[32768, :, 0], key[0]) and not bool(cache[0].any())
    out: Any = paged_attention(
        key, cache, cache, torch.tensor([[32768]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, key)

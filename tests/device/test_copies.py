"""Block copies are bit exact, coalesced, and ordered."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from blocktable.core.errors import ConfigError, TransferError
from blocktable.device.copies import BlockCopier, _addresses, find_runs, make_host_caches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def caches(layers: int = 3, blocks: int = 64) -> list[torch.Tensor]:
    return [
        torch.randn(blocks, 2, 2, 16, 8, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)
    ]


def test_neighbours_that_stay_neighbours_are_one_run() -> None:
    runs = find_runs(np.array([10, 7, 42, 8, 3, 9, 43]), np.array([3, 0, 9, 1, 5, 2, 10]))
    assert runs.source.tolist() == [3, 7, 42]
    assert runs.target.tolist() == [5, 0, 9]
    assert runs.length.tolist() == [1, 4, 2]
    assert find_runs(np.array([], int), np.array([], int)).length.size == 0
    assert find_runs(np.array([1, 2]), np.array([6, 5])).length.tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_runs_cover_every_pair_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.choice(50, 30, replace=False)
    target = np.where(rng.random(30) < 0.7, source + 5, rng.permutation(np.arange(100, 130)))
    runs = find_runs(source, target)
    pairs = [(s + i, t + i) for s, t, n in zip(*runs, strict=True) for i in range(n)]
    assert sorted(pairs) == sorted(zip(source.tolist(), target.tolist(), strict=True))


def test_a_permutation_of_blocks_is_one_call() -> None:
    layers = caches()
    before = [layer.clone() for layer in layers]
    BlockCopier(layers).copy(np.array([1, 2, 3, 5]), np.array([2, 3, 1, 9]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[2, 3, 1, 9]], old[[1, 2, 3, 5]])
        assert torch.equal(layer[10:], old[10:]) and torch.equal(layer[0], old[0])


def test_rounds_of_write_swap_overwrite_restore_are_bit_exact() -> None:
    """150 rounds; fences alone keep the order."""
    rng = np.random.default_rng(0)
    layers = caches(blocks=40)
    copier = BlockCopier(layers, make_host_caches(layers, 24))
    for step in range(150):
        count = int(rng.integers(1, 20))
        blocks = rng.choice(np.arange(1, 40), count, replace=False)
        if step % 2:
            blocks.sort()
        host = rng.choice(24, count, replace=False)
        index = torch.from_numpy(blocks).to(DEVICE)
        for layer in layers:
            layer[index] = torch.randn_like(layer[index])
        wanted = [layer[index].clone() for layer in layers]
        copier.swap_out(blocks, host).wait()
        for layer in layers:
            layer[index] = float("nan")
        back = rng.choice(np.arange(1, 40), count, replace=False)
        copier.swap_in(host, back).wait()
        place = torch.from_numpy(back).to(DEVICE)
        for layer, right in zip(layers, wanted, strict=True):
            assert torch.equal(layer[place], right)


def test_impossible_copies_are_refused_and_change_nothing() -> None:
    layers = caches(1)
    before = layers[0].clone()
    copier = BlockCopier(layers, make_host_caches(layers, 4))
    with pytest.raises(TransferError, match=r"block 64 is not in 0\.\.63"):
        copier.copy(np.array([64]), np.array([1]))
    with pytest.raises(TransferError, match=r"target block 4 is not in 0\.\.3"):
        copier.swap_out(np.array([1]), np.array([4]))
    with pytest.raises(TransferError, match="one place"):
        copier.copy(np.array([1, 2]), np.array([3, 3]))
    with pytest.raises(TransferError, match="2 source and 1 target"):
        copier.swap_in(np.array([1, 2]), np.array([3]))
    with pytest.raises(TransferError, match="no host memory"):
        BlockCopier(layers).swap_out(np.array([1]), np.array([1]))
    with pytest.raises(ConfigError, match="do not match"):
        BlockCopier(layers, [layers[0].float().cpu()])
    assert torch.equal(layers[0], before)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_addresses_of_a_batched_copy_move_whole_blocks(seed: int, gap: int) -> None:
    """What the driver is told, carried out by memmove: blocks with and without gaps between."""
    rng = np.random.default_rng(seed)
    layers, blocks, moved = 3, 40, 23
    wide = [torch.randn(blocks, 8 + gap, dtype=torch.float32) for _ in range(layers)]
    caches = [tensor[:, :8] for tensor in wide]
    host = make_host_caches(caches, 30, pin_memory=False)
    for tensor in host:
        tensor.fill_(-1.0)
    source = np.sort(rng.permutation(blocks)[:moved])
    target = np.arange(30)[:moved] if seed % 2 else rng.permutation(30)[:moved]
    runs = find_runs(source, target)
    to, start, sizes = _addresses(caches, host, runs)
    if gap == 0:
        assert len(sizes) == layers * len(runs.length)
    for pieces in zip(to.tolist(), start.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*pieces)
    for cache, copy in zip(caches, host, strict=True):
        assert torch.equal(copy[target], cache[source])
        rest = np.setdiff1d(np.arange(30), target)
        assert (copy[rest] == -1).all()

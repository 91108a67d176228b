"""Moving whole blocks: copies on the device, and swaps to pinned host memory and back.

A swap moves a list of blocks. Neighbouring blocks that stay neighbours are one copy::

    device blocks  7 8 9 10   42 43   3
    host blocks    0 1 2 3    9  10   5       -> 3 copies instead of 7

Swaps run on side streams. Each returns a ``Fence``: until it is passed, the blocks it reads must
not be overwritten and the blocks it fills must not be read. Fences between the two directions, and
with what the current stream did before, are placed here; the caller orders what comes after
(``fence.wait()``), which costs the host nothing. Runs go to the copy engine, which leaves the
multiprocessors alone, in one call of the driver (`batch_copy`); scattered blocks to a kernel of a
few programs, in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.core.errors import ConfigError, TransferError
from blocktable.device.batch_copy import Words, batch_copy

Ids = NDArray[np.integer]


BATCHED_RUN_BYTES = 512 << 10
"""Runs of this size on average, and above, go to the copy engine in one call (H200, of one large
copy: 64 KiB at a time 67%, 256 KiB 88-90%, 1 MiB 96%, 4 MiB 99%; the kernel 87-92% at any size)."""
LONG_RUN_BYTES = 2 << 20
"""The same where the driver takes no batches: a copy each (1 MiB 80-85%, 4 MiB 95%)."""
_SWAP_PROGRAMS = 24
"""Programs that a swap may take: enough to fill the bus, a sixth of an H200."""
_COPY_PROGRAMS = 528
"""Programs that copies within the device may take."""


class Runs(NamedTuple):
    """Maximal runs of neighbouring blocks: source start, target start, blocks, an entry per run."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    length: NDArray[np.int64]


def find_runs(source: Ids, target: Ids) -> Runs:
    """Pairs of blocks as runs; the order of the pairs does not matter. Cost: one sort."""
    source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
    if source.shape != target.shape or source.ndim != 1:
        raise ConfigError(f"{source.shape} source blocks and {target.shape} target blocks")
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    follows = (np.diff(source) == 1) & (np.diff(target) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1)) if source.size else source
    return Runs(source[starts], target[starts], np.diff(np.append(starts, source.size)))


class Fence:
    """The end of a copy. On a CPU there is nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the copy has ended; asks the device, waits for nothing."""
        return self._event is None or self._event.query()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let ``stream`` (default: the current one) wait for the copy; the host does not wait."""
        if self._event is not None:
            (stream or torch.cuda.current_stream()).wait_event(self._event)

    def synchronize(self) -> None:
        """Let the host wait for the copy."""
        if self._event is not None:
            self._event.synchronize()


class _Pending(NamedTuple):
    """Host blocks that a swap still touches."""

    blocks: NDArray[np.int64]
    fence: Fence


def make_host_caches(
    caches: Sequence[torch.Tensor], num_blocks: int, *, pin_memory: bool | None = None
) -> list[torch.Tensor]:
    """Host memory for ``num_blocks`` blocks of every layer, pinned where there is a device."""
    if num_blocks < 1:
        raise ConfigError(f"a host pool needs at least 1 block, got {num_blocks}")
    return [
        torch.empty(
            (num_blocks, *cache.shape[1:]), dtype=cache.dtype,
            pin_memory=cache.is_cuda if pin_memory is None else pin_memory,
        )
        for cache in caches
    ]  # fmt: skip


class BlockCopier:
    """Copies blocks of all layers of a group.

    caches: one tensor a layer, blocks along the first dimension, each block contiguous. host: the
    same layers in (pinned) host memory, any number of blocks; without it only ``copy`` works.
    Raises ConfigError for layers that do not match.
    """

    def __init__(
        self, caches: Sequence[torch.Tensor], host: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.caches, self.host = list(caches), list(host or [])
        for cache in [*self.caches, *self.host]:
            if cache.stride(0) * cache.element_size() % 16 or cache.data_ptr() % 16:
                raise ConfigError(f"blocks with strides {cache.stride()} are not 16-byte aligned")
            if not cache[:1].is_contiguous() or cache.stride(0) < cache[:1].numel():
                raise ConfigError(f"blocks of a cache with strides {cache.stride()} are not whole")
        for cache, copy in zip(self.caches, self.host, strict=host is not None):
            if cache.shape[1:] != copy.shape[1:] or cache.dtype != copy.dtype:
                raise ConfigError(
                    f"host blocks {tuple(copy.shape[1:])} {copy.dtype} do not match device blocks "
                    f"{tuple(cache.shape[1:])} {cache.dtype}"
                )
        self._on_device = bool(self.caches) and self.caches[0].is_cuda
        self._out = torch.cuda.Stream() if self._on_device else None
        self._in = torch.cuda.Stream() if self._on_device else None
        self._bases: dict[int, torch.Tensor] = {}
        self._leaving: list[_Pending] = []
        self._entering: list[_Pending] = []

    def copy(self, source: Ids, target: Ids) -> None:
        """Copy blocks within the device on the current stream (copy on write, beam reorder).

        All sources are read before any target is written, so a permutation is one call. Blocks of
        targets are distinct. Cost: one launch; a gather and a scatter per layer where a block is
        both read and written.
        """
        source, target = self._checked(source, target, len(self.caches[0]), len(self.caches[0]))
        if source.size == 0:
            return
        if self._on_device and not np.isin(target, source).any():
            self._launch(self.caches, self.caches, source, target, _COPY_PROGRAMS)
            return
        ids = torch.from_numpy(np.stack((source, target)))
        if self._on_device:
            ids = ids.to(self.caches[0].device, non_blocking=True)
        for cache in self.caches:
            cache.index_copy_(0, ids[1], cache.index_select(0, ids[0]))

    def swap_out(self, device_blocks: Ids, host_blocks: Ids) -> Fence:
        """Copy device blocks to host blocks, after all work queued on the current stream so far.

        The device blocks may be overwritten once the fence is passed.
        """
        source, target = self._checked(device_blocks, host_blocks, len(self.caches[0]), self._room)
        return self._swap(self.caches, self.host, source, target, self._out, leaving=True)

    def swap_in(self, host_blocks: Ids, device_blocks: Ids) -> Fence:
        """Copy host blocks to device blocks, after all work queued on the current stream so far and
        after swaps that still fill these host blocks. The blocks may be read once the fence is
        passed."""
        source, target = self._checked(host_blocks, device_blocks, self._room, len(self.caches[0]))
        return self._swap(self.host, self.caches, source, target, self._in, leaving=False)

    @property
    def _room(self) -> int:
        if not self.host:
            raise TransferError("there is no host memory to swap to")
        return len(self.host[0])

    def _swap(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor], source: NDArray[np.int64],
        target: NDArray[np.int64], stream: torch.cuda.Stream | None, *, leaving: bool,
    ) -> Fence:  # fmt: skip
        runs = find_runs(source, target)
        if stream is None:
            _copy_runs(sources, targets, runs)
            return Fence()
        stream.wait_stream(torch.cuda.current_stream())
        in_host = target if leaving else source
        self._leaving = [swap for swap in self._leaving if not swap.fence.done()]
        self._entering = [swap for swap in self._entering if not swap.fence.done()]
        # Whoever fills a host block goes before whoever reads it, and the other way round.
        for swap in self._entering if leaving else self._leaving:
            if np.isin(in_host, swap.blocks).any():
                swap.fence.wait(stream)
        block_bytes = sources[0][0].numel() * sources[0].element_size()
        with torch.cuda.stream(stream):
            mean_bytes, batch = runs.length.mean() * block_bytes, batch_copy()
            if batch is not None and mean_bytes >= BATCHED_RUN_BYTES:
                batch(*_addresses(sources, targets, runs), stream.cuda_stream)
            elif mean_bytes >= LONG_RUN_BYTES:
                _copy_runs(sources, targets, runs)
            else:
                self._launch(sources, targets, source, target, _SWAP_PROGRAMS)
            event = torch.cuda.Event()
            event.record(stream)
        fence = Fence(event)
        (self._leaving if leaving else self._entering).append(_Pending(in_host, fence))
        return fence

    def _launch(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor],
        source: NDArray[np.int64], target: NDArray[np.int64], programs: int,
    ) -> None:  # fmt: skip
        """All pairs and layers in one kernel on the current stream."""
        from blocktable.device.copy_kernel import launch_copy

        device = self.caches[0].device
        pairs = torch.from_numpy(np.stack((source, target), axis=1))
        element = sources[0].element_size()
        launch_copy(
            self._bases_of(sources), self._bases_of(targets),
            pairs.to(device, non_blocking=True),
            (sources[0].stride(0) * element // 8, targets[0].stride(0) * element // 8),
            sources[0][0].numel() * element // 8, programs,
        )  # fmt: skip

    def _bases_of(self, caches: list[torch.Tensor]) -> torch.Tensor:
        """Addresses of the layers, on the device."""
        key = caches[0].data_ptr()
        if key not in self._bases:
            addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64)
            self._bases[key] = addresses.to(self.caches[0].device)
        return self._bases[key]

    @staticmethod
    def _checked(
        source: Ids, target: Ids, num_source: int, num_target: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        if source.shape != target.shape:
            raise TransferError(f"{source.size} source and {target.size} target blocks")
        for name, ids, limit in (("source", source, num_source), ("target", target, num_target)):
            wrong = (ids < 0) | (ids >= limit)
            if wrong.any():
                raise TransferError(f"{name} block {ids[wrong][0]} is not in 0..{limit - 1}")
        if np.unique(target).size != target.size:
            raise TransferError("two blocks would be copied to one place")
        return source, target


def _copy_runs(sources: list[torch.Tensor], targets: list[torch.Tensor], runs: Runs) -> None:
    """One copy per run and layer on the current stream."""
    for start, to, length in zip(*(part.tolist() for part in runs), strict=True):
        for source, target in zip(sources, targets, strict=True):
            target[to : to + length].copy_(source[start : start + length], non_blocking=True)


def _addresses(
    sources: list[torch.Tensor], targets: list[torch.Tensor], runs: Runs
) -> tuple[Words, Words, Words]:
    """Where each run of each layer goes to and comes from, and its bytes: uint64 [runs * layers].

    A run of blocks is one piece of memory only where blocks lie without gaps: else a piece a block.
    """
    block_bytes = sources[0][0].numel() * sources[0].element_size()
    steps = [tensors[0].stride(0) * tensors[0].element_size() for tensors in (targets, sources)]
    if steps != [block_bytes, block_bytes]:
        runs = _single(runs)
    ends = [
        np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        + (starts[:, None] * step).astype(np.uint64)
        for tensors, starts, step in zip(
            (targets, sources), (runs.target, runs.source), steps, strict=True
        )
    ]
    sizes = np.repeat(runs.length * block_bytes, len(sources)).astype(np.uint64)
    return ends[0].ravel(), ends[1].ravel(), sizes


def _single(runs: Runs) -> Runs:
    """The same blocks, one a run."""
    within = np.arange(runs.length.sum()) - np.repeat(
        np.cumsum(runs.length) - runs.length, runs.length
    )
    return Runs(
        np.repeat(runs.source, runs.length) + within, np.repeat(runs.target, runs.length) + within,
        np.ones(len(within), np.int64),
    )  # fmt: skip

"""The memory behind the block pool: one tensor of pages a memory, seen by each layer as its
cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.engine.attention_glue import LayerCache
from blocktable.engine.kv_layout import KVLayout
from blocktable.engine.probe import ProbedLayer


class KVMemory:
    """Pages on the device and, for swapping, on the host.

    ``pages[m]`` is ``[num_blocks, page_elements]``; a page holds a block's keys, then its values,
    so a layer whose K and V vectors are equally long sees ``[num_blocks, 2, Hkv, block_size, D]``.
    ``caches`` has each layer's views by ``id(module)``. All memory is zeroed; on a CPU it comes
    from calloc, so that pages no token was written to cost nothing.
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: Sequence[ProbedLayer],
        num_blocks: int,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        count = layout.num_memories if layers else 0
        width = layout.page_bytes // layout.dtype.itemsize
        host = torch.device("cpu")
        self.num_blocks = num_blocks
        self.pages = [_zeros(num_blocks, width, layout.dtype, device) for _ in range(count)]
        self.host_pages = [
            _zeros(num_host_blocks, width, layout.dtype, host)
            for _ in range(count if num_host_blocks else 0)
        ]
        self.caches: dict[int, LayerCache] = {}
        for layer, place in zip(layers, layout.places, strict=True):
            k, v = _views(self.pages[place.memory], layer, layout.block_size)
            self.caches[id(layer.module)] = LayerCache(
                k, v, place.group, layer.call.chunk, layer.window
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the device's pages."""
        return sum(page.numel() * page.element_size() for page in self.pages)

    def copy(self, pairs: NDArray[np.int32]) -> None:
        """Page ``pairs[i, 0]`` is copied to page ``pairs[i, 1]`` in every memory; no page may be
        both source and destination. One gather and one scatter a memory."""
        self._move(self.pages, self.pages, pairs)

    def swap_out(self, pairs: NDArray[np.int32]) -> None:
        """Device page ``pairs[i, 0]`` -> host page ``pairs[i, 1]``; done when it returns."""
        self._move(self.pages, self.host_pages, pairs)

    def swap_in(self, pairs: NDArray[np.int32]) -> None:
        """Host page ``pairs[i, 0]`` -> device page ``pairs[i, 1]``."""
        self._move(self.host_pages, self.pages, pairs)

    def _move(
        self, source: list[torch.Tensor], target: list[torch.Tensor], pairs: NDArray[np.int32]
    ) -> None:
        if not len(pairs):
            return
        index = torch.from_numpy(pairs.astype(np.int64))
        for src, dst in zip(source, target, strict=True):
            taken = src[index[:, 0].to(src.device)].to(dst.device)
            dst[index[:, 1].to(dst.device)] = taken


def _zeros(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros((rows, width), dtype=dtype, device=device)
    raw = np.zeros((rows, width * dtype.itemsize), np.uint8)
    return torch.from_numpy(raw).view(dtype)


def _views(
    pages: torch.Tensor, layer: ProbedLayer, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer in its pages: [num_blocks, Hkv, block_size, D] and [..., Dv]."""
    call, stride, rows = layer.call, pages.stride(0), pages.shape[0]
    k_size = call.num_kv_heads * block_size * call.head_size

    def view(offset: int, width: int) -> torch.Tensor:
        shape = (rows, call.num_kv_heads, block_size, width)
        return pages.as_strided(shape, (stride, block_size * width, width, 1), offset)

    return view(0, call.head_size), view(k_size, call.head_size_v)

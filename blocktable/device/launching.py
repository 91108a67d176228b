"""Launching a Triton kernel whose argument types never change, without looking them up again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch


class _Build(NamedTuple):
    """A compiled kernel, and what its launcher wants before the kernel's own arguments."""

    run: Any
    function: Any
    metadata: Any
    device: int


class FixedLaunch:
    """Launches one ``triton.jit`` kernel through the build its first launch made.

    Triton works out the types and alignments of all arguments at every launch to find the build
    that fits. The kernels of this package leave nothing to find: they specialise on no integer and
    on no alignment that varies. So the build is looked up by ``variant`` alone, which must name
    all that may differ (device, element types, constants). Tensors go to the launcher as
    addresses: given a tensor, it asks the driver about each.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._builds: dict[Hashable, _Build] = {}

    @property
    def num_builds(self) -> int:
        """Variants compiled so far."""
        return len(self._builds)

    def __call__(self, grid: tuple[int, int, int], variant: Hashable, *arguments: Any) -> None:
        """Enqueue on the current stream of the current device. ``arguments`` in the kernel's
        order, constants included."""
        build = self._builds.get(variant)
        if build is None:
            self._first(grid, variant, arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(build.device)
        build.run(
            *grid, stream, build.function, build.metadata, None, None, None,
            *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments),
        )  # fmt: skip

    def _first(self, grid: tuple[int, int, int], variant: Hashable, arguments: Any) -> None:
        made = self.kernel[grid](*arguments)
        if made is not None:  # the interpreter has no builds
            self._builds[variant] = _Build(
                made.run, made.function, made.packed_metadata, torch.cuda.current_device()
            )

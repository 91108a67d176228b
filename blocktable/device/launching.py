"""Launching a Triton kernel whose argument types never change, without looking them up again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class FixedLaunch:
    """Launches one ``triton.jit`` kernel through the build its first launch made.

    Triton works out the types and alignments of all arguments at every launch to find the build
    that fits. The kernels of this package leave nothing to find: they specialise on no integer and
    on no alignment that varies. So the build is looked up by ``variant`` alone, which must name
    all that may differ (device, element types, constants).
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._builds: dict[Hashable, Any] = {}

    @property
    def num_builds(self) -> int:
        """Variants compiled so far."""
        return len(self._builds)

    def __call__(self, grid: tuple[int, int, int], variant: Hashable, *arguments: Any) -> None:
        """Enqueue on the current stream of the current device. ``arguments`` in the kernel's
        order, constants included."""
        build = self._builds.get(variant)
        if build is not None:
            build[grid](*arguments)
            return
        build = self.kernel[grid](*arguments)
        if build is not None:  # the interpreter has no builds
            self._builds[variant] = build

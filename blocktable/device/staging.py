"""Host memory a device copy can read while the host already writes the next step.

A ring of pinned buffers. Each is guarded by an event: a buffer is written again only when the
device has read it. With three of them the host may run two steps ahead without waiting::

    step 7   [0] written -> copy enqueued -> event 0
    step 8   [1] written -> copy enqueued -> event 1      (device still reads [0])
    step 10  [0] waits for event 0 before it is written
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import numpy as np
import torch

from blocktable.core.errors import ConfigError


class StagingSlot:
    """One buffer of the ring, as NumPy array and tensor over the same bytes.

    Used as a context manager: leaving it marks everything enqueued on the current stream since
    as a reader that must be done before the buffer is handed out again.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._cuda)
        self.array = self.tensor.numpy()  # uint8 [num_bytes]
        self.int_tensor = self.tensor[: num_bytes // 4 * 4].view(torch.int32)
        self.ints = self.int_tensor.numpy()  # int32 [num_bytes // 4], the same bytes
        self._event = torch.cuda.Event() if self._cuda else None
        self._pending = False

    def wait(self) -> None:
        """Block until the device has read what was last enqueued; free when it has."""
        if self._pending and self._event is not None:
            self._event.synchronize()
            self._pending = False

    def release(self) -> None:
        """Record the readers enqueued so far on the current stream."""
        if self._event is not None:
            self._event.record()
            self._pending = True

    def copy_to(self, target: torch.Tensor, start: int, stop: int) -> None:
        """Enqueue bytes ``start .. stop - 1`` to the same place of ``target`` (uint8, device)."""
        target[start:stop].copy_(self.tensor[start:stop], non_blocking=True)

    def __enter__(self) -> StagingSlot:
        self.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class StagingRing:
    """``depth`` buffers of ``num_bytes`` each, handed out in turn. One user thread."""

    def __init__(self, num_bytes: int, device: torch.device | str, *, depth: int = 3) -> None:
        self._device = torch.device(device)
        self._slots = [StagingSlot(num_bytes, self._device) for _ in range(depth)]
        self._turn = 0

    def next(self, num_bytes: int = 0) -> StagingSlot:
        """The buffer whose turn it is; enter it to write. Replaced by one twice as large (or more)
        when it holds fewer than ``num_bytes``: the old one lives until its readers are done."""
        slot = self._slots[self._turn]
        if num_bytes > len(slot.array):
            slot.wait()
            size = max(2 * len(slot.array), 1 << (num_bytes - 1).bit_length())
            slot = self._slots[self._turn] = StagingSlot(size, self._device)
        self._turn = (self._turn + 1) % len(self._slots)
        return slot

    @property
    def slots(self) -> tuple[StagingSlot, ...]:
        """All buffers, in turn order."""
        return tuple(self._slots)


def pin_array(array: np.ndarray) -> None:
    """Page-lock an array's memory in place, until the array is collected. CUDA only.

    Raises ConfigError when the driver refuses (too much memory locked already).
    """
    runtime: Any = torch.cuda.cudart()
    address = array.ctypes.data
    result = runtime.cudaHostRegister(address, array.nbytes, 0)
    if int(result) != 0:
        raise ConfigError(f"cannot page-lock {array.nbytes} bytes: CUDA error {int(result)}")
    weakref.finalize(array, runtime.cudaHostUnregister, address)

"""A `Communicator` over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from blocktable.core.errors import ConfigError, PeerLost, RankError

T = TypeVar("T")


class TorchCommunicator:
    """Collectives of one process group. ``timeout`` bounds every one of them, in seconds.

    Small data of the start-up (`gather_objects`, `broadcast_bytes`) travels as JSON or raw bytes,
    never pickled. Raises RankError when a peer is gone or late.
    """

    def __init__(self, group: Any | None = None, *, timeout: float = 60.0) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised: use join() or torchrun")
        self._group, self.timeout = group, timeout
        self._device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def join(
        cls, rank: int, world_size: int, address: str, *, backend: str = "gloo",
        timeout: float = 60.0, store: Any | None = None,
    ) -> TorchCommunicator:  # fmt: skip
        """Enter a world of ``world_size`` ranks that meet at ``tcp://address`` (host:port), or
        through ``store``."""
        try:
            dist.init_process_group(
                backend, init_method=None if store else f"tcp://{address}", store=store, rank=rank,
                world_size=world_size, timeout=timedelta(seconds=timeout),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {rank} cannot join the {world_size} ranks at {address}: {error}"
            ) from error
        return cls(timeout=timeout)

    def limit(self, timeout: float) -> None:
        """Bound every later collective of the default group by ``timeout`` seconds."""
        self.timeout = timeout
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), None)

    @property
    def rank(self) -> int:
        """See `Communicator.rank`."""
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        """See `Communicator.world_size`."""
        return dist.get_world_size(self._group)

    def _run(self, name: str, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RuntimeError as error:  # torch.distributed's errors are its subclasses
            raise PeerLost(
                f"rank {self.rank}: {name} failed; a rank is gone or silent for "
                f"{self.timeout:g} s ({str(error).splitlines()[0]})"
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        self._run("all_reduce", lambda: dist.all_reduce(tensor, group=self._group))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator.all_gather`."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        whole = tensor.contiguous()
        self._run("all_gather", lambda: dist.all_gather(parts, whole, group=self._group))
        return parts

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.broadcast`."""
        self._run("broadcast", lambda: dist.broadcast(tensor, 0, group=self._group))
        return tensor

    def gather_objects(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """See `Communicator.gather_objects`; values must be what JSON can hold."""
        data = json.dumps(value).encode()
        sizes = self.all_gather(torch.tensor([len(data)], device=self._device))
        longest = int(max(size.item() for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = self.all_gather(padded)
        return [
            json.loads(part[: int(size.item())].cpu().numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """See `Communicator.broadcast_bytes`."""
        size = torch.tensor([len(data) if data is not None else 0], device=self._device)
        self.broadcast(size)
        buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=self._device)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(buffer):
            self.broadcast(buffer)
        return buffer.cpu().numpy().tobytes()

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._run("barrier", lambda: dist.barrier(group=self._group))

    def close(self) -> None:
        """Leave the process group if it is the default one; idempotent."""
        if self._group is None and dist.is_initialized():
            dist.destroy_process_group()


class SingleRank:
    """A `Communicator` for a world of one."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Any) -> Any:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Any) -> list[Any]:
        """The tensor alone."""
        return [tensor]

    def broadcast(self, tensor: Any) -> Any:
        """The tensor itself."""
        return tensor

    def gather_objects(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """The value alone."""
        return [value]

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The data itself."""
        return data or b""

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """There is nothing to leave."""

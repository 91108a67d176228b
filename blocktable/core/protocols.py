"""What other layers, or other people's code, implement for the core and the engine."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Communicator(Protocol):
    """Collectives among the ranks of one engine; rank 0 runs the scheduler.

    Every call takes effect on all ranks in the same order. A rank that does not take part within
    the communicator's time-out makes the others raise `RankError`; none of the calls hangs.
    """

    @property
    def rank(self) -> int:
        """This process, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: Any) -> Any:
        """Sum a tensor over the ranks, in place; returns it."""
        ...

    def all_gather(self, tensor: Any) -> list[Any]:
        """The tensor of every rank (equal shapes), in rank order."""
        ...

    def broadcast(self, tensor: Any) -> Any:
        """Rank 0's tensor, on every rank; others pass one of its shape, which is filled."""
        ...

    def gather_objects(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """A small plain dict of every rank, in rank order, on every rank. For start-up."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; other ranks pass None."""
        ...

    def barrier(self) -> None:
        """Return once all ranks have called."""
        ...

    def close(self) -> None:
        """Leave; idempotent."""
        ...

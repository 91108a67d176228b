"""Reading a peer's memory: NIXL (RDMA, NVLink, shared memory: what UCX finds)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from blocktable.core.errors import ConfigError, TransferError
from blocktable.transfer.layout import Runs

ReadState = Literal["busy", "done", "failed"]


class Region(NamedTuple):
    """Memory that peers may read or that reads go to. ``device`` is None for host memory, else the
    GPU's index."""

    address: int
    size: int
    device: int | None = None


class Reader(Protocol):
    """One process's access to the memory of others."""

    def metadata(self) -> bytes:
        """What a peer needs to read this process's regions."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer's regions readable; returns its name."""
        ...

    def start(self, peer: str, device: int | None, runs: Runs) -> Any:
        """Begin to read ``runs`` (source = the peer's addresses); returns a handle."""
        ...

    def state(self, handle: Any) -> ReadState:
        """How a read stands; never blocks."""
        ...

    def cancel(self, handle: Any) -> bool:
        """Give a read up or forget a finished one. True once nothing can be written any more."""
        ...

    def close(self) -> None:
        """Unregister the regions."""
        ...


class NixlReader:
    """A `Reader` over a NIXL agent. ``regions`` are this process's, registered at once."""

    def __init__(self, name: str, regions: Sequence[Region], *, backend: str = "UCX") -> None:
        try:
            logging.getLogger("nixl").setLevel(logging.ERROR)
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError("block transfer needs NIXL: pip install nixl") from error
        self._agent = nixl_agent(name, nixl_agent_config(backends=[backend]))
        self._device = regions[0].device if regions else None
        listed = [(region.address, region.size, region.device or 0, "") for region in regions]
        self._registered = self._agent.register_memory(listed, _kind(self._device))

    def metadata(self) -> bytes:
        """See `Reader.metadata`."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """See `Reader.add_peer`."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:  # NIXL raises types of its own for each cause
            raise TransferError(f"the peer's NIXL metadata cannot be used: {error!r}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def start(self, peer: str, device: int | None, runs: Runs) -> Any:
        """See `Reader.start`."""
        local = self._descriptors(runs.target, runs.size, self._device)
        remote = self._descriptors(runs.source, runs.size, device)
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
            if self._agent.transfer(handle) == "ERR":
                self._agent.release_xfer_handle(handle)
                raise TransferError(f"NIXL refused to read {len(runs.size)} runs from {peer}")
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"cannot read from {peer}: {error!r}") from error
        return handle

    def _descriptors(self, addresses: np.ndarray, sizes: np.ndarray, device: int | None) -> Any:
        rows = np.stack([addresses, sizes, np.full(len(sizes), device or 0)], axis=1)
        return self._agent.get_xfer_descs(rows.astype(np.uint64), _kind(device))

    def state(self, handle: Any) -> ReadState:
        """See `Reader.state`."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception:  # a lost peer is an exception in some releases, a state in others
            return "failed"
        return {"DONE": "done", "ERR": "failed"}.get(state, "busy")  # type: ignore[return-value]

    def cancel(self, handle: Any) -> bool:
        """See `Reader.cancel`."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # still in progress, and this backend cannot abort
            return self.state(handle) != "busy"
        return True

    def close(self) -> None:
        """See `Reader.close`."""
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None


def _kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"

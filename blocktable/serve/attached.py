"""The inspector's page over another engine, from the KV events that it publishes.

Events name blocks by hash, not by number, so each stored copy gets the lowest free number here. A
gap that the publisher can no longer fill is shown, and everything known before it is forgotten.
"""

from __future__ import annotations

import heapq
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import WireError
from blocktable.parallel.event_stream import EventSubscriber, Received
from blocktable.parallel.events import AllBlocksCleared, BlockRemoved, BlockStored
from blocktable.serve.frames import CACHED, FREE, Frame
from blocktable.serve.ring import FrameRing

_CACHED_CODE = CACHED | (1 << 3)


class AttachedSource:
    """Keeps what an event stream says is cached. ``apply`` is called by one thread; the questions
    take the lock, since any thread may ask."""

    def __init__(self, ring_bytes: int, num_blocks: int = 1024, endpoint: str = "") -> None:
        self.ring, self._endpoint = FrameRing(ring_bytes), endpoint
        self.problem: str | None = None  # why the last batch could not be read
        self._forgot_at: float | None = None
        self.sequence = self.missed = self.restarts = self.batches = 0
        self.lock = threading.Lock()
        self._block_size = 0
        self._free = list(range(1, num_blocks))
        self._blocks: dict[tuple[int, Any], list[int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self.num_blocks = 0
        self.codes = self.parent = self.place = np.zeros(0, np.int32)
        self._resize(num_blocks)

    def _resize(self, size: int) -> None:
        more = size - self.num_blocks
        self.codes = np.concatenate([self.codes, np.zeros(more, np.int32)])
        self.parent = np.concatenate([self.parent, np.zeros(more, np.int32)])
        self.place = np.concatenate([self.place, np.full(more, -1, np.int32)])
        self.num_blocks = size

    # --- the stream's side ---

    def apply(self, received: Received) -> None:
        """Take one batch; one frame comes of it."""
        with self.lock:
            before: dict[int, int] = {}
            if received.missed or received.restarted:
                self.missed += received.missed
                self.restarts += received.restarted
                self._forgot_at = time.time()
                self._clear(before)
            for event in received.batch.events:
                if isinstance(event, BlockStored):
                    self._store(event, before)
                elif isinstance(event, BlockRemoved):
                    self._remove(event, before)
                elif isinstance(event, AllBlocksCleared):
                    self._clear(before)
            self.batches += 1
            self.problem = None
            self._frame(before, received)

    def _set(self, block: int, code: int, before: dict[int, int]) -> None:
        before.setdefault(block, int(self.codes[block]))
        self.codes[block] = code

    def _store(self, event: BlockStored, before: dict[int, int]) -> None:
        group, size = event.group_idx or 0, event.block_size
        self._block_size = size
        known = self._blocks.get((group, event.parent_block_hash))
        parent = known[0] if known else 0
        for i, name in enumerate(event.block_hashes):
            if not self._free:
                self._free = list(range(self.num_blocks, 2 * self.num_blocks))
                self._resize(2 * self.num_blocks)
            block = heapq.heappop(self._free)
            self._blocks.setdefault((group, name), []).append(block)
            self.place[block] = self.place[parent] + 1 if parent else 0
            self.parent[block] = parent
            self._tokens[block] = event.token_ids[i * size : (i + 1) * size]
            self._set(block, _CACHED_CODE, before)
            parent = block

    def _remove(self, event: BlockRemoved, before: dict[int, int]) -> None:
        for name in event.block_hashes:
            held = self._blocks.get((event.group_idx or 0, name))
            if not held:
                continue
            block = held.pop()
            if not held:
                del self._blocks[event.group_idx or 0, name]
            self._drop(block, before)

    def _drop(self, block: int, before: dict[int, int]) -> None:
        self._set(block, FREE, before)
        self._tokens.pop(block, None)
        self.place[block] = -1
        heapq.heappush(self._free, block)

    def _clear(self, before: dict[int, int]) -> None:
        for held in self._blocks.values():
            for block in held:
                self._drop(block, before)
        self._blocks.clear()

    def _frame(self, before: dict[int, int], received: Received) -> None:
        blocks = np.array(sorted(before), np.int32)
        old = np.array([before[b] for b in blocks.tolist()], np.int32)
        cached = int((self.codes != FREE).sum())
        self.sequence += 1
        counts = (0, self.num_blocks - 1 - cached, cached, 0, 0, 0, 0, 0, 0, 0)
        self.ring.append(
            Frame(
                self.sequence, received.sequence, received.batch.ts, 0.0, 1, blocks, old,
                self.codes[blocks], counts, missed=received.missed,
            )
        )  # fmt: skip

    # --- the page's side ---

    @property
    def notice(self) -> dict[str, Any]:
        """See `Source.notice`: what was lost, what cannot be read, or that nothing came yet."""
        if self.problem is not None:
            return {"text": f"an event cannot be read: {self.problem:.200}", "time": None}
        if not self.batches:
            return {
                "text": f"no events yet from {self._endpoint}: does an engine publish there?",
                "time": None,
            }
        if self._forgot_at is None:
            return {"text": "", "time": None}
        lost = f"{self.missed} batches of events were lost" if self.missed else ""
        new = f"the publisher began anew {self.restarts} times" if self.restarts else ""
        what = " and ".join(filter(None, (lost, new))).replace(" 1 times", " once")
        return {"text": f"{what}; all before is forgotten, the last time", "time": self._forgot_at}

    def snapshot(self) -> dict[str, Any]:
        """See `Source.snapshot`."""
        return {
            "num_blocks": self.num_blocks, "block_size": self._block_size, "block_bytes": 0,
            "max_model_len": 0, "groups": 1, "sequence": self.sequence,
            "codes": self.codes.tolist(), "requests": [], "cost_share": 0.0,
            "missed": self.missed, "restarts": self.restarts, "events": True,
        }  # fmt: skip

    def block(self, block: int) -> dict[str, Any]:
        """See `Source.block`. The number is this page's own, so it has no slots elsewhere."""
        size = max(self._block_size, 1)
        return {
            "block": block, "code": int(self.codes[block]), "owner": 0, "request": None,
            "index": int(self.place[block]), "parent": int(self.parent[block]), "hits": 0,
            "slots": [block * size, (block + 1) * size - 1],
            "tokens": self._tokens.get(block, []),
        }  # fmt: skip

    def request(self, number: int) -> dict[str, Any] | None:
        """Events name no requests."""
        return None

    def tree_arrays(self) -> tuple[NDArray[np.int32], ...]:
        """See `Source.tree_arrays`."""
        blocks = np.flatnonzero(self.codes != FREE).astype(np.int32)
        none = np.zeros(len(blocks), np.int32)
        return blocks, self.parent[blocks], none, none, self.place[blocks]


class Follower:
    """A thread that feeds a source from a subscriber."""

    def __init__(self, source: AttachedSource, subscriber: EventSubscriber) -> None:
        self._source, self._subscriber = source, subscriber
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-events-follow")

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following and close the subscriber."""
        self._stopping.set()
        self._thread.join(timeout=5)
        self._subscriber.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                received = self._subscriber.receive(0.2)
            except WireError as error:
                self._source.problem = str(error)
                continue
            if received is not None:
                self._source.apply(received)

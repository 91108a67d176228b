"""Records what every step does to the pool, for the inspector, within a share of the step's time.

Nothing in the core is slowed or changed: after a step the recorder compares the pool's arrays with
their last copies and looks at the rows whose count changed. Where that would take more than its
share of the time (a pool of millions of blocks under steps of a millisecond) it waits, and one
frame covers several steps.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core import pool as states
from blocktable.engine.engine import Engine
from blocktable.sched.output import SchedulerOutput
from blocktable.serve.frames import (
    CACHED,
    FENCED,
    FREE,
    MAX_NUMBER,
    OWNED,
    SHARED,
    Frame,
    SeenRequest,
    pack,
)
from blocktable.serve.ring import FrameRing

_KIND = np.zeros(4, np.int32)
_KIND[[states.FREE, states.OWNED, states.FENCED, states.EVICTABLE]] = FREE, OWNED, FENCED, CACHED
_REMEMBERED = 2000
_REMEMBERED_TOKENS = 1 << 20
"""Tokens of ended requests that are kept: 4 MiB, 500 tokens each where all are remembered."""
_NO_TOKENS = np.zeros(0, np.int32)
_DEBT = -0.02  # seconds of recording ahead of its share that a change of rows may take


class TableRecorder:
    """Frames of one engine. All methods run in the engine's thread.

    Args:
        ring_bytes: memory for frames, about.
        share: most of the engine's time that recording may take.
    """

    def __init__(self, engine: Engine, ring_bytes: int, share: float = 0.005) -> None:
        self._engine, self._share = engine, share
        self.ring = FrameRing(ring_bytes)
        pool = engine.manager.pool
        self.num_blocks = count = pool.num_blocks
        self.codes = np.zeros(count, np.int32)
        self.parent = np.zeros(count, np.int32)  # block before it in the row that filled it
        self.place = np.full(count, -1, np.int32)  # its index in that row
        self.hits = np.zeros(count, np.int32)  # requests that found it in the cache
        self._owner = np.zeros(count, np.int32)
        self._ref, self._state = pool.ref.copy(), pool.state.copy()
        rows = len(engine.scheduler.requests)
        self._who: Any = np.full(rows, None, object)
        self._number = np.zeros(rows, np.int32)
        self._hit_blocks = np.zeros(rows, np.int32)
        self._counts = [np.zeros(rows, np.int32) for _ in engine.manager.tables]
        self.requests: OrderedDict[int, SeenRequest] = OrderedDict()
        self._numbers: dict[str, int] = {}
        self._kept: deque[SeenRequest] = deque()  # ended, with tokens, in the order of their ends
        self._kept_tokens = 0
        self._away: list[SeenRequest] = []  # preempted, and not seen in a row again
        self._next = 1
        self.sequence = 0
        self._started: list[tuple[Any, ...]] = []
        self._ended: list[tuple[int, str]] = []
        self._touched: list[NDArray[np.int32]] = []
        self._sources: list[NDArray[np.int64]] = []  # blocks that a row left for a copy
        self._waited = self._credit = 0.0
        self._cost, self._steps = 0.0, 0
        self._last = (0, 0, 0, 0)
        engine.on_schedule = self.before_step

    @property
    def notice(self) -> None:
        """See `Source.notice`: of one's own engine everything is known."""
        return None

    @property
    def cost_share(self) -> float:
        """Part of the engine's time that recording took, smoothed."""
        return self._cost

    def before_step(self, output: SchedulerOutput) -> None:
        """Note who was placed where; called when a step is scheduled, before it runs."""
        if output.preempted:
            self._leave_rows(output.preempted)
        if output.preempted or output.admitted or output.forked:
            self._look()
        if len(output.copies):
            self._look_at_copies(output)

    def after_step(self, engine: Engine, seconds: float, outputs: object = None) -> None:
        """Record a step that took ``seconds``, or leave it to a later frame."""
        self._waited += seconds
        self._steps += 1
        self._credit = min(self._credit + seconds * self._share, 0.05)
        changed = bool(self._started) or bool((engine.scheduler.requests != self._who).any())
        if self._credit <= 0 and engine.has_unfinished and not (changed and self._credit > _DEBT):
            return
        begin = time.thread_time()  # not the wall clock: other threads may hold the interpreter
        self._record(self._waited)
        spent = time.thread_time() - begin
        self._credit -= spent
        self._cost += 0.05 * (spent / max(self._waited, 1e-9) - self._cost)
        self._waited, self._steps = 0.0, 0

    # --- one frame ---

    def _record(self, seconds: float) -> None:
        pool, scheduler = self._engine.manager.pool, self._engine.scheduler
        self._look()
        if self._away:
            self._look_at_away()
        started, self._started = self._started, []
        ended, self._ended = self._ended, []
        moved = np.flatnonzero((pool.ref != self._ref) | (pool.state != self._state))
        self._look_at_left(moved[self._ref[moved] > 1], bool(ended))
        touched, self._touched = self._touched, []
        blocks = np.unique(np.concatenate([moved.astype(np.int32), *touched]))
        self._ref[moved], self._state[moved] = pool.ref[moved], pool.state[moved]
        new = self._codes_of(blocks)
        old = self.codes[blocks]
        differs = old != new
        blocks, old, new = blocks[differs], old[differs], new[differs]
        self.codes[blocks] = new
        self.hits[blocks[(new & 7) == FREE]] = 0
        self.sequence += 1
        self.ring.append(
            Frame(
                self.sequence, scheduler.stats.steps, time.time(), seconds, self._steps,
                blocks, old, new, self._numbers_of_step(), tuple(started), tuple(ended),
            )
        )  # fmt: skip

    def _look_at_left(self, fewer: NDArray[np.int64], some_ended: bool) -> None:
        """Note who holds a block alone, where who filled it has left or went on in a copy.
        ``fewer`` were shared. O(those in doubt times the rows), and O(blocks) if ``some_ended``."""
        sources, self._sources = self._sources, []
        if not (some_ended or sources or len(fewer)):
            return
        pool, rows = self._engine.manager.pool, np.flatnonzero(self._who != None)  # noqa: E711
        doubtful = np.concatenate([fewer, *sources])
        if some_ended:
            held = np.flatnonzero(pool.state == states.OWNED)
            gone = ~np.isin(self._owner[held], self._number[rows])
            doubtful = np.concatenate([doubtful, held[gone]])
        doubtful = np.unique(doubtful)
        alone = (pool.state[doubtful] == states.OWNED) & (pool.ref[doubtful] == 1)
        doubtful = doubtful[alone]
        if not len(doubtful):
            return
        place = self.place[doubtful]
        for table in self._engine.manager.tables:
            there = table.rows[rows[:, None], np.minimum(place, table.rows.shape[1] - 1)]
            used = (place >= 0) & (place < table.counts[rows][:, None])
            line, at = np.nonzero((there == doubtful) & used)
            self._owner[doubtful[at]] = self._number[rows[line]]
        self._touched.append(doubtful.astype(np.int32))

    def _codes_of(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        pool = self._engine.manager.pool
        references = pool.ref[blocks]
        kind = _KIND[pool.state[blocks]]
        kind[(kind == OWNED) & (references > 1)] = SHARED
        number = np.where((kind == OWNED) | (kind == CACHED), self._owner[blocks], 0)
        return pack(kind, references, number)

    def _look(self) -> None:
        self._look_at_rows(self._engine.scheduler.requests)
        for group, table in enumerate(self._engine.manager.tables):
            blocks = self._look_at_table(group, table)
            if len(blocks):
                self._touched.append(blocks)

    def _leave_rows(self, requests: Sequence[Any]) -> None:
        """Note that these requests lost their rows (they may be back in the same rows already)."""
        for request in requests:
            for row in np.flatnonzero(self._who == request).tolist():
                self._ended.append(self._leave(int(self._number[row]), "preempted", time.time()))
                self._who[row] = None

    def _look_at_copies(self, output: SchedulerOutput) -> None:
        """A row whose shared block was copied before it is written has a new block there."""
        self._sources.append(output.copies[:, 0].astype(np.int64))
        for table in self._engine.manager.tables:
            place = output.num_computed // max(self._engine.block_size, 1)
            blocks = table.rows[output.rows, place]
            fresh = np.isin(blocks, output.copies[:, 1])
            rows, place, blocks = output.rows[fresh], place[fresh], blocks[fresh]
            self._owner[blocks], self.place[blocks] = self._number[rows], place
            before = table.rows[rows, np.maximum(place - 1, 0)]
            self.parent[blocks] = np.where(place > 0, before, 0)
            self._touched.append(blocks)

    def _look_at_rows(self, requests: Any) -> None:
        """Note who came into rows and who left them; a row's new occupant starts from entry 0."""
        now = time.time()
        for row in np.flatnonzero(requests != self._who).tolist():
            before, after = self._who[row], requests[row]
            if before is not None:
                reason = before.finish_reason or "preempted"
                self._ended.append(self._leave(int(self._number[row]), reason, now))
            self._who[row] = after
            for counts in self._counts:
                counts[row] = 0
            if after is not None:
                seen = self._arrive(after, row, now)
                self._number[row] = seen.number
                self._started.append(
                    (seen.number, seen.request_id, row, seen.prompt_tokens, seen.cached_tokens)
                )

    def _arrive(self, request: Any, row: int, now: float) -> SeenRequest:
        number = self._numbers.get(request.request_id)
        if number is None:
            number, self._next = self._next, self._next % MAX_NUMBER + 1
            self._numbers[request.request_id] = number
        seen = SeenRequest(
            number, request.request_id, request.num_prompt_tokens,
            max(request.num_cached_tokens, 0), row, now, source=request,
        )  # fmt: skip
        self.requests[number] = seen
        self.requests.move_to_end(number)
        while len(self.requests) > _REMEMBERED + len(self._who):
            _, oldest = self.requests.popitem(last=False)
            self._numbers.pop(oldest.request_id, None)
        self._hit_blocks[row] = seen.cached_tokens // max(self._engine.block_size, 1)
        self._count_hits(row)
        return seen

    def _leave(self, number: int, reason: str, now: float) -> tuple[int, str]:
        seen = self.requests.get(number)
        if seen is not None:
            seen.ended, seen.reason, seen.row = now, reason, -1
            if seen.source is not None and seen.source.finish_reason is None:
                self._away.append(seen)
            elif seen.source is not None:
                self._keep_tokens(seen)
        return number, reason

    def _look_at_away(self) -> None:
        """Requests that were preempted may end without coming back into a row."""
        away, self._away = self._away, []
        for seen in away:
            if self.requests.get(seen.number) is not seen:
                continue  # it came back, and is seen anew
            reason = seen.source.finish_reason
            if reason is None:
                self._away.append(seen)
            else:
                seen.ended, seen.reason = time.time(), reason
                self._ended.append((seen.number, reason))
                self._keep_tokens(seen)

    def _keep_tokens(self, seen: SeenRequest) -> None:
        """Keep an ended request's tokens and not the request, which holds its texts and scores. The
        oldest tokens go where too many are kept."""
        seen.tokens, seen.source = seen.source.tokens, None
        self._kept.append(seen)
        self._kept_tokens += len(seen.tokens)
        while self._kept_tokens > _REMEMBERED_TOKENS or len(self._kept) > _REMEMBERED:
            oldest = self._kept.popleft()
            self._kept_tokens -= len(oldest.tokens)
            oldest.tokens = _NO_TOKENS

    def _count_hits(self, row: int) -> None:
        for table in self._engine.manager.tables:
            hit = table.rows[row, : self._hit_blocks[row]]
            np.add.at(self.hits, hit[hit > 0], 1)

    def _look_at_table(self, group: int, table: Any) -> NDArray[np.int32]:
        """Note owner, place and parent of entries that are new; returns their blocks."""
        before, now = self._counts[group], table.counts
        rows = np.flatnonzero(now != before)
        grown = rows[now[rows] > before[rows]]
        added = (now[grown] - before[grown]).astype(np.int64)
        line = np.repeat(grown, added)
        start = np.cumsum(added) - added
        place = np.arange(len(line)) - np.repeat(start, added) + np.repeat(before[grown], added)
        blocks = table.rows[line, place]
        self.place[blocks] = place
        self.parent[blocks] = np.where(place > 0, table.rows[line, place - 1], 0)
        # a block that was hit while others hold it stays with the request that filled it
        own = (place >= self._hit_blocks[line]) | (self._engine.manager.pool.ref[blocks] == 1)
        self._owner[blocks[own]] = self._number[line[own]]
        self._owner[0] = 0
        before[rows] = now[rows]
        return blocks

    def _numbers_of_step(self) -> tuple[int, ...]:
        scheduler = self._engine.scheduler
        pool, stats = self._engine.manager.pool.counts(), scheduler.stats
        now = (
            stats.scheduled_tokens, stats.generated_tokens, stats.hit_tokens, stats.preemptions,
        )  # fmt: skip
        deltas = tuple(a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        running = len(scheduler.running_rows)
        return (
            pool.used, pool.free, pool.evictable, pool.fenced, running, scheduler.num_waiting,
            *deltas,
        )  # fmt: skip

    # --- questions, asked in the engine's thread ---

    def snapshot(self) -> dict[str, Any]:
        """Everything a page needs to begin."""
        engine = self._engine
        return {
            "num_blocks": self.num_blocks, "block_size": engine.block_size,
            "block_bytes": engine.block_bytes, "max_model_len": engine.max_model_len,
            "groups": len(engine.manager.tables), "sequence": self.sequence,
            "codes": self.codes.tolist(),
            "requests": [seen.as_json() for seen in self.requests.values()],
            "cost_share": round(self._cost, 5),
        }  # fmt: skip

    def block(self, block: int) -> dict[str, Any]:
        """Where a block stands, its slots and its tokens."""
        size = self._engine.block_size
        number, place = int(self._owner[block]), int(self.place[block])
        seen = self.requests.get(number)
        tokens: list[int] = []
        if seen is not None and place >= 0:
            tokens = self._tokens(seen)[place * size : (place + 1) * size].tolist()
        return {
            "block": block, "code": int(self.codes[block]), "owner": number,
            "request": None if seen is None else seen.request_id, "index": place,
            "parent": int(self.parent[block]), "hits": int(self.hits[block]),
            "slots": [block * size, (block + 1) * size - 1], "tokens": tokens,
        }  # fmt: skip

    def _tokens(self, seen: SeenRequest) -> NDArray[np.int32]:
        manager = self._engine.manager
        if seen.row >= 0:
            return manager.tokens[seen.row, : int(manager.num_tokens[seen.row])].copy()
        return seen.tokens if seen.source is None else seen.source.tokens

    def request(self, number: int) -> dict[str, Any] | None:
        """A request, its row block by block, and how much of it was hit."""
        seen = self.requests.get(number)
        if seen is None:
            return None
        rows = []
        if seen.row >= 0:
            for table in self._engine.manager.tables:
                rows.append(table.rows[seen.row, : table.counts[seen.row]].tolist())
        return {**seen.as_json(), "rows": rows, "tokens": self._tokens(seen).tolist()}

    def tree_arrays(self) -> tuple[NDArray[np.int32], ...]:
        """Keyed blocks with their parents, hits, references and places, as copies."""
        blocks = np.flatnonzero(self._engine.manager.pool.keyed).astype(np.int32)
        references = self._engine.manager.pool.ref[blocks]
        return blocks, self.parent[blocks], self.hits[blocks], references, self.place[blocks]

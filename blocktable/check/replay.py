"""Run a script of cache operations through the real manager and scheduler, state after each.

``blocktable replay SCRIPT.jsonl --answers OUT.jsonl`` calls :func:`run`. Scripts recorded from
other implementations compare line by line (as parsed JSON): counts and hits, never block ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from blocktable.check.script import Operation, Script, ScriptConfig, ScriptError, read_script
from blocktable.core.errors import BlocktableError
from blocktable.core.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from blocktable.manager import KVCacheManager, TokenSequence
from blocktable.sched.config import SchedulerConfig
from blocktable.sched.output import SchedulerOutput
from blocktable.sched.request import Request
from blocktable.sched.scheduler import Scheduler

Answer = dict[str, Any]


def run(script: Path, answers: Path) -> None:
    """Run a script file and write one answer a line. Raises ScriptError for a broken script, before
    anything is written, and for an answers file that cannot be written."""
    checked = read_script(script)
    lines = [json.dumps(answer) for answer in replay(checked)]
    try:
        Path(answers).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ScriptError(f"cannot write answers {answers}: {error}") from None


def replay(script: Script) -> Iterator[Answer]:
    """The answers of a script, one an operation. Raises ScriptError, naming the line, for an
    operation that manager or scheduler refuse and for sizes that memory does not hold."""
    with _named(script.places[0]):
        machine = Replay(script.config, sum(op["op"] == "new" for op in script.operations))
    for i, operation in enumerate(script.operations):
        with _named(script.places[i + 1]):
            answer = machine.answer(i, operation)
        yield answer


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Errors from within the block say where the script caused them."""
    try:
        yield
    except (BlocktableError, MemoryError, ValueError) as error:  # NumPy: "array is too big"
        raise ScriptError(f"{place}: {error}") from error


class Replay:
    """A manager and a scheduler driven by script operations.

    A script's step has ended when its line is done: what it scheduled counts as computed, and
    sampled tokens come by the ``sample`` operation, to whichever requests the script names.
    """

    def __init__(self, config: ScriptConfig, num_requests: int) -> None:
        rows = max(1, min(num_requests, config.num_blocks - 1))
        self.config = config
        self.manager = KVCacheManager(
            KVCacheConfig(config.num_blocks, _groups(config)),
            max_num_rows=rows,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.budget,
            enable_caching=config.caching,
            seed=0,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=rows, max_num_batched_tokens=config.budget,
                watermark=config.watermark, full_sequence_must_fit=config.full_fit,
                max_model_len_must_fit=False,
            ),
            self.manager,
        )  # fmt: skip
        self.scheduler.lift_capacity()
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, TokenSequence] = {}
        self._counted = (0, 0, 0)
        self._cleared = 0

    def answer(self, i: int, operation: Operation) -> Answer:
        """Do one operation; what it did, and the state after it."""
        op = operation["op"]
        result = getattr(self, f"_do_{op}")(operation)
        stats = self.manager.stats()
        counted = (stats.stored_blocks, stats.removed_blocks, self._cleared)
        events = [now - before for now, before in zip(counted, self._counted, strict=True)]
        self._counted = counted
        return {
            "i": i, "op": op, "result": result,
            "running": [self._running_state(row) for row in self.scheduler.running_rows.tolist()],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "blocks": self._blocks(),
            "free": stats.pool.available,
            "cached_blocks": stats.cached_blocks, "cached_hashes": stats.cached_keys,
            "free_cached": stats.free_cached,
            "events": dict(zip(("stored", "removed", "cleared"), events, strict=True)),
            "hits": {name: self._hit(sequence) for name, sequence in self.prompts.items()},
        }  # fmt: skip

    # -- operations -----------------------------------------------------------------------------

    def _do_new(self, operation: Operation) -> Answer:
        request = Request(
            request_id=operation["id"], prompt_token_ids=np.array(operation["tokens"], np.int32),
            max_tokens=operation["max_tokens"], salt=operation.get("salt"),
        )  # fmt: skip
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.prompts[request.request_id] = self.manager.sequence(
            request.prompt_token_ids, salt=request.salt
        )
        return {}

    def _do_step(self, operation: Operation) -> Answer:
        held = {row: self._counts(row) for row in self.scheduler.running_rows.tolist()}
        output = self.scheduler.schedule()
        result = self._step_result(output, held)
        self.scheduler.update(output, None)
        return result

    def _step_result(self, output: SchedulerOutput, held: dict[int, list[int]]) -> Answer:
        names = self._names
        scheduled = {
            names(row): n
            for row, n in zip(output.rows.tolist(), output.num_scheduled.tolist(), strict=True)
        }
        came = {entry.row for entry in output.admitted}
        grown = {
            names(row): self._shown(self._grown(row, held[row]))
            for row in output.rows.tolist()
            if row not in came
        }
        admitted = []
        for entry in output.admitted:
            hit = entry.num_cached // self.config.block_size
            name = entry.request.request_id
            admitted.append({
                "id": name, "hit_tokens": entry.num_cached,
                "new_blocks": self._shown(self._grown(entry.row, [hit] * self._num_groups)),
                "scheduled": scheduled[name],
            })  # fmt: skip
        blocked = output.blocked
        return {
            "scheduled": scheduled, "new_blocks": grown, "admitted": admitted,
            "preempted": [request.request_id for request in output.preempted],
            "blocked": blocked
            and {"id": blocked.request_id, "hit_tokens": output.blocked_hit},
        }  # fmt: skip

    def _do_sample(self, operation: Operation) -> Answer:
        finished, ignored = [], []
        for name, tokens in operation["tokens"].items():
            request = self.requests.get(name)
            if request is None or not self._caught_up(request):
                ignored.append(name)
            elif tokens:
                row = np.array([request.row], np.int32)
                fed = self.scheduler.feed(
                    row, np.array(tokens, np.int32), np.array([len(tokens)], np.int32)
                )
                finished += [done.request_id for done in fed.finished]
        return {"finished": finished, "ignored": ignored}

    def _caught_up(self, request: Request) -> bool:
        row = request.row
        return row >= 0 and self.manager.num_computed[row] == self.manager.num_tokens[row]

    def _do_preempt(self, operation: Operation) -> Answer:
        done = bool(self.scheduler.preempt([operation["id"]]))
        self.scheduler.forget_notes()  # only what a step preempts belongs to its result
        return {"done": done}

    def _do_finish(self, operation: Operation) -> Answer:
        return {"done": bool(self.scheduler.finish([operation["id"]], "abort"))}

    def _do_reset(self, operation: Operation) -> Answer:
        done = self.scheduler.reset_prefix_cache()
        self._cleared += done
        return {"ok": done}

    def _do_probe(self, operation: Operation) -> Answer:
        if not operation["tokens"]:
            return {"hit_tokens": 0}
        manager = self.manager  # a probe may be longer than any request
        sequence = TokenSequence(
            operation["tokens"], manager.keying, manager.hash_block_size,
            salt=operation.get("salt"),
        )  # fmt: skip
        return {"hit_tokens": self._hit(sequence)}

    # -- state ----------------------------------------------------------------------------------

    @property
    def _num_groups(self) -> int:
        return len(self.manager.tables)

    def _names(self, row: int) -> str:
        return self.scheduler.requests[row].request_id

    def _hit(self, sequence: TokenSequence) -> int:
        return self.manager.find_hit(sequence).num_tokens

    def _counts(self, row: int) -> list[int]:
        return [int(table.counts[row]) for table in self.manager.tables]

    def _grown(self, row: int, before: list[int]) -> list[int]:
        return [now - old for now, old in zip(self._counts(row), before, strict=True)]

    def _shown(self, counts: list[int]) -> int | list[int]:
        return counts if len(counts) > 1 else counts[0]

    def _running_state(self, row: int) -> list[Any]:
        manager = self.manager
        return [self._names(row), int(manager.num_computed[row]), int(manager.num_tokens[row])]

    def _blocks(self) -> Answer:
        found: Answer = {}
        for row in self.scheduler.running_rows.tolist():
            groups = [self._row_state(group, row) for group in range(self._num_groups)]
            if any(group["n"] for group in groups):
                found[self._names(row)] = groups if len(groups) > 1 else groups[0]
        return found

    def _row_state(self, group: int, row: int) -> dict[str, int]:
        table, pool = self.manager.tables[group], self.manager.pool
        ids = table.rows[row, : table.counts[row]]
        real = ids[ids != 0]
        return {
            "n": len(ids), "null": len(ids) - len(real),
            "cached": int(pool.keyed[real].sum()), "shared": int((pool.ref[real] > 1).sum()),
        }  # fmt: skip


def _groups(config: ScriptConfig) -> tuple[KVCacheGroupSpec, ...]:
    full = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=8)
    specs: list[KVCacheSpec] = [full] if config.spec != "swa" else []
    if config.window is not None:
        specs.append(
            SlidingWindowSpec(
                block_size=config.block_size,
                num_kv_heads=1,
                head_size=8,
                sliding_window=config.window,
            )
        )
    return tuple(KVCacheGroupSpec((f"group.{i}",), spec) for i, spec in enumerate(specs))

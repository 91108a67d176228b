"""A device that computes nothing but remembers what was written where.

Every slot holds a fingerprint of the tokens up to its position. Before a row runs, everything it
may attend to must hold the right fingerprints: a wrong hit, a missed copy, a swap that lost a
block, a block reused too early or a rejected draft that was kept all raise ``Corruption``.
The next token is a function of the last ones, so the right output is known without a model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from blocktable.check.fake_states import Corruption, Prints, RowStates, advance_blocks
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.core.types import TokenIds
from blocktable.manager import KVCacheManager
from blocktable.sched.output import SchedulerOutput
from blocktable.sched.request import Request


def next_token(tokens: TokenIds, vocabulary: int, index: int = 0) -> int:
    """The token that follows ``tokens`` in continuation ``index``: a short recurrence, so that
    prompt lookup guesses some of it right."""
    last = [int(t) for t in tokens[-2:]]
    return (3 * last[-1] + (last[0] if len(last) > 1 else 1) + 1 + index) % vocabulary


def fingerprints(tokens: TokenIds, salt: str | None) -> Prints:
    """uint64 [len(tokens)]: entry p depends on salt, tokens[0 .. p] and p."""
    mixed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= (np.arange(len(tokens), dtype=np.uint64) + np.uint64(1)) * np.uint64(
        0xC2B2AE3D27D4EB4F
    )
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    start = np.uint64(sum(ord(c) * 31**i for i, c in enumerate(salt or "")) % 2**64)
    return np.cumsum(mixed, dtype=np.uint64) + start


class FakeDevice:
    """KV memory of one manager: ``memory[g]`` uint64 [num_blocks, block_size of group g], host
    memory alike. ``run`` executes an output and returns what it samples."""

    def __init__(self, manager: KVCacheManager, vocabulary: int) -> None:
        self.manager, self.vocabulary = manager, vocabulary
        sizes = [group.kv_cache_spec.block_size for group in manager.config.kv_cache_groups]
        host = manager.host_pool.num_blocks if manager.host_pool is not None else 1
        self.memory = [np.zeros((manager.pool.num_blocks, size), np.uint64) for size in sizes]
        self.host = [np.zeros((host, size), np.uint64) for size in sizes]
        self.last = np.zeros(manager.max_num_rows, np.int32)
        self.states = RowStates()
        self.checked_slots = 0

    def run(
        self, output: SchedulerOutput, requests: NDArray[np.object_]
    ) -> tuple[TokenIds, NDArray[np.int32] | None]:
        """Move blocks, compute, sample: (tokens, counts) for ``Scheduler.update``.

        requests: [max rows] who is in each row, as scheduled."""
        self._move(self.memory, self.host, output.swap_out)
        self._move(self.memory, self.memory, output.copies)
        self._move(self.host, self.memory, output.swap_in)
        self.states.begin(output)
        people: list[Request] = requests.tolist()
        texts = {}
        for i, row in enumerate(output.rows.tolist()):
            texts[i] = self._compute(output, i, row, people[row])
        self.states.end(output)
        tokens: list[int] = []
        counts: list[int] = []
        for row, i in zip(output.sample_rows.tolist(), output.sample_index.tolist(), strict=True):
            drafts = 0 if output.num_drafts is None else int(output.num_drafts[i])
            made = self._sample(texts[i], drafts, people[row].index)
            self.last[row] = made[-1]
            tokens += made
            counts.append(len(made))
        several = None if output.num_drafts is None else np.array(counts, np.int32)
        return np.array(tokens, np.int32), several

    def _move(self, source: list[Prints], target: list[Prints], pairs: NDArray[np.int32]) -> None:
        for src, dst in zip(source, target, strict=True):
            dst[pairs[:, 1]] = src[pairs[:, 0]]

    def _compute(self, output: SchedulerOutput, i: int, row: int, request: Request) -> TokenIds:
        start, count = int(output.num_computed[i]), int(output.num_scheduled[i])
        text = self.manager.tokens[row, : start + count].copy()
        if output.pending is not None and output.pending[i]:
            text[-1] = self.last[row]
        prints = fingerprints(text, request.salt)
        if output.num_drafts is None:
            self.states.advance(row, start, prints)
        else:  # which drafts stay is not known yet, and a state cannot be rolled back
            self.states.lose(row)
        for group, memory in enumerate(self.memory):
            table = self.manager.tables[group]
            entries = table.rows[row, : table.counts[row]]
            spec = self.manager.config.kv_cache_groups[group].kv_cache_spec
            if isinstance(spec, MambaSpec):
                self.checked_slots += advance_blocks(
                    memory, entries, spec, start, prints, (row, group)
                )
                continue
            size = memory.shape[1]
            position = np.arange(start + count)
            block = entries[position // size]
            old, live = position < start, block != 0
            self._expect(memory, block, position, prints, old & live, (row, group))
            self._attends(group, start, live)
            new = ~old
            if (block[new] == 0).any():
                raise Corruption(f"row {row}, group {group}: a new token has no block")
            memory[block[new], position[new] % size] = prints[new]
        return text

    def _expect(
        self,
        memory: Prints,
        block: NDArray[np.int32],
        position: NDArray[np.int64],
        prints: Prints,
        where: NDArray[np.bool_],
        name: tuple[int, int],
    ) -> None:
        found = memory[block[where], position[where] % memory.shape[1]]
        self.checked_slots += len(found)
        wrong = found != prints[where]
        if wrong.any():
            at = int(position[where][wrong][0])
            raise Corruption(
                f"row {name[0]}, group {name[1]}: position {at} (block {block[at]}) does not hold "
                f"its token's KV; {int(wrong.sum())} of {len(found)} positions are wrong"
            )

    def _attends(self, group: int, start: int, live: NDArray[np.bool_]) -> None:
        """What the step's first token attends to must not be null."""
        spec = self.manager.config.kv_cache_groups[group].kv_cache_spec
        first = 0
        if isinstance(spec, SinkWindowSpec) and not live[: spec.num_sink_tokens].all():
            at = int(np.argmin(live))
            raise Corruption(f"group {group}: position {at} is a sink but is null")
        if isinstance(spec, SlidingWindowSpec):
            first = max(0, start - spec.sliding_window + 1)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        if not live[first:].all():
            at = first + int(np.argmin(live[first:]))
            raise Corruption(f"group {group}: position {at} is attended from {start} but is null")

    def _sample(self, text: TokenIds, drafts: int, index: int) -> list[int]:
        """Accepted drafts and the token after them."""
        base = len(text) - drafts
        made: list[int] = []
        for k in range(drafts + 1):
            made.append(next_token(text[: base + k], self.vocabulary, index))
            if k < drafts and made[-1] != text[base + k]:
                break
        return made

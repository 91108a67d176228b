"""The attention work of a step, planned on the host and kept at fixed device addresses.

Layers of one KV cache group that look alike share a plan. Items of a plan name rows of the batch;
here they are renamed to the rows of the device table, so the kernels read the table where it lies
and no step gathers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from blocktable.attention.plan import SMALL_M, AttentionPlan, PlanConfig, plan_attention
from blocktable.attention.plan_items import field
from blocktable.attention.triton import (
    DevicePlan,
    PlanBuffers,
    Workspace,
    make_workspace,
    plan_config,
    upload_plan,
)
from blocktable.core.table import HostTable
from blocktable.engine.attention_glue import AttentionCall, LayerCache
from blocktable.engine.probe import ProbedLayer


class GroupShape(NamedTuple):
    """What the layers of one KV cache group have in common: all that a plan depends on."""

    config: PlanConfig
    value_size: int


def group_shapes(
    layers: Sequence[ProbedLayer],
    caches: dict[int, LayerCache],
    num_groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[GroupShape | None]:
    """The shape of each group; None where its layers differ (they then plan for themselves)."""
    found: list[dict[AttentionCall, LayerCache]] = [{} for _ in range(num_groups)]
    for layer in layers:
        cache = caches[id(layer.module)]
        found[cache.group][layer.call] = cache
    return [_shape(calls, dtype, device) for calls in found]


def _shape(
    calls: dict[AttentionCall, LayerCache], dtype: torch.dtype, device: torch.device
) -> GroupShape | None:
    shapes = {
        (c.num_heads, c.num_kv_heads, c.head_size, c.head_size_v, c.sliding_window, c.chunk)
        for c in calls
    }
    if len(shapes) != 1:
        return None
    call, cache = next(iter(calls.items()))
    query = torch.empty((1, call.num_heads, call.head_size), dtype=dtype, device=device)
    config = plan_config(
        query, cache.k_cache, cache.v_cache,
        sliding_window=call.sliding_window or cache.window, chunk=cache.chunk,
    )  # fmt: skip
    return GroupShape(config, call.head_size_v)


class _Standing(NamedTuple):
    """A decode plan that the next steps can go on with while their batch stays the same."""

    plan: AttentionPlan
    rows: NDArray[np.int32]  # [n] table rows of the batch
    lens: NDArray[np.int32]  # [n] lengths it was last brought up to
    size: int
    last: NDArray[np.intp]  # small items that end at their row's last key
    age: int


_STANDING_STEPS = 64
"""Steps after which a plan is made anew: its pieces are then at most this many keys uneven."""


class GroupPlanner:
    """Plans of one group, for steps in a graph and for others.

    A graph launches as many tile programs as its buffers have room for, and those without work take
    5 us each all the same (256 requests behind one prefix: 120 us a layer with room for any plan,
    of which 45 us are work). So graphs come in *levels* of room: none, for plans that share
    nothing; two rounds of the multiprocessors, which nearly all plans keep to; and for any plan.
    """

    def __init__(
        self, shape: GroupShape, table: HostTable, device: torch.device, rows: int
    ) -> None:
        self.shape, self._table, self._device = shape, table, device
        config = shape.config
        self.max_tiles = 2 * config.num_tile_workers if config.may_share else 0
        two_rounds = min(2 * config.slots(config.num_tile_workers), self.max_tiles)
        self.tile_rooms = tuple(sorted({0, two_rounds, self.max_tiles}))
        self._workspace = self._make_workspace(rows)
        self._buffers: dict[tuple[int, int], PlanBuffers] = {}
        self._standing: _Standing | None = None

    def _make_workspace(self, rows: int) -> Workspace:
        """Partial results for the largest batch, shared by all graphs: they never run at once."""
        config = self.shape.config
        largest = PlanBuffers(
            config, self.shape.value_size, rows, "meta", max_tiles=self.max_tiles,
            workspace=make_workspace(1, 1, config, self.shape.value_size, torch.device("meta")),
        )  # fmt: skip
        return make_workspace(largest.max_slots, rows, config, self.shape.value_size, self._device)

    def decode_plan(
        self, rows: NDArray[np.int32], lens: NDArray[np.int32], size: int
    ) -> AttentionPlan:
        """The plan of a step in which each of ``rows`` decodes one token, padded to ``size``.

        While the batch stays the same, the last plan is carried on: each row's last piece gains
        the new key, in place (10 us instead of 300). Any cut of the keys gives the right result.
        """
        plan = self._carried_on(rows, lens, size)
        if plan is not None:
            return plan
        count = len(rows)
        starts = np.minimum(np.arange(size + 1, dtype=np.int32), count)
        padded = np.zeros(size, np.int32)
        padded[:count] = lens
        plan = self.host_plan(rows, starts, padded, num_tokens=size)
        last = self._last_pieces(plan, padded)
        if len(last) == count:
            self._standing = _Standing(plan, rows.copy(), lens.copy(), size, last, 0)
        return plan

    def _last_pieces(self, plan: AttentionPlan, lens: NDArray[np.int32]) -> NDArray[np.intp]:
        """The small item of each live row that reads its last key; fewer than rows where the plan
        cannot be carried on (windows move; a wide group of query heads has no small items)."""
        config = self.shape.config
        if config.sliding_window or config.chunk or config.group > SMALL_M:
            return np.zeros(0, np.intp)
        ends = field(plan.small, "kv_end")
        reads = (field(plan.small, "packed_rows") > 0) & (ends > field(plan.small, "kv_start"))
        some = np.flatnonzero(reads)
        owner = field(plan.small, "query_start")[some]  # one query token a request
        return some[ends[some] == lens[owner]]

    def _carried_on(
        self, rows: NDArray[np.int32], lens: NDArray[np.int32], size: int
    ) -> AttentionPlan | None:
        held = self._standing
        if (
            held is None
            or held.size != size
            or held.age >= _STANDING_STEPS
            or not np.array_equal(held.rows, rows)
            or not self._grew(lens - held.lens)
        ):
            self._standing = None
            return None
        plan = held.plan
        owner = field(plan.small, "query_start")[held.last]  # one query token a request
        field(plan.small, "kv_end")[held.last] += (lens - held.lens)[owner]
        field(plan.small, "position")[:] += 1
        plan.tokens[:, 2] += 1
        held.lens[:] = lens
        self._standing = held._replace(age=held.age + 1)
        return plan

    def _grew(self, keys: NDArray[np.int32]) -> bool:
        """Whether a standing plan can take rows that gained so many keys: one each, or none where
        keys are dealt out to ranks and another rank got it (no mask then: positions mean nothing).
        """
        if not self.shape.config.causal:
            return bool(((keys == 0) | (keys == 1)).all())
        return bool((keys == 1).all())

    def host_plan(
        self,
        rows: NDArray[np.int32],
        starts: NDArray[np.int32],
        lens: NDArray[np.int32],
        *,
        num_tokens: int | None = None,
    ) -> AttentionPlan:
        """The plan of a batch; rows past ``len(rows)`` of ``lens`` are padding of length 0."""
        table = None
        if self.shape.config.may_share and len(rows) > 1:
            width = int(self._table.counts[rows].max())
            table = np.zeros((len(lens), width), np.int32)
            table[: len(rows)] = self._table.rows[rows, :width]
        config = self.shape.config.for_graph(len(lens))  # for the kernel in that graph
        plan = plan_attention(config, starts, lens, table, num_tokens=num_tokens)
        names = np.zeros(len(lens), np.int32)
        names[: len(rows)] = rows
        for items in (plan.small, plan.tile):
            at = field(items, "table_row")
            at[:] = names[at]
        return plan

    def upload(self, plan: AttentionPlan) -> DevicePlan:
        """A plan for a step outside the graphs."""
        return upload_plan(plan, self.shape.config, self.shape.value_size, self._device)

    def level(self, plan: AttentionPlan) -> int:
        """The least level whose graphs have room for a plan's tiles; the last where none has."""
        fits = (i for i, room in enumerate(self.tile_rooms) if len(plan.tile) <= room)
        return next(fits, len(self.tile_rooms) - 1)

    def buffers(self, num_rows: int, level: int) -> PlanBuffers:
        """The fixed buffers of a graph of ``num_rows`` requests with a level of room for tiles; a
        level beyond the last is the last."""
        key = (num_rows, min(level, len(self.tile_rooms) - 1))
        if key not in self._buffers:
            self._buffers[key] = PlanBuffers(
                self.shape.config, self.shape.value_size, num_rows, self._device,
                max_tiles=self.tile_rooms[key[1]], workspace=self._workspace,
            )  # fmt: skip
        return self._buffers[key]
